//! Operations on sessions: lifecycle, append, checkpoints, forks, search, transfer, retention.

pub(crate) mod append;
pub(crate) mod archive;
pub(crate) mod assistants;
pub(crate) mod checkpoint;
pub(crate) mod compact;
pub(crate) mod doctor;
pub(crate) mod edit;
pub(crate) mod find;
pub(crate) mod lifecycle;
pub(crate) mod list;
pub(crate) mod merge;
pub(crate) mod redaction;
pub(crate) mod search;
pub(crate) mod sweep;
pub(crate) mod transcript;
pub(crate) mod transfer;
pub(crate) mod view;
