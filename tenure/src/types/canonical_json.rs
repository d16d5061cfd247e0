//! JSON in a canonical spelling: equal values have equal text.

use crate::types::blob::BlobId;

/// A hash of some JSON that does not depend on spelling: keys sorted, nulls left out.
pub(crate) fn canonical_hash(json: &str) -> BlobId {
    match serde_json::from_str::<serde_json::Value>(json) {
        Ok(value) => BlobId::of(canonical(&value, Nulls::Drop).as_bytes()),
        Err(_) => BlobId::of(json.as_bytes()),
    }
}

/// Whether a field that is `null` is the same as none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nulls {
    Keep,
    Drop,
}

/// JSON with sorted keys and no spaces: equal values, equal text.
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
