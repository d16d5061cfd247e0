//! Model backends: OpenAI-compatible servers and the built-in echo model.

pub mod echo;
mod models;
pub mod sse;
pub mod upstream;

pub use models::ModelRegistry;
