//! Embedding backends: a BERT model in this process (D-078), or an OpenAI-compatible embedding server.

mod bert;
mod charsmap;
mod local;
mod modules;
mod normalizer;
mod prefixes;
mod server;
mod source;
mod tokenizer;
mod unigram;
mod vector;
mod weights;
mod wordpiece;

pub use local::{LOCAL_MODEL_HASH, LocalModel, hash_model_files};
pub use server::EmbeddingServer;
pub use source::EmbeddingSource;
