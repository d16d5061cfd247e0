//! Long-term memory of sessions, users and groups: storage, recall, embeddings, consolidation,
//! retraction.

pub(crate) mod dream;
pub(crate) mod memories;
pub(crate) mod recall;
pub(crate) mod retract;
pub(crate) mod tool;
pub(crate) mod vectors;
