//! Line endings in HTTP/1 requests.
//!
//! The HTTP library accepts lines that end with LF alone; a proxy in front of the server may not see a line end
//! there, and the two then disagree on where a request ends (request smuggling). This scanner sees the bytes before
//! the library does and makes such a line end invalid (D-100).

/// An incremental scanner of the HTTP/1 requests on one connection: heads, bodies and trailers.
#[derive(Debug)]
pub struct RequestScanner {
    state: ScannerState,
    /// Maximum length of a line in bytes. A longer one ends the scan, because the library rejects it.
    max_line: usize,
    /// The current line, without its end.
    line: Vec<u8>,
    first_line: bool,
    content_length: u64,
    chunked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScannerState {
    /// Request line and headers.
    Head,
    /// A body with this many bytes left.
    Body(u64),
    /// The size line of a chunk.
    ChunkSize,
    /// A chunk with this many bytes left, including its line end.
    Chunk(u64),
    Trailers,
    /// HTTP/2, or a request that cannot be parsed: no further checks, the library decides alone.
    Unchecked,
}

impl RequestScanner {
    /// Creates a scanner for a new connection. `max_line` is the longest line that the library accepts, in bytes.
    pub fn new(max_line: usize) -> Self {
        Self {
            state: ScannerState::Head,
            max_line,
            line: Vec::new(),
            first_line: true,
            content_length: 0,
            chunked: false,
        }
    }

    /// Scans bytes in the order in which they were received. An LF without CR in a head, a chunk size line or
    /// trailers is replaced by NUL, which the library rejects; nothing else is changed. Returns the number of bytes
    /// up to and including that NUL.
    pub fn scan(&mut self, bytes: &mut [u8]) -> Option<usize> {
        let mut position = 0;
        while position < bytes.len() {
            match self.state {
                ScannerState::Unchecked => return None,
                ScannerState::Body(remaining) => {
                    let step = remaining.min((bytes.len() - position) as u64);
                    position += step as usize;
                    self.state =
                        if remaining == step { ScannerState::Head } else { ScannerState::Body(remaining - step) };
                }
                ScannerState::Chunk(remaining) => {
                    let step = remaining.min((bytes.len() - position) as u64);
                    position += step as usize;
                    self.state =
                        if remaining == step { ScannerState::ChunkSize } else { ScannerState::Chunk(remaining - step) };
                }
                ScannerState::Head | ScannerState::Trailers | ScannerState::ChunkSize => {
                    let byte = bytes[position];
                    if byte != b'\n' {
                        self.line.push(byte);
                        if self.line.len() > self.max_line {
                            self.state = ScannerState::Unchecked;
                        }
                    } else if self.line.last() == Some(&b'\r') {
                        self.line.pop();
                        self.end_line();
                        self.line.clear();
                    } else {
                        bytes[position] = 0;
                        self.state = ScannerState::Unchecked;
                        return Some(position + 1);
                    }
                    position += 1;
                }
            }
        }
        None
    }

    fn end_line(&mut self) {
        match self.state {
            // Empty lines before a request are ignored.
            ScannerState::Head if self.first_line && self.line.is_empty() => {}
            ScannerState::Head if self.first_line => {
                self.first_line = false;
                if self.line == b"PRI * HTTP/2.0" {
                    self.state = ScannerState::Unchecked;
                }
            }
            ScannerState::Head if self.line.is_empty() => {
                self.state = match (self.chunked, self.content_length) {
                    (true, _) => ScannerState::ChunkSize,
                    (false, 0) => ScannerState::Head,
                    (false, length) => ScannerState::Body(length),
                };
                self.first_line = true;
                self.chunked = false;
                self.content_length = 0;
            }
            ScannerState::Head => self.parse_header(),
            ScannerState::ChunkSize => {
                let digits = self.line.split(|b| *b == b';').next().unwrap_or_default().trim_ascii();
                let size = std::str::from_utf8(digits).ok().and_then(|d| u64::from_str_radix(d, 16).ok());
                self.state = match size {
                    Some(0) => ScannerState::Trailers,
                    Some(size) => ScannerState::Chunk(size.saturating_add(2)),
                    None => ScannerState::Unchecked,
                };
            }
            ScannerState::Trailers if self.line.is_empty() => self.state = ScannerState::Head,
            ScannerState::Trailers | ScannerState::Body(_) | ScannerState::Chunk(_) | ScannerState::Unchecked => {}
        }
    }

    fn parse_header(&mut self) {
        let Some(colon) = self.line.iter().position(|b| *b == b':') else { return };
        let name = &self.line[..colon];
        let value = self.line[colon + 1..].trim_ascii();
        if name.eq_ignore_ascii_case(b"transfer-encoding") {
            self.chunked = true;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            match std::str::from_utf8(value).ok().and_then(|v| v.parse().ok()) {
                Some(length) => self.content_length = length,
                None => self.state = ScannerState::Unchecked,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes that the library receives, and checks that they do not depend on how the input is split.
    fn scanned(text: &str) -> String {
        let mut results = (1..=text.len()).map(|size| {
            let mut scanner = RequestScanner::new(4096);
            let mut bytes = text.as_bytes().to_vec();
            for part in bytes.chunks_mut(size) {
                scanner.scan(part);
            }
            String::from_utf8(bytes).unwrap()
        });
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first), "{text:?}");
        first
    }

    #[test]
    fn a_bare_line_feed_becomes_invalid() {
        for (sent, delivered) in [
            ("GET / HTTP/1.1\nhost: a\r\n\r\n", "GET / HTTP/1.1\0host: a\r\n\r\n"),
            ("GET / HTTP/1.1\r\nhost: a\n\r\n", "GET / HTTP/1.1\r\nhost: a\0\r\n"),
            ("GET / HTTP/1.1\r\nhost: a\r\n\n", "GET / HTTP/1.1\r\nhost: a\r\n\0"),
            ("\nGET / HTTP/1.1\r\n\r\n", "\0GET / HTTP/1.1\r\n\r\n"),
        ] {
            assert_eq!(scanned(sent), delivered);
        }
    }

    /// A second request on the connection is scanned too, however the first one ends.
    #[test]
    fn requests_are_scanned_to_their_end() {
        for first in [
            "GET / HTTP/1.1\r\nhost: a\r\n\r\n",
            "\r\nPOST / HTTP/1.1\r\nContent-Length: 4\r\n\r\na\n\nb",
            "POST / HTTP/1.1\r\ncontent-length:  4 \r\nhost: a\r\n\r\n\n\n\n\n",
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\ncontent-length: 9\r\n\r\n3;x=1\r\na\nb\r\n0\r\nx: y\r\n\r\n",
            "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\na\r\n\n\n\n\n\n\n\n\n\n\n\r\n0\r\n\r\n",
        ] {
            let good = format!("{first}GET / HTTP/1.1\r\n\r\n");
            assert_eq!(scanned(&good), good);
            let bad = scanned(&format!("{first}GET / HTTP/1.1\n\n"));
            assert_eq!(bad, format!("{first}GET / HTTP/1.1\0\n"));
        }
    }

    #[test]
    fn bytes_that_cannot_be_parsed_are_unchanged() {
        for text in [
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\n\n\n".to_owned(),
            "POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n\n\n".to_owned(),
            "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\n\n".to_owned(),
            format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n\n", "y".repeat(4096)),
        ] {
            let mut bytes = text.clone().into_bytes();
            assert_eq!(RequestScanner::new(4096).scan(&mut bytes), None);
            assert_eq!(String::from_utf8(bytes).unwrap(), text);
        }
    }
}
