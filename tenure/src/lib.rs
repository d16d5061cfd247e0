//! Sessions that last, for LLM agents.

pub mod entry;
pub mod error;
pub mod head;
pub mod id;
pub mod media;
pub mod message;
pub mod policy;
pub mod session;
pub mod store;
