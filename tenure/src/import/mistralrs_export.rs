//! Writes sessions in the format of mistral.rs: in its tagged form, which mistral.rs imports, and with plain OpenAI
//! messages, as `GET /v1/sessions/{id}` returns them.

use super::mistralrs::{embedded_medium, image};
use crate::import::imported::SkippedPart;
use crate::import::raw_json::{items, object, quoted, string};
use crate::session::transfer::export::Export;
use crate::types::blob::{BlobId, payload};
use crate::types::error::{Error, Result};
use crate::types::message::{Message, Role};
use crate::types::raw_object::RawObjectRef;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// An export in the format of mistral.rs.
#[derive(Serialize)]
struct PlainExport<'a> {
    #[serde(flatten)]
    export: &'a Export,
    images: Vec<String>,
    videos: Vec<String>,
    files: Vec<MistralFile>,
}

#[derive(Serialize)]
struct MistralFile {
    id: String,
    name: String,
    bytes: usize,
    purpose: &'static str,
    source: MistralSource,
    data_base64: String,
}

#[derive(Serialize)]
struct MistralSource {
    tool: &'static str,
    round: usize,
    turn: usize,
}

/// Serializes a session as `GET /v1/sessions/{id}` returns it: `messages`, each exactly as it was
/// given; the media in them again as base64 lists (`images`, `videos`, `files`); and the other
/// fields of an export. [`read`](super::read) converts it back to the same export (D-096).
pub fn to_mistralrs(export: &Export) -> Result<Box<RawValue>> {
    let mut images = Vec::new();
    let mut videos = Vec::new();
    let mut files = Vec::new();
    let mut turn = 0;
    for message in &export.messages {
        let content = RawObjectRef::parse(message.as_str()).and_then(|f| f.get("content"));
        for part in content.and_then(items).unwrap_or_default().into_iter().filter_map(RawObjectRef::parse) {
            let Some((kind, data)) = embedded_medium(&part) else { continue };
            let Ok(bytes) = STANDARD.decode(payload(&data)) else { continue };
            match kind {
                _ if bytes.is_empty() => {}
                "image" => images.push(payload(&data).to_owned()),
                "video" => videos.push(payload(&data).to_owned()),
                _ => files.push(MistralFile {
                    id: format!("file-{}", &BlobId::of(&bytes).to_string()[..32]),
                    name: part.object("file").and_then(|f| f.text("filename")).unwrap_or_else(|| "file".to_owned()),
                    bytes: bytes.len(),
                    purpose: "user_data",
                    source: MistralSource { tool: "user", round: 0, turn },
                    data_base64: payload(&data).to_owned(),
                }),
            }
        }
        turn += usize::from(message.role() == Role::User);
    }
    serde_json::value::to_raw_value(&PlainExport { export, images, videos, files })
        .map_err(|e| Error::invalid("messages", format!("the session cannot be serialized as JSON: {e}")))
}

/// Serializes a session in the form that mistral.rs exports and imports: each value of a message is tagged,
/// `{"Left": "a text"}` or `{"Right": [parts]}`, and an image is a placeholder whose data are in `images`. Also
/// returns what this form cannot represent. [`read`](super::read) converts it back to the same messages.
///
/// ```
/// use tenure::{Message, import, session::Export};
///
/// let messages = vec![Message::user("hi"), Message::assistant("hello")];
/// let (text, skipped) = import::to_mistralrs_tagged(&Export { messages: messages.clone(), ..Export::default() })?;
/// assert!(text.starts_with(r#"{"messages":[{"role":{"Left":"user"},"content":{"Left":"hi"}}"#) && skipped.is_empty());
/// assert_eq!(import::read(&text, None)?.remove(0)?.export.messages, messages);
/// # Ok::<(), tenure::Error>(())
/// ```
pub fn to_mistralrs_tagged(export: &Export) -> Result<(String, Vec<SkippedPart>)> {
    let mut writer = TaggedWriter::default();
    let mut messages = Vec::with_capacity(export.messages.len());
    for (i, message) in export.messages.iter().enumerate() {
        messages.push(writer.message(message, &format!("messages[{i}]"))?);
    }
    let images: Vec<String> = writer.images.iter().map(|data| quoted(data)).collect();
    // Videos are lists of decoded frames there, which a session does not have: they stay in their messages.
    let text = format!(r#"{{"messages":[{}],"images":[{}],"videos":[]}}"#, messages.join(","), images.join(","));
    Ok((text, writer.skipped))
}

/// Converts messages to their tagged form, in order.
#[derive(Default)]
struct TaggedWriter {
    images: Vec<String>,
    /// The names of called tools by the ids of their calls: a result names its tool.
    tools: Vec<(String, String)>,
    skipped: Vec<SkippedPart>,
}

impl TaggedWriter {
    fn message(&mut self, message: &Message, location: &str) -> Result<String> {
        let invalid = || Error::invalid(location, "the message is not a JSON object");
        let fields = RawObjectRef::parse(message.as_str()).ok_or_else(invalid)?;
        self.tools.extend(message.tool_calls().into_iter().map(|call| (call.id, call.name)));
        let mut tagged: Vec<(&str, Cow<'_, str>)> = Vec::new();
        for (name, value) in &fields.0 {
            let value = match &**name {
                "content" if *value == "null" => Some(left("\"\"")),
                "content" => self.content(value),
                "tool_calls" => items(value).map(|calls| right(calls.into_iter().map(call_with_json))),
                _ => tag(value),
            };
            match value {
                Some(value) => tagged.push((name, value.into())),
                None if name == "tool_calls" || fields.get(name) == Some("null") => {}
                None => self.skipped.push(SkippedPart::new(
                    format!("{location}.{name}"),
                    "the field is neither a text nor a list of objects",
                )),
            }
        }
        if message.role() == Role::Tool && fields.get("name").is_none() {
            let call = fields.text("tool_call_id").unwrap_or_default();
            if let Some((_, tool)) = self.tools.iter().rev().find(|(id, _)| *id == call) {
                tagged.push(("name", left(&quoted(tool)).into()));
            }
        }
        Ok(object(tagged))
    }

    /// Tags a content. Images become placeholders, and their data are listed; other media stay.
    fn content(&mut self, raw: &str) -> Option<String> {
        let Some(parts) = items(raw) else { return tag(raw) };
        let mut tagged = Vec::new();
        for part in parts {
            let fields = RawObjectRef::parse(part)?;
            match embedded_medium(&fields).filter(|(kind, data)| *kind == "image" && is_image(data)) {
                Some((_, data)) => {
                    self.images.push(payload(&data).to_owned());
                    tagged.push(r#"{"type":"image"}"#.to_owned());
                }
                None => tagged.push(part.to_owned()),
            }
        }
        Some(right(tagged.into_iter()))
    }
}

/// Returns true if a medium is base64 of an image format that mistral.rs decodes: it rejects a session with any other.
fn is_image(data: &str) -> bool {
    let Ok(bytes) = STANDARD.decode(payload(data)) else { return false };
    let starts = [&b"\x89PNG\r\n\x1a\n"[..], b"\xff\xd8", b"GIF8", b"RIFF"];
    starts.iter().any(|start| bytes.starts_with(start)) && image(&quoted(data), "").is_ok()
}

/// Tags a JSON value. `None` if it is neither a string nor a list of objects.
fn tag(raw: &str) -> Option<String> {
    if string(raw).is_some() {
        return Some(left(raw));
    }
    let parts = items(raw)?;
    parts.iter().all(|part| RawObjectRef::parse(part).is_some()).then(|| right(parts.into_iter().map(str::to_owned)))
}

fn left(text: &str) -> String {
    format!(r#"{{"Left":{text}}}"#)
}

fn right(list: impl Iterator<Item = String>) -> String {
    format!(r#"{{"Right":[{}]}}"#, list.collect::<Vec<_>>().join(","))
}

/// Converts a call so that its arguments are JSON and not text, if they are an object.
fn call_with_json(call: &str) -> String {
    let with_json = || {
        let fields = RawObjectRef::parse(call)?;
        let function = fields.object("function")?;
        let arguments = function.text("arguments").filter(|text| RawObjectRef::parse(text).is_some())?;
        let function = object(function.0.iter().map(|(name, value)| match &**name {
            "arguments" => (&**name, Cow::Borrowed(arguments.trim())),
            _ => (&**name, Cow::Borrowed(*value)),
        }));
        Some(object(fields.0.iter().map(|(name, value)| match &**name {
            "function" => (&**name, Cow::Borrowed(&*function)),
            _ => (&**name, Cow::Borrowed(*value)),
        })))
    };
    with_json().unwrap_or_else(|| call.to_owned())
}
