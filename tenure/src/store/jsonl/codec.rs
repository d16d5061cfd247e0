//! The JSONL file format: serialization, parsing and checksums.
//!
//! A file is a sequence of commits, a commit is a sequence of lines, and a line is one JSON object:
//!
//! ```text
//! {"owner":"user/ada"}                                          the owner of the items; the first line of an item file
//! {"removed":{"namespace":"cache","key":"k0"}}                  a removed item (tombstone)
//! {"item":{"namespace":"cache","key":"k1","value":"…",…}}       an inserted or replaced item
//! {"seq":3,"at":"2026-01-01T00:00:00.000001Z","entry":{…}}      a record
//! ```
//!
//! The last line of a commit has further fields after its own (and may have none of its own), in
//! this order:
//!
//! * `"head":{…}`: the head, unless it equals the fold of the previous head and the commit's
//!   records;
//! * `"blobs":["…",…]`: the blobs that the session references from the first record of this commit
//!   on;
//! * `"sum":"xxxxxxxx"`: always, and always last. The CRC-32 in 8 lower-case hexadecimal digits
//!   over every byte from the start of the commit's first line up to the quotation mark before
//!   `sum`, including line breaks and the last comma.
//!
//! The last 18 bytes of a commit are therefore `"sum":"xxxxxxxx"}` and a line break. No other line
//! ends in `"}`: those end in `}}`.

use crate::store::item::{Item, Owner};
use crate::types::blob::BlobId;
use crate::types::decode_error::DecodeError;
use crate::types::entry::{Entry, Record};
use crate::types::head::Head;
use crate::types::id::Seq;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read};

/// The field that begins a checksum.
const CHECKSUM_FIELD: &[u8] = br#""sum":""#;
/// Length of a checksum with its field, its brace and its line break, in bytes.
const CHECKSUM_LEN: usize = CHECKSUM_FIELD.len() + 8 + b"\"}\n".len();

/// One parsed line.
#[derive(Deserialize)]
pub(super) struct LogLine<'a> {
    pub seq: Option<Seq>,
    pub at: Option<Timestamp>,
    #[serde(borrow)]
    pub entry: Option<&'a RawValue>,
    pub owner: Option<String>,
    pub item: Option<ItemLine<String, Item>>,
    pub removed: Option<RemovedLine<String>>,
    pub head: Option<Head>,
    #[serde(default)]
    pub blobs: Vec<BlobId>,
}

/// An item with the name of its namespace.
#[derive(Serialize, Deserialize)]
pub(super) struct ItemLine<S, I> {
    pub namespace: S,
    #[serde(flatten)]
    pub item: I,
}

/// A tombstone: an item that was removed.
#[derive(Serialize, Deserialize)]
pub(super) struct RemovedLine<S> {
    pub namespace: S,
    pub key: S,
}

impl<'a> LogLine<'a> {
    /// Parses a line. The error does not quote it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        // The message of serde would quote the line; the column suffices.
        serde_json::from_slice(bytes)
            .map_err(|e| DecodeError::caused(format!("invalid line (column {})", e.column()), e))
    }

    /// Returns the record of the line, with its entry deserialized. `None` means that the line is
    /// not a record.
    pub fn decode(&self) -> Result<Option<Record>, DecodeError> {
        let Some((seq, at, text)) = self.record() else { return Ok(None) };
        let entry = Entry::decode(text)
            .map_err(|e| DecodeError::caused(format!("the entry of record {seq} cannot be parsed"), e))?;
        Ok(Some(Record { seq, at, entry }))
    }

    /// Returns the record of the line: sequence number, time and serialized entry. `None` means
    /// that the line is not a record.
    pub fn record(&self) -> Option<(Seq, Timestamp, &'a str)> {
        Some((self.seq?, self.at?, self.entry?.get()))
    }
}

/// A builder for the lines of one commit.
#[derive(Default)]
pub(super) struct LineBatch {
    text: String,
    first: Seq,
    offsets: Vec<u64>,
    items: usize,
}

/// A serialized commit with its checksum, ready to be appended.
pub(super) struct EncodedCommit {
    pub bytes: Vec<u8>,
    /// The sequence number of the first record; 0 if there are no records.
    pub first: Seq,
    /// The offset of each record, relative to the start of the commit.
    pub offsets: Vec<u64>,
    /// The number of lines about items.
    pub items: usize,
}

impl LineBatch {
    /// Adds the owner; the first line of an item file.
    pub fn owner(&mut self, owner: &Owner) {
        self.line("owner", &owner.to_string());
    }

    /// Adds an inserted or replaced item.
    pub fn item(&mut self, namespace: &str, item: &Item) {
        self.items += 1;
        self.line("item", &ItemLine { namespace, item });
    }

    /// Adds a tombstone for a removed item.
    pub fn removed_item(&mut self, namespace: &str, key: &str) {
        self.items += 1;
        self.line("removed", &RemovedLine { namespace, key });
    }

    /// Adds a record with its serialized entry.
    pub fn record(&mut self, seq: Seq, at: Timestamp, entry: &str) {
        if self.offsets.is_empty() {
            self.first = seq;
        }
        self.offsets.push(self.text.len() as u64);
        writeln!(self.text, r#"{{"seq":{seq},"at":"{at}","entry":{entry}}}"#).expect("writing to a String cannot fail");
    }

    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Completes the commit with its head, blob references and checksum.
    pub fn finish(self, head: Option<&Head>, blobs: &[BlobId]) -> EncodedCommit {
        let LineBatch { mut text, first, offsets, items } = self;
        match text.strip_suffix("}\n").map(str::len) {
            Some(end) => {
                text.truncate(end);
                text.push(',');
            }
            None => text.push('{'),
        }
        if let Some(head) = head {
            text += &format!(r#""head":{},"#, json(head));
        }
        if !blobs.is_empty() {
            text += &format!(r#""blobs":{},"#, json(&blobs));
        }
        let sum = crc32fast::hash(text.as_bytes());
        text += &format!("\"sum\":\"{sum:08x}\"}}\n");
        EncodedCommit { bytes: text.into_bytes(), first, offsets, items }
    }

    fn line(&mut self, kind: &str, value: &impl Serialize) {
        writeln!(self.text, r#"{{"{kind}":{}}}"#, json(value)).expect("writing to a String cannot fail");
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("heads and items have only string keys and finite numbers")
}

/// Returns the checksum that a line ends with, or `None` if it is not the last line of a commit.
fn parse_checksum(line: &[u8]) -> Option<u32> {
    let end = line.strip_suffix(b"\"}\n")?;
    let (start, digits) = end.split_at_checked(end.len().checked_sub(8)?)?;
    let digits = std::str::from_utf8(digits).ok().filter(|d| d.bytes().all(|b| b"0123456789abcdef".contains(&b)))?;
    start.ends_with(CHECKSUM_FIELD).then(|| u32::from_str_radix(digits, 16).ok())?
}

/// A reader that yields a file commit by commit.
pub(super) struct CommitReader<R> {
    reader: BufReader<R>,
    /// The commit that was read last.
    pub bytes: Vec<u8>,
    /// The byte offset of that commit.
    pub offset: u64,
    /// The line number of that commit, counted from 1.
    pub line: usize,
}

/// The result of reading on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextCommit {
    /// A commit with a valid checksum.
    Valid,
    /// Bytes that are not a valid commit.
    Invalid,
    /// The end of the file.
    End,
}

impl<R: Read> CommitReader<R> {
    pub fn new(reader: R) -> Self {
        Self { reader: BufReader::with_capacity(1 << 16, reader), bytes: Vec::new(), offset: 0, line: 1 }
    }

    /// Reads the next commit and verifies its checksum.
    pub fn next(&mut self) -> io::Result<NextCommit> {
        self.offset += self.bytes.len() as u64;
        self.line += self.lines().count();
        self.bytes.clear();
        loop {
            let start = self.bytes.len();
            if self.reader.read_until(b'\n', &mut self.bytes)? == 0 {
                return Ok(if start == 0 { NextCommit::End } else { NextCommit::Invalid });
            }
            if let Some(sum) = parse_checksum(&self.bytes[start..]) {
                let covered = &self.bytes[..self.bytes.len() - CHECKSUM_LEN];
                return Ok(if crc32fast::hash(covered) == sum { NextCommit::Valid } else { NextCommit::Invalid });
            }
        }
    }

    /// Iterates over the lines of the commit that was read last.
    pub fn lines(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.split_inclusive(|b| *b == b'\n')
    }
}

/// Returns whether a valid commit begins at any line of the rest. If so, the bytes before it are
/// damaged, and not a write that a crash interrupted.
pub(super) fn contains_commit(reader: impl Read) -> io::Result<bool> {
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    let mut hashes = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        let sum = parse_checksum(&line);
        let mut hash = crc32fast::Hasher::new();
        hash.update(&line[..line.len() - if sum.is_some() { CHECKSUM_LEN } else { 0 }]);
        hashes.push(hash);
        line.clear();
        let Some(sum) = sum else { continue };
        // Extends the checksum backwards, one line at a time, from the last line to each line that
        // may begin this commit.
        let mut rest = crc32fast::Hasher::new();
        for mut hash in hashes.drain(..).rev() {
            hash.combine(&rest);
            if hash.clone().finalize() == sum {
                return Ok(true);
            }
            rest = hash;
        }
    }
    Ok(false)
}
