//! Redaction of text that leaves the log. Rules are regular expressions; each match is replaced by a mark.
//!
//! The log stays unredacted (D-084). Transcripts, memories, vectors and search results are redacted before
//! they are written.

use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::id::check_text;
use crate::types::message::Message;
use crate::types::raw_object::RawObject;
use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of rules (`max_rules`).
pub const MAX_REDACTION_RULES: usize = 256;
/// Maximum size of one compiled pattern, in bytes (`max_pattern_bytes`).
pub const MAX_PATTERN_BYTES: usize = 1 << 20;

/// Maximum nesting of JSON inside JSON strings that is parsed. JSON nested deeper is redacted as plain text.
const MAX_NESTED_STRINGS: usize = 4;

/// Maximum depth of JSON that is parsed. Each level is parsed once more and uses stack, and this bounds both.
/// Values nested deeper are redacted as plain text.
const MAX_DEPTH: usize = 32;

/// A compiled redaction rule.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "RuleText", into = "RuleText")]
pub struct RedactionRule {
    text: RuleText,
    mark: Arc<str>,
    regex: Regex,
}

/// The serialized form of a rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    name: String,
    pattern: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replace: Option<String>,
}

impl RedactionRule {
    /// Compiles a rule. `replace` is inserted literally in place of each match; `None` means `[redacted:
    /// NAME]`.
    pub fn new(name: &str, pattern: &str, replace: Option<&str>) -> Result<Self> {
        let replace = replace.map(str::to_owned);
        RuleText { name: name.to_owned(), pattern: pattern.to_owned(), replace }.try_into()
    }

    /// Returns the name of the rule.
    pub fn name(&self) -> &str {
        &self.text.name
    }
}

impl TryFrom<RuleText> for RedactionRule {
    type Error = Error;

    fn try_from(text: RuleText) -> Result<Self> {
        let name = &text.name;
        if let Err(reason) = check_text(name) {
            return Err(Error::invalid(
                "name",
                format!("{name} is not a valid rule name: {reason}", name = excerpt(name)),
            ));
        }
        let invalid = |reason: String| Error::invalid("pattern", format!("the pattern of the rule {name:?} {reason}"));
        let regex = RegexBuilder::new(&text.pattern).size_limit(MAX_PATTERN_BYTES).build().map_err(|e| match e {
            regex::Error::CompiledTooBig(max) => {
                invalid(format!("exceeds the limit `max_pattern_bytes` of {max} bytes when compiled; simplify it"))
            }
            // The last line is the error message; the lines before it draw its position.
            e => {
                let message = e.to_string();
                let last = message.lines().last().unwrap_or_default();
                invalid(format!("is not a valid regular expression: {}", last.trim_start_matches("error: ")))
            }
        })?;
        if regex.is_match("") {
            return Err(invalid(
                "matches the empty string; change it so that every match contains at least one character".to_owned(),
            ));
        }
        let mark = text.replace.clone().unwrap_or_else(|| format!("[redacted: {name}]"));
        Ok(Self { text, mark: mark.into(), regex })
    }
}

impl From<RedactionRule> for RuleText {
    fn from(rule: RedactionRule) -> Self {
        rule.text
    }
}

impl PartialEq for RedactionRule {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

/// A set of redaction rules, compiled once. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<RedactionRule>", into = "Vec<RedactionRule>")]
pub struct Redaction(Arc<[RedactionRule]>);

impl TryFrom<Vec<RedactionRule>> for Redaction {
    type Error = Error;

    fn try_from(rules: Vec<RedactionRule>) -> Result<Self> {
        if rules.len() > MAX_REDACTION_RULES {
            return Err(Error::TooLarge {
                subject: format!("a list of {} rules", rules.len()),
                limit: "max_rules",
                max: MAX_REDACTION_RULES as u64,
            });
        }
        let mut names = BTreeSet::new();
        match rules.iter().find(|r| !names.insert(r.name())) {
            Some(duplicate) => Err(Error::invalid(
                "name",
                format!(
                    "two rules are named {:?}; give each rule a unique name, because marks contain it",
                    duplicate.name()
                ),
            )),
            None => Ok(Self(rules.into())),
        }
    }
}

impl From<Redaction> for Vec<RedactionRule> {
    fn from(redaction: Redaction) -> Self {
        redaction.0.to_vec()
    }
}

impl Redaction {
    /// Returns true if there are no rules, so that nothing is redacted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Replaces matches by marks. Also returns the names of the rules that matched. All rules apply to the
    /// original text (D-085); overlapping matches are merged and get the mark of the first. Marks that the
    /// text already contains are preserved.
    ///
    /// The work is linear in the length of the text and in the number of matches, and besides the output, the
    /// memory does not grow with the number of matches.
    pub fn apply<'t>(&self, text: &'t str) -> (Cow<'t, str>, Vec<&str>) {
        self.apply_counted(text, &mut 0)
    }

    /// Redacts a text and adds the number of matches and marks examined to `steps`, so that a test can
    /// measure the work without a clock.
    fn apply_counted<'t>(&self, text: &'t str, steps: &mut usize) -> (Cow<'t, str>, Vec<&str>) {
        // The matches of all rules by position: a k-way merge of one ordered iterator per rule.
        let mut rules: Vec<_> = self.0.iter().map(|r| r.regex.find_iter(text).filter(|m| !m.is_empty())).collect();
        let first =
            rules.iter_mut().enumerate().filter_map(|(i, matches)| matches.next().map(|m| (m.start(), i, m.end())));
        let mut next: BinaryHeap<_> = first.map(Reverse).collect();
        if next.is_empty() {
            return (Cow::Borrowed(text), Vec::new());
        }
        let marks = self.marks(text);
        *steps += marks.len();
        let mut out = String::new();
        // The end of the part of the text that was processed.
        let mut copied = 0;
        let mut applied = BTreeSet::new();
        let mut passed_marks = 0;
        let mut marked_upto = 0;
        while let Some(Reverse((start, rule, end))) = next.pop() {
            *steps += 1;
            if let Some(following) = rules[rule].next() {
                next.push(Reverse((following.start(), rule, following.end())));
            }
            // The furthest end of the marks that start at or before this match. A match that ends before it
            // is inside a mark.
            while let Some(mark) = marks.get(passed_marks).filter(|mark| mark.start <= start) {
                marked_upto = marked_upto.max(mark.end);
                passed_marks += 1;
                *steps += 1;
            }
            if end <= marked_upto {
                continue;
            }
            // A match that starts inside another match is covered by the mark of that one.
            if start >= copied {
                out.push_str(&text[copied..start]);
                out.push_str(&self.0[rule].mark);
            }
            copied = copied.max(end);
            applied.insert(rule);
        }
        if applied.is_empty() {
            return (Cow::Borrowed(text), Vec::new());
        }
        out.push_str(&text[copied..]);
        (Cow::Owned(out), applied.into_iter().map(|rule| self.0[rule].name()).collect())
    }

    /// Finds the default marks that the text already contains, by their start.
    fn marks(&self, text: &str) -> Vec<Range<usize>> {
        let marks = self.0.iter().filter(|r| r.text.replace.is_none()).map(|r| &*r.mark);
        let mut found: Vec<_> =
            marks.flat_map(|mark| text.match_indices(mark).map(|(at, m)| at..at + m.len())).collect();
        found.sort_unstable_by_key(|mark| mark.start);
        found
    }

    /// Redacts a message: its texts, the arguments of its calls, and unknown fields. Also returns the names
    /// of the rules that matched. The result is a valid message: known field names, roles, ids and media are
    /// unchanged, and text that is JSON stays JSON. Detached media ([`Message::blob_refs`]) stay detached.
    pub fn redact_message(&self, message: &Message) -> (Message, Vec<&str>) {
        let mut names = BTreeSet::new();
        let text = if self.is_empty() {
            None
        } else {
            self.redact_value(message.as_str(), RedactionPart::Message, NestingGuard::default(), &mut names)
        };
        let message = match text {
            Some(text) => Message::trusted(text, Vec::new()),
            None => message.clone(),
        };
        (message, names.into_iter().collect())
    }

    /// Redacts a JSON value. `None` means that nothing matched.
    fn redact_value<'a>(
        &'a self,
        raw: &str,
        part: RedactionPart,
        nesting: NestingGuard,
        names: &mut BTreeSet<&'a str>,
    ) -> Option<String> {
        let below = NestingGuard { levels: nesting.levels + 1, ..nesting };
        match raw.as_bytes().first()? {
            // Inside a string, the rules are applied to the whole string afterwards.
            b'{' | b'[' if nesting.levels >= MAX_DEPTH && part == RedactionPart::EmbeddedJson => None,
            b'{' | b'[' if nesting.levels >= MAX_DEPTH => self.redact_plain(raw, names),
            b'{' => {
                let fields: RawObject = serde_json::from_str(raw).ok()?;
                let mut changed = false;
                let mut out = String::with_capacity(raw.len());
                for (name, value) in fields.iter() {
                    // The field names of a message are fixed; those of embedded JSON may contain anything.
                    let name = match part {
                        RedactionPart::EmbeddedJson => {
                            self.redact_text(name, nesting, names).unwrap_or(Cow::Borrowed(name))
                        }
                        _ => Cow::Borrowed(name),
                    };
                    let part = part.below(&name, value);
                    let new = part.and_then(|part| self.redact_value(value, part, below, names));
                    changed |= new.is_some() || matches!(name, Cow::Owned(_));
                    out.push(if out.is_empty() { '{' } else { ',' });
                    out.push_str(&Value::from(name).to_string());
                    out.push(':');
                    out.push_str(new.as_deref().unwrap_or(value));
                }
                changed.then(|| if out.is_empty() { "{}".to_owned() } else { out + "}" })
            }
            b'[' => {
                let items: Vec<&RawValue> = serde_json::from_str(raw).ok()?;
                let new: Vec<_> = items.iter().map(|i| self.redact_value(i.get(), part, below, names)).collect();
                let either = items.iter().zip(&new).map(|(item, new)| new.as_deref().unwrap_or(item.get()));
                new.iter().any(Option::is_some).then(|| format!("[{}]", either.collect::<Vec<_>>().join(",")))
            }
            b'"' => {
                let text: String = serde_json::from_str(raw).ok()?;
                self.redact_text(&text, nesting, names).map(|new| Value::from(new).to_string())
            }
            b't' | b'f' | b'n' => None,
            // A redacted number becomes a string that contains the mark.
            _ => self.redact_plain(raw, names),
        }
    }

    /// Redacts JSON as plain text, without parsing it, and returns a JSON string. `None` means that nothing
    /// matched.
    fn redact_plain<'a>(&'a self, raw: &str, names: &mut BTreeSet<&'a str>) -> Option<String> {
        let (new, applied) = self.apply(raw);
        names.extend(&applied);
        (!applied.is_empty()).then(|| Value::from(new).to_string())
    }

    /// Redacts a text: first inside the JSON that it may contain, where characters can be escaped, then as a
    /// whole. `None` means that nothing matched.
    fn redact_text<'a, 't>(
        &'a self,
        text: &'t str,
        nesting: NestingGuard,
        names: &mut BTreeSet<&'a str>,
    ) -> Option<Cow<'t, str>> {
        let json = text.trim();
        let inside = if nesting.texts < MAX_NESTED_STRINGS && json.starts_with(['{', '[']) {
            let nesting = NestingGuard { texts: nesting.texts + 1, ..nesting };
            self.redact_value(json, RedactionPart::EmbeddedJson, nesting, names)
        } else {
            None
        };
        let (new, applied) = self.apply(inside.as_deref().unwrap_or(text));
        names.extend(&applied);
        if applied.is_empty() { inside.map(Cow::Owned) } else { Some(Cow::Owned(new.into_owned())) }
    }
}

/// The depth of a value in a message.
#[derive(Clone, Copy, Debug, Default)]
struct NestingGuard {
    /// Number of enclosing objects and arrays, over all nested strings ([`MAX_DEPTH`]).
    levels: usize,
    /// Number of enclosing JSON strings ([`MAX_NESTED_STRINGS`]).
    texts: usize,
}

/// The part of a message that a value belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RedactionPart {
    Message,
    Content,
    Media,
    Calls,
    Function,
    /// An unknown field.
    Other,
    /// JSON inside a string.
    EmbeddedJson,
}

impl RedactionPart {
    /// Returns the part that a field belongs to. `None` means that the field is not redacted.
    fn below(self, name: &str, value: &str) -> Option<RedactionPart> {
        match (self, name) {
            (RedactionPart::Message, "role" | "tool_call_id")
            | (RedactionPart::Calls, "id" | "type")
            | (RedactionPart::Function, "name")
            | (RedactionPart::Content, "type") => None,
            (RedactionPart::Message, "content") => Some(RedactionPart::Content),
            (RedactionPart::Message, "tool_calls") => Some(RedactionPart::Calls),
            (RedactionPart::Calls, "function" | "custom") => Some(RedactionPart::Function),
            (RedactionPart::Content, "image_url" | "video_url" | "audio_url" | "input_audio" | "file") => {
                (!is_media(value)).then_some(RedactionPart::Media)
            }
            (RedactionPart::Media, "data" | "file_data" | "url") => (!is_media(value)).then_some(RedactionPart::Other),
            (RedactionPart::EmbeddedJson, _) => Some(RedactionPart::EmbeddedJson),
            _ => Some(RedactionPart::Other),
        }
    }
}

/// Returns true if a JSON string holds base64 media and no text, with or without the prefix of a data URL.
fn is_media(raw: &str) -> bool {
    let Some(text) = raw.strip_prefix('"').and_then(|t| t.strip_suffix('"')) else { return false };
    match text.strip_prefix("data:") {
        Some(rest) => rest.split_once(";base64,").is_some_and(|(_, data)| is_base64(data)),
        None => text.len() >= 64 && is_base64(text),
    }
}

fn is_base64(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+/=\\".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rules(rules: &[(&str, &str, Option<&str>)]) -> Redaction {
        let rules: Vec<_> = rules.iter().map(|(n, p, r)| RedactionRule::new(n, p, *r).unwrap()).collect();
        rules.try_into().unwrap()
    }

    fn usual() -> Redaction {
        rules(&[("email", r"[\w.]+@[\w.]+\w", None), ("card", r"\b(\d[ -]?){15}\d\b", Some("****"))])
    }

    #[test]
    fn a_mark_shows_the_position_and_the_rule() {
        let usual = usual();
        let (text, names) = usual.apply("ann@example.com paid with 4111 1111 1111 1111, bob@x.org did not");
        assert_eq!(text, "[redacted: email] paid with ****, [redacted: email] did not");
        assert_eq!(names, ["email", "card"]);
        let (text, names) = usual.apply("nothing here");
        assert!(matches!(text, Cow::Borrowed("nothing here")) && names.is_empty());
    }

    #[test]
    fn overlapping_matches_leave_nothing_between_them() {
        let both = rules(&[("b", "cdef", None), ("a", "abcd", None), ("tail", "f+", None)]);
        let (text, names) = both.apply("xabcdefffx");
        assert_eq!((text.as_ref(), names), ("x[redacted: a]x", vec!["b", "a", "tail"]));
        // A rule that matches its own mark does not match it again.
        let own = rules(&[("email", "email", None)]);
        let once = own.apply("my email").0.into_owned();
        assert_eq!((own.apply(&once).0.as_ref(), once.as_str()), ("my [redacted: email]", "my [redacted: email]"));
    }

    #[test]
    fn the_work_is_linear_in_the_matches() {
        let usual = usual();
        let work = |n: usize| {
            let text = "ann@example.com and [redacted: email] ".repeat(n);
            let mut steps = 0;
            let (redacted, names) = usual.apply_counted(&text, &mut steps);
            assert_eq!(
                (redacted.as_ref(), names),
                (&*"[redacted: email] and [redacted: email] ".repeat(n), vec!["email"])
            );
            steps
        };
        let few = work(100);
        let many = work(10_000);
        assert!(few >= 200 && many <= few * 101, "{few} steps for 100 matches and marks, {many} for 10,000");
    }

    #[test]
    fn deeply_nested_json_is_redacted_as_plain_text() {
        let usual = usual();
        for depth in [MAX_DEPTH - 2, 200_000] {
            let text = format!("{}\"ann@example.com\"{}", "[".repeat(depth), "]".repeat(depth));
            let (redacted, names) = usual.redact_message(&Message::user(&text));
            assert_eq!(redacted.text(), text.replace("ann@example.com", "[redacted: email]"), "depth {depth}");
            assert_eq!(names, ["email"]);
        }
        let raw =
            format!(r#"{{"role":"user","content":"x","deep":{}"ann@example.com"{}}}"#, "[".repeat(99), "]".repeat(99));
        let (redacted, _) = usual.redact_message(&Message::parse(&raw).unwrap());
        assert!(!redacted.as_str().contains("ann@example.com"), "{}", redacted.as_str());
        Message::parse(redacted.as_str()).unwrap();
    }

    #[test]
    fn a_message_stays_a_message() {
        let raw = json!({
            "role": "assistant", "content": [
                {"type": "text", "text": "write to ann@example.com"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,4111111111111111"}},
                {"type": "image_url", "image_url": {"url": "https://x.org/?u=ann@example.com"}},
            ],
            "tool_calls": [{"id": "4111111111111111", "type": "function", "function": {
                "name": "pay", "arguments": "{\"to\":\"ann\\u0040example.com\",\"card\":4111111111111111,\"n\":1.50}"}}],
            "reasoning": {"of": ["ann@example.com"]},
        });
        let message = Message::parse(&raw.to_string()).unwrap();
        let usual = usual();
        let (redacted, names) = usual.redact_message(&message);
        let value = Message::parse(redacted.as_str()).unwrap().to_value();
        assert_eq!(names, ["card", "email"]);
        assert_eq!(value["content"][0]["text"], "write to [redacted: email]");
        assert_eq!(value["content"][1], raw["content"][1], "media are no words");
        assert_eq!(value["content"][2]["image_url"]["url"], "https://x.org/?u=[redacted: email]");
        assert_eq!(value["tool_calls"][0]["id"], "4111111111111111", "a result must find its call");
        let arguments = value["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
        assert_eq!(arguments, r#"{"to":"[redacted: email]","card":"****","n":1.50}"#);
        assert_eq!(value["reasoning"]["of"][0], "[redacted: email]");
        assert!(redacted.as_str().starts_with(r#"{"content":["#), "fields stay in their order");
        let plain = Message::parse(r#"{"role":"user", "content": "a  b", "x": 1.50}"#).unwrap();
        assert_eq!(usual.redact_message(&plain), (plain, vec![]));
    }

    #[test]
    fn json_inside_a_text_is_redacted() {
        let usual = usual();
        let result = r#" [{"who":"ann\u0040example.com"}, {"bob@x.org": null}, {}]"#;
        let (redacted, _) = usual.redact_message(&Message::tool("c1", result));
        assert_eq!(redacted.text(), r#"[{"who":"[redacted: email]"},{"[redacted: email]":null},{}]"#);
        let broken = usual.redact_message(&Message::tool("c1", "{ann@example.com")).0;
        assert_eq!(broken.text(), "{[redacted: email]");
    }

    #[test]
    fn an_invalid_rule_is_rejected() {
        for (name, pattern, expected) in [
            ("a", "(", "unclosed group"),
            ("a", r"\w{1000}{1000}", "max_pattern_bytes"),
            ("a", "x*", "matches the empty string"),
            ("", "x", "name"),
            ("a\n", "x", "name"),
        ] {
            let error = RedactionRule::new(name, pattern, None).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains('\n'), "{pattern}: {error}");
        }
        let rule = RedactionRule::new("a", "x", None).unwrap();
        let duplicate = Redaction::try_from(vec![rule.clone(), rule.clone()]).unwrap_err();
        assert!(duplicate.to_string().contains("two rules"), "{duplicate}");
        let many = (0..=MAX_REDACTION_RULES).map(|i| RedactionRule::new(&format!("r{i}"), "x", None).unwrap());
        assert!(Redaction::try_from(many.collect::<Vec<_>>()).unwrap_err().to_string().contains("max_rules"));
        let read: Result<Redaction, _> = serde_json::from_value(json!([{"name": "a", "patern": "x"}]));
        assert!(read.unwrap_err().to_string().contains("patern"));
        let text = json!([{"name": "a", "pattern": "x", "replace": "y"}]);
        let read: Redaction = serde_json::from_value(text.clone()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), text);
    }
}
