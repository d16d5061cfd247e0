//! The server's tests: one binary, one module per subject.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs, reason = "tests")]

mod cli;
mod door;
mod openapi;
mod parts;
mod sessions;
mod tenants;
mod transfer;
