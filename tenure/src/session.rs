//! Operations on sessions: lifecycle, append, checkpoints, forks, search, transfer and expiry.

pub(crate) mod append;
pub(crate) mod archive;
pub(crate) mod assistants;
pub(crate) mod checkpoint;
pub(crate) mod edit;
pub(crate) mod expire;
pub(crate) mod find;
pub(crate) mod lifecycle;
pub(crate) mod merge;
pub(crate) mod search;
pub(crate) mod transcript;
pub(crate) mod transfer;
pub(crate) mod view;
