//! The only code that reads and writes sessions in a store: cache, write loop, log reader, notifications.

pub(crate) mod cache;
pub(crate) mod idempotency;
pub(crate) mod log;
pub(crate) mod quota;
pub(crate) mod read_scheduler;
pub(crate) mod registry;
pub(crate) mod turn_lock;
