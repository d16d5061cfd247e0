//! Templates in an assistant's instructions and conditions of its review rules (D-132, D-134).
//!
//! Both are evaluated by `minijinja` with a limit on the number of steps, without access to files, other
//! templates or functions. A template consists of values (`{{ metadata.name }}`) and `if` blocks. There is
//! nothing that binds a name or repeats a text, so that the size of every intermediate value is bounded by the
//! length of the template.

use crate::types::excerpt::excerpt;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value as TemplateValue, filters, tests};
use serde_json::{Map, Value};
use std::io::Write;

/// Maximum number of steps of one evaluation.
const FUEL: u64 = 2_000;
/// Maximum size of a rendered text, in bytes.
const MAX_RENDERED_BYTES: usize = 256 << 10;
/// Maximum size of a condition, in bytes.
const MAX_CONDITION_BYTES: usize = 1_000;
/// The blocks that a template can contain.
const BLOCKS: [&str; 6] = ["if", "elif", "else", "endif", "raw", "endraw"];

/// An environment with the filters and tests whose results are not larger than their inputs.
fn environment<'source>(undefined: UndefinedBehavior) -> Environment<'source> {
    let mut env = Environment::empty();
    env.set_fuel(Some(FUEL));
    env.set_undefined_behavior(undefined);
    if let Ok(syntax) = SyntaxConfig::builder().keep_trailing_newline(true).build() {
        env.set_syntax(syntax);
    }
    env.add_filter("abs", filters::abs);
    env.add_filter("capitalize", filters::capitalize);
    env.add_filter("default", filters::default);
    env.add_filter("float", filters::float);
    env.add_filter("int", filters::int);
    env.add_filter("length", filters::length);
    env.add_filter("lower", filters::lower);
    env.add_filter("round", filters::round);
    env.add_filter("title", filters::title);
    env.add_filter("trim", filters::trim);
    env.add_filter("upper", filters::upper);
    env.add_test("defined", tests::is_defined);
    env.add_test("undefined", tests::is_undefined);
    env.add_test("none", tests::is_none);
    env.add_test("number", tests::is_number);
    env.add_test("string", tests::is_string);
    env.add_test("sequence", tests::is_sequence);
    env.add_test("mapping", tests::is_mapping);
    env
}

/// Returns true if a text contains template syntax. Any other text is used as it is.
pub(crate) fn is_template(text: &str) -> bool {
    text.contains("{{") || text.contains("{%")
}

/// Checks the syntax of a template, and that its blocks, filters and tests exist. The error says what is wrong.
pub(crate) fn check_template(text: &str) -> Result<(), String> {
    if !is_template(text) {
        return Ok(());
    }
    let block_name = |rest: &str| -> String {
        let rest = rest.trim_start_matches(['-', '+']).trim_start();
        rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').take(32).collect()
    };
    if let Some(name) = text.split("{%").skip(1).map(block_name).find(|name| !BLOCKS.contains(&name.as_str())) {
        return Err(format!("{{% {name} %}} is not supported; a template has values, if, elif, else and raw"));
    }
    let env = environment(UndefinedBehavior::Chainable);
    match env.render_str(text, TemplateValue::UNDEFINED) {
        Err(e) if is_static(&e) => Err(describe(&e)),
        _ => Ok(()),
    }
}

/// Renders a template with these values. The error says what is wrong.
pub(crate) fn render(text: &str, values: &Map<String, Value>) -> Result<String, String> {
    let env = environment(UndefinedBehavior::Lenient);
    let template = env.template_from_str(text).map_err(|e| describe(&e))?;
    let mut output = LimitedBuffer::default();
    let rendered = template.render_captured_to(TemplateValue::from(Serde(values)), &mut output);
    if output.is_exceeded {
        return Err(format!("the rendered text exceeds {MAX_RENDERED_BYTES} bytes"));
    }
    rendered.map_err(|e| describe(&e))?;
    String::from_utf8(output.bytes).map_err(|e| e.to_string())
}

/// Checks a condition: an expression over the arguments of a tool call. The error says what is wrong.
pub(crate) fn check_condition(condition: &str) -> Result<(), String> {
    if condition.trim().is_empty() || condition.len() > MAX_CONDITION_BYTES {
        return Err(format!("a condition has 1 to {MAX_CONDITION_BYTES} bytes"));
    }
    if has_subscript(condition) {
        return Err("subscripts are not supported; name the argument, as in `customer.country`".to_owned());
    }
    let env = environment(UndefinedBehavior::Chainable);
    let expression = env.compile_expression(condition).map_err(|e| describe(&e))?;
    match expression.eval(TemplateValue::UNDEFINED) {
        Err(e) if is_static(&e) => Err(describe(&e)),
        _ => Ok(()),
    }
}

/// Evaluates a condition on the arguments of a tool call with this parameter schema. Returns false only if the
/// condition certainly does not hold: if an argument that it names is missing, null or not of its declared type,
/// if it cannot be evaluated, or if the result is not a boolean, the result is true.
pub(crate) fn may_hold(condition: &str, arguments: &Map<String, Value>, schema: &Value) -> bool {
    let env = environment(UndefinedBehavior::Strict);
    let Ok(expression) = env.compile_expression(condition) else { return true };
    let names = expression.undeclared_variables(true);
    if has_subscript(condition) || names.iter().any(|path| !is_usable(path, arguments, schema)) {
        return true;
    }
    match expression.eval(TemplateValue::from(Serde(arguments))) {
        // 0 equals false, but is not a boolean.
        Ok(value) => value.kind() != ValueKind::Bool || value.is_true(),
        Err(_) => true,
    }
}

/// Returns true if an expression contains a subscript (`list[0]`), whose value could be missing without being
/// named. A list (`in ['EUR']`) follows an operator or a keyword.
fn has_subscript(expression: &str) -> bool {
    let mut quote = None;
    for (offset, c) in expression.char_indices() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, '[') => {
                let before = expression[..offset].trim_end();
                let is_word = |c: char| c.is_alphanumeric() || c == '_';
                let word = &before[before.trim_end_matches(is_word).len()..];
                if before.ends_with([']', ')', '}', '\'', '"'])
                    || !(word.is_empty() || ["in", "and", "or", "not", "if", "else", "is"].contains(&word))
                {
                    return true;
                }
            }
            _ => {}
        }
    }
    false
}

/// Returns true if the argument at a dotted path exists, is not null, and has the type that the schema declares.
fn is_usable(path: &str, arguments: &Map<String, Value>, schema: &Value) -> bool {
    let mut parts = path.split('.');
    let Some(mut value) = parts.next().and_then(|name| arguments.get(name)) else { return false };
    let mut schema = &schema["properties"][path.split('.').next().unwrap_or_default()];
    for part in parts {
        let Some(inner) = value.get(part) else { return false };
        value = inner;
        schema = &schema["properties"][part];
    }
    !value.is_null() && has_declared_type(value, &schema["type"])
}

/// Returns true if a value has the type of a JSON schema, or one of its types. No declared type matches any
/// value.
fn has_declared_type(value: &Value, declared: &Value) -> bool {
    match declared {
        Value::String(name) => match name.as_str() {
            "number" => value.is_number(),
            "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|n| n.fract() == 0.0),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => true,
        },
        Value::Array(names) => names.iter().any(|name| has_declared_type(value, name)),
        _ => true,
    }
}

/// Returns true if an error does not depend on the values.
fn is_static(error: &minijinja::Error) -> bool {
    use ErrorKind::{SyntaxError, UnknownFilter, UnknownFunction, UnknownMethod, UnknownTest};
    matches!(error.kind(), SyntaxError | UnknownFilter | UnknownFunction | UnknownMethod | UnknownTest)
}

fn describe(error: &minijinja::Error) -> String {
    let detail = error.detail().map(|detail| format!(": {}", excerpt(detail))).unwrap_or_default();
    let line = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    format!("{}{detail}{line}", error.kind())
}

/// A buffer that rejects writes beyond [`MAX_RENDERED_BYTES`].
#[derive(Default)]
struct LimitedBuffer {
    bytes: Vec<u8>,
    is_exceeded: bool,
}

impl Write for LimitedBuffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_RENDERED_BYTES {
            self.is_exceeded = true;
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests_of_templates {
    use super::*;
    use serde_json::json;

    fn map(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    fn rendered(text: &str) -> Result<String, String> {
        let values = json!({"user": "ada", "now": "2026-01-01T12:00:00Z", "metadata": {"name": "Ada <3", "tier": "gold", "n": 3}});
        render(text, &map(values))
    }

    #[test]
    fn values_and_blocks_are_rendered() {
        for (text, want) in [
            ("Help {{ metadata.name }}.\n", "Help Ada <3.\n"),
            ("{% if metadata.tier == 'gold' %}Be quick.{% else %}Be kind.{% endif %}", "Be quick."),
            (
                "{{ metadata.city | default('nowhere') }} {{ metadata.city }}|{{ user|upper }} {{ now }}",
                "nowhere |ADA 2026-01-01T12:00:00Z",
            ),
            ("{% raw %}{{ x }}{% endraw %}", "{{ x }}"),
        ] {
            assert_eq!(check_template(text), Ok(()), "{text}");
            assert_eq!(rendered(text).as_deref(), Ok(want), "{text}");
        }
    }

    #[test]
    fn an_invalid_template_is_rejected() {
        for (text, want) in [
            ("{{ metadata.name", "syntax error"),
            ("{% if x %}", "syntax error"),
            ("{{ x | nonsense }}", "unknown filter"),
            ("{{ x is nonsense }}", "unknown test"),
            ("{{ range(5) }}", "unknown function"),
            ("{% for a in [1] %}{{ a }}{% endfor %}", "{% for %} is not supported"),
            ("{%- set a = 'x' %}", "{% set %} is not supported"),
            ("{% include 'x' %}", "{% include %} is not supported"),
        ] {
            let error = check_template(text).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
        assert_eq!(check_template("plain {# text #} } with { braces %}"), Ok(()));
    }

    #[test]
    fn evaluation_is_limited() {
        assert!(rendered("{{ metadata.a.b }}").unwrap_err().contains("undefined"));
        assert!(rendered("{{ 1 / 0 }}").is_err());
        let long = "{{ user }}".repeat(3_000);
        assert!(rendered(&long).unwrap_err().contains("fuel"), "{:?}", rendered(&long).map(|t| t.len()));
        let large = "{{ 'x' * 200000 }}{{ 'x' * 200000 }}";
        assert!(rendered(large).unwrap_err().contains("exceeds 262144 bytes"));
    }

    #[test]
    fn a_condition_holds_unless_it_certainly_does_not() {
        let schema = json!({"type": "object", "properties": {"amount": {"type": "number"}, "to": {"properties": {"vip": {"type": ["boolean"]}}}}});
        let holds = |condition: &str, arguments: Value| {
            assert_eq!(check_condition(condition), Ok(()), "{condition}");
            may_hold(condition, &map(arguments), &schema)
        };
        assert!(holds("amount > 100", json!({"amount": 101})));
        assert!(!holds("amount > 100", json!({"amount": 100})));
        assert!(!holds("amount > 100", json!({"amount": 99.5})));
        assert!(holds("amount > 100 or currency != 'EUR'", json!({"amount": 1, "currency": "USD"})));
        assert!(!holds("amount > 100 or currency not in ['EUR', 'CHF']", json!({"amount": 1, "currency": "CHF"})));
        assert!(!holds("note | length > 20", json!({"note": "short"})));
        // Not certain: missing, null, of another type, not a boolean, or it fails.
        assert!(holds("amount > 100", json!({})));
        assert!(holds("amount > 100", json!({"amount": null})));
        assert!(holds("amount < 100", json!({"amount": "99"})));
        assert!(holds("amount < 100", json!({"amount": true})));
        assert!(holds("to.vip", json!({"to": {}})));
        assert!(holds("to.vip", json!({"to": {"vip": 0}})));
        assert!(!holds("to.vip", json!({"to": {"vip": false}})));
        assert!(holds("amount - 100", json!({"amount": 100})));
        assert!(holds("amount / (amount - amount) > 1", json!({"amount": 1})));
        assert!(holds("amount is defined and amount > 100", json!({})));
        for (condition, want) in [
            ("amount >", "syntax error"),
            ("", "1 to 1000 bytes"),
            ("f(amount)", "unknown function"),
            ("x | nope", "unknown filter"),
            ("list[3] > 1", "subscripts"),
        ] {
            let error = check_condition(condition).unwrap_err();
            assert!(error.contains(want), "{condition}: {error}");
        }
        assert!(may_hold("list[3] > 1", &map(json!({"list": []})), &schema), "an unsupported condition");
        assert!(may_hold("amount >", &map(json!({"amount": 1})), &schema), "an invalid condition");
    }
}
