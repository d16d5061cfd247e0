//! The library's tests, in one binary.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests spawn tasks, and the environment tells them things"
)]

mod crash;
mod doctor;
mod foreign;
mod formats;
mod invariants;
mod lifecycle;
mod model;
mod places;
mod rules;
mod stores;
mod transcripts;
mod verbs;
