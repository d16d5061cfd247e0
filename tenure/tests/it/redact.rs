//! Redaction: no secret leaves a message, whatever its structure, and the result is a valid
//! message.

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tenure::{policy::*, session::*};

fn rules() -> Redaction {
    let rule = |name, pattern| RedactionRule::new(name, pattern, None).unwrap();
    vec![rule("secret", r"S3cr3t-[0-9]{4}"), rule("word", "(?i)zauberwört"), rule("number", r"\b99[0-9]{6}\b")]
        .try_into()
        .unwrap()
}

/// Escapes every character of the JSON strings.
fn escaped(json: &str) -> String {
    let mut inside = false;
    let write = |c: char| match c {
        '"' => {
            inside = !inside;
            c.to_string()
        }
        c if inside && (c.is_ascii_alphanumeric() || !c.is_ascii()) && c.len_utf16() == 1 => {
            format!("\\u{:04x}", c as u32)
        }
        c => c.to_string(),
    };
    json.chars().map(write).collect()
}

fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        3 => "[ a-z.,\u{e4}\u{65e5}]{0,8}",
        1 => Just("S3cr3t-1234".to_owned()),
        1 => Just("ZAUBERW\u{d6}RT".to_owned()),
        1 => Just(" 99123456 ".to_owned()),
    ];
    prop::collection::vec(part, 0..5).prop_map(|parts| parts.concat())
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![text().prop_map(Value::from), Just(json!(99123456)), Just(json!(1.5)), Just(Value::Null)];
    leaf.prop_recursive(3, 12, 3, |inner| {
        let fields = prop::collection::vec((text(), inner.clone()), 0..3);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            fields.prop_map(|f| Value::Object(f.into_iter().collect::<Map<_, _>>())),
            // JSON inside a string, plain and with every character escaped.
            inner.clone().prop_map(|v| Value::from(json!([v]).to_string())),
            inner.prop_map(|v| match json!([v]).to_string() {
                plain if plain.contains('\\') => Value::from(plain),
                plain => Value::from(escaped(&plain)),
            }),
        ]
    })
}

/// Collects all text of a value, including JSON inside strings.
fn words(value: &Value, all: &mut String) {
    match value {
        Value::Object(map) => map.iter().for_each(|(name, v)| {
            all.push_str(&format!("\n{name}\n"));
            words(v, all);
        }),
        Value::Array(items) => items.iter().for_each(|v| words(v, all)),
        Value::String(text) => match serde_json::from_str::<Value>(text) {
            Ok(inner) if inner.is_object() || inner.is_array() => words(&inner, all),
            _ => all.push_str(&format!("\n{text}\n")),
        },
        other => all.push_str(&format!("\n{other}\n")),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_secret_gets_out_of_a_message(answer in text(), inner in value(), arguments in value()) {
        let arguments = json!({"given": arguments}).to_string();
        let call = json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let assistant = json!({"role": "assistant", "content": answer, "tool_calls": [call], "reasoning": answer});
        let result = json!({"role": "tool", "tool_call_id": "c1", "content": json!([inner]).to_string()});
        for message in [assistant, result] {
            let message = Message::parse(&message.to_string()).unwrap();
            let rules = rules();
            let (redacted, names) = rules.redact_message(&message);
            let again = Message::parse(redacted.as_str());
            prop_assert!(again.is_ok(), "{redacted:?}");
            let mut before = String::new();
            let mut after = redacted.as_str().to_owned();
            words(&message.to_value(), &mut before);
            words(&redacted.to_value(), &mut after);
            let has = |all: &str| all.contains("S3cr3t-") || all.to_lowercase().contains("zauberwört") || all.contains("99123456");
            prop_assert!(!has(&after), "{message:?} became {redacted:?}");
            prop_assert_eq!(names.is_empty(), !has(&before), "{:?}", names);
            prop_assert_eq!(message.tool_calls().len(), redacted.tool_calls().len());
            prop_assert_eq!(names.is_empty(), message == redacted);
        }
    }
}
