//! Incremental decoder for server-sent events.

use serde_json::value::RawValue;

/// Maximum size in bytes of a non-streamed answer, and of one event of a streamed one.
pub const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Decodes server-sent events that arrive in chunks of any size.
#[derive(Debug, Default)]
pub struct SseDecoder {
    bytes: Vec<u8>,
    /// Offset up to which `bytes` was scanned and contains no line end.
    scanned: usize,
    data: Option<String>,
    ready: std::collections::VecDeque<String>,
}

impl SseDecoder {
    /// Decodes a chunk; chunk boundaries may be anywhere, even inside a character.
    pub fn push(&mut self, part: &[u8]) -> Result<(), String> {
        self.bytes.extend_from_slice(part);
        let mut start = 0;
        while let Some(end) = self.bytes[self.scanned.max(start)..].iter().position(|b| *b == b'\n') {
            let end = end + self.scanned.max(start);
            let line = self.bytes[start..end].strip_suffix(b"\r").unwrap_or(&self.bytes[start..end]);
            let line = std::str::from_utf8(line).map_err(|_| "the stream is not UTF-8 text")?;
            if line.is_empty() {
                self.ready.extend(self.data.take());
            } else if let Some(data) = line.strip_prefix("data:") {
                let data = data.strip_prefix(' ').unwrap_or(data);
                match &mut self.data {
                    Some(all) => {
                        all.push('\n');
                        all.push_str(data);
                    }
                    None => self.data = Some(data.to_owned()),
                }
            }
            start = end + 1;
            self.scanned = start;
        }
        self.bytes.drain(..start);
        self.scanned = self.bytes.len();
        if self.bytes.len() + self.data.as_ref().map_or(0, String::len) > MAX_ANSWER_BYTES {
            return Err(format!("an event exceeds {MAX_ANSWER_BYTES} bytes"));
        }
        Ok(())
    }

    /// Ends the stream and completes an event that lacks its final empty line. Returns true if that yields a valid
    /// event.
    pub fn finish(&mut self) -> bool {
        let Ok(()) = self.push(b"\n\n") else { return false };
        self.ready.retain(|data| data == "[DONE]" || serde_json::from_str::<&RawValue>(data).is_ok());
        !self.ready.is_empty()
    }

    /// Returns the data of the next complete event.
    pub fn next_event(&mut self) -> Option<String> {
        self.ready.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_in_any_parts() {
        let text = "data: one\n\n: a comment\r\ndata: two\r\n\r\nevent: x\ndata:three\ndata: four\n\ndata: [DONE]\n\ndata: cut";
        for size in 1..text.len() {
            let mut events = SseDecoder::default();
            let mut all = Vec::new();
            for part in text.as_bytes().chunks(size) {
                events.push(part).unwrap();
                while let Some(event) = events.next_event() {
                    all.push(event);
                }
            }
            assert_eq!(all, ["one", "two", "three\nfour", "[DONE]"], "in parts of {size}");
        }
    }
}
