//! Semantic equality of messages: comparison of their normalized content, independent of formatting.
//!
//! Clients rarely send a message back byte for byte. They turn a string into text parts, strip or collapse
//! white space, drop the reasoning block and the media, reformat JSON, and rename tool calls. Such a copy is
//! still the same message (D-024).

use super::{Message, MessageShape, PartShape, Role, ToolCall};
use crate::types::blob::{BlobId, content_id};
use crate::types::canonical_json::{Nulls, canonical, canonical_hash};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::HashSet;

/// The normalized content by which two messages without tool calls are compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Meaning {
    /// The normalized text.
    pub text: String,
    /// Content parts that are neither text nor media, as hashes of their canonical JSON.
    pub other: Vec<BlobId>,
    /// Media, as hashes of their bytes.
    pub media: Vec<BlobId>,
}

/// The degree to which the tool calls of two assistant messages agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CallMatch {
    /// Only names and arguments agree: the client renamed the ids.
    Content,
    /// An id agrees, but not all names and arguments.
    Id,
    /// Ids, names and arguments agree.
    Both,
}

impl Message {
    /// Returns the normalized content of the message.
    pub(crate) fn meaning(&self) -> Meaning {
        let mut meaning = Meaning::default();
        let Ok(shape) = MessageShape::read(&self.raw) else { return meaning };
        let mut texts: Vec<Cow<'_, str>> = Vec::new();
        let mut blob_refs = self.blob_refs().iter();
        for part in shape.parts().unwrap_or_default() {
            match part {
                PartShape::Text(text) => texts.push(text),
                PartShape::Other(raw) => meaning.other.push(canonical_hash(raw)),
                PartShape::Media(data) => {
                    meaning.media.push(content_id(&data, || blob_refs.next().map(|blob_ref| blob_ref.id)));
                }
            }
        }
        if texts.iter().all(|t| t.is_empty())
            && let Some(refusal) = shape.refusal.and_then(|r| serde_json::from_str::<String>(r.get()).ok())
        {
            texts.push(refusal.into());
        }
        meaning.text = match &texts[..] {
            [text] => normalize(self.role(), text),
            texts => normalize(self.role(), &texts.join("\n")),
        };
        meaning
    }

    /// Returns true if `incoming` is a copy of this stored message: roles and normalized contents are equal.
    /// Tool results are matched by the call that they answer, tool calls by their ids, or by names and
    /// arguments if the client renamed the ids. A copy without its media is the same message.
    pub fn is_same(&self, incoming: &Message) -> bool {
        if self.raw == incoming.raw && self.blob_refs == incoming.blob_refs {
            return true;
        }
        if self.role() != incoming.role() {
            return false;
        }
        if self.role() == Role::Tool {
            return self.tool_call_id_ref() == incoming.tool_call_id_ref();
        }
        if self.may_call() || incoming.may_call() {
            let stored_calls = self.tool_calls();
            let incoming_calls = incoming.tool_calls();
            if !stored_calls.is_empty() || !incoming_calls.is_empty() {
                return match_calls(&stored_calls, &incoming_calls).is_some();
            }
        }
        self.has_same_content(incoming)
    }

    /// Returns true if the contents are equal, regardless of roles and ids.
    pub(crate) fn has_same_content(&self, incoming: &Message) -> bool {
        (self.raw == incoming.raw && self.blob_refs == incoming.blob_refs) || self.has_content(&incoming.meaning())
    }

    /// Returns true if this stored message has the given content. Missing media in `incoming` are not a
    /// difference.
    pub(crate) fn has_content(&self, incoming: &Meaning) -> bool {
        let stored = self.meaning();
        let media = incoming.media.is_empty() || stored.media == incoming.media;
        stored.text == incoming.text && stored.other == incoming.other && media
    }

    /// Compares the tool calls of this stored message with those of an incoming one. `None` means that either
    /// has none, or that they differ.
    pub(crate) fn call_match(&self, incoming: &Message) -> Option<CallMatch> {
        match_calls(&self.tool_calls(), &incoming.tool_calls())
    }
}

/// Compares tool calls. One common id with the same name is enough, because ids are unique and some clients
/// split or merge parallel calls. Without a common id, all names and arguments must be equal, in any order.
pub(crate) fn match_calls(stored: &[ToolCall], incoming: &[ToolCall]) -> Option<CallMatch> {
    if stored.is_empty() || incoming.is_empty() {
        return None;
    }
    let named: HashSet<(&str, &str)> = stored.iter().map(|o| (o.id.as_str(), o.name.as_str())).collect();
    let by_id = incoming.iter().any(|t| named.contains(&(t.id.as_str(), t.name.as_str())));
    let by_content = pair_calls(stored, incoming).is_some();
    match (by_id, by_content) {
        (true, true) => Some(CallMatch::Both),
        (true, false) => Some(CallMatch::Id),
        (false, true) => Some(CallMatch::Content),
        (false, false) => None,
    }
}

/// Returns, for each incoming call, the index of the stored call with the same name and arguments. `None`
/// unless this is a one-to-one mapping.
pub(crate) fn pair_calls(stored: &[ToolCall], incoming: &[ToolCall]) -> Option<Vec<usize>> {
    if stored.len() != incoming.len() {
        return None;
    }
    // Sorted alike, calls with equal contents have equal positions.
    let sorted = |calls: &[ToolCall]| -> Vec<(String, String, usize)> {
        let content = calls.iter().enumerate().map(|(i, c)| (c.name.clone(), canonical_text(&c.arguments), i));
        let mut content: Vec<_> = content.collect();
        content.sort();
        content
    };
    let mut pairs = vec![0; incoming.len()];
    for (stored, incoming) in sorted(stored).into_iter().zip(sorted(incoming)) {
        if (&stored.0, &stored.1) != (&incoming.0, &incoming.1) {
            return None;
        }
        pairs[incoming.2] = stored.2;
    }
    Some(pairs)
}

/// Normalizes text for comparison: drops a leading reasoning block of an assistant, collapses white space,
/// and canonicalizes JSON objects.
pub(crate) fn normalize(role: Role, text: &str) -> String {
    let mut text = text.trim();
    if role == Role::Assistant
        && let Some((_, rest)) = text.strip_prefix("<think>").and_then(|t| t.split_once("</think>"))
    {
        text = rest.trim_start();
    }
    canonical_text(text)
}

/// Maximum length of a text that is parsed as JSON, in bytes. Parsing takes many times the memory of the
/// text.
const MAX_JSON_BYTES: usize = 64 << 10;

/// Returns a JSON object in canonical form, and any other text with white space collapsed.
fn canonical_text(text: &str) -> String {
    let text = text.trim();
    if text.len() <= MAX_JSON_BYTES
        && text.starts_with('{')
        && text.ends_with('}')
        && let Ok(value @ Value::Object(_)) = serde_json::from_str(text)
    {
        return canonical(&value, Nulls::Keep);
    }
    let mut collapsed = String::with_capacity(text.len());
    for word in text.split_whitespace() {
        if !collapsed.is_empty() {
            collapsed.push(' ');
        }
        collapsed.push_str(word);
    }
    collapsed
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn message(value: serde_json::Value) -> Message {
        Message::from_value(&value).unwrap()
    }

    fn calls(calls: &[(&str, &str, &str)]) -> Message {
        let calls: Vec<_> = calls
            .iter()
            .map(|(id, name, arguments)| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
            .collect();
        message(json!({"role": "assistant", "content": null, "tool_calls": calls}))
    }

    #[test]
    fn a_copy_that_is_written_differently_is_the_same_message() {
        let stored = Message::assistant("  Answer with *spaces*  \n\n- x\n");
        for copy in [
            json!({"role": "assistant", "content": "Answer with *spaces* - x"}),
            json!({"role": "assistant", "content": [{"type": "text", "text": "Answer with *spaces*"}, {"type": "text", "text": "- x"}]}),
            json!({"role": "assistant", "content": "<think>hm</think>\nAnswer with *spaces* - x", "refusal": null, "x": 1}),
        ] {
            assert!(stored.is_same(&message(copy.clone())), "{copy}");
        }
        assert!(!stored.is_same(&Message::assistant("Answer with spaces - x")));
        assert!(!stored.is_same(&Message::user("Answer with *spaces* - x")));
        let json = Message::assistant(r#"{"name": "a", "n": 1}"#);
        assert!(json.is_same(&Message::assistant(r#"{"n":1,"name":"a"}"#)));
        assert!(!json.is_same(&Message::assistant(r#"{"n":2,"name":"a"}"#)));
        // A user message may legitimately contain the tags of a reasoning block.
        assert!(!Message::user("<think>x</think> y").is_same(&Message::user("y")));
    }

    #[test]
    fn refusals_with_different_words_differ() {
        let refusal = |text: &str| message(json!({"role": "assistant", "content": null, "refusal": text}));
        assert!(refusal("no").is_same(&refusal("no ")));
        assert!(!refusal("no").is_same(&refusal("never")));
    }

    #[test]
    fn calls_agree_by_id_or_by_content() {
        let stored = calls(&[("a", "f", r#"{"q": 1}"#), ("b", "g", "{}")]);
        let cases = [
            (calls(&[("b", "g", "{}"), ("a", "f", r#"{"q":1}"#)]), Some(CallMatch::Both)),
            (calls(&[("a", "f", r#"{"q":2}"#)]), Some(CallMatch::Id)),
            (calls(&[("x", "f", r#"{"q":1}"#), ("y", "g", "{}")]), Some(CallMatch::Content)),
            (calls(&[("x", "f", r#"{"q":1}"#)]), None),
            (calls(&[("a", "h", r#"{"q":1}"#)]), None),
        ];
        for (incoming, expected) in cases {
            assert_eq!(stored.call_match(&incoming), expected, "{incoming:?}");
            assert_eq!(stored.is_same(&incoming), expected.is_some(), "{incoming:?}");
        }
        assert!(!stored.is_same(&Message::assistant("x")));
    }
}
