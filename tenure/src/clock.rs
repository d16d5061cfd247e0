//! The clock. This is the only module that reads the time, so that tests can replace it.
#![expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]

use jiff::{SignedDuration, Timestamp};
use std::sync::atomic::{AtomicI64, Ordering};
use std::{sync::Arc, time::Instant};

/// A source of wall-clock time, and of how far it has drifted from monotonic time.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The system clock.
    System(ClockOrigin),
    /// A clock for tests, advanced by hand.
    Manual(Arc<ManualClock>),
}

/// The wall-clock and monotonic times at which a system clock was created. Drift is measured against them.
#[derive(Clone, Copy, Debug)]
pub struct ClockOrigin {
    wall: Timestamp,
    monotonic: Instant,
}

/// A clock that advances only when [`Clock::advance`] or [`Clock::jump`] is called.
#[derive(Debug)]
pub struct ManualClock {
    wall: AtomicI64,
    drift: AtomicI64,
}

impl Default for Clock {
    fn default() -> Self {
        Clock::System(ClockOrigin { wall: micros(Timestamp::now()), monotonic: Instant::now() })
    }
}

impl Clock {
    /// Creates a manual clock for tests, starting at `start`.
    pub fn manual(start: Timestamp) -> Self {
        Clock::Manual(Arc::new(ManualClock { wall: start.as_microsecond().into(), drift: 0.into() }))
    }

    /// Returns the current wall-clock time, truncated to microseconds: the precision that every store can
    /// persist.
    pub fn now(&self) -> Timestamp {
        match self {
            Clock::System(_) => micros(Timestamp::now()),
            Clock::Manual(m) => from_micros(m.wall.load(Ordering::SeqCst)),
        }
    }

    /// Returns how far the wall clock has jumped relative to monotonic time since this clock was created.
    /// Expiry and purging stop when it has jumped (D-016).
    pub fn drift(&self) -> SignedDuration {
        match self {
            Clock::System(start) => {
                let elapsed = SignedDuration::try_from(start.monotonic.elapsed()).unwrap_or(SignedDuration::MAX);
                self.now().duration_since(start.wall) - elapsed
            }
            Clock::Manual(m) => SignedDuration::from_micros(m.drift.load(Ordering::SeqCst)),
        }
    }

    /// Advances a manual clock. Has no effect on the system clock.
    pub fn advance(&self, by: SignedDuration) {
        if let Clock::Manual(m) = self {
            m.wall.fetch_add(by.as_micros() as i64, Ordering::SeqCst);
        }
    }

    /// Makes a manual clock jump forwards or backwards while no monotonic time passes, so that
    /// [`Clock::drift`] changes too. Has no effect on the system clock.
    pub fn jump(&self, by: SignedDuration) {
        if let Clock::Manual(m) = self {
            self.advance(by);
            m.drift.fetch_add(by.as_micros() as i64, Ordering::SeqCst);
        }
    }
}

/// Truncates a timestamp to microseconds.
fn micros(t: Timestamp) -> Timestamp {
    from_micros(t.as_microsecond())
}

fn from_micros(us: i64) -> Timestamp {
    Timestamp::from_microsecond(us).unwrap_or(Timestamp::UNIX_EPOCH)
}
