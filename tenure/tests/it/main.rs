//! The library's integration tests, in one binary.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests spawn tasks, and the environment tells them things"
)]

mod archive;
mod ask_human;
mod audit;
mod backup;
mod clients;
mod compact;
mod crash;
mod doctor;
mod eager_model_call;
mod formats;
mod history_loss;
mod import;
mod invariants;
mod leases;
mod lifecycle;
mod memories;
mod metadata;
mod next;
mod operations;
mod outage;
mod preferences;
mod private_files;
mod rate_limits;
mod recall;
mod redact;
mod reference_model;
mod reviews;
mod rules;
mod runs;
mod search;
mod search_index;
mod seeds;
mod session_end;
mod stateless;
mod stores;
mod support;
mod takeover;
mod traces;
mod transcripts;
mod transfer;
