//! Attacks on the real binary, each a named case with a bound on requests and time, over loopback only.
//!
//! `make test` runs the short form. `make attack` runs the long form and prints the numbers of `docs/reliability.md`.

mod answers;
mod authentication;
mod bodies;
mod connections;
mod fairness;
mod sandbox;
mod signals;

/// Returns true in the long form (`make attack`).
pub fn is_long() -> bool {
    std::env::var("ATTACK").is_ok_and(|form| form == "long")
}

/// The number of requests, clients or rounds of a case: `short` in `make test`, `long` in `make attack`.
pub fn amount(short: usize, long: usize) -> usize {
    if is_long() { long } else { short }
}

/// Prints one measured number of a case. Tests assert invariants, never durations.
pub fn report(case: &str, measure: &str, value: impl std::fmt::Display) {
    println!("attack: {case}: {measure}: {value}");
}
