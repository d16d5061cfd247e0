//! Handlers, one file for each kind of thing: extract, one call, respond.

pub mod chat;
pub mod models;
pub mod operations;
