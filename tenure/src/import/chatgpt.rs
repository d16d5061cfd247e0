//! Reads the data export of ChatGPT (`conversations.json`): a list of conversations, each a tree of messages. The
//! branch that ends at `current_node` becomes the session; messages of other branches are counted and skipped.

use crate::import::builder::{ImportedCall, ImportedPart, MessageBuilder, timed_messages};
use crate::import::detect::Document;
use crate::import::imported::{ImportFormat, ImportedSession, SkippedPart, join_location, prefix_location};
use crate::session::transfer::export::Export;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::id::SessionId;
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Reads one conversation.
pub(super) fn read(doc: &Document<'_>) -> Result<ImportedSession> {
    let location = doc.location("conversations");
    let mut imported = convert(doc.raw).map_err(|e| prefix_location(&location, e))?;
    imported.skipped.iter_mut().for_each(|part| part.location = join_location(&location, &part.location));
    Ok(imported)
}

fn convert(raw: &str) -> Result<ImportedSession> {
    let conversation: Value = serde_json::from_str(raw).map_err(|e| Error::invalid("", format!("not JSON: {e}")))?;
    let text = |name: &str| conversation.get(name).and_then(Value::as_str).filter(|t| !t.is_empty());
    let mapping = conversation.get("mapping").and_then(Value::as_object);
    let mapping = mapping.ok_or_else(|| Error::invalid("mapping", "`mapping` must be an object of messages"))?;
    let mut reader = ChatReader::default();
    let mut export = Export {
        title: text("title").map(str::to_owned),
        model: text("default_model_slug").map(str::to_owned),
        created_at: time(conversation.get("create_time")),
        updated_at: time(conversation.get("update_time")),
        ..Export::default()
    };
    match text("conversation_id").or(text("id")).map(SessionId::new) {
        Some(Ok(id)) => export.session_id = Some(id),
        Some(Err(e)) => reader.skip("id", format!("{e}; a new session id is generated")),
        None => {}
    }
    let branch = branch(mapping, text("current_node"));
    for id in &branch {
        if let Some(message) = mapping.get(*id).and_then(|node| node.get("message")).filter(|m| m.is_object()) {
            reader.message(id, message);
        }
    }
    let on_branch: HashSet<&str> = branch.into_iter().collect();
    let other_messages = mapping.iter().filter(|(id, node)| !on_branch.contains(&***id) && has_content(node)).count();
    if other_messages > 0 {
        reader.skip("mapping", format!("{other_messages} messages of branches other than the current one"));
    }
    (export.messages, export.message_times) = timed_messages(reader.drafts)?;
    Ok(ImportedSession { format: ImportFormat::ChatGpt, export, skipped: reader.skipped })
}

/// The ids of the nodes from the root to the current one. Without a current node, the last leaf counts.
fn branch<'a>(mapping: &'a Map<String, Value>, current: Option<&'a str>) -> Vec<&'a str> {
    let is_leaf = |node: &Value| node.get("children").and_then(Value::as_array).is_none_or(Vec::is_empty);
    let last_leaf = || mapping.iter().filter(|(_, node)| is_leaf(node)).map(|(id, _)| id.as_str()).next_back();
    let mut next = current.filter(|id| mapping.contains_key(*id)).or_else(last_leaf);
    let mut branch = Vec::new();
    let mut seen = HashSet::new();
    // A damaged tree may have a cycle.
    while let Some(id) = next.filter(|id| seen.insert(*id)) {
        branch.push(id);
        next = mapping.get(id).and_then(|node| node.get("parent")?.as_str());
    }
    branch.reverse();
    branch
}

/// Parses a time in seconds since 1970, to the microsecond.
fn time(value: Option<&Value>) -> Option<Timestamp> {
    let seconds = value?.as_f64().filter(|s| s.abs() < 1e11)?;
    Timestamp::from_microsecond((seconds * 1e6).round() as i64).ok()
}

fn has_content(node: &Value) -> bool {
    let content = node.get("message").and_then(|m| m.get("content"));
    let parts = content.and_then(|c| c.get("parts")?.as_array());
    parts.is_some_and(|parts| parts.iter().any(|p| p.as_str() != Some("")))
        || content.and_then(|c| c.get("text")?.as_str()).is_some_and(|t| !t.is_empty())
}

/// Converts the messages of a branch, in order.
#[derive(Default)]
struct ChatReader {
    drafts: Vec<MessageBuilder>,
    /// The call that has no result yet: its id, and the name of the tool.
    open_call: Option<(String, String)>,
    skipped: Vec<SkippedPart>,
}

impl ChatReader {
    fn skip(&mut self, location: impl Into<String>, reason: impl Into<String>) {
        self.skipped.push(SkippedPart::new(location, reason));
    }

    fn message(&mut self, id: &str, message: &Value) {
        let location = format!("message {:.40}", id);
        let author = |name: &str| message.get("author").and_then(|a| a.get(name)?.as_str());
        let role = author("role").unwrap_or_default();
        let recipient = message.get("recipient").and_then(Value::as_str).unwrap_or("all");
        if !["user", "assistant", "system", "tool"].contains(&role) {
            return self.skip(location, format!("a message of the role {}", excerpt(role)));
        }
        let parts = self.parts(message.get("content").unwrap_or(&Value::Null), &location);
        if parts.is_empty() {
            return;
        }
        let mut draft =
            MessageBuilder { time: time(message.get("create_time")), ..MessageBuilder::new(&*location, role) };
        if role == "assistant" && recipient != "all" {
            let input: String = parts.iter().filter_map(ImportedPart::text).collect();
            draft.calls.push(ImportedCall::function(id.to_owned(), recipient, &json!({"input": input}).to_string()));
            self.open_call = Some((id.to_owned(), recipient.to_owned()));
        } else if role == "tool" {
            let tool = author("name").unwrap_or_default();
            let is_answer = |call: &mut (String, String)| call.1.split('.').next() == tool.split('.').next();
            match self.open_call.take_if(is_answer) {
                Some((call, _)) => draft.answered_call = Some(call),
                None => return self.skip(location, format!("a result of {} that no call asked for", excerpt(tool))),
            }
            draft.parts = parts;
        } else {
            draft.parts = parts;
        }
        self.drafts.push(draft);
    }

    /// Converts a content. What is not a text is skipped and reported: the export has media as files beside it.
    fn parts(&mut self, content: &Value, location: &str) -> Vec<ImportedPart> {
        let kind = content.get("content_type").and_then(Value::as_str).unwrap_or_default();
        let text = content.get("text").and_then(Value::as_str).filter(|t| !t.is_empty());
        match kind {
            "text" | "multimodal_text" => {}
            "code" | "execution_output" => return text.map(|t| ImportedPart::Text(t.to_owned())).into_iter().collect(),
            other => {
                self.skip(location, format!("content of the type {}", excerpt(other)));
                return Vec::new();
            }
        }
        let mut parts = Vec::new();
        for (i, part) in content.get("parts").and_then(Value::as_array).into_iter().flatten().enumerate() {
            match part.as_str() {
                Some("") => {}
                Some(text) => parts.push(ImportedPart::Text(text.to_owned())),
                None => {
                    let kind = part.get("content_type").and_then(Value::as_str).unwrap_or("unknown");
                    let reason = format!("a part of the type {}, whose data are not in this file", excerpt(kind));
                    self.skip(format!("{location}: parts[{i}]"), reason);
                }
            }
        }
        parts
    }
}
