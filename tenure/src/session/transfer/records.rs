//! The records of an export as JSON.

use crate::types::decode_error::DecodeError;
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::id::Seq;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// A serialized record of an export.
#[derive(Serialize, Deserialize)]
struct ExportLine {
    seq: Seq,
    at: Timestamp,
    entry: Box<RawValue>,
}

/// Parses the list of records. The records are not validated yet.
pub(crate) fn parse(raw: &str) -> Result<Vec<Record>> {
    let list: Vec<&RawValue> =
        serde_json::from_str(raw).map_err(|_| Error::invalid("log", "`log` must be a list of records"))?;
    let read = |(i, raw): (usize, &&RawValue)| {
        let line: ExportLine = serde_json::from_str(raw.get())
            .map_err(|e| Error::invalid(format!("log[{i}]"), format!("a record has `seq`, `at` and `entry`: {e}")))?;
        record(line).map_err(|e| Error::invalid(format!("log[{i}].entry"), e.to_string()))
    };
    list.iter().enumerate().map(read).collect()
}

/// Decodes a record. Its message is not validated yet.
fn record(line: ExportLine) -> Result<Record, DecodeError> {
    // Times are stored with microsecond precision.
    let at =
        Timestamp::from_microsecond(line.at.as_microsecond()).map_err(|e| DecodeError::caused(e.to_string(), e))?;
    Ok(Record { seq: line.seq, at, entry: Entry::decode_any(line.entry.get())? })
}

/// Serializes and deserializes the records of an export with serde.
pub(crate) mod as_list {
    use super::*;
    use serde::de::Error as _;
    use serde::ser::{Error as _, SerializeSeq};

    /// Serializes records as a list of `seq`, `at` and `entry`.
    pub fn serialize<S: serde::Serializer>(log: &[Record], s: S) -> Result<S::Ok, S::Error> {
        let mut list = s.serialize_seq(Some(log.len()))?;
        for record in log {
            let entry = RawValue::from_string(record.entry.encode()).map_err(S::Error::custom)?;
            list.serialize_element(&ExportLine { seq: record.seq, at: record.at, entry })?;
        }
        list.end()
    }

    /// Deserializes records. Their messages are not validated yet.
    pub fn deserialize<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Vec<Record>, D::Error> {
        let lines = Vec::<ExportLine>::deserialize(d)?;
        lines.into_iter().map(|line| record(line).map_err(D::Error::custom)).collect()
    }
}
