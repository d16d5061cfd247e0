//! Data types and their validation. This module is pure: nothing in it awaits, reads a clock or accesses a
//! store.

pub(crate) mod assistant;
pub(crate) mod blob;
pub(crate) mod byte_size;
pub(crate) mod canonical_json;
pub(crate) mod decision_chain;
pub(crate) mod decode_error;
pub(crate) mod digest;
pub(crate) mod entry;
pub(crate) mod error;
pub(crate) mod error_source;
pub(crate) mod excerpt;
pub(crate) mod file_name;
pub(crate) mod head;
pub(crate) mod human_duration;
pub(crate) mod id;
pub(crate) mod log_hash;
pub(crate) mod media;
pub(crate) mod memory;
pub(crate) mod message;
pub(crate) mod model;
pub(crate) mod policy;
pub(crate) mod quota;
pub(crate) mod raw_object;
pub(crate) mod resumable;
pub(crate) mod status;
pub(crate) mod template;
pub(crate) mod tool;
pub(crate) mod tool_source;
pub(crate) mod vector;
