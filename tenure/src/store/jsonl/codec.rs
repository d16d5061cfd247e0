//! The format of a file of lines.
//!
//! A file is a row of commits, a commit is a row of lines, and a line is one JSON object:
//!
//! ```text
//! {"owner":"user/ada"}                                          whose shelves these are; the first line of such a file
//! {"gone":{"shelf":"cache","key":"k0"}}                         an item that was removed
//! {"item":{"shelf":"cache","key":"k1","value":"…",…}}           an item that was put
//! {"seq":3,"at":"2026-01-01T00:00:00.000001Z","entry":{…}}      a record
//! ```
//!
//! The last line of a commit has more fields after its own (and may have none of its own), in this order:
//!
//! * `"head":{…}`: the index card, if it is not the one that follows from the card before and the commit's records;
//! * `"blobs":["…",…]`: the blobs that the session uses from the first record of this commit on;
//! * `"sum":"xxxxxxxx"`: always, and always last. The CRC-32 in 8 lower-case hexadecimal digits over every byte from the
//!   start of the commit's first line up to the quotation mark before `sum`, line breaks and the last comma included.
//!
//! So the last 18 bytes of a commit are `"sum":"xxxxxxxx"}` and a line break, and no other line ends in `"}`: those end in `}}`.

use crate::store::item::{Item, Owner};
use crate::types::blob::BlobId;
use crate::types::entry::{Entry, Record};
use crate::types::head::Head;
use crate::types::id::Seq;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read};

const SUM: &[u8] = br#""sum":""#;
const SEAL: usize = SUM.len() + 8 + b"\"}\n".len();

/// One line, as it is read.
#[derive(Deserialize)]
pub(super) struct Line<'a> {
    pub seq: Option<Seq>,
    pub at: Option<Timestamp>,
    #[serde(borrow)]
    pub entry: Option<&'a RawValue>,
    pub owner: Option<String>,
    pub item: Option<Shelved<String, Item>>,
    pub gone: Option<Gone<String>>,
    pub head: Option<Head>,
    #[serde(default)]
    pub blobs: Vec<BlobId>,
}

/// An item with the name of its shelf.
#[derive(Serialize, Deserialize)]
pub(super) struct Shelved<S, I> {
    pub shelf: S,
    #[serde(flatten)]
    pub item: I,
}

/// An item that was removed.
#[derive(Serialize, Deserialize)]
pub(super) struct Gone<S> {
    pub shelf: S,
    pub key: S,
}

impl<'a> Line<'a> {
    pub fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        // What serde says would quote the line; its place is enough.
        serde_json::from_slice(bytes).map_err(|e| format!("not a line of this format (column {})", e.column()))
    }

    /// Its record, with the entry read.
    pub fn decode(&self) -> Result<Option<Record>, String> {
        let Some((seq, at, text)) = self.record() else { return Ok(None) };
        // For the same reason, not what the entry's reader says.
        let entry = Entry::decode(text).map_err(|_| format!("the entry of record {seq} can not be read"))?;
        Ok(Some(Record { seq, at, entry }))
    }

    /// Its record: place, time and text.
    pub fn record(&self) -> Option<(Seq, Timestamp, &'a str)> {
        Some((self.seq?, self.at?, self.entry?.get()))
    }
}

/// The lines of one commit, being written.
#[derive(Default)]
pub(super) struct Batch {
    text: String,
    first: Seq,
    offsets: Vec<u64>,
    items: usize,
}

/// The lines of one commit, with their checksum.
pub(super) struct Sealed {
    pub bytes: Vec<u8>,
    /// The first record; 0 if there is none.
    pub first: Seq,
    /// Where the records begin.
    pub offsets: Vec<u64>,
    /// How many lines are about items.
    pub items: usize,
}

impl Batch {
    pub fn owner(&mut self, owner: &Owner) {
        self.line("owner", &owner.to_string());
    }

    pub fn item(&mut self, shelf: &str, item: &Item) {
        self.items += 1;
        self.line("item", &Shelved { shelf, item });
    }

    pub fn gone(&mut self, shelf: &str, key: &str) {
        self.items += 1;
        self.line("gone", &Gone { shelf, key });
    }

    pub fn record(&mut self, seq: Seq, at: Timestamp, entry: &str) {
        if self.offsets.is_empty() {
            self.first = seq;
        }
        self.offsets.push(self.text.len() as u64);
        writeln!(self.text, r#"{{"seq":{seq},"at":"{at}","entry":{entry}}}"#).expect("a string takes everything");
    }

    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Ends the commit.
    pub fn seal(self, head: Option<&Head>, blobs: &[BlobId]) -> Sealed {
        let Batch { mut text, first, offsets, items } = self;
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
        Sealed { bytes: text.into_bytes(), first, offsets, items }
    }

    fn line(&mut self, kind: &str, value: &impl Serialize) {
        writeln!(self.text, r#"{{"{kind}":{}}}"#, json(value)).expect("a string takes everything");
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("cards and items have string keys and finite numbers only")
}

/// The checksum that a line ends with, if it is the last of a commit.
fn sum(line: &[u8]) -> Option<u32> {
    let end = line.strip_suffix(b"\"}\n")?;
    let (start, digits) = end.split_at_checked(end.len().checked_sub(8)?)?;
    let digits = std::str::from_utf8(digits).ok().filter(|d| d.bytes().all(|b| b"0123456789abcdef".contains(&b)))?;
    start.ends_with(SUM).then(|| u32::from_str_radix(digits, 16).ok())?
}

/// Reads a file commit by commit.
pub(super) struct Commits<R> {
    reader: BufReader<R>,
    /// The commit that was read last.
    pub bytes: Vec<u8>,
    /// Where it begins in the file.
    pub at: u64,
    /// Its first line, counted from 1.
    pub line: usize,
}

/// What comes next in a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A commit whose checksum is right.
    Whole,
    /// Bytes that are no commit.
    Bad,
    /// Nothing.
    End,
}

impl<R: Read> Commits<R> {
    pub fn new(reader: R) -> Self {
        Self { reader: BufReader::with_capacity(1 << 16, reader), bytes: Vec::new(), at: 0, line: 1 }
    }

    pub fn next(&mut self) -> io::Result<Next> {
        self.at += self.bytes.len() as u64;
        self.line += self.lines().count();
        self.bytes.clear();
        loop {
            let start = self.bytes.len();
            if self.reader.read_until(b'\n', &mut self.bytes)? == 0 {
                return Ok(if start == 0 { Next::End } else { Next::Bad });
            }
            if let Some(sum) = sum(&self.bytes[start..]) {
                let covered = &self.bytes[..self.bytes.len() - SEAL];
                return Ok(if crc32fast::hash(covered) == sum { Next::Whole } else { Next::Bad });
            }
        }
    }

    /// The lines of the commit.
    pub fn lines(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.split_inclusive(|b| *b == b'\n')
    }
}

/// Whether a whole commit begins at any line of what is left: then what is before it is damage, and no write that a crash cut short.
pub(super) fn any_commit(reader: impl Read) -> io::Result<bool> {
    let mut reader = BufReader::new(reader);
    let (mut line, mut hashes) = (Vec::new(), Vec::new());
    while reader.read_until(b'\n', &mut line)? > 0 {
        let sum = sum(&line);
        let mut hash = crc32fast::Hasher::new();
        hash.update(&line[..line.len() - if sum.is_some() { SEAL } else { 0 }]);
        hashes.push(hash);
        line.clear();
        let Some(sum) = sum else { continue };
        // From the last line back to the first one that may begin this commit, each time with one more line in front.
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
