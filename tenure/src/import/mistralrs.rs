//! Reads sessions in the format of mistral.rs.
//!
//! Its messages are maps whose values are tagged: `{"Left": "a text"}` or `{"Right": [parts or
//! calls]}`. Media are listed separately: the message has a placeholder part `{"type": "image"}` or
//! `{"type": "video"}`, in the order of the lists (D-095). The arguments of a call are JSON, not
//! text, and a result names its tool, not its call.

use crate::import::builder::ImportedPart;
use crate::import::detect::untagged;
use crate::import::imported::SkippedPart;
use crate::import::raw_json::{items, object, quoted, string};
use crate::types::blob::payload;
use crate::types::error::{Error, Result};
use crate::types::message::{Message, Role};
use crate::types::raw_object::RawObjectRef;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::borrow::Cow;
use std::collections::VecDeque;

/// A medium that is listed separately from the messages.
struct Medium {
    /// The location in the input.
    location: String,
    /// The base64 data.
    data: String,
    /// The message parts that replace the placeholder.
    parts: Vec<String>,
}

/// The media of an export that are not assigned to a message yet, and the calls that have no result yet.
#[derive(Default)]
pub(super) struct ListedMessages {
    images: VecDeque<Medium>,
    videos: VecDeque<Medium>,
    files: VecDeque<Medium>,
    open_calls: Vec<(String, String)>,
    skipped: Vec<SkippedPart>,
}

impl ListedMessages {
    /// Reads the media lists of an export.
    pub fn read(fields: &RawObjectRef<'_>) -> Result<Self> {
        let mut listed = Self::default();
        for (i, raw) in list(fields, "images")?.into_iter().enumerate() {
            let location = format!("images[{i}]");
            let (data, part) = image(raw, &location)?;
            listed.images.push_back(Medium { location, data, parts: vec![part] });
        }
        for (i, raw) in list(fields, "videos")?.into_iter().enumerate() {
            let video = listed.video(raw, format!("videos[{i}]"))?;
            listed.videos.push_back(video);
        }
        for (i, raw) in list(fields, "files")?.into_iter().enumerate() {
            let data = RawObjectRef::parse(raw).and_then(|f| f.text("data_base64")).unwrap_or_default();
            listed.files.push_back(Medium { location: format!("files[{i}]"), data, parts: Vec::new() });
        }
        Ok(listed)
    }

    /// Converts a video: either a file, or a list of frames, which become images.
    fn video(&mut self, raw: &str, location: String) -> Result<Medium> {
        if let Some(data) = string(raw) {
            let url = if data.starts_with("data:") { data.clone() } else { format!("data:video/mp4;base64,{data}") };
            let part = format!(r#"{{"type":"video_url","video_url":{{"url":{}}}}}"#, quoted(&url));
            return Ok(Medium { location, data: payload(&data).to_owned(), parts: vec![part] });
        }
        let frames = RawObjectRef::parse(raw).and_then(|f| f.get("frames").and_then(items));
        let frames = frames
            .ok_or_else(|| Error::invalid(&*location, "a video must be a base64 string or an object with `frames`"))?;
        let frame = |(i, f): (usize, &str)| Ok(image(f, &format!("{location}.frames[{i}]"))?.1);
        let parts = frames.into_iter().enumerate().map(frame).collect::<Result<Vec<_>>>()?;
        let reason = format!(
            "the frame rate and frame positions of the video; its {} frames are imported as images",
            parts.len()
        );
        self.skipped.push(SkippedPart::new(&*location, reason));
        Ok(Medium { location, data: String::new(), parts })
    }

    /// Converts the messages, with each medium in place of its placeholder. Media that remain are
    /// listed as skipped.
    pub fn messages(mut self, list: &[&str], skipped: &mut Vec<SkippedPart>) -> Result<Vec<Message>> {
        let mut messages = Vec::with_capacity(list.len());
        for (i, raw) in list.iter().enumerate() {
            let location = format!("messages[{i}]");
            messages.push(
                self.message(raw, &location).map_err(|e| crate::import::imported::prefix_location(&location, e))?,
            );
        }
        for medium in self.images.into_iter().chain(self.videos) {
            // A fork in mistral.rs keeps the media of turns that it does not have.
            self.skipped.push(SkippedPart::new(medium.location, "no message has a placeholder for this medium"));
        }
        for file in self.files {
            self.skipped.push(SkippedPart::new(
                file.location,
                "no message contains this file; a session stores files only in messages",
            ));
        }
        skipped.append(&mut self.skipped);
        Ok(messages)
    }

    fn message(&mut self, raw: &str, location: &str) -> Result<Message> {
        let Some(fields) = RawObjectRef::parse(raw) else { return Message::parse(raw) };
        let mut changed = false;
        let mut parts: Vec<(&str, Cow<'_, str>)> = Vec::new();
        for (name, value) in &fields.0 {
            let plain = untagged(value).unwrap_or(value);
            changed |= plain.len() != value.len();
            let converted = match &**name {
                "tool_calls" => calls(plain),
                "content" => self.content(plain, &format!("{location}.content")),
                _ => None,
            };
            changed |= converted.is_some();
            parts.push((name, converted.map_or(Cow::Borrowed(plain), Cow::Owned)));
        }
        let text = |name: &str| parts.iter().find(|(n, _)| *n == name).and_then(|(_, v)| string(v));
        if text("role").as_deref() == Some("tool") {
            let tool = text("name");
            let named = text("tool_call_id");
            let is_match = |(id, name): &(String, String)| match &named {
                Some(named) => id == named,
                None => tool.as_ref().is_none_or(|t| t == name),
            };
            let call = self.open_calls.iter().position(is_match).map(|i| self.open_calls.remove(i));
            if let (None, Some((id, _))) = (named, call) {
                parts.insert(1, ("tool_call_id", quoted(&id).into()));
                changed = true;
            }
        }
        let message = if changed { Message::parse(&object(parts)) } else { Message::parse(raw) }?;
        if message.role() == Role::Assistant {
            self.open_calls.extend(message.tool_calls().into_iter().map(|c| (c.id, c.name)));
        }
        Ok(message)
    }

    /// Inserts media into a content. `None` means that it is unchanged.
    fn content(&mut self, raw: &str, location: &str) -> Option<String> {
        let mut parts = Vec::new();
        let mut changed = false;
        for (i, part) in items(raw)?.into_iter().enumerate() {
            let fields = RawObjectRef::parse(part).unwrap_or_default();
            let kind = fields.text("type").unwrap_or_default();
            let queue = match &*kind {
                "image" | "image_url" => Some(&mut self.images),
                "video" | "video_url" => Some(&mut self.videos),
                "file" => Some(&mut self.files),
                _ => None,
            };
            // A placeholder has only a type: the medium is listed separately.
            if fields.0.len() == 1 && ["image", "video", "audio"].contains(&&*kind) {
                changed = true;
                match queue.and_then(VecDeque::pop_front) {
                    Some(medium) => parts.extend(medium.parts),
                    None => {
                        let reason = format!("the {kind} of this placeholder is not in the export");
                        self.skipped.push(SkippedPart::new(format!("{location}[{i}]"), reason));
                    }
                }
                continue;
            }
            // The medium is both in the message and in a list: it is not inserted twice.
            if let (Some(queue), Some((_, data))) = (queue, embedded_medium(&fields))
                && queue.front().is_some_and(|m| !m.data.is_empty() && m.data == payload(&data))
            {
                queue.pop_front();
            }
            parts.push(part.to_owned());
        }
        changed.then(|| format!("[{}]", parts.join(",")))
    }
}

fn list<'a>(fields: &RawObjectRef<'a>, name: &str) -> Result<Vec<&'a str>> {
    match fields.get(name) {
        None => Ok(Vec::new()),
        Some(raw) => items(raw).ok_or_else(|| Error::invalid(name, format!("`{name}` must be a list"))),
    }
}

/// Converts an image. Returns its base64 data and its message part.
pub(super) fn image(raw: &str, location: &str) -> Result<(String, String)> {
    let data = string(raw).ok_or_else(|| Error::invalid(location, "an image must be a base64 string"))?;
    let bytes = STANDARD.decode(payload(&data)).map_err(|e| Error::invalid(location, format!("not base64: {e}")))?;
    let kind = match &bytes[..] {
        [0xff, 0xd8, ..] => "jpeg",
        [b'G', b'I', b'F', ..] => "gif",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => "webp",
        _ => "png",
    };
    let url = if data.starts_with("data:") { data.clone() } else { format!("data:image/{kind};base64,{data}") };
    match ImportedPart::image(&url) {
        ImportedPart::Json(part) => Ok((payload(&data).to_owned(), part)),
        ImportedPart::Text(_) => Err(Error::invalid(location, "not an image")),
    }
}

/// Converts calls so that their arguments are text. `None` means that they are unchanged.
fn calls(raw: &str) -> Option<String> {
    let mut calls = Vec::new();
    let mut changed = false;
    for call in items(raw)? {
        let fields = RawObjectRef::parse(call)?;
        let Some(function) = fields.object("function") else {
            calls.push(call.to_owned());
            continue;
        };
        let text = function.0.iter().map(|(name, value)| match &**name {
            "arguments" if !value.starts_with('"') => {
                changed = true;
                (&**name, Cow::Owned(quoted(value)))
            }
            _ => (&**name, Cow::Borrowed(*value)),
        });
        let function = object(text.collect::<Vec<_>>());
        calls.push(object(fields.0.iter().map(|(name, value)| match &**name {
            "function" => (&**name, Cow::Borrowed(&*function)),
            _ => (&**name, Cow::Borrowed(*value)),
        })));
    }
    changed.then(|| format!("[{}]", calls.join(",")))
}

/// The kind and the data of the medium in a message part.
pub(super) fn embedded_medium(part: &RawObjectRef<'_>) -> Option<(&'static str, String)> {
    let url = |name: &str| part.text(name).or_else(|| part.object(name)?.text("url"));
    match &*part.text("type")? {
        "image_url" => Some(("image", url("image_url")?)),
        "video_url" => Some(("video", url("video_url")?)),
        "file" => Some(("file", part.object("file")?.text("file_data")?)),
        _ => None,
    }
}
