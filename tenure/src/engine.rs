//! The session engine: the session cache, the write path, the log reader and change notifications.
//! Every record is committed here, and every session is loaded through it.

pub(crate) mod cache;
pub(crate) mod core;
pub(crate) mod hooks;
pub(crate) mod idempotency;
pub(crate) mod index_build;
pub(crate) mod list;
pub(crate) mod live_count;
pub(crate) mod log;
pub(crate) mod log_reader;
pub(crate) mod message_index;
pub(crate) mod node;
pub(crate) mod notifications;
pub(crate) mod observer;
pub(crate) mod options;
pub(crate) mod pending_commit;
pub(crate) mod policies;
pub(crate) mod quota;
pub(crate) mod read;
pub(crate) mod read_scheduler;
pub(crate) mod registry;
pub(crate) mod scheduled_store;
pub(crate) mod status;
pub(crate) mod turn_lock;
pub(crate) mod usage;
pub(crate) mod vector_index;
pub(crate) mod watch;
pub(crate) mod write;
