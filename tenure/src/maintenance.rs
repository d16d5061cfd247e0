//! Background work on all sessions: expiry, eviction, retention, erasure, checks and repair.

pub(crate) mod doctor;
pub(crate) mod erase;
pub(crate) mod sweep;
