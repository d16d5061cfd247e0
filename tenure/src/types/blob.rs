//! Content-addressed binary data (media) and references to it.

use crate::types::error::{Error, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

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
