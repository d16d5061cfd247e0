//! Human-readable byte sizes, such as `64MB`.

use crate::types::error::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A number of bytes, written like `512MB`. `KB`, `MB` and `GB` are powers of 1024. A plain number is parsed
/// as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "String")]
pub struct Size(pub u64);

#[derive(Deserialize)]
#[serde(untagged, expecting = "a size such as 512MB")]
enum Written {
    Number(u64),
    Text(String),
}

const UNITS: [(&str, u64); 4] = [("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10), ("B", 1)];

impl FromStr for Size {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let (number, unit) = UNITS.iter().find_map(|(u, n)| Some((text.strip_suffix(u)?, *n))).unwrap_or((text, 1));
        let bytes = number.trim().parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
        bytes.map(Size).ok_or_else(|| Error::invalid("", format!("{text:?} is not a size such as 64KB, 512MB or 2GB")))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS.iter().find(|(_, n)| self.0 > 0 && self.0.is_multiple_of(*n));
        let (unit, n) = whole.unwrap_or(&UNITS[3]);
        write!(f, "{}{unit}", self.0 / n)
    }
}

impl TryFrom<Written> for Size {
    type Error = Error;
    fn try_from(written: Written) -> Result<Self, Error> {
        match written {
            Written::Number(bytes) => Ok(Size(bytes)),
            Written::Text(text) => text.parse(),
        }
    }
}

impl From<Size> for String {
    fn from(size: Size) -> String {
        size.to_string()
    }
}
