//! Reads items of OpenAI's Responses API, where messages, calls and results are separate items.

use crate::import::builder::{Bookkeeping, ImportedCall, ImportedPart, MessageBuilder, timed_messages};
use crate::import::detect::{Document, list_page};
use crate::import::imported::{ImportFormat, ImportedSession, SkippedPart, prefix_location};
use crate::import::raw_json::{items, quoted, string};
use crate::session::transfer::export::Export;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::raw_object::RawObjectRef;

/// The known fields of an item, which are not listed as skipped.
const ITEM_FIELDS: [&str; 8] = ["type", "role", "content", "call_id", "name", "arguments", "input", "output"];

/// Reads one session from its items.
pub(super) fn read(docs: &[Document<'_>]) -> Result<ImportedSession> {
    let mut reader = ResponsesReader::default();
    if let [page] = docs
        && let Some(list) = list_page(page)
    {
        for (i, raw) in list.items.iter().enumerate() {
            reader.item(raw, &format!("data[{i}]"))?;
        }
        if list.has_more {
            reader.skipped.push(SkippedPart::new("has_more", "further pages of the list, which are not in this file"));
        }
        return reader.finish();
    }
    for doc in docs {
        reader.item(doc.raw, &doc.location("items"))?;
    }
    reader.finish()
}

/// Converts the items of one session, in order.
#[derive(Default)]
pub(super) struct ResponsesReader {
    drafts: Vec<MessageBuilder>,
    fields: Bookkeeping,
    skipped: Vec<SkippedPart>,
}

impl ResponsesReader {
    /// The converted session.
    pub fn finish(self) -> Result<ImportedSession> {
        let (messages, message_times) = timed_messages(self.drafts)?;
        let export = Export { messages, message_times, ..Export::default() };
        let skipped = self.skipped.into_iter().chain(self.fields.into_skipped("every item")).collect();
        Ok(ImportedSession { format: ImportFormat::Responses, export, skipped })
    }

    /// Converts the next item.
    pub fn item(&mut self, raw: &str, location: &str) -> Result<()> {
        self.convert(raw, location).map_err(|e| prefix_location(location, e))
    }

    /// Converts the next item, which has a time.
    #[cfg(feature = "sqlite")]
    pub fn item_at(&mut self, raw: &str, location: &str, time: Option<jiff::Timestamp>) -> Result<()> {
        let before = self.drafts.len();
        self.item(raw, location)?;
        self.drafts[before..].iter_mut().for_each(|draft| draft.time = time);
        Ok(())
    }

    fn convert(&mut self, raw: &str, location: &str) -> Result<()> {
        let item = RawObjectRef::parse(raw).ok_or_else(|| Error::invalid("", "an item must be a JSON object"))?;
        let required =
            |name: &str| item.text(name).ok_or_else(|| Error::invalid(name, format!("the item needs a `{name}`")));
        let kind = item.text("type").unwrap_or_else(|| "message".to_owned());
        match &*kind {
            "message" => {
                let role = required("role")?;
                let mut draft = MessageBuilder::new(location, &role);
                self.content(item.get("content"), &format!("{location}.content"), &mut draft)?;
                if !draft.is_empty() {
                    self.drafts.push(draft);
                }
            }
            "function_call" => {
                let call = ImportedCall::function(required("call_id")?, &required("name")?, &required("arguments")?);
                self.call(location, call);
            }
            "custom_tool_call" => {
                let call = ImportedCall::custom(required("call_id")?, &required("name")?, &required("input")?);
                self.call(location, call);
            }
            "function_call_output" | "custom_tool_call_output" => {
                let mut result = MessageBuilder {
                    answered_call: Some(required("call_id")?),
                    ..MessageBuilder::new(location, "tool")
                };
                self.content(item.get("output"), &format!("{location}.output"), &mut result)?;
                self.drafts.push(result);
            }
            "reasoning" => {
                self.skipped.push(SkippedPart::new(
                    location,
                    "reasoning of the model, which only the model that produced it can read",
                ));
                return Ok(());
            }
            other => {
                self.skipped.push(SkippedPart::new(
                    location,
                    format!(
                        "an item that is neither a message, a tool call nor a tool result, type {other}",
                        other = excerpt(other)
                    ),
                ));
                return Ok(());
            }
        }
        self.fields.record_unknown("", item.0.iter().map(|(n, _)| &**n), &ITEM_FIELDS);
        Ok(())
    }

    /// Adds a call to the assistant message right before it, or to a new one.
    fn call(&mut self, location: &str, call: ImportedCall) {
        match self.drafts.last_mut() {
            Some(draft) if draft.role == "assistant" => draft.calls.push(call),
            _ => self.drafts.push(MessageBuilder { calls: vec![call], ..MessageBuilder::new(location, "assistant") }),
        }
    }

    /// Adds the content of an item to a message.
    fn content(&mut self, raw: Option<&str>, location: &str, draft: &mut MessageBuilder) -> Result<()> {
        let raw = raw.unwrap_or(r#""""#);
        if let Some(text) = string(raw) {
            draft.parts.push(ImportedPart::Text(text));
            return Ok(());
        }
        let name = location.rsplit('.').next().unwrap_or_default();
        let parts = items(raw).ok_or_else(|| Error::invalid(name, "the value must be a string or a list of parts"))?;
        for (i, raw) in parts.into_iter().enumerate() {
            let fields = RawObjectRef::parse(raw).unwrap_or_default();
            let part = match &*fields.text("type").unwrap_or_default() {
                "input_text" | "output_text" | "text" => fields.text("text").map(ImportedPart::Text),
                "input_image" => fields.text("image_url").map(|url| match fields.get("detail") {
                    Some(detail) => {
                        let image = format!(r#"{{"url":{},"detail":{detail}}}"#, quoted(&url));
                        ImportedPart::Json(format!(r#"{{"type":"image_url","image_url":{image}}}"#))
                    }
                    None => ImportedPart::image(&url),
                }),
                "input_file" => file(&fields),
                "input_audio" => Some(ImportedPart::Json(raw.to_owned())),
                "refusal" => {
                    draft.refusal = fields.text("refusal");
                    continue;
                }
                _ => None,
            };
            let extra = ["annotations", "logprobs"].into_iter().filter(|n| fields.get(n).is_some_and(|v| v != "[]"));
            self.fields.record_unknown("content.", extra, &[]);
            match part {
                Some(part) => draft.parts.push(part),
                None => {
                    let kind = fields.text("type").unwrap_or_default();
                    let reason = format!(
                        "a content part that cannot be represented in a message, type {kind}",
                        kind = excerpt(kind)
                    );
                    self.skipped.push(SkippedPart::new(format!("{location}[{i}]"), reason));
                }
            }
        }
        Ok(())
    }
}

/// Converts a file part with data or an id. A file given by URL cannot be represented in a message.
fn file(part: &RawObjectRef<'_>) -> Option<ImportedPart> {
    let known = ["filename", "file_data", "file_id"];
    let fields: Vec<_> = known.iter().filter_map(|n| Some((*n, part.get(n)?.into()))).collect();
    let has_source = part.get("file_data").or(part.get("file_id")).is_some();
    has_source
        .then(|| ImportedPart::Json(format!(r#"{{"type":"file","file":{}}}"#, crate::import::raw_json::object(fields))))
}
