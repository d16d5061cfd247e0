//! Reads and writes values as JSON text, so that values that are not used stay byte for byte as they are.

use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// Parses a JSON string. `None` means that it is not a string.
pub(super) fn string(raw: &str) -> Option<String> {
    serde_json::from_str(raw).ok()
}

/// The original text of the elements of a JSON list. `None` means that it is not a list.
pub(super) fn items(raw: &str) -> Option<Vec<&str>> {
    let items: Vec<&RawValue> = serde_json::from_str(raw).ok()?;
    Some(items.into_iter().map(RawValue::get).collect())
}

/// Serializes a text as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Serializes an object from its fields, whose values are JSON.
pub(super) fn object<'t>(fields: impl IntoIterator<Item = (&'t str, Cow<'t, str>)>) -> String {
    let fields: Vec<String> = fields.into_iter().map(|(k, v)| format!("{}:{v}", quoted(k))).collect();
    format!("{{{}}}", fields.join(","))
}
