//! Background work on all sessions: expiry, retention, erasure, checking and repair.

pub(crate) mod doctor;
pub(crate) mod erase;
pub(crate) mod sweep;
