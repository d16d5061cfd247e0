//! A JSON object as a list of its fields in their order, each value as its original text, so that
//! values that are not used stay byte for byte as they are.

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// The fields of a JSON object, with the original text of their values.
#[derive(Clone, Debug, Default)]
pub(super) struct ForeignObject<'a>(pub Vec<(String, &'a str)>);

impl<'a> ForeignObject<'a> {
    /// Parses an object. `None` means that it is not a JSON object.
    pub fn of(raw: &'a str) -> Option<Self> {
        serde_json::from_str(raw).ok()
    }

    /// The original text of a field's value. A `null` value counts as absent.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        self.0.iter().rev().find(|(k, v)| k == name && *v != "null").map(|(_, v)| *v)
    }

    /// The value of a field that is a string.
    pub fn text(&self, name: &str) -> Option<String> {
        self.get(name).and_then(string)
    }

    /// The value of a field that is an object.
    pub fn object(&self, name: &str) -> Option<ForeignObject<'a>> {
        self.get(name).and_then(ForeignObject::of)
    }

    /// Returns true if a field is `true`.
    pub fn is_true(&self, name: &str) -> bool {
        self.get(name) == Some("true")
    }
}

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

impl<'de: 'a, 'a> Deserialize<'de> for ForeignObject<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = ForeignObject<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ForeignObject<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, &'de RawValue>()? {
                    fields.push((key, value.get()));
                }
                Ok(ForeignObject(fields))
            }
        }

        d.deserialize_map(InOrder)
    }
}
