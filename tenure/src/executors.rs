//! Interfaces that the embedding application implements for runs and memory: models, tools,
//! embedders.

pub(crate) mod embedder;
pub(crate) mod model;
pub(crate) mod tools;
