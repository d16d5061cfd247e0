//! What time it is and how long things take. Nothing else here reads a clock; what is stored gets its time from the library's.
#![expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]

use jiff::Timestamp;
use std::time::{Duration, Instant};

/// The time, for what is shown or sent and not stored.
pub fn now() -> Timestamp {
    Timestamp::now()
}

/// Measures time from when it was made.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Starts now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// The time since.
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}
