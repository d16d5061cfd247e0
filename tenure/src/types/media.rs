//! Media: pictures, sound and files inside messages. Their bytes are kept once per tenant as blobs, addressed by content;
//! the message keeps its text, with the place where the base64 belongs.

use crate::error::{Error, Result};
use crate::types::message::Message;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, fmt, str::FromStr, sync::Arc};

/// Media of fewer base64 characters stay in their message: a blob would cost more than it saves.
pub const MIN_BLOB_TEXT: usize = 1024;

/// The BLAKE3 hash of a blob's bytes: its name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Cow<'_, str>", into = "String")]
pub struct BlobId(pub [u8; 32]);

impl BlobId {
    /// The id of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl fmt::Display for BlobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for BlobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for BlobId {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let hash =
            blake3::Hash::from_hex(s).map_err(|_| Error::invalid("blob", "a blob id has 64 hexadecimal digits"))?;
        Ok(Self(*hash.as_bytes()))
    }
}

impl TryFrom<Cow<'_, str>> for BlobId {
    type Error = Error;
    fn try_from(s: Cow<'_, str>) -> Result<Self> {
        s.parse()
    }
}

impl From<BlobId> for String {
    fn from(id: BlobId) -> String {
        id.to_string()
    }
}

/// Media in their original bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// The hash of the bytes.
    pub id: BlobId,
    /// The bytes.
    pub bytes: Arc<[u8]>,
}

/// A place in a message's text where the base64 of a blob belongs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// Byte offset in the text without any media.
    pub at: usize,
    /// Which blob.
    pub id: BlobId,
    /// The number of its bytes; 0 if an older version wrote this.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub len: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// The base64 part of a data URL, or the whole of anything else.
pub(crate) fn payload(data: &str) -> &str {
    match data.strip_prefix("data:") {
        Some(rest) => rest.split_once(";base64,").map_or("", |(_, b)| b),
        None => data,
    }
}

/// The identity of media as they stand in a message: the hash of their bytes if they are inside, else of their address.
/// `cut` gives the id of media that were taken out.
pub(crate) fn content_id(data: &str, mut cut: impl FnMut() -> Option<BlobId>) -> BlobId {
    let inside = payload(data);
    if (data.is_empty() || data.ends_with(";base64,"))
        && let Some(id) = cut()
    {
        return id;
    }
    match STANDARD.decode(inside) {
        Ok(bytes) if !bytes.is_empty() => BlobId::of(&bytes),
        _ => BlobId::of(data.as_bytes()),
    }
}

/// A hash of some JSON that does not depend on spelling: keys sorted, nulls left out.
pub(crate) fn canonical_hash(json: &str) -> BlobId {
    match serde_json::from_str::<serde_json::Value>(json) {
        Ok(value) => BlobId::of(canonical(&value, Nulls::Drop).as_bytes()),
        Err(_) => BlobId::of(json.as_bytes()),
    }
}

/// Whether a field that is `null` is the same as none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nulls {
    Keep,
    Drop,
}

/// JSON with sorted keys and no spaces: equal values, equal text.
pub(crate) fn canonical(value: &serde_json::Value, nulls: Nulls) -> String {
    use serde_json::Value::{Array, Object};
    match value {
        Array(items) => format!("[{}]", items.iter().map(|v| canonical(v, nulls)).collect::<Vec<_>>().join(",")),
        Object(map) => {
            let mut fields: Vec<_> = map.iter().filter(|(_, v)| nulls == Nulls::Keep || !v.is_null()).collect();
            fields.sort_by_key(|(k, _)| *k);
            let text = |k: &str, v| format!("{}:{}", serde_json::Value::from(k), canonical(v, nulls));
            format!("{{{}}}", fields.into_iter().map(|(k, v)| text(k, v)).collect::<Vec<_>>().join(","))
        }
        plain => plain.to_string(),
    }
}

impl Message {
    /// Takes the media out of the text: what is stored. [`Message::attach`] gives back the same bytes.
    pub fn detach(&self) -> (Message, Vec<Blob>) {
        let raw = self.as_str();
        if raw.len() < MIN_BLOB_TEXT || !self.cuts().is_empty() {
            return (self.clone(), Vec::new());
        }
        let (mut text, mut cuts, mut blobs, mut done) = (String::new(), Vec::new(), Vec::new(), 0);
        for base64 in self.embedded_media() {
            // Only what encodes to the same characters again can be given back as it came.
            let bytes = match STANDARD.decode(base64) {
                Ok(bytes) if base64.len() >= MIN_BLOB_TEXT && STANDARD.encode(&bytes) == base64 => bytes,
                _ => continue,
            };
            let start = base64.as_ptr() as usize - raw.as_ptr() as usize;
            text.push_str(&raw[done..start]);
            done = start + base64.len();
            let blob = Blob { id: BlobId::of(&bytes), bytes: bytes.into() };
            cuts.push(Cut { at: text.len(), id: blob.id, len: blob.bytes.len() as u64 });
            blobs.push(blob);
        }
        if cuts.is_empty() {
            return (self.clone(), Vec::new());
        }
        text.push_str(&raw[done..]);
        (Message::trusted(text, cuts), blobs)
    }

    /// Puts the media back where they were. `blob` gives the bytes of an id.
    pub fn attach(&self, mut blob: impl FnMut(&BlobId) -> Option<Arc<[u8]>>) -> Result<Message> {
        if self.cuts().is_empty() {
            return Ok(self.clone());
        }
        let (mut text, mut done) = (String::new(), 0);
        for cut in self.cuts() {
            let bytes = blob(&cut.id).ok_or_else(|| Error::corrupt(format!("blob {}", cut.id), "it is missing"))?;
            let before = self.as_str().get(done..cut.at);
            text.push_str(before.ok_or_else(|| Error::corrupt("message", "a medium has no place in its text"))?);
            STANDARD.encode_string(&bytes, &mut text);
            done = cut.at;
        }
        text.push_str(&self.as_str()[done..]);
        Ok(Message::trusted(text, Vec::new()))
    }
}
