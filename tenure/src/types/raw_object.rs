//! A JSON object that preserves its source text: fields in their order, each value as the received text.

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer, ser::SerializeMap};
use serde_json::value::{RawValue, to_raw_value};
use std::fmt;
use std::marker::PhantomData;

/// A JSON object with unparsed values. Serializing it reproduces the order of the fields and the text of
/// every value.
#[derive(Clone, Debug, Default)]
pub struct RawObject(Vec<(String, Box<RawValue>)>);

impl RawObject {
    /// Returns the text of a field's value.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, v)| v.get())
    }

    /// Removes a field and returns its value.
    pub fn remove(&mut self, name: &str) -> Option<Box<RawValue>> {
        let mut removed = None;
        self.0.retain_mut(|(n, v)| {
            let is_match = n == name;
            if is_match {
                removed = Some(std::mem::take(v));
            }
            !is_match
        });
        removed
    }

    /// Sets a field: in place if it exists, else at the end.
    pub fn set(&mut self, name: &str, value: impl Serialize) {
        let Ok(value) = to_raw_value(&value) else { return };
        match self.0.iter_mut().find(|(n, _)| n == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name.to_owned(), value)),
        }
    }

    /// Serializes the object with a field set as by [`RawObject::set`], to a value that is already JSON text.
    /// Avoids parsing and copying a large value again.
    pub fn text_with(&self, name: &str, value: &str) -> String {
        let rest: usize = self.0.iter().map(|(n, v)| n.len() + v.get().len() + 8).sum();
        let mut text = String::with_capacity(rest + name.len() + value.len() + 8);
        let mut push_field = |name: &str, value: &str| {
            text.push(if text.is_empty() { '{' } else { ',' });
            text.push_str(&serde_json::Value::from(name).to_string());
            text.push(':');
            text.push_str(value);
        };
        self.0.iter().for_each(|(n, v)| push_field(n, if n == name { value } else { v.get() }));
        if self.get(name).is_none() {
            push_field(name, value);
        }
        text.push('}');
        text
    }

    /// Iterates over the fields, each with the text of its value.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(n, v)| (n.as_str(), v.get()))
    }

    /// Iterates over the names of the fields.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(n, _)| n.as_str())
    }
}

impl fmt::Display for RawObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl Serialize for RawObject {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut map = s.serialize_map(Some(self.0.len()))?;
        self.0.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for RawObject {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        ordered_fields(d).map(RawObject)
    }
}

/// A [`RawObject`] that borrows the text it was parsed from, for reading values without copying them.
#[derive(Clone, Debug, Default)]
pub(crate) struct RawObjectRef<'a>(pub Vec<(String, &'a str)>);

impl<'a> RawObjectRef<'a> {
    /// Parses an object. `None` means that it is not a JSON object.
    pub fn parse(text: &'a str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// Returns the text of a field's value: of the last one, if there are several fields with this name. A
    /// `null` value counts as absent.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        self.0.iter().rev().find(|(k, v)| k == name && *v != "null").map(|(_, v)| *v)
    }

    /// Returns the value of a field that is a string.
    pub fn text(&self, name: &str) -> Option<String> {
        self.get(name).and_then(|value| serde_json::from_str(value).ok())
    }

    /// Returns the value of a field that is an object.
    pub fn object(&self, name: &str) -> Option<RawObjectRef<'a>> {
        self.get(name).and_then(RawObjectRef::parse)
    }

    /// Returns true if a field is `true`.
    pub fn is_true(&self, name: &str) -> bool {
        self.get(name) == Some("true")
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for RawObjectRef<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let fields: Vec<(String, &'de RawValue)> = ordered_fields(d)?;
        Ok(Self(fields.into_iter().map(|(name, value)| (name, value.get())).collect()))
    }
}

/// Deserializes the fields of a JSON object in their order.
fn ordered_fields<'de, D: Deserializer<'de>, V: Deserialize<'de>>(d: D) -> Result<Vec<(String, V)>, D::Error> {
    struct InOrder<V>(PhantomData<V>);
    impl<'de, V: Deserialize<'de>> Visitor<'de> for InOrder<V> {
        type Value = Vec<(String, V)>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a JSON object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut fields = Vec::with_capacity(map.size_hint().unwrap_or(16));
            while let Some(field) = map.next_entry()? {
                fields.push(field);
            }
            Ok(fields)
        }
    }
    d.deserialize_map(InOrder(PhantomData))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_with_sets_a_field_at_its_position() {
        for object in ["{}", r#"{"a": 1}"#, r#"{"a": [1, 2], "list": "old", "\"b\"\n": {"x": 1.0}}"#] {
            let mut fields: RawObject = serde_json::from_str(object).unwrap();
            let text = fields.text_with("list", "[3,4]");
            fields.set("list", [3, 4]);
            assert_eq!(text, fields.to_string());
        }
    }

    #[test]
    fn both_forms_preserve_the_order_and_text_of_the_fields() {
        let text = r#"{"z": 1.0, "a": [1,  2], "z": null, "b": "x\n"}"#;
        let fields = [("z", "1.0"), ("a", "[1,  2]"), ("z", "null"), ("b", r#""x\n""#)];
        let owned: RawObject = serde_json::from_str(text).unwrap();
        assert_eq!(owned.iter().collect::<Vec<_>>(), fields);
        let borrowed = RawObjectRef::parse(text).unwrap();
        assert_eq!(borrowed.0.iter().map(|(n, v)| (n.as_str(), *v)).collect::<Vec<_>>(), fields);
        assert_eq!((borrowed.get("z"), borrowed.text("b").as_deref()), (Some("1.0"), Some("x\n")), "null is absent");
        assert!(RawObjectRef::parse("[]").is_none() && RawObjectRef::parse("{").is_none());
    }
}
