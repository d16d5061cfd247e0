//! Transcripts: one JSONL file per session, one message per line. The format is stable: each line is a message in OpenAI's shape.
//!
//! Files of the JSONL store can be read the same way; what was rewound is left out. A line that can not be read is never skipped
//! in silence: it is reported with its file and number.

use crate::private_files;
use crate::rules::session::Session;
use crate::types::blob::BlobId;
use crate::types::entry::{Entry, Parent, Record};
use crate::types::error::{Error, Result};
use crate::types::id::{Key, Seq, SessionId, Tenant};
use crate::types::message::Message;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

/// A transcript that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonlTranscript {
    /// The file.
    pub path: PathBuf,
    /// What was said.
    pub messages: Vec<Message>,
    /// The lines that could not be read.
    pub problems: Vec<Problem>,
}

/// A line that could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file.
    pub path: PathBuf,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub why: String,
}

impl JsonlTranscript {
    /// Adds messages to a transcript file, which is made if there is none, and waits until they are on disk.
    pub fn append(path: impl AsRef<Path>, messages: &[Message]) -> Result<()> {
        let path = path.as_ref();
        let mut text = String::new();
        for message in messages {
            text.push_str(message.as_str());
            text.push('\n');
        }
        let write = || -> std::io::Result<()> {
            let mut file = private_files::options().create(true).append(true).open(path)?;
            file.write_all(text.as_bytes())?;
            file.sync_data()
        };
        write().map_err(|e| io_error(path, e))
    }

    /// Writes a whole transcript file, in place of what is there. Until it is whole, it is `FILE.….part` beside it.
    pub fn write(path: impl AsRef<Path>, messages: &[Message]) -> Result<()> {
        let path = path.as_ref();
        // Two may write the same file at once.
        let part = path.with_extension(format!("jsonl.{}.part", uuid::Uuid::now_v7().simple()));
        let replace = || -> Result<()> {
            private_files::create(&part).map_err(|e| io_error(&part, e))?;
            Self::append(&part, messages)?;
            fs::rename(&part, path).map_err(|e| io_error(path, e))
        };
        replace().inspect_err(|_| drop(fs::remove_file(&part)))
    }
}

/// Reads a transcript. Only a file that can not be read at all is an error; bad lines are in `problems`.
pub fn read_transcript(path: impl AsRef<Path>) -> Result<JsonlTranscript> {
    let path = path.as_ref();
    let mut read = Reader::new(path);
    let file = File::open(path).map_err(|e| io_error(path, e))?;
    let mut lines = BufReader::new(file);
    let (mut bytes, mut number) = (Vec::new(), 0);
    loop {
        bytes.clear();
        if lines.read_until(b'\n', &mut bytes).map_err(|e| io_error(path, e))? == 0 {
            break;
        }
        number += 1;
        let whole = bytes.last() == Some(&b'\n');
        match std::str::from_utf8(&bytes) {
            Ok(text) if text.trim().is_empty() => {}
            Ok(text) => read.line(number, text.trim(), whole),
            Err(_) => read.problem(number, "it is not UTF-8 text"),
        }
    }
    let mut messages = std::mem::take(&mut read.messages);
    if !read.records.is_empty() {
        messages.extend(fold(path, &mut read)?);
    }
    Ok(JsonlTranscript { path: path.to_owned(), messages, problems: read.problems })
}

/// Reads all transcripts below a directory, in the order of their paths. Files of discarded messages are left out.
pub fn iter_transcripts(dir: impl AsRef<Path>) -> Result<impl Iterator<Item = Result<(PathBuf, JsonlTranscript)>>> {
    let mut files = Vec::new();
    collect(dir.as_ref(), &mut files)?;
    files.sort();
    Ok(files.into_iter().map(|path| read_transcript(&path).map(|t| (path, t))))
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(|e| io_error(dir, e))? {
        let path = entry.map_err(|e| io_error(dir, e))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if path.is_dir() {
            // Shelves and blobs of a JSONL store hold no messages.
            if !["shelves", "blobs"].contains(&name) {
                collect(&path, files)?;
            }
        } else if name.ends_with(".jsonl") && !name.ends_with(".discarded.jsonl") {
            files.push(path);
        }
    }
    Ok(())
}

struct Reader<'a> {
    path: &'a Path,
    messages: Vec<Message>,
    records: Vec<Record>,
    /// The last card in the file: what the session leans on may have changed since it was created.
    card: Option<Card>,
    problems: Vec<Problem>,
}

/// A line of the JSONL store that has a card.
#[derive(Deserialize)]
struct CardLine {
    head: Card,
}

#[derive(Deserialize)]
struct Card {
    parent: Option<Parent>,
}

/// What the session with these records leans on.
fn leans_on(records: &[Record], card: &Option<Card>) -> Option<Parent> {
    match (card, records.first()) {
        (Some(card), _) => card.parent.clone(),
        (None, Some(Record { entry: Entry::Created(created), .. })) => created.parent.clone(),
        _ => None,
    }
}

/// A line of the JSONL store.
#[derive(Deserialize)]
struct RecordLine<'a> {
    seq: Seq,
    at: Timestamp,
    #[serde(borrow)]
    entry: &'a RawValue,
}

impl<'a> Reader<'a> {
    fn new(path: &'a Path) -> Self {
        Self { path, messages: Vec::new(), records: Vec::new(), card: None, problems: Vec::new() }
    }

    fn problem(&mut self, line: usize, why: impl Into<String>) {
        self.problems.push(Problem { path: self.path.to_owned(), line, why: why.into() });
    }

    fn line(&mut self, number: usize, text: &str, whole: bool) {
        if let Ok(line) = serde_json::from_str::<CardLine>(text) {
            self.card = Some(line.head);
        }
        if let Ok(line) = serde_json::from_str::<RecordLine<'_>>(text) {
            match Entry::decode(line.entry.get()) {
                Ok(entry) => self.records.push(Record { seq: line.seq, at: line.at, entry }),
                Err(why) => self.problem(number, why),
            }
            return;
        }
        match Message::parse(text) {
            Ok(message) => self.messages.push(message),
            // What the JSONL store keeps beside records.
            Err(_) if ["{\"item\":", "{\"gone\":", "{\"head\":"].iter().any(|p| text.starts_with(p)) => {}
            Err(_) if !whole => self.problem(number, "the line is torn: it ends before its message does"),
            Err(e) => self.problem(number, e.to_string()),
        }
    }
}

/// The messages of a session file of the JSONL store; the part that a fork shares is read from the file it leans on, beside it.
fn fold(path: &Path, read: &mut Reader<'_>) -> Result<Vec<Message>> {
    let key = Key { tenant: Tenant::default(), session: SessionId::new("transcript")? };
    let mut all = std::mem::take(&mut read.records);
    let mut leaning = leans_on(&all, &read.card);
    while let Some(parent) = leaning {
        let beside = path.with_file_name(format!("{}.jsonl", parent.session));
        let mut other = Reader::new(&beside);
        for (i, text) in fs::read_to_string(&beside).unwrap_or_default().lines().enumerate() {
            other.line(i + 1, text, true);
        }
        leaning = leans_on(&other.records, &other.card);
        other.records.retain(|r| r.seq <= parent.seq);
        read.problems.append(&mut other.problems);
        let reaches = other.records.last().is_some_and(|r| r.seq == parent.seq);
        // Each file begins before the one that leans on it; anything else would go round in circles.
        if !reaches || other.records.first().map(|r| r.seq) >= all.first().map(|r| r.seq) {
            let why =
                format!("it leans on {}, whose file is not beside it; only its own messages are here", parent.session);
            read.problem(1, why);
            break;
        }
        all.splice(0..0, other.records);
    }
    let session =
        Session::replay(&key, all).ok_or_else(|| Error::corrupt(path.display(), "it does not begin with `created`"))?;
    let blob = |id: &BlobId| fs::read(path.with_file_name("blobs").join(id.to_string())).ok().map(Into::into);
    session.messages.iter().map(|m| m.message.attach(blob)).collect()
}

fn io_error(path: &Path, e: std::io::Error) -> Error {
    match e.kind() {
        std::io::ErrorKind::StorageFull => Error::Full { place: path.display().to_string() },
        _ => Error::unavailable(format!("{}: {e}", path.display())),
    }
}
