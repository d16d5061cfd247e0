//! Splits a text into JSON documents, and detects their format.

use crate::import::imported::ImportFormat;
use crate::import::raw_json::{items, string};
use crate::types::error::{Error, Result};
use crate::types::raw_object::RawObjectRef;
use serde_json::value::RawValue;

/// One JSON document: an element of a list, a line, or the whole text.
#[derive(Clone, Debug)]
pub(super) struct Document<'a> {
    /// The location in the text.
    pub path: DocumentPath,
    /// The original text of the document.
    pub raw: &'a str,
}

/// The location of a document in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DocumentPath {
    /// The document is the whole text.
    Whole,
    /// A line number, from 1.
    Line(usize),
    /// An index in a list, from 0.
    Item(usize),
}

impl<'a> Document<'a> {
    /// The fields of the document. `None` means that it is not a JSON object.
    pub fn fields(&self) -> Option<RawObjectRef<'a>> {
        RawObjectRef::parse(self.raw)
    }

    /// Returns true if the document is an object with this field.
    pub fn has(&self, field: &str) -> bool {
        self.fields().is_some_and(|f| f.get(field).is_some())
    }

    /// The location as text. `list` is the name of the list that the document is in, if it is in one.
    pub fn location(&self, list: &str) -> String {
        match self.path {
            DocumentPath::Whole => String::new(),
            DocumentPath::Line(n) => format!("line {n}"),
            DocumentPath::Item(i) => format!("{list}[{i}]"),
        }
    }
}

/// Splits a text into documents: a list into its elements, JSONL into its lines. It is an error if
/// it is neither JSON nor JSONL.
pub(super) fn split(text: &str) -> Result<Vec<Document<'_>>> {
    let text = text.trim_start_matches('\u{feff}').trim();
    if text.is_empty() {
        return Err(Error::invalid("", "the input is empty; send a session as JSON or JSONL"));
    }
    let parse_error = match serde_json::from_str::<&RawValue>(text) {
        Ok(_) => match items(text) {
            Some(items) => {
                return Ok(items
                    .into_iter()
                    .enumerate()
                    .map(|(i, raw)| Document { path: DocumentPath::Item(i), raw })
                    .collect());
            }
            None => return Ok(vec![Document { path: DocumentPath::Whole, raw: text }]),
        },
        Err(e) => e,
    };
    let lines =
        text.lines().enumerate().map(|(i, line)| Document { path: DocumentPath::Line(i + 1), raw: line.trim() });
    let lines: Vec<_> = lines.filter(|d| !d.raw.is_empty()).collect();
    if lines.iter().any(|d| d.fields().is_some_and(|f| !f.0.is_empty())) {
        Ok(lines)
    } else {
        Err(Error::invalid("", format!("the input is neither JSON nor JSONL: {parse_error}")))
    }
}

/// A page of a list of OpenAI's API: `{"object": "list", "data": […], "has_more": …}`.
pub(super) struct ListPage<'a> {
    pub items: Vec<&'a str>,
    pub has_more: bool,
}

/// Reads a document as a page of a list, such as the items of a conversation. `None` if it is not one.
pub(super) fn list_page<'a>(doc: &Document<'a>) -> Option<ListPage<'a>> {
    let fields = doc.fields().filter(|f| f.text("object").as_deref() == Some("list"))?;
    Some(ListPage { items: items(fields.get("data")?)?, has_more: fields.is_true("has_more") })
}

/// Detects the format of a text. `None` means that it is unknown.
pub(super) fn detect_format(docs: &[Document<'_>]) -> Option<ImportFormat> {
    let mut kinds = docs.iter().filter_map(detect_document_format);
    match kinds.next() {
        // Plain messages and items of the Responses API look alike until one of them is a call.
        Some(ImportFormat::OpenAi) if kinds.any(|k| k == ImportFormat::Responses) => Some(ImportFormat::Responses),
        None if docs.is_empty() => Some(ImportFormat::OpenAi),
        first => first,
    }
}

/// Detects the format of one document. `None` means that it is unknown.
pub(super) fn detect_document_format(doc: &Document<'_>) -> Option<ImportFormat> {
    let fields = doc.fields()?;
    let has = |name: &str| fields.get(name).is_some();
    if fields.object("mapping").is_some() {
        return Some(ImportFormat::ChatGpt);
    }
    if let Some(list) = list_page(doc) {
        let is_item = |raw: &&str| detect_document_format(&Document { path: doc.path, raw }).is_some();
        return list.items.first().is_none_or(is_item).then_some(ImportFormat::Responses);
    }
    if let Some(messages) = fields.get("messages") {
        let has_media_lists =
            ["images", "videos", "files"].into_iter().any(|l| fields.get(l).is_some_and(|v| items(v).is_some()));
        return Some(if has("tenure") {
            ImportFormat::Tenure
        } else if has_media_lists || items(messages)?.into_iter().any(is_tagged) {
            ImportFormat::MistralRs
        } else {
            ImportFormat::OpenAi
        });
    }
    if has("type") && ["uuid", "sessionId", "leafUuid", "snapshot"].into_iter().any(has) {
        return Some(ImportFormat::ClaudeCode);
    }
    let kind = fields.text("type").unwrap_or_default();
    let parts = fields.get("content").and_then(items).unwrap_or_default();
    let part_type = |p: &str| RawObjectRef::parse(p).and_then(|f| f.text("type")).unwrap_or_default();
    let is_responses_type = |k: &str| ["input_text", "output_text", "input_image", "input_file"].contains(&k);
    if kind == "message"
        || kind == "reasoning"
        || ["_call", "_call_output"].iter().any(|end| kind.ends_with(end))
        || parts.into_iter().any(|p| is_responses_type(&part_type(p)))
    {
        return Some(ImportFormat::Responses);
    }
    has("role").then(|| if is_tagged(doc.raw) { ImportFormat::MistralRs } else { ImportFormat::OpenAi })
}

/// Returns true if a message has a value of the form `{"Left": …}` or `{"Right": …}`.
fn is_tagged(message: &str) -> bool {
    RawObjectRef::parse(message).is_some_and(|f| f.0.iter().any(|(_, v)| untagged(v).is_some()))
}

/// The value inside a `Left` or `Right` tag. `None` means that the value is not tagged.
pub(super) fn untagged(raw: &str) -> Option<&str> {
    if !raw.starts_with('{') {
        return None;
    }
    match &RawObjectRef::parse(raw)?.0[..] {
        [(tag, value)] if tag == "Left" && string(value).is_some() => Some(value),
        [(tag, value)] if tag == "Right" && value.starts_with('[') => Some(value),
        _ => None,
    }
}
