//! Builds messages in OpenAI's format from other formats.

use crate::import::raw_json::quoted;
use crate::types::error::Result;
use crate::types::message::Message;
use jiff::Timestamp;
use std::collections::BTreeSet;

/// A part of a message's content.
#[derive(Clone, Debug)]
pub(super) enum ImportedPart {
    Text(String),
    /// Any other part, as JSON.
    Json(String),
}

impl ImportedPart {
    /// An image part with a URL.
    pub fn image(url: &str) -> Self {
        ImportedPart::Json(format!(r#"{{"type":"image_url","image_url":{{"url":{}}}}}"#, quoted(url)))
    }

    /// The text, if the part is one.
    pub fn text(&self) -> Option<&str> {
        match self {
            ImportedPart::Text(text) => Some(text),
            ImportedPart::Json(_) => None,
        }
    }

    fn json(&self) -> String {
        match self {
            ImportedPart::Text(text) => format!(r#"{{"type":"text","text":{}}}"#, quoted(text)),
            ImportedPart::Json(json) => json.clone(),
        }
    }
}

/// A tool call of a message.
#[derive(Clone, Debug)]
pub(super) struct ImportedCall {
    /// The id of the call.
    pub id: String,
    /// The call as JSON.
    pub json: String,
}

impl ImportedCall {
    /// A function call. `arguments` is the JSON that the tool gets.
    pub fn function(id: String, name: &str, arguments: &str) -> Self {
        let function = format!(r#"{{"name":{},"arguments":{}}}"#, quoted(name), quoted(arguments));
        let json = format!(r#"{{"id":{},"type":"function","function":{function}}}"#, quoted(&id));
        Self { id, json }
    }

    /// A call of a custom tool with free text input.
    pub fn custom(id: String, name: &str, input: &str) -> Self {
        let custom = format!(r#"{{"name":{},"input":{}}}"#, quoted(name), quoted(input));
        let json = format!(r#"{{"id":{},"type":"custom","custom":{custom}}}"#, quoted(&id));
        Self { id, json }
    }
}

/// A message that is being built.
#[derive(Clone, Debug, Default)]
pub(super) struct MessageBuilder {
    /// The location in the input.
    pub location: String,
    /// The role.
    pub role: String,
    /// The content.
    pub parts: Vec<ImportedPart>,
    /// The tool calls.
    pub calls: Vec<ImportedCall>,
    /// The id of the call that a tool message answers.
    pub answered_call: Option<String>,
    /// The text with which the model refused to answer.
    pub refusal: Option<String>,
    /// The original time.
    pub time: Option<Timestamp>,
}

impl MessageBuilder {
    /// An empty message with a role.
    pub fn new(location: impl Into<String>, role: &str) -> Self {
        Self { location: location.into(), role: role.to_owned(), ..Self::default() }
    }

    /// Returns true if the message has no content.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.calls.is_empty() && self.answered_call.is_none() && self.refusal.is_none()
    }

    /// Converts to a message. It is an error if the result is not valid.
    pub fn message(&self) -> Result<Message> {
        let content = match &self.parts[..] {
            [] if self.calls.is_empty() && self.refusal.is_none() => quoted(""),
            [] => "null".to_owned(),
            [ImportedPart::Text(text)] => quoted(text),
            parts => format!("[{}]", parts.iter().map(ImportedPart::json).collect::<Vec<_>>().join(",")),
        };
        let mut json = format!(r#"{{"role":{}"#, quoted(&self.role));
        if let Some(id) = &self.answered_call {
            json += &format!(r#","tool_call_id":{}"#, quoted(id));
        }
        json += &format!(r#","content":{content}"#);
        if let Some(refusal) = &self.refusal {
            json += &format!(r#","refusal":{}"#, quoted(refusal));
        }
        if !self.calls.is_empty() {
            let calls: Vec<_> = self.calls.iter().map(|c| &*c.json).collect();
            json += &format!(r#","tool_calls":[{}]"#, calls.join(","));
        }
        Message::parse(&(json + "}")).map_err(|e| crate::import::imported::prefix_location(&self.location, e))
    }
}

/// Converts to messages, and their times if any of them has one. Tool results that follow their calls are sorted by the
/// order of the calls.
pub(super) fn timed_messages(mut drafts: Vec<MessageBuilder>) -> Result<(Vec<Message>, Vec<Option<Timestamp>>)> {
    let mut start = 0;
    while start < drafts.len() {
        let order: Vec<String> = drafts[start].calls.iter().map(|c| c.id.clone()).collect();
        let results = drafts[start + 1..].iter().take_while(|d| d.answered_call.is_some()).count();
        let call_position = |d: &MessageBuilder| {
            order.iter().position(|id| Some(id) == d.answered_call.as_ref()).unwrap_or(order.len())
        };
        drafts[start + 1..start + 1 + results].sort_by_key(call_position);
        start += 1 + results;
    }
    let messages = drafts.iter().map(MessageBuilder::message).collect::<Result<_>>()?;
    let has_times = drafts.iter().any(|draft| draft.time.is_some());
    let times = if has_times { drafts.iter().map(|draft| draft.time).collect() } else { Vec::new() };
    Ok((messages, times))
}

/// The names of fields that cannot be represented in a session, deduplicated, so that they are
/// listed once and not for each line.
#[derive(Debug, Default)]
pub(super) struct Bookkeeping(BTreeSet<String>);

impl Bookkeeping {
    /// Adds the names that are not `known`. `prefix` is the prefix of their path.
    pub fn record_unknown<'n>(&mut self, prefix: &str, names: impl IntoIterator<Item = &'n str>, known: &[&str]) {
        let unknown = names.into_iter().filter(|n| !known.contains(n));
        self.0.extend(unknown.map(|n| format!("{prefix}{n}")));
    }

    /// The list of fields as one entry. `None` means that there are none.
    pub fn into_skipped(self, location: &str) -> Option<crate::import::imported::SkippedPart> {
        let names: Vec<String> = self.0.into_iter().collect();
        let reason = || format!("these fields cannot be represented in a session: {}", names.join(", "));
        (!names.is_empty()).then(|| crate::import::imported::SkippedPart::new(location, reason()))
    }
}
