//! Composition of JSON text from parts that are already serialized.

use serde::Serialize;
use std::fmt::Write;

/// Serializes a view to JSON text.
pub fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// Appends fields to a serialized JSON object. `object` must be a non-empty object, and the values must be
/// valid JSON; neither is checked.
pub fn with_fields(mut object: String, fields: &[(&str, &str)]) -> String {
    object.pop();
    object.reserve(fields.iter().map(|(name, value)| name.len() + value.len() + 4).sum::<usize>() + 1);
    for (name, value) in fields {
        let _ = write!(object, r#","{name}":"#);
        object.push_str(value);
    }
    object.push('}');
    object
}

/// Renders a list response from serialized data. `next` is the cursor of the next page; `None` means the last
/// page.
pub fn list(data: &str, next: Option<String>) -> String {
    format!(r#"{{"object":"list","data":{data},"next_cursor":{}}}"#, to_json(&next))
}
