//! Human-readable byte sizes, such as `64MB`.

use crate::types::error::Error;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A number of bytes, written like `512MB`. `KB`, `MB` and `GB` are powers of 1024. A plain number is parsed
/// as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "SizeOrText", into = "String")]
pub struct ByteSize(pub u64);

#[derive(Deserialize)]
#[serde(untagged, expecting = "a size such as 512MB")]
enum SizeOrText {
    Number(u64),
    Text(String),
}

const UNITS: [(&str, u64); 4] = [("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10), ("B", 1)];

impl FromStr for ByteSize {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let (number, unit) = UNITS.iter().find_map(|(u, n)| Some((text.strip_suffix(u)?, *n))).unwrap_or((text, 1));
        let bytes = number.trim().parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
        bytes.map(ByteSize).ok_or_else(|| {
            Error::invalid("", format!("{text:?} is not a valid size; write for example 64KB, 512MB or 2GB"))
        })
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = UNITS.iter().find(|(_, n)| self.0 > 0 && self.0.is_multiple_of(*n));
        let (unit, n) = exact.unwrap_or(&UNITS[3]);
        write!(f, "{}{unit}", self.0 / n)
    }
}

impl TryFrom<SizeOrText> for ByteSize {
    type Error = Error;
    fn try_from(value: SizeOrText) -> Result<Self, Error> {
        match value {
            SizeOrText::Number(bytes) => Ok(ByteSize(bytes)),
            SizeOrText::Text(text) => text.parse(),
        }
    }
}

impl From<ByteSize> for String {
    fn from(size: ByteSize) -> String {
        size.to_string()
    }
}
