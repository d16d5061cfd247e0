//! Wall clock and stopwatch of the server: the only module of this crate that reads a clock. Timestamps that are
//! persisted come from the library's clock instead.
#![expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]

use jiff::Timestamp;
use std::time::{Duration, Instant};

/// Returns the current wall-clock time, for values that are displayed or sent but not persisted.
pub fn now() -> Timestamp {
    Timestamp::now()
}

/// A monotonic stopwatch that measures the time since it was created.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Creates a stopwatch that starts now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Returns the time since [`Stopwatch::start`].
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}
