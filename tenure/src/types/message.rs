//! A message in OpenAI's format. The received JSON text is stored unchanged, including unknown fields, key
//! order and number formatting; fields are parsed only on access.

pub(crate) mod meaning;

use crate::types::blob::{BlobRef, payload};
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::{borrow::Cow, fmt, ops::Deref};

/// Maximum nesting depth of a message. Every database and model server can parse this depth.
pub const MAX_DEPTH: usize = 100;

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions.
    System,
    /// Instructions, by their newer name. Treated like `system`.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// All roles in the order of their discriminants.
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

    /// Returns true for instructions (`system` or `developer`).
    pub fn is_instruction(self) -> bool {
        matches!(self, Role::System | Role::Developer)
    }
}

/// A tool call made by an assistant message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The id that the result refers to.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// The arguments as the model wrote them.
    pub arguments: String,
}

/// A message: JSON text that was validated once. Cloning shares the text.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    raw: SharedStr,
    blob_refs: Option<Arc<[BlobRef]>>,
    role: CachedRole,
}

/// A lazily computed role: 0, or one more than the discriminant of the role. It is derived from the text, so
/// it is only a cache and does not affect equality.
#[derive(Default)]
struct CachedRole(AtomicU8);

impl Clone for CachedRole {
    fn clone(&self) -> Self {
        Self(AtomicU8::new(self.0.load(Ordering::Relaxed)))
    }
}

impl PartialEq for CachedRole {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for CachedRole {}

impl CachedRole {
    /// Returns the cached role, or computes and caches it.
    fn get_or(&self, compute: impl FnOnce() -> Role) -> Role {
        let cached = Role::ALL.get(usize::from(self.0.load(Ordering::Relaxed)).wrapping_sub(1));
        cached.copied().unwrap_or_else(|| {
            let role = compute();
            self.0.store(role as u8 + 1, Ordering::Relaxed);
            role
        })
    }
}

/// A shared, immutable string slice. It keeps the whole buffer alive, so that messages that were read
/// together share one allocation (D-010).
#[derive(Clone)]
pub(crate) struct SharedStr {
    buffer: Arc<String>,
    from: usize,
    to: usize,
}

impl SharedStr {
    /// Creates a slice of a buffer. `part` must point into `buffer`.
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    pub fn within(buffer: &Arc<String>, part: &str) -> Self {
        let from = part.as_ptr() as usize - buffer.as_ptr() as usize;
        Self { buffer: buffer.clone(), from, to: from + part.len() }
    }
}

impl From<String> for SharedStr {
    fn from(text: String) -> Self {
        Self { from: 0, to: text.len(), buffer: Arc::new(text) }
    }
}

impl From<&str> for SharedStr {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl Deref for SharedStr {
    type Target = str;
    fn deref(&self) -> &str {
        &self.buffer[self.from..self.to]
    }
}

impl PartialEq for SharedStr {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for SharedStr {}

impl Message {
    /// Validates a message and stores its text unchanged, except that line breaks between tokens become
    /// spaces, so that a message is always a single line.
    pub fn parse(raw: &str) -> Result<Self> {
        let raw = raw.trim();
        let shape = MessageShape::read(raw)?;
        shape.check()?;
        let depth = depth(raw);
        if depth > MAX_DEPTH {
            return Err(Error::invalid(
                "",
                format!("the message is nested {depth} deep; at most {MAX_DEPTH} is allowed"),
            ));
        }
        let raw = if raw.contains(['\n', '\r']) { raw.replace(['\n', '\r'], " ").into() } else { raw.into() };
        Ok(Self { raw, blob_refs: None, role: CachedRole::default() })
    }

    /// Creates a message from a JSON value.
    pub fn from_value(value: &serde_json::Value) -> Result<Self> {
        Self::parse(&value.to_string())
    }

    /// Creates a message from text that a store returned. It is not validated, because its checksum has been
    /// verified.
    pub(crate) fn trusted(raw: impl Into<SharedStr>, blob_refs: Vec<BlobRef>) -> Self {
        let blob_refs = (!blob_refs.is_empty()).then(|| blob_refs.into());
        Self { raw: raw.into(), blob_refs, role: CachedRole::default() }
    }

    fn plain(role: &str, content: &str) -> Self {
        let content = serde_json::Value::from(content);
        Self::trusted(format!(r#"{{"role":"{role}","content":{content}}}"#), Vec::new())
    }

    /// Creates a user message of plain text.
    pub fn user(content: &str) -> Self {
        Self::plain("user", content)
    }

    /// Creates an assistant message of plain text.
    pub fn assistant(content: &str) -> Self {
        Self::plain("assistant", content)
    }

    /// Creates an assistant message that requests tool calls: id, name of the tool, and arguments.
    ///
    /// ```
    /// use serde_json::json;
    /// use tenure::Message;
    ///
    /// let message = Message::assistant_tool_calls([("call_1", "weather", json!({"city": "Bern"}))]);
    /// assert_eq!(message.tool_calls()[0].name, "weather");
    /// ```
    pub fn assistant_tool_calls<'a>(calls: impl IntoIterator<Item = (&'a str, &'a str, serde_json::Value)>) -> Self {
        let call = |(id, name, arguments): (&str, &str, serde_json::Value)| {
            let function = serde_json::json!({"name": name, "arguments": arguments.to_string()});
            serde_json::json!({"id": id, "type": "function", "function": function})
        };
        let calls = serde_json::Value::Array(calls.into_iter().map(call).collect());
        Self::trusted(format!(r#"{{"role":"assistant","content":null,"tool_calls":{calls}}}"#), Vec::new())
    }

    /// Creates a system message of plain text.
    pub fn system(content: &str) -> Self {
        Self::plain("system", content)
    }

    /// Creates the result of a tool call, as plain text.
    pub fn tool(call_id: &str, content: &str) -> Self {
        let call_id = serde_json::Value::from(call_id);
        let content = serde_json::Value::from(content);
        Self::trusted(format!(r#"{{"role":"tool","tool_call_id":{call_id},"content":{content}}}"#), Vec::new())
    }

    /// Returns the JSON text. The base64 of detached media ([`Message::blob_refs`]) is missing in it.
    pub fn as_str(&self) -> &str {
        &self.raw
    }

    /// Returns the length of the text in bytes.
    pub(crate) fn text_len(&self) -> usize {
        self.raw.to - self.raw.from
    }

    /// Returns the number of bytes that the message occupies in a store: its text and its media.
    pub(crate) fn stored_len(&self) -> u64 {
        self.text_len() as u64 + self.blob_refs().iter().map(|blob_ref| blob_ref.len).sum::<u64>()
    }

    /// Returns the references to media that were detached from the text and are stored as blobs.
    pub fn blob_refs(&self) -> &[BlobRef] {
        self.blob_refs.as_deref().unwrap_or_default()
    }

    /// Parses the message into a JSON value, for access to fields without an accessor.
    pub fn to_value(&self) -> serde_json::Value {
        serde_json::from_str(&self.raw).unwrap_or_default()
    }

    /// Returns the role.
    pub fn role(&self) -> Role {
        // Fast path: this library and most clients write the role first. Anything else is parsed.
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

    /// Returns the plain text of the content, with text parts joined by line breaks.
    pub fn text(&self) -> String {
        let Ok(shape) = MessageShape::read(&self.raw) else { return String::new() };
        let parts = shape.parts().unwrap_or_default().into_iter();
        let texts = parts.filter_map(|p| if let PartShape::Text(t) = p { Some(t) } else { None });
        texts.filter(|t| !t.is_empty()).collect::<Vec<_>>().join("\n")
    }

    /// Returns the tool calls of an assistant message.
    pub fn tool_calls(&self) -> Vec<ToolCall> {
        if !self.may_call() {
            return Vec::new();
        }
        let Ok(shape) = MessageShape::read(&self.raw) else { return Vec::new() };
        let calls = shape.tool_calls.unwrap_or_default();
        calls.iter().map(CallShape::to_tool_call).collect()
    }

    /// Returns the ids of the tool calls of an assistant message, without parsing names and arguments.
    pub(crate) fn call_ids(&self) -> Vec<Cow<'_, str>> {
        if !self.may_call() {
            return Vec::new();
        }
        let calls: CallList<'_> = serde_json::from_str(&self.raw).unwrap_or_default();
        calls.tool_calls.unwrap_or_default().into_iter().map(|call| call.id.0).collect()
    }

    /// Returns false if the message certainly contains no tool calls, without parsing it.
    fn may_call(&self) -> bool {
        self.role() == Role::Assistant && self.raw.contains("\"tool_calls\"")
    }

    /// Returns the id of the call that a tool message is the result of.
    pub fn tool_call_id(&self) -> Option<String> {
        self.tool_call_id_ref().map(Cow::into_owned)
    }

    /// Returns the id of the call that a tool message is the result of, borrowed if possible.
    pub(crate) fn tool_call_id_ref(&self) -> Option<Cow<'_, str>> {
        // Fast path: the format written by this library. Anything else is parsed.
        if let Some(rest) = self.raw.strip_prefix(r#"{"role":"tool","tool_call_id":""#)
            && let Some(id) = rest.split('"').next()
            && !id.contains('\\')
        {
            return Some(id.into());
        }
        if self.role() != Role::Tool {
            return None;
        }
        MessageShape::read(&self.raw).ok()?.tool_call_id.map(|id| id.0)
    }

    /// Returns this tool result with another call id. Every other byte is unchanged.
    pub(crate) fn with_tool_call_id(&self, call_id: &str) -> Message {
        #[derive(Deserialize)]
        struct Line<'a> {
            #[serde(borrow)]
            tool_call_id: &'a RawValue,
        }
        let Ok(line) = serde_json::from_str::<Line<'_>>(&self.raw) else { return self.clone() };
        let old = line.tool_call_id.get();
        let new = serde_json::Value::from(call_id).to_string();
        let start = old.as_ptr() as usize - self.raw.as_ptr() as usize;
        let raw = [&self.raw[..start], &new, &self.raw[start + old.len()..]].concat();
        let moved = |blob_ref: &BlobRef| {
            if blob_ref.offset > start {
                BlobRef { offset: blob_ref.offset + new.len() - old.len(), ..blob_ref.clone() }
            } else {
                blob_ref.clone()
            }
        };
        Self::trusted(raw, self.blob_refs().iter().map(moved).collect())
    }

    /// Returns true if the message is part of a tool round: an assistant message with calls, or a tool
    /// result.
    pub fn is_tool_round(&self) -> bool {
        match self.role() {
            Role::Tool => true,
            Role::Assistant => !self.call_ids().is_empty(),
            _ => false,
        }
    }

    /// Returns true if the message is displayed to users: a user message, or an assistant message without
    /// tool calls.
    pub fn is_visible(&self) -> bool {
        match self.role() {
            Role::User => true,
            Role::Assistant => self.call_ids().is_empty(),
            _ => false,
        }
    }

    /// Returns the embedded base64 media as slices of the text. These can be stored as blobs.
    pub(crate) fn embedded_media(&self) -> Vec<&str> {
        let Ok(shape) = MessageShape::read(&self.raw) else { return Vec::new() };
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

/// Returns the maximum nesting depth of brackets outside strings.
fn depth(json: &str) -> usize {
    let mut depth = 0usize;
    let mut deepest = 0usize;
    let mut in_string = false;
    let mut escaped = false;
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

// The fields that are parsed, borrowed from the text where they contain no escapes.

#[derive(Clone, Deserialize)]
#[serde(transparent)]
struct CowStr<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
struct MessageShape<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<Vec<CallShape<'a>>>,
    #[serde(borrow, default)]
    tool_call_id: Option<CowStr<'a>>,
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
struct CallList<'a> {
    #[serde(borrow, default)]
    tool_calls: Option<Vec<CallId<'a>>>,
}

#[derive(Deserialize)]
struct CallId<'a> {
    #[serde(borrow)]
    id: CowStr<'a>,
}

#[derive(Deserialize)]
struct CallShape<'a> {
    #[serde(borrow)]
    id: CowStr<'a>,
    #[serde(borrow, default)]
    function: Option<FunctionShape<'a>>,
    #[serde(borrow, default)]
    custom: Option<FunctionShape<'a>>,
}

#[derive(Deserialize)]
struct FunctionShape<'a> {
    #[serde(borrow)]
    name: CowStr<'a>,
    #[serde(borrow, default, alias = "input")]
    arguments: Option<CowStr<'a>>,
}

impl CallShape<'_> {
    fn to_tool_call(&self) -> ToolCall {
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
    kind: CowStr<'a>,
    #[serde(borrow, default)]
    text: Option<CowStr<'a>>,
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
    data: Option<CowStr<'a>>,
}

impl<'a> MessageShape<'a> {
    fn read(raw: &'a str) -> Result<Self> {
        if !raw.starts_with('{') {
            return Err(Error::invalid("", "a message must be a JSON object with a role"));
        }
        serde_json::from_str(raw).map_err(|e| Error::invalid("", format!("not a valid message: {e}")))
    }

    fn check(&self) -> Result<()> {
        let Some(role) = Role::parse(&self.role) else {
            let roles = "system, developer, user, assistant or tool";
            return Err(Error::invalid("role", format!("unknown role {}; it must be {roles}", excerpt(&self.role))));
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
        let invalid = |e: serde_json::Error| Error::invalid("content", format!("not valid content: {e}"));
        match content.as_bytes()[0] {
            b'n' => Ok(Vec::new()),
            b'"' => Ok(vec![PartShape::Text(serde_json::from_str::<CowStr<'a>>(content).map_err(invalid)?.0)]),
            b'[' => {
                let parts: Vec<&'a RawValue> = serde_json::from_str(content).map_err(invalid)?;
                let parts = parts.into_iter().enumerate();
                parts.map(|(i, p)| parse_part(p.get()).map_err(|e| e.within(&format!("content[{i}]")))).collect()
            }
            _ => Err(Error::invalid("content", "content must be a string, a list of parts, or null")),
        }
    }
}

fn parse_part<'a>(raw: &'a str) -> Result<PartShape<'a>> {
    let invalid = |e: serde_json::Error| Error::invalid("", format!("not a valid content part: {e}"));
    let part: RawPart<'a> = serde_json::from_str(raw).map_err(invalid)?;
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
                PartShape::Media(serde_json::from_str::<CowStr<'a>>(url).map_err(invalid)?.0)
            }
            Some(url) => data(Some(serde_json::from_str(url).map_err(invalid)?)),
            None => return Err(Error::invalid(part.kind.0, "the part needs a URL")),
        },
        "input_audio" => data(part.input_audio),
        "file" => data(part.file),
        _ => PartShape::Other(raw),
    })
}
