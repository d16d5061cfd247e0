//! Blobs: content-addressed binary data (media), and references to them from messages.

use crate::types::error::{Error, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The id of a blob: the BLAKE3 hash of its bytes. Equal bytes have equal ids.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Cow<'_, str>", into = "String")]
pub struct BlobId(pub [u8; 32]);

impl BlobId {
    /// Computes the id of these bytes.
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

/// A blob: the original, decoded bytes of a medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// The BLAKE3 hash of the bytes.
    pub id: BlobId,
    /// The content.
    pub bytes: Arc<[u8]>,
}

/// A reference from a message to a blob: the position in the message's text where the base64 of the blob is
/// inserted again (D-004).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobRef {
    /// Byte offset in the text without any media.
    pub offset: usize,
    /// The id of the blob.
    pub id: BlobId,
    /// The size of the blob in bytes.
    pub len: u64,
}

/// Returns the base64 part of a data URL, or the whole input if it is not a data URL.
pub(crate) fn payload(data: &str) -> &str {
    match data.strip_prefix("data:") {
        Some(rest) => rest.split_once(";base64,").map_or("", |(_, b)| b),
        None => data,
    }
}

/// Returns the identity of a medium in a message: the hash of its bytes if they are embedded, else the hash
/// of its address. `next_detached` returns the id of the next detached medium and is called only if the data
/// is missing in the text.
pub(crate) fn content_id(data: &str, mut next_detached: impl FnMut() -> Option<BlobId>) -> BlobId {
    let base64_text = payload(data);
    if (data.is_empty() || data.ends_with(";base64,"))
        && let Some(id) = next_detached()
    {
        return id;
    }
    match STANDARD.decode(base64_text) {
        Ok(bytes) if !bytes.is_empty() => BlobId::of(&bytes),
        _ => BlobId::of(data.as_bytes()),
    }
}

impl From<BlobId> for String {
    fn from(id: BlobId) -> String {
        id.to_string()
    }
}
