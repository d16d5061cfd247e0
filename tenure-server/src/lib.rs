//! The binary `tenure`: an OpenAI-compatible endpoint with a memory, in front of any model server, and its command line.
//!
//! The sessions themselves are the library [`tenure`]'s. Here are HTTP, configuration, models, and what people type.

pub mod auth;
pub mod bodies;
pub mod cli;
pub mod clock;
pub mod compact;
pub mod config;
pub mod connections;
pub mod cron;
pub mod embed;
pub mod error;
pub mod extract;
pub mod hooks;
pub mod http;
pub mod http1;
pub mod memory;
pub mod metrics;
pub mod query;
pub mod rehearsal;
pub mod responses;
pub mod router;
pub mod runner;
pub mod schedules;
pub mod server;
pub mod signals;
pub mod startup;
pub mod telemetry;
pub mod tls;
pub mod tools;
pub mod transcripts;
pub mod transport;
pub mod upstream;
pub mod workspace;
