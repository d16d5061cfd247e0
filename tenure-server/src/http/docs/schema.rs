//! JSON schemas of the OpenAPI document: their fields, and example values.

use serde_json::{Map, Value, json};

/// Maximum nesting of fields in a table; deeper ones are shown as `object`.
const MAX_DEPTH: usize = 3;
/// Maximum nesting of an example. Schemas may refer to themselves.
const MAX_EXAMPLE_DEPTH: usize = 8;

/// One field of a body.
pub struct Field {
    /// Its path: `data[].id`.
    pub path: String,
    /// Its type: `string`, `list of integers`.
    pub kind: String,
    /// Whether it must be present.
    pub required: bool,
    /// What it means.
    pub description: String,
}

/// The schemas of a document, by name.
pub struct Schemas<'a>(&'a Value);

impl<'a> Schemas<'a> {
    /// The schemas of an OpenAPI document.
    pub fn of(document: &'a Value) -> Self {
        Self(&document["components"]["schemas"])
    }

    /// Follows references, and chooses the first alternative that is not `null`.
    fn resolve(&self, schema: &'a Value) -> &'a Value {
        if let Some(reference) = schema["$ref"].as_str() {
            return self.resolve(&self.0[reference.rsplit('/').next().unwrap_or_default()]);
        }
        match schema["oneOf"].as_array().and_then(|all| all.iter().find(|one| one["type"] != "null")) {
            Some(one) => self.resolve(one),
            None => schema,
        }
    }

    /// The properties of an object, each with whether it is required. An `allOf` has those of all its parts.
    fn properties(&self, schema: &'a Value) -> Vec<(&'a str, &'a Value, bool)> {
        let schema = self.resolve(schema);
        if let Some(parts) = schema["allOf"].as_array() {
            return parts.iter().flat_map(|part| self.properties(part)).collect();
        }
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let properties = schema["properties"].as_object().into_iter().flatten();
        properties.map(|(name, value)| (name.as_str(), value, required.contains(&name.as_str()))).collect()
    }

    /// The fields of a body, nested ones by their paths.
    pub fn fields(&self, schema: &'a Value) -> Vec<Field> {
        let mut fields = Vec::new();
        self.add_fields(schema, "", MAX_DEPTH, &mut fields);
        fields
    }

    fn add_fields(&self, schema: &'a Value, prefix: &str, depth: usize, fields: &mut Vec<Field>) {
        if depth == 0 {
            return;
        }
        for (name, value, required) in self.properties(schema) {
            let path = format!("{prefix}{name}");
            let description = value["description"].as_str().or_else(|| self.resolve(value)["description"].as_str());
            let description = description.unwrap_or_default().to_owned();
            fields.push(Field { kind: self.kind(value), required, description, path: path.clone() });
            let inner = self.resolve(value);
            if inner["items"].is_object() {
                self.add_fields(&inner["items"], &format!("{path}[]."), depth - 1, fields);
            } else {
                self.add_fields(inner, &format!("{path}."), depth - 1, fields);
            }
        }
    }

    /// The type of a value, for people.
    pub fn kind(&self, schema: &'a Value) -> String {
        let schema = self.resolve(schema);
        if let Some(values) = schema["enum"].as_array() {
            return values.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" | ");
        }
        let kind = type_of(schema);
        match (kind, schema["format"].as_str()) {
            ("array", _) => format!("list of {}", plural(&self.kind(&schema["items"]))),
            ("string", Some("date-time")) => "time".to_owned(),
            ("", _) if schema["allOf"].is_array() => "object".to_owned(),
            ("", _) => "any".to_owned(),
            (kind, _) => kind.to_owned(),
        }
    }

    /// An example of a value. `name` is the field that has it.
    pub fn example(&self, schema: &'a Value, name: &str) -> Value {
        self.example_at(schema, name, MAX_EXAMPLE_DEPTH)
    }

    fn example_at(&self, schema: &'a Value, name: &str, depth: usize) -> Value {
        let schema = self.resolve(schema);
        if let Some(first) = schema["enum"].as_array().and_then(|values| values.first()) {
            return first.clone();
        }
        let properties = self.properties(schema);
        if depth > 0 && !properties.is_empty() {
            let fields = properties
                .into_iter()
                .map(|(name, value, _)| (name.to_owned(), self.example_at(value, name, depth - 1)))
                .collect::<Map<_, _>>();
            return Value::Object(fields);
        }
        match type_of(schema) {
            "array" if depth > 0 => json!([self.example_at(&schema["items"], name, depth - 1)]),
            "array" => json!([]),
            "integer" | "number" => json!(1),
            "boolean" => json!(false),
            "string" if schema["format"] == "date-time" => json!("2026-01-01T12:00:00Z"),
            "string" => json!(example_text(name)),
            _ => json!({}),
        }
    }
}

/// The type of a schema, without `null`.
fn type_of(schema: &Value) -> &str {
    match &schema["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).find(|t| *t != "null").unwrap_or_default(),
        one => one.as_str().unwrap_or_default(),
    }
}

fn plural(kind: &str) -> String {
    if ["string", "integer", "object", "number", "boolean"].contains(&kind) {
        format!("{kind}s")
    } else {
        kind.to_owned()
    }
}

/// An example of a text, by the name of its field.
fn example_text(name: &str) -> &str {
    match name {
        "id" | "session_id" => "trip",
        "run_id" => "run_d1xm7xxq05gem677",
        "review_id" => "rev_12_run_d1xm7xxq05gem677",
        "status" => "active",
        "user" | "reviewer" => "ada",
        "assistant_id" | "assistant" => "support",
        "model" => "default",
        "object" => "list",
        "title" => "The red ferry",
        "tags" => "travel",
        "next_cursor" | "cursor" => "…",
        _ => "text",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_and_recursive_schemas() {
        let document = json!({"components": {"schemas": {
            "Node": {"type": "object", "required": ["id"], "properties": {
                "id": {"type": "string", "description": "Its id."},
                "children": {"type": ["array", "null"], "items": {"$ref": "#/components/schemas/Node"}},
            }},
            "Whole": {"allOf": [{"$ref": "#/components/schemas/Node"}, {"type": "object", "properties": {
                "at": {"type": "string", "format": "date-time"},
                "kind": {"oneOf": [{"type": "null"}, {"type": "string", "enum": ["a", "b"]}]},
            }}]},
        }}});
        let schemas = Schemas::of(&document);
        let whole = json!({"$ref": "#/components/schemas/Whole"});
        let fields = schemas.fields(&whole);
        let find = |path: &str| fields.iter().find(|f| f.path == path).unwrap_or_else(|| panic!("{path}"));
        assert_eq!((find("id").kind.as_str(), find("id").required), ("string", true));
        assert_eq!(find("children").kind, "list of objects");
        assert_eq!(find("children[].id").description, "Its id.");
        assert_eq!((find("at").kind.as_str(), find("kind").kind.as_str()), ("time", "a | b"));
        assert!(fields.iter().all(|f| f.path.matches("children").count() <= MAX_DEPTH));
        let example = schemas.example(&whole, "");
        assert_eq!((&example["id"], &example["kind"]), (&json!("trip"), &json!("a")));
        assert_eq!(example["children"][0]["id"], "trip");
    }
}
