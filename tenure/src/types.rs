//! Data types and their validation. Nothing here waits, reads a clock or knows a store.

pub(crate) mod entry;
pub(crate) mod head;
pub(crate) mod id;
pub(crate) mod log_hash;
pub(crate) mod media;
pub(crate) mod message;
pub(crate) mod policy;
pub(crate) mod raw_object;
pub(crate) mod tool_source;
