//! What makes vectors of texts: a model in this process, or a server that speaks OpenAI's language.

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
