//! The running hash over the records of a session's log.

use crate::types::entry::Record;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A running hash over every record of a session since it was created: sequence number, timestamp and text
/// (64 bits of BLAKE3).
///
/// A sequence number only tells the length of a log. Two logs with equal hashes hold the same records, so a
/// writer whose commit is conditional on both never continues from records that the store does not have: a
/// database that was restored from a backup, or that lost its last commits in a failover, and then grew to
/// the same length again, has a different hash (D-007).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LogHash(pub u64);

impl LogHash {
    /// Returns the hash of a log that consists of this record only.
    pub fn of(first: &Record) -> Self {
        Self::default().then(first)
    }

    /// Returns the hash of this log with one more record appended.
    #[must_use]
    pub fn then(self, record: &Record) -> Self {
        let mut hash = blake3::Hasher::new();
        for number in [self.0, record.seq, record.at.as_microsecond().cast_unsigned()] {
            hash.update(&number.to_le_bytes());
        }
        hash.update(record.entry.encode().as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
        Self(u64::from_le_bytes(first))
    }
}

impl fmt::Display for LogHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for LogHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<LogHash> for String {
    fn from(hash: LogHash) -> String {
        hash.to_string()
    }
}

impl TryFrom<String> for LogHash {
    type Error = std::num::ParseIntError;
    fn try_from(s: String) -> Result<Self, Self::Error> {
        u64::from_str_radix(&s, 16).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::entry::Entry;
    use crate::types::message::Message;
    use jiff::Timestamp;

    #[test]
    fn the_hash_covers_number_time_text_and_everything_before() {
        let record = |seq, at, text: &str| Record {
            seq,
            at: Timestamp::from_microsecond(at).unwrap(),
            entry: Entry::message(Message::user(text)),
        };
        let start = LogHash(7);
        let logs = [
            start.then(&record(2, 5, "a")),
            start.then(&record(3, 5, "a")),
            start.then(&record(2, 6, "a")),
            start.then(&record(2, 5, "b")),
            LogHash(8).then(&record(2, 5, "a")),
            start.then(&record(2, 5, "a")).then(&record(3, 5, "a")),
        ];
        for (i, a) in logs.iter().enumerate() {
            assert!(logs[i + 1..].iter().all(|b| a != b), "{logs:?}");
        }
        let json = serde_json::to_string(&LogHash(0xab)).unwrap();
        assert_eq!(json, "\"00000000000000ab\"");
        assert_eq!(serde_json::from_str::<LogHash>(&json).unwrap(), LogHash(0xab));
    }
}
