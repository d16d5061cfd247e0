//! The library's tests, in one binary.
#![allow(clippy::unwrap_used, reason = "tests")]

mod rules;
