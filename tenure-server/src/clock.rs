//! How long things take, and how long ago they were. Nothing else here reads a clock; what is stored gets its time from the library's.
#![expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]

use std::time::{Duration, Instant};

/// The time, to say how long ago something was.
pub fn now() -> jiff::Timestamp {
    jiff::Timestamp::now()
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
