//! Embedding backends: a BERT model in this process (D-078), or an OpenAI-compatible embedding server.

mod bert;
mod local;
mod server;
mod source;
mod vector;
mod weights;
mod wordpiece;

pub use local::{HASH, LocalModel, hash};
pub use server::EmbeddingServer;
pub use source::EmbeddingSource;
