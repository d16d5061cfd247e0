//! A message in OpenAI's shape. The text we were given is the text we keep: unknown fields, key order and number spelling
//! included. Only what somebody asks for is ever parsed.

pub(crate) mod meaning;

use crate::types::blob::{Cut, payload};
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::{borrow::Cow, fmt, ops::Deref};

/// Deepest nesting of a message. Every database and model server can read that much.
pub const MAX_DEPTH: usize = 100;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions.
    System,
    /// Instructions, by their newer name; treated like `system`.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// In their order.
    const ALL: [Role; 5] = [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool];

    fn parse(s: &str) -> Option<Role> {
        Some(match s {
            "system" => Role::System,
            "developer" => Role::Developer,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
            _ => return None,
        })
    }

    /// Whether it gives instructions (`system` or `developer`).
    pub fn instructs(self) -> bool {
        matches!(self, Role::System | Role::Developer)
    }
}

/// A tool call that an assistant message makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The id that its result will name.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// The arguments, as the model wrote them.
    pub arguments: String,
}

/// One message: JSON text, checked once. Cloning shares the text.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    raw: Text,
    cuts: Option<Arc<[Cut]>>,
    role: Speaker,
}

/// Who speaks, once somebody has asked: one more than the role's place among all of them. It follows from the text, so it makes no
/// difference to anything but speed.
#[derive(Default)]
struct Speaker(AtomicU8);

impl Clone for Speaker {
    fn clone(&self) -> Self {
        Self(AtomicU8::new(self.0.load(Ordering::Relaxed)))
    }
}

impl PartialEq for Speaker {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Speaker {}

impl Speaker {
    fn get_or(&self, find: impl FnOnce() -> Role) -> Role {
        let known = Role::ALL.get(usize::from(self.0.load(Ordering::Relaxed)).wrapping_sub(1));
        known.copied().unwrap_or_else(|| {
            let role = find();
            self.0.store(role as u8 + 1, Ordering::Relaxed);
            role
        })
    }
}

/// A text, or a part of one that it keeps in memory: messages that were read together lie together.
#[derive(Clone)]
pub(crate) struct Text {
    whole: Arc<String>,
    from: usize,
    to: usize,
}

impl Text {
    /// A part of a text, which must be a slice of it.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    pub fn within(whole: &Arc<String>, part: &str) -> Self {
        let from = part.as_ptr() as usize - whole.as_ptr() as usize;
        Self { whole: whole.clone(), from, to: from + part.len() }
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self { from: 0, to: text.len(), whole: Arc::new(text) }
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl Deref for Text {
    type Target = str;
    fn deref(&self) -> &str {
        &self.whole[self.from..self.to]
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Text {}

impl Message {
    /// Checks a message's JSON text and keeps it as it is. Line breaks between tokens become spaces, so that a message is
    /// always one line.
    pub fn parse(raw: &str) -> Result<Self> {
        let raw = raw.trim();
        let shape = Shape::read(raw)?;
        shape.check()?;
        let depth = depth(raw);
        if depth > MAX_DEPTH {
            return Err(Error::invalid(
                "",
                format!("the message is nested {depth} deep; at most {MAX_DEPTH} is allowed"),
            ));
        }
        let raw = match raw.contains(['\n', '\r']) {
            true => raw.replace(['\n', '\r'], " ").into(),
            false => raw.into(),
        };
        Ok(Self { raw, cuts: None, role: Speaker::default() })
    }

    /// A message from a JSON value.
    pub fn from_value(value: &serde_json::Value) -> Result<Self> {
        Self::parse(&value.to_string())
    }

    /// A message that a store gave back; its checksum has been verified already.
    pub(crate) fn trusted(raw: impl Into<Text>, cuts: Vec<Cut>) -> Self {
        let cuts = (!cuts.is_empty()).then(|| cuts.into());
        Self { raw: raw.into(), cuts, role: Speaker::default() }
    }

    fn plain(role: &str, content: &str) -> Self {
        let content = serde_json::Value::from(content);
        Self::trusted(format!(r#"{{"role":"{role}","content":{content}}}"#), Vec::new())
    }

    /// A user message of plain text.
    pub fn user(content: &str) -> Self {
        Self::plain("user", content)
    }

    /// An assistant message of plain text.
    pub fn assistant(content: &str) -> Self {
        Self::plain("assistant", content)
    }

    /// A system message of plain text.
    pub fn system(content: &str) -> Self {
        Self::plain("system", content)
    }

    /// The result of a tool call, as plain text.
    pub fn tool(call_id: &str, content: &str) -> Self {
        let (call_id, content) = (serde_json::Value::from(call_id), serde_json::Value::from(content));
        Self::trusted(format!(r#"{{"role":"tool","tool_call_id":{call_id},"content":{content}}}"#), Vec::new())
    }

    /// The JSON text. Where media were taken out ([`Message::cuts`]), their base64 is missing in it.
    pub fn as_str(&self) -> &str {
        &self.raw
    }

    /// The length of the text, without looking at it.
    pub(crate) fn text_len(&self) -> usize {
        self.raw.to - self.raw.from
    }

    /// The bytes that it takes in a store: its text, and its media.
    pub(crate) fn stored_len(&self) -> u64 {
        self.text_len() as u64 + self.cuts().iter().map(|cut| cut.len).sum::<u64>()
    }

    /// The media that were taken out of the text and are kept as blobs.
    pub fn cuts(&self) -> &[Cut] {
        self.cuts.as_deref().unwrap_or_default()
    }

    /// The message as a JSON value, for looking into fields that have no accessor here.
    pub fn to_value(&self) -> serde_json::Value {
        serde_json::from_str(&self.raw).unwrap_or_default()
    }

    /// Who speaks.
    pub fn role(&self) -> Role {
        // What we and most clients write: the role comes first. Anything else is parsed.
        if let Some(rest) = self.raw.strip_prefix(r#"{"role":""#)
            && let Some(role) = rest.split('"').next().and_then(Role::parse)
        {
            return role;
        }
        self.role.get_or(|| {
            let shape: Option<RoleShape<'_>> = serde_json::from_str(&self.raw).ok();
            shape.and_then(|s| Role::parse(&s.role)).unwrap_or(Role::User)
        })
    }

    /// The plain text of the content, text parts joined by line breaks.
    pub fn text(&self) -> String {
        let Ok(shape) = Shape::read(&self.raw) else { return String::new() };
        let parts = shape.parts().unwrap_or_default().into_iter();
        let texts = parts.filter_map(|p| if let PartShape::Text(t) = p { Some(t) } else { None });
        texts.filter(|t| !t.is_empty()).collect::<Vec<_>>().join("\n")
    }

    /// The tool calls that an assistant message makes.
    pub fn tool_calls(&self) -> Vec<ToolCall> {
        if !self.may_call() {
            return Vec::new();
        }
        let Ok(shape) = Shape::read(&self.raw) else { return Vec::new() };
        let calls = shape.tool_calls.unwrap_or_default();
        calls.iter().map(CallShape::call).collect()
    }

    /// The ids of those calls, for whoever needs no more.
    pub(crate) fn call_ids(&self) -> Vec<Cow<'_, str>> {
        if !self.may_call() {
            return Vec::new();
        }
        let calls: Calls<'_> = serde_json::from_str(&self.raw).unwrap_or_default();
        calls.tool_calls.unwrap_or_default().into_iter().map(|call| call.id.0).collect()
    }

    fn may_call(&self) -> bool {
        self.role() == Role::Assistant && self.raw.contains("\"tool_calls\"")
    }

    /// The call that a tool message answers.
    pub fn tool_call_id(&self) -> Option<String> {
        self.answers().map(Cow::into_owned)
    }

    /// The same, not copied.
    pub(crate) fn answers(&self) -> Option<Cow<'_, str>> {
        // As we write it. Anything else is parsed.
        if let Some(rest) = self.raw.strip_prefix(r#"{"role":"tool","tool_call_id":""#)
            && let Some(id) = rest.split('"').next()
            && !id.contains('\\')
        {
            return Some(id.into());
        }
        if self.role() != Role::Tool {
            return None;
        }
        Shape::read(&self.raw).ok()?.tool_call_id.map(|id| id.0)
    }

    /// The same result for another call. Every other byte stays.
    pub(crate) fn answering(&self, call_id: &str) -> Message {
        #[derive(Deserialize)]
        struct Line<'a> {
            #[serde(borrow)]
            tool_call_id: &'a RawValue,
        }
        let Ok(line) = serde_json::from_str::<Line<'_>>(&self.raw) else { return self.clone() };
        let (old, new) = (line.tool_call_id.get(), serde_json::Value::from(call_id).to_string());
        let at = old.as_ptr() as usize - self.raw.as_ptr() as usize;
        let raw = [&self.raw[..at], &new, &self.raw[at + old.len()..]].concat();
        let moved = |cut: &Cut| match cut.at > at {
            true => Cut { at: cut.at + new.len() - old.len(), ..cut.clone() },
            false => cut.clone(),
        };
        Self::trusted(raw, self.cuts().iter().map(moved).collect())
    }

    /// Whether it belongs to a tool turn: an assistant message with calls, or a result.
    pub fn is_tool_turn(&self) -> bool {
        match self.role() {
            Role::Tool => true,
            Role::Assistant => !self.call_ids().is_empty(),
            _ => false,
        }
    }

    /// Whether a user sees it: from the user, or an answer of the assistant without tool calls.
    pub fn is_visible(&self) -> bool {
        match self.role() {
            Role::User => true,
            Role::Assistant => self.call_ids().is_empty(),
            _ => false,
        }
    }

    /// Base64 media with their place in the text: what can be kept apart as blobs.
    pub(crate) fn embedded_media(&self) -> Vec<&str> {
        let Ok(shape) = Shape::read(&self.raw) else { return Vec::new() };
        let parts = shape.parts().unwrap_or_default();
        parts
            .into_iter()
            .filter_map(|p| match p {
                PartShape::Media(Cow::Borrowed(data)) => Some(payload(data)),
                _ => None,
            })
            .collect()
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.raw)
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let raw: &RawValue = serde_json::from_str(&self.raw).map_err(serde::ser::Error::custom)?;
        raw.serialize(s)
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let raw = <Box<RawValue>>::deserialize(d)?;
        Message::parse(raw.get()).map_err(serde::de::Error::custom)
    }
}

/// Deepest nesting of brackets outside strings.
fn depth(json: &str) -> usize {
    let (mut depth, mut deepest, mut in_string, mut escaped) = (0usize, 0usize, false, false);
    for b in json.bytes() {
        if in_string {
            (in_string, escaped) = (escaped || b != b'"', !escaped && b == b'\\');
            continue;
        }
        match b {
            b'"' => in_string = true,
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

// The fields we look at, borrowed from the text where they have no escapes.

#[derive(Clone, Deserialize)]
#[serde(transparent)]
struct Str<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
struct Shape<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<Vec<CallShape<'a>>>,
    #[serde(borrow, default)]
    tool_call_id: Option<Str<'a>>,
    #[serde(borrow, default)]
    refusal: Option<&'a RawValue>,
    #[serde(borrow, default)]
    audio: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct RoleShape<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
}

#[derive(Default, Deserialize)]
struct Calls<'a> {
    #[serde(borrow, default)]
    tool_calls: Option<Vec<CallId<'a>>>,
}

#[derive(Deserialize)]
struct CallId<'a> {
    #[serde(borrow)]
    id: Str<'a>,
}

#[derive(Deserialize)]
struct CallShape<'a> {
    #[serde(borrow)]
    id: Str<'a>,
    #[serde(borrow, default)]
    function: Option<FunctionShape<'a>>,
    #[serde(borrow, default)]
    custom: Option<FunctionShape<'a>>,
}

#[derive(Deserialize)]
struct FunctionShape<'a> {
    #[serde(borrow)]
    name: Str<'a>,
    #[serde(borrow, default, alias = "input")]
    arguments: Option<Str<'a>>,
}

impl CallShape<'_> {
    fn call(&self) -> ToolCall {
        let f = self.function.as_ref().or(self.custom.as_ref());
        ToolCall {
            id: self.id.0.clone().into_owned(),
            name: f.map(|f| f.name.0.clone().into_owned()).unwrap_or_default(),
            arguments: f.and_then(|f| f.arguments.clone()).map(|a| a.0.into_owned()).unwrap_or_default(),
        }
    }
}

enum PartShape<'a> {
    Text(Cow<'a, str>),
    Media(Cow<'a, str>),
    Other(&'a str),
}

#[derive(Deserialize)]
struct RawPart<'a> {
    #[serde(borrow, rename = "type")]
    kind: Str<'a>,
    #[serde(borrow, default)]
    text: Option<Str<'a>>,
    #[serde(borrow, default, alias = "video_url", alias = "audio_url")]
    image_url: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input_audio: Option<DataShape<'a>>,
    #[serde(borrow, default)]
    file: Option<DataShape<'a>>,
}

#[derive(Deserialize)]
struct DataShape<'a> {
    #[serde(borrow, default, alias = "file_data", alias = "url")]
    data: Option<Str<'a>>,
}

impl<'a> Shape<'a> {
    fn read(raw: &'a str) -> Result<Self> {
        if !raw.starts_with('{') {
            return Err(Error::invalid("", "a message must be a JSON object with a role"));
        }
        serde_json::from_str(raw).map_err(|e| Error::invalid("", format!("not a valid message: {e}")))
    }

    fn check(&self) -> Result<()> {
        let Some(role) = Role::parse(&self.role) else {
            let known = "system, developer, user, assistant or tool";
            return Err(Error::invalid("role", format!("unknown role {}; it must be {known}", excerpt(&self.role))));
        };
        let empty = |v: Option<&RawValue>| v.is_none_or(|v| v.get() == "null");
        self.parts()?;
        match role {
            Role::Assistant => {
                let calls = self.tool_calls.as_deref().unwrap_or_default();
                if calls.is_empty() && empty(self.content) && empty(self.refusal) && empty(self.audio) {
                    return Err(Error::invalid("content", "an assistant message needs content or tool_calls"));
                }
                for (i, call) in calls.iter().enumerate() {
                    if call.id.0.is_empty() {
                        return Err(Error::invalid(format!("tool_calls[{i}].id"), "a tool call needs an id"));
                    }
                    if call.function.is_none() && call.custom.is_none() {
                        return Err(Error::invalid(
                            format!("tool_calls[{i}].function"),
                            "a tool call needs a function",
                        ));
                    }
                }
            }
            Role::Tool if self.tool_call_id.as_ref().is_none_or(|id| id.0.is_empty()) => {
                return Err(Error::invalid("tool_call_id", "a tool message must name the call it answers"));
            }
            _ if empty(self.content) => {
                return Err(Error::invalid("content", format!("a {} message needs content", self.role)));
            }
            _ => {}
        }
        Ok(())
    }

    fn parts(&self) -> Result<Vec<PartShape<'a>>> {
        let Some(content) = self.content.map(RawValue::get) else { return Ok(Vec::new()) };
        let wrong = |e: serde_json::Error| Error::invalid("content", format!("not valid content: {e}"));
        match content.as_bytes()[0] {
            b'n' => Ok(Vec::new()),
            b'"' => Ok(vec![PartShape::Text(serde_json::from_str::<Str<'a>>(content).map_err(wrong)?.0)]),
            b'[' => {
                let parts: Vec<&'a RawValue> = serde_json::from_str(content).map_err(wrong)?;
                let parts = parts.into_iter().enumerate();
                parts.map(|(i, p)| part(p.get()).map_err(|e| e.within(&format!("content[{i}]")))).collect()
            }
            _ => Err(Error::invalid("content", "content must be a string, a list of parts, or null")),
        }
    }
}

fn part<'a>(raw: &'a str) -> Result<PartShape<'a>> {
    let wrong = |e: serde_json::Error| Error::invalid("", format!("not a valid content part: {e}"));
    let part: RawPart<'a> = serde_json::from_str(raw).map_err(wrong)?;
    let data = |d: Option<DataShape<'a>>| match d.and_then(|d| d.data) {
        Some(s) => PartShape::Media(s.0),
        None => PartShape::Other(raw),
    };
    Ok(match &*part.kind.0 {
        "text" => match part.text {
            Some(t) => PartShape::Text(t.0),
            None => return Err(Error::invalid("text", "a text part needs a text")),
        },
        "image_url" | "video_url" | "audio_url" => match part.image_url.map(RawValue::get) {
            Some(url) if url.starts_with('"') => {
                PartShape::Media(serde_json::from_str::<Str<'a>>(url).map_err(wrong)?.0)
            }
            Some(url) => data(Some(serde_json::from_str(url).map_err(wrong)?)),
            None => return Err(Error::invalid(part.kind.0, "the part needs a URL")),
        },
        "input_audio" => data(part.input_audio),
        "file" => data(part.file),
        _ => PartShape::Other(raw),
    })
}
