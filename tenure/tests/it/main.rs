//! The library's tests, in one binary.
#![allow(clippy::unwrap_used, reason = "tests")]

mod crash;
mod formats;
mod invariants;
mod lifecycle;
mod model;
mod places;
mod rules;
mod stores;
mod transcripts;
mod verbs;
