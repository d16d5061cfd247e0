//! Models: servers that speak OpenAI's protocol, and the one that is built in.

pub mod echo;
pub mod sse;
pub mod upstream;
