//! HTTP handlers, one file per resource. A handler extracts its parameters, makes one call into the application
//! or library layer, and renders the response.

pub mod assistants;
pub mod audit;
pub mod backup;
mod body;
pub mod cache;
mod caller;
pub mod chat;
pub mod checkpoints;
pub mod compact;
pub mod docs;
mod errors;
pub mod extract;
pub mod keys;
pub mod memories;
pub mod messages;
pub mod models;
pub mod operations;
pub mod query;
pub mod reviews;
pub mod runs;
pub mod schedules;
pub mod search;
pub mod sessions;
pub mod sessions_v1;
pub mod threads;
pub mod transfer;
pub mod users;
pub mod view;
