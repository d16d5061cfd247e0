//! JSON text that is put together from parts which are JSON text already.

use serde::Serialize;
use std::fmt::Write;

/// The plain views as JSON text.
pub fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// A JSON object with more fields at its end.
pub fn with(mut object: String, fields: &[(&str, &str)]) -> String {
    object.pop();
    object.reserve(fields.iter().map(|(name, value)| name.len() + value.len() + 4).sum::<usize>() + 1);
    for (name, value) in fields {
        let _ = write!(object, r#","{name}":"#);
        object.push_str(value);
    }
    object.push('}');
    object
}

/// A list that comes in one answer or in pages.
pub fn list(data: &str, next: Option<String>) -> String {
    format!(r#"{{"object":"list","data":{data},"next_cursor":{}}}"#, text(&next))
}
