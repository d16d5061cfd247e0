//! What a caller provides for runs and memory: models, tools, embedders.

pub(crate) mod embedder;
pub(crate) mod model;
pub(crate) mod tools;
