//! Reads transcripts of Claude Code, which have one line for each block of a message, and lines of
//! the program's own.
//!
//! The lines of one answer have the same `message.id` and become one message; tool results follow
//! it in the order of the calls. Where a question was asked again from the same parent, only the
//! last one counts (D-097). Lines for the program's own use are skipped and listed.

use crate::import::builder::{Bookkeeping, ImportedCall, ImportedPart, MessageBuilder, timed_messages};
use crate::import::detect::Document;
use crate::import::imported::{ImportFormat, ImportedSession, SkippedPart};
use crate::import::raw_json::{items, quoted, string};
use crate::session::transfer::export::Export;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::id::SessionId;
use crate::types::raw_object::RawObjectRef;
use std::collections::{HashMap, HashSet};

/// The known fields of a line, which are not listed as skipped.
const LINE_FIELDS: [&str; 8] =
    ["type", "message", "sessionId", "uuid", "parentUuid", "isSidechain", "timestamp", "isApiErrorMessage"];
/// The known fields of a message, which are not listed as skipped.
const MESSAGE_FIELDS: [&str; 5] = ["id", "role", "content", "model", "type"];

/// Block types that contain the model's reasoning.
const REASONING_BLOCKS: [&str; 2] = ["thinking", "redacted_thinking"];

/// A line of a transcript.
struct ClaudeLine<'a> {
    number: String,
    fields: RawObjectRef<'a>,
    kind: String,
    uuid: Option<String>,
    parent: Option<String>,
}

impl ClaudeLine<'_> {
    /// Returns true if this is a question of the user: not a tool result, and not a note of the program.
    fn is_question(&self) -> bool {
        let content = self.fields.object("message").and_then(|m| m.get("content")).unwrap_or_default();
        let result = |b: &str| RawObjectRef::parse(b).and_then(|f| f.text("type")).as_deref() == Some("tool_result");
        self.kind == "user"
            && !self.fields.is_true("isMeta")
            && !self.fields.is_true("isSidechain")
            && !items(content).unwrap_or_default().into_iter().any(result)
    }
}

/// Reads the sessions of a transcript, in the order in which they begin, and returns an error for
/// each line that is not a JSON object.
pub(super) fn read(docs: &[Document<'_>]) -> Vec<Result<ImportedSession>> {
    let mut sessions = Vec::<(String, Vec<ClaudeLine<'_>>)>::new();
    let mut errors = Vec::new();
    let mut session_by_uuid = HashMap::new();
    let mut unassigned = Vec::new();
    for doc in docs {
        let number = doc.location("line");
        let Some(fields) = doc.fields() else {
            errors.push(Err(Error::invalid(number, "this line is not a JSON object; it may be torn")));
            continue;
        };
        let kind = fields.text("type").unwrap_or_default();
        let uuid = fields.text("uuid");
        let session = fields.text("sessionId");
        let parent = fields.text("parentUuid");
        let line = ClaudeLine { number, fields, kind, uuid, parent };
        let Some(session) = session else {
            unassigned.push(line);
            continue;
        };
        let index = sessions.iter().position(|(id, _)| *id == session).unwrap_or_else(|| {
            sessions.push((session, Vec::new()));
            sessions.len() - 1
        });
        session_by_uuid.extend(line.uuid.clone().map(|u| (u, index)));
        sessions[index].1.push(line);
    }
    if sessions.is_empty() && !unassigned.is_empty() {
        sessions.push((String::new(), Vec::new()));
    }
    // Lines without a session id belong to the session that has the line they refer to, or
    // otherwise to the first session.
    for line in unassigned {
        let referenced =
            ["leafUuid", "messageId"].into_iter().find_map(|f| line.fields.text(f)).or(line.parent.clone());
        let index = referenced.and_then(|leaf| session_by_uuid.get(&leaf).copied()).unwrap_or_default();
        if let Some((_, lines)) = sessions.get_mut(index) {
            lines.push(line);
        }
    }
    sessions.into_iter().map(|(id, lines)| session(&id, &lines)).chain(errors).collect()
}

/// Converts the lines of one session.
fn session(id: &str, lines: &[ClaudeLine<'_>]) -> Result<ImportedSession> {
    let mut reader = ClaudeReader { abandoned: abandoned(lines), ..ClaudeReader::default() };
    for line in lines {
        reader.line(line)?;
    }
    let mut export = reader.export;
    let mut skipped = reader.skipped;
    match SessionId::new(id) {
        Ok(id) => export.session_id = Some(id),
        Err(_) if id.is_empty() => {}
        Err(e) => skipped.push(SkippedPart::new("sessionId", format!("{e}; a new session id is generated"))),
    }
    (export.messages, export.message_times) = timed_messages(reader.drafts)?;
    skipped.extend(reader.fields.into_skipped("every line"));
    Ok(ImportedSession { format: ImportFormat::ClaudeCode, export, skipped })
}

/// The ids of questions that were asked again from the same parent, and of all lines that follow from them.
fn abandoned(lines: &[ClaudeLine<'_>]) -> HashSet<String> {
    let questions = lines.iter().filter(|l| l.is_question());
    let last: HashMap<&str, &str> =
        questions.clone().filter_map(|l| Some((l.parent.as_deref()?, l.uuid.as_deref()?))).collect();
    let mut abandoned = HashSet::new();
    for line in lines {
        let (Some(parent), Some(uuid)) = (&line.parent, &line.uuid) else { continue };
        if abandoned.contains(parent) || (line.is_question() && last.get(&**parent).is_some_and(|l| l != uuid)) {
            abandoned.insert(uuid.clone());
        }
    }
    abandoned
}

/// Converts the lines of one session, in order.
#[derive(Default)]
struct ClaudeReader {
    abandoned: HashSet<String>,
    seen: HashSet<String>,
    export: Export,
    drafts: Vec<MessageBuilder>,
    /// The answer that is being built: its id, and its index in `drafts`.
    answer: Option<(String, usize)>,
    fields: Bookkeeping,
    skipped: Vec<SkippedPart>,
}

impl ClaudeReader {
    /// Lists a part of the input as skipped.
    fn skip(&mut self, location: &str, reason: impl Into<String>) {
        self.skipped.push(SkippedPart::new(location, reason));
    }

    fn line(&mut self, line: &ClaudeLine<'_>) -> Result<()> {
        let location = &*line.number;
        let fields = &line.fields;
        if line.uuid.as_ref().is_some_and(|u| self.abandoned.contains(u)) {
            self.skip(location, "an abandoned branch: the question was asked again from the same parent, and only the last one is imported");
        } else if line.uuid.as_ref().is_some_and(|u| !self.seen.insert(u.clone())) {
            self.skip(location, "duplicate line: this uuid occurred before");
        } else if fields.is_true("isSidechain") {
            self.skip(location, "a sidechain: the conversation of a subagent, not part of this conversation");
        } else if fields.is_true("isApiErrorMessage") {
            self.skip(location, "an error message of the program, not an answer of the model");
        } else {
            match (&*line.kind, fields.object("message")) {
                ("user" | "assistant", Some(message)) => return self.message(line, &message),
                ("user" | "assistant", None) => {
                    let path = format!("{location}: message");
                    return Err(Error::invalid(path, "the line has no message; it needs one with role and content"));
                }
                ("summary", _) => {
                    if let Some(before) = self.export.title.replace(fields.text("summary").unwrap_or_default()) {
                        self.skip(location, format!("this summary replaces an earlier title: {before}"));
                    }
                }
                (kind, _) => {
                    self.skip(location, format!("an internal line of the program, type {kind}", kind = excerpt(kind)))
                }
            }
        }
        Ok(())
    }

    fn message(&mut self, line: &ClaudeLine<'_>, message: &RawObjectRef<'_>) -> Result<()> {
        self.fields.record_unknown("", line.fields.0.iter().map(|(n, _)| &**n), &LINE_FIELDS);
        self.fields.record_unknown("message.", message.0.iter().map(|(n, _)| &**n), &MESSAGE_FIELDS);
        if let Some(timestamp) = line.fields.text("timestamp").and_then(|t| t.parse().ok()) {
            self.export.created_at.get_or_insert(timestamp);
            self.export.updated_at = Some(timestamp);
        }
        if let Some(model) = message.text("model").filter(|m| m != "<synthetic>") {
            self.export.model = Some(model);
        }
        let location = &*line.number;
        let content = message.get("content").unwrap_or_default();
        let mut draft = MessageBuilder::new(format!("{location}: message"), &line.kind);
        let mut results = Vec::new();
        match (string(content), items(content)) {
            (Some(text), _) => draft.parts.push(ImportedPart::Text(text)),
            (_, Some(blocks)) => {
                for (i, block) in blocks.into_iter().enumerate() {
                    self.block(block, &format!("{location}: message.content[{i}]"), &mut draft, &mut results)?;
                }
            }
            _ => {
                let path = format!("{location}: message.content");
                return Err(Error::invalid(path, "content must be a string or a list of blocks"));
            }
        }
        let time = line.fields.text("timestamp").and_then(|time| time.parse().ok());
        draft.time = time;
        results.iter_mut().for_each(|result| result.time = time);
        self.add(line, message.text("id"), draft, results);
        Ok(())
    }

    /// Adds the content of a line as a message, or to the answer that is being built.
    fn add(&mut self, line: &ClaudeLine<'_>, id: Option<String>, draft: MessageBuilder, results: Vec<MessageBuilder>) {
        if line.kind != "assistant" {
            self.drafts.extend(results);
            if !draft.is_empty() {
                self.answer = None;
                self.drafts.push(draft);
            }
            return;
        }
        match (&self.answer, &id) {
            // The answer continues. At most results of its calls came between.
            (Some((open, index)), Some(id)) if open == id => {
                self.drafts[*index].parts.extend(draft.parts);
                self.drafts[*index].calls.extend(draft.calls);
            }
            _ if draft.is_empty() => {}
            _ => {
                self.answer = id.map(|id| (id, self.drafts.len()));
                self.drafts.push(draft);
            }
        }
    }

    fn block(
        &mut self,
        raw: &str,
        location: &str,
        draft: &mut MessageBuilder,
        results: &mut Vec<MessageBuilder>,
    ) -> Result<()> {
        let invalid = |field: &str, reason: &str| Error::invalid(format!("{location}.{field}"), reason);
        let block = RawObjectRef::parse(raw)
            .ok_or_else(|| Error::invalid(location, "a block must be a JSON object with a type"))?;
        match &*block.text("type").unwrap_or_default() {
            "tool_use" if draft.role == "assistant" => {
                let id = block.text("id").ok_or_else(|| invalid("id", "a tool call needs an id"))?;
                let name = block.text("name").ok_or_else(|| invalid("name", "a tool call needs the tool's name"))?;
                draft.calls.push(ImportedCall::function(id, &name, block.get("input").unwrap_or("{}")));
            }
            "tool_result" if draft.role == "user" => {
                let id = block.text("tool_use_id");
                let id = id.ok_or_else(|| invalid("tool_use_id", "a result must name the call it answers"))?;
                let mut result = MessageBuilder { answered_call: Some(id), ..MessageBuilder::new(location, "tool") };
                let content = block.get("content").unwrap_or("[]");
                match (string(content), items(content)) {
                    (Some(text), _) => result.parts.push(ImportedPart::Text(text)),
                    (_, Some(blocks)) => {
                        for (i, b) in blocks.into_iter().enumerate() {
                            let location = format!("{location}.content[{i}]");
                            let fields = RawObjectRef::parse(b).unwrap_or_default();
                            let part = self.part(&fields, &location);
                            result.parts.extend(part);
                        }
                    }
                    _ => return Err(invalid("content", "content must be a string or a list of blocks")),
                }
                if block.is_true("is_error") {
                    self.skip(
                        &format!("{location}.is_error"),
                        "the error flag of the call; a tool result has only content",
                    );
                }
                results.push(result);
            }
            _ => draft.parts.extend(self.part(&block, location)),
        }
        Ok(())
    }

    /// Converts a content block to a message part. `None` means that it was listed as skipped.
    fn part(&mut self, block: &RawObjectRef<'_>, location: &str) -> Option<ImportedPart> {
        let kind = block.text("type").unwrap_or_default();
        let source = block.object("source").unwrap_or_default();
        let data = || Some(format!("data:{};base64,{}", source.text("media_type")?, source.text("data")?));
        let url = source.text("url").or_else(data);
        let part = match (&*kind, url) {
            ("text", _) => block.text("text").map(ImportedPart::Text),
            ("image", Some(url)) => Some(ImportedPart::image(&url)),
            ("document", Some(url)) if url.starts_with("data:") => {
                let name = block.text("title").unwrap_or_else(|| "document".to_owned());
                let file = format!(r#"{{"filename":{},"file_data":{}}}"#, quoted(&name), quoted(&url));
                Some(ImportedPart::Json(format!(r#"{{"type":"file","file":{file}}}"#)))
            }
            _ => None,
        };
        if part.is_none() {
            let reason = if REASONING_BLOCKS.contains(&&*kind) {
                "reasoning of the model, which only the model that produced it can read".to_owned()
            } else {
                format!("a content block that cannot be represented in a message, type {kind}", kind = excerpt(kind))
            };
            self.skip(location, reason);
        }
        part
    }
}
