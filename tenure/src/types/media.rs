//! Media (images, audio and files) inside messages. Their bytes are stored once per tenant as
//! content-addressed blobs; the message keeps its text, with a reference at the position where the base64
//! belongs (D-004).

use crate::types::blob::{Blob, BlobId, BlobRef};
use crate::types::error::{Error, Result};
use crate::types::message::Message;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use std::sync::Arc;

/// Minimum length of base64 text that is stored as a blob. Shorter media stay in their message, because a
/// blob would cost more than it saves.
pub const MIN_BLOB_TEXT: usize = 1024;

impl Message {
    /// Detaches the media from the text, yielding what is stored. [`Message::attach`] restores the same
    /// bytes.
    pub fn detach(&self) -> (Message, Vec<Blob>) {
        let raw = self.as_str();
        if raw.len() < MIN_BLOB_TEXT || !self.blob_refs().is_empty() {
            return (self.clone(), Vec::new());
        }
        let mut text = String::new();
        let mut blob_refs = Vec::new();
        let mut blobs = Vec::new();
        // The end of the part of `raw` that was processed.
        let mut copied = 0;
        for base64 in self.embedded_media() {
            // Only base64 that re-encodes to the same characters can be restored byte for byte.
            let bytes = match STANDARD.decode(base64) {
                Ok(bytes) if base64.len() >= MIN_BLOB_TEXT && STANDARD.encode(&bytes) == base64 => bytes,
                _ => continue,
            };
            let start = base64.as_ptr() as usize - raw.as_ptr() as usize;
            text.push_str(&raw[copied..start]);
            copied = start + base64.len();
            let blob = Blob { id: BlobId::of(&bytes), bytes: bytes.into() };
            blob_refs.push(BlobRef { offset: text.len(), id: blob.id, len: blob.bytes.len() as u64 });
            blobs.push(blob);
        }
        if blob_refs.is_empty() {
            return (self.clone(), Vec::new());
        }
        text.push_str(&raw[copied..]);
        (Message::trusted(text, blob_refs), blobs)
    }

    /// Inserts the media again at their positions. `blob` returns the bytes of an id; a missing blob is an
    /// error.
    pub fn attach(&self, mut blob: impl FnMut(&BlobId) -> Option<Arc<[u8]>>) -> Result<Message> {
        if self.blob_refs().is_empty() {
            return Ok(self.clone());
        }
        let mut text = String::new();
        let mut copied = 0;
        for blob_ref in self.blob_refs() {
            let bytes =
                blob(&blob_ref.id).ok_or_else(|| Error::corrupt(format!("blob {}", blob_ref.id), "it is missing"))?;
            let before = self.as_str().get(copied..blob_ref.offset);
            text.push_str(
                before
                    .ok_or_else(|| Error::corrupt("message", "the offset of a blob reference is outside the text"))?,
            );
            STANDARD.encode_string(&bytes, &mut text);
            copied = blob_ref.offset;
        }
        text.push_str(&self.as_str()[copied..]);
        Ok(Message::trusted(text, Vec::new()))
    }
}
