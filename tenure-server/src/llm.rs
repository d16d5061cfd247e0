//! Models: servers that speak OpenAI's protocol, and the one that is built in.

pub mod echo;
mod models;
pub mod sse;
pub mod upstream;

pub use models::ModelRegistry;
