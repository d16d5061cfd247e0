//! What can be set: for an assistant's sessions, and for the house as a whole.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, time::Duration};

/// A span of time as people write it: `250ms`, `90s`, `30m`, `2h`, `7d`, `2w`, or `never`, which has no end.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Period(Option<Duration>);

const UNITS: [(&str, u64); 6] =
    [("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

impl Period {
    /// Without an end.
    pub const NEVER: Self = Self(None);

    /// A span of so long.
    pub const fn of(duration: Duration) -> Self {
        Self(Some(duration))
    }

    /// How long; `None`: without an end.
    pub fn duration(self) -> Option<Duration> {
        self.0
    }
}

impl FromStr for Period {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let wrong = || Error::invalid("", format!("{s:.40?} is not a span of time; write 90s, 30m, 2h, 7d or never"));
        if s == "never" {
            return Ok(Self::NEVER);
        }
        let digits = s.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = s.split_at(digits);
        let (_, millis) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
        let millis = number.parse::<u64>().ok().and_then(|n| n.checked_mul(*millis)).ok_or_else(wrong)?;
        Ok(Self::of(Duration::from_millis(millis)))
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(duration) = self.0 else { return f.write_str("never") };
        let all = duration.as_millis() as u64;
        let exact = UNITS.iter().find(|(_, millis)| all >= *millis && all.is_multiple_of(*millis));
        let (unit, millis) = exact.unwrap_or(&("s", 1000));
        write!(f, "{}{unit}", all / millis)
    }
}

impl fmt::Debug for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Period> for String {
    fn from(p: Period) -> String {
        p.to_string()
    }
}

impl TryFrom<String> for Period {
    type Error = Error;
    fn try_from(s: String) -> Result<Self> {
        s.parse()
    }
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How much of a history a model is shown. What is left out stays in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// At most so many turns, the newest.
    pub max_turns: Option<usize>,
    /// At most so many tokens, estimated (see [`crate::history()`]); the newest turn is always shown.
    pub max_tokens: Option<usize>,
}

/// How long tool results are kept, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachePolicy {
    /// How long a result is good for.
    pub ttl: Duration,
    /// How many results a session keeps; the least recently used goes first.
    pub max_entries: usize,
}

impl Default for CachePolicy {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(60 * 60), max_entries: 256 }
    }
}

/// Everything that can be set for the sessions of an assistant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// An active session that is idle for longer expires. `None`: never.
    pub ttl: Option<Duration>,
    /// An expired or deleted session is purged after so long. `None`: never.
    pub retention: Option<Duration>,
    /// What a model is shown.
    pub window: Window,
    /// The cache of tool results.
    pub cache: CachePolicy,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            ttl: Some(7 * DAY),
            retention: Some(30 * DAY),
            window: Window { max_turns: Some(50), max_tokens: None },
            cache: CachePolicy::default(),
        }
    }
}

/// The limits. Each has a name, and an error says which one was passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one message, media included.
    pub max_message_bytes: usize,
    /// Messages in one append or import.
    pub max_messages: usize,
    /// Bytes of title, tags and metadata together.
    pub max_info_bytes: usize,
    /// Bytes of one tool result or other item.
    pub max_item_bytes: usize,
    /// Sessions in one page of a list.
    pub max_page: usize,
    /// Sessions that one pass of the sweep works on.
    pub max_sweep: usize,
    /// Requests that wait for one busy session.
    pub max_queue: usize,
    /// Times a step is tried again after another writer was first.
    pub max_retries: usize,
    /// How long whoever listens to an answer may take nothing of it, before it is finished without them.
    pub max_stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_message_bytes: 64 << 20,
            max_messages: 200_000,
            max_info_bytes: 256 << 10,
            max_item_bytes: 16 << 20,
            max_page: 100,
            max_sweep: 1_000,
            max_queue: 16,
            max_retries: 16,
            max_stall: Duration::from_secs(60),
        }
    }
}
