//! The time. Nothing else here reads it.
#![expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]

use jiff::{SignedDuration, Timestamp};
use std::sync::atomic::{AtomicI64, Ordering};
use std::{sync::Arc, time::Instant};

/// Where the time comes from.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine.
    System(Start),
    /// A test.
    Manual(Arc<Manual>),
}

/// When the process began to watch the clock, by both its clocks.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    wall: Timestamp,
    steady: Instant,
}

/// A clock that stands still until it is told to move.
#[derive(Debug)]
pub struct Manual {
    wall: AtomicI64,
    drift: AtomicI64,
}

impl Default for Clock {
    fn default() -> Self {
        Clock::System(Start { wall: micros(Timestamp::now()), steady: Instant::now() })
    }
}

impl Clock {
    /// A clock for tests that begins at this time.
    pub fn manual(start: Timestamp) -> Self {
        Clock::Manual(Arc::new(Manual { wall: start.as_microsecond().into(), drift: 0.into() }))
    }

    /// The time, to the microsecond: what every store can keep.
    pub fn now(&self) -> Timestamp {
        match self {
            Clock::System(_) => micros(Timestamp::now()),
            Clock::Manual(m) => from_micros(m.wall.load(Ordering::SeqCst)),
        }
    }

    /// How far the wall clock has jumped against steady time since the process began to watch.
    pub fn drift(&self) -> SignedDuration {
        match self {
            Clock::System(start) => {
                let passed = SignedDuration::try_from(start.steady.elapsed()).unwrap_or(SignedDuration::MAX);
                self.now().duration_since(start.wall) - passed
            }
            Clock::Manual(m) => SignedDuration::from_micros(m.drift.load(Ordering::SeqCst)),
        }
    }

    /// Lets time pass on a manual clock; the machine's clock takes no orders.
    pub fn advance(&self, by: SignedDuration) {
        if let Clock::Manual(m) = self {
            m.wall.fetch_add(by.as_micros() as i64, Ordering::SeqCst);
        }
    }

    /// Makes a manual clock jump, forwards or back, while no time passes.
    pub fn jump(&self, by: SignedDuration) {
        if let Clock::Manual(m) = self {
            self.advance(by);
            m.drift.fetch_add(by.as_micros() as i64, Ordering::SeqCst);
        }
    }
}

fn micros(t: Timestamp) -> Timestamp {
    from_micros(t.as_microsecond())
}

fn from_micros(us: i64) -> Timestamp {
    Timestamp::from_microsecond(us).unwrap_or(Timestamp::UNIX_EPOCH)
}
