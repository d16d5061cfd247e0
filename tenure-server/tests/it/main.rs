//! The server's tests: one binary, one module per subject.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs, reason = "tests")]

mod access;
mod audit;
mod auth;
mod chat;
mod cli;
mod compact;
mod crash;
mod door;
mod embed;
mod fuzz;
mod hooks;
mod kit;
mod limits;
mod lossless;
mod memories;
mod metrics;
mod nodes;
mod openapi;
mod parts;
mod running;
mod runs;
mod schedules;
mod search;
mod sessions;
mod stop;
mod telemetry;
mod tenants;
mod terminal;
mod tools;
mod traces;
mod transcripts;
mod transfer;
mod turns;
mod upstream;
mod workspace;
