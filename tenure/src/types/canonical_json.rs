//! Canonical JSON: equal values have equal text, whatever the original formatting.

use crate::types::blob::BlobId;

/// Hashes a JSON text independently of its formatting: keys are sorted and `null` fields are dropped. A text
/// that is not JSON is hashed as it is.
pub(crate) fn canonical_hash(json: &str) -> BlobId {
    match serde_json::from_str::<serde_json::Value>(json) {
        Ok(value) => BlobId::of(canonical(&value, Nulls::Drop).as_bytes()),
        Err(_) => BlobId::of(json.as_bytes()),
    }
}

/// Whether canonicalization keeps fields that are `null`, or drops them as if they were absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nulls {
    Keep,
    Drop,
}

/// Serializes a value as JSON with sorted keys and no white space, so that equal values yield equal text.
pub(crate) fn canonical(value: &serde_json::Value, nulls: Nulls) -> String {
    use serde_json::Value::{Array, Object};
    match value {
        Array(items) => format!("[{}]", items.iter().map(|v| canonical(v, nulls)).collect::<Vec<_>>().join(",")),
        Object(map) => {
            let mut fields: Vec<_> = map.iter().filter(|(_, v)| nulls == Nulls::Keep || !v.is_null()).collect();
            fields.sort_by_key(|(k, _)| *k);
            let text = |k: &str, v| format!("{}:{}", serde_json::Value::from(k), canonical(v, nulls));
            format!("{{{}}}", fields.into_iter().map(|(k, v)| text(k, v)).collect::<Vec<_>>().join(","))
        }
        plain => plain.to_string(),
    }
}
