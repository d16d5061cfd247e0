//! The binary `tenure`: an OpenAI-compatible endpoint with a memory, in front of any model server, and its command line.
//!
//! The sessions themselves are the library [`tenure`]'s. Here are HTTP, configuration, models, and what people type.

pub mod app;
pub mod auth;
pub mod cli;
pub mod clock;
pub mod config;
pub mod embed;
pub mod error;
pub mod headers;
pub mod http;
pub mod http_client;
pub mod jobs;
pub mod llm;
pub mod names;
pub mod net;
pub mod observability;
pub mod router;
pub mod serve;
pub mod sessions;
pub mod signals;
pub mod startup;
pub mod tasks;
pub mod tools;
pub mod transcripts;
pub mod webhooks;
pub mod workspace;

/// The names that `fuzz/targets.rs` uses.
pub mod server {
    pub use crate::app::App;
    pub use crate::router::in_process;
}
