//! Human-readable durations, such as `30s`, `24h` or `never`.

use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A duration in human-readable form: `250ms`, `90s`, `30m`, `2h`, `7d`, `2w`, or `never`, which is
/// unbounded.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HumanDuration(Option<Duration>);

const UNITS: [(&str, u64); 6] =
    [("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

impl HumanDuration {
    /// The unbounded duration.
    pub const NEVER: Self = Self(None);

    /// Creates a bounded duration.
    pub const fn of(duration: Duration) -> Self {
        Self(Some(duration))
    }

    /// Returns the duration. `None` means unbounded.
    pub fn duration(self) -> Option<Duration> {
        self.0
    }
}

impl FromStr for HumanDuration {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let invalid = || {
            Error::invalid(
                "",
                format!("{s} is not a valid duration; write for example 90s, 30m, 2h, 7d or never", s = excerpt(s)),
            )
        };
        if s == "never" {
            return Ok(Self::NEVER);
        }
        let digits = s.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = s.split_at(digits);
        let (_, millis) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(invalid)?;
        let millis = number.parse::<u64>().ok().and_then(|n| n.checked_mul(*millis)).ok_or_else(invalid)?;
        Ok(Self::of(Duration::from_millis(millis)))
    }
}

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(duration) = self.0 else { return f.write_str("never") };
        let total = duration.as_millis() as u64;
        let exact = UNITS.iter().find(|(_, millis)| total >= *millis && total.is_multiple_of(*millis));
        let (unit, millis) = exact.unwrap_or(&("s", 1000));
        write!(f, "{}{unit}", total / millis)
    }
}

impl fmt::Debug for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TryFrom<String> for HumanDuration {
    type Error = Error;
    fn try_from(s: String) -> Result<Self> {
        s.parse()
    }
}

impl From<HumanDuration> for String {
    fn from(p: HumanDuration) -> String {
        p.to_string()
    }
}
