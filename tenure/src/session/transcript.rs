//! Transcripts: one JSONL file per session, one message per line. The format is stable: each line
//! is a message in OpenAI's format.
//!
//! Session files of the JSONL store can be read in the same way; discarded messages are omitted. A
//! line that cannot be parsed is never skipped silently: it is reported with its file and line
//! number.

use crate::home::expand_home;
use crate::private_files;
use crate::rules::session::Session;
use crate::types::blob::BlobId;
use crate::types::entry::{Entry, Parent, Record};
use crate::types::error::{Error, Result};
use crate::types::file_name::session_file_name;
use crate::types::id::{Seq, SessionId, SessionKey, Tenant};
use crate::types::message::Message;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

/// The contents of a transcript file.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonlTranscript {
    /// The path of the file.
    pub path: PathBuf,
    /// The messages, in order.
    pub messages: Vec<Message>,
    /// The lines that could not be parsed.
    pub problems: Vec<TranscriptProblem>,
}

/// A line of a transcript that could not be parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TranscriptProblem {
    /// The path of the file.
    pub path: PathBuf,
    /// The line number, from 1.
    pub line: usize,
    /// The reason why it could not be parsed.
    pub reason: String,
}

impl JsonlTranscript {
    /// Appends messages to a transcript file, which is created if it does not exist. They are
    /// synced to disk when it returns.
    pub fn append(path: impl AsRef<Path>, messages: &[Message]) -> Result<()> {
        let path = &expand_home(path);
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

    /// Replaces a transcript file atomically. The new contents are written to `FILE.….part` beside
    /// it, which is then renamed.
    pub fn write(path: impl AsRef<Path>, messages: &[Message]) -> Result<()> {
        let path = &expand_home(path);
        // A random name, because two writers may replace the same file concurrently.
        let part = path.with_extension(format!("jsonl.{}.part", uuid::Uuid::now_v7().simple()));
        let replace = || -> Result<()> {
            private_files::create(&part).map_err(|e| io_error(&part, e))?;
            Self::append(&part, messages)?;
            fs::rename(&part, path).map_err(|e| io_error(path, e))
        };
        replace().inspect_err(|_| drop(fs::remove_file(&part)))
    }
}

/// Reads a transcript. A `~` at the beginning of the path is the home directory. It is an error only if the file cannot be read at all; lines that cannot be
/// parsed are in `problems`.
pub fn read_transcript(path: impl AsRef<Path>) -> Result<JsonlTranscript> {
    let path = &*expand_home(path);
    let mut reader = TranscriptReader::new(path);
    let file = File::open(path).map_err(|e| io_error(path, e))?;
    let mut lines = BufReader::new(file);
    let mut bytes = Vec::new();
    let mut number = 0;
    loop {
        bytes.clear();
        if lines.read_until(b'\n', &mut bytes).map_err(|e| io_error(path, e))? == 0 {
            break;
        }
        number += 1;
        let is_complete = bytes.last() == Some(&b'\n');
        match std::str::from_utf8(&bytes) {
            Ok(text) if text.trim().is_empty() => {}
            Ok(text) => reader.line(number, text.trim(), is_complete),
            Err(_) => reader.problem(number, "the line is not valid UTF-8"),
        }
    }
    let mut messages = std::mem::take(&mut reader.messages);
    if !reader.records.is_empty() {
        messages.extend(fold(path, &mut reader)?);
    }
    Ok(JsonlTranscript { path: path.to_owned(), messages, problems: reader.problems })
}

/// Reads all transcripts below a directory, in the order of their paths. Files of discarded
/// messages are omitted.
pub fn iter_transcripts(dir: impl AsRef<Path>) -> Result<impl Iterator<Item = Result<(PathBuf, JsonlTranscript)>>> {
    let mut files = Vec::new();
    collect(&expand_home(dir), &mut files)?;
    files.sort();
    Ok(files.into_iter().map(|path| read_transcript(&path).map(|t| (path, t))))
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(|e| io_error(dir, e))? {
        let path = entry.map_err(|e| io_error(dir, e))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if path.is_dir() {
            // The directories of items and blobs of a JSONL store contain no messages.
            if !["namespaces", "blobs"].contains(&name) {
                collect(&path, files)?;
            }
        } else if name.ends_with(".jsonl") && !name.ends_with(".discarded.jsonl") {
            files.push(path);
        }
    }
    Ok(())
}

/// Parses the lines of one file.
struct TranscriptReader<'a> {
    path: &'a Path,
    messages: Vec<Message>,
    records: Vec<Record>,
    /// The last head in the file: the parent of the session may have changed since it was created (D-001).
    head: Option<HeadFields>,
    problems: Vec<TranscriptProblem>,
}

/// A line of the JSONL store that contains a head.
#[derive(Deserialize)]
struct HeadLine {
    head: HeadFields,
}

/// The part of a head that is needed here.
#[derive(Deserialize)]
struct HeadFields {
    parent: Option<Parent>,
}

/// The current parent of the session with these records.
fn current_parent(records: &[Record], head: &Option<HeadFields>) -> Option<Parent> {
    match (head, records.first()) {
        (Some(head), _) => head.parent.clone(),
        (None, Some(Record { entry: Entry::Created(created), .. })) => created.parent.clone(),
        _ => None,
    }
}

/// A line of the JSONL store that contains a record.
#[derive(Deserialize)]
struct RecordLine<'a> {
    seq: Seq,
    at: Timestamp,
    #[serde(borrow)]
    entry: &'a RawValue,
}

impl<'a> TranscriptReader<'a> {
    fn new(path: &'a Path) -> Self {
        Self { path, messages: Vec::new(), records: Vec::new(), head: None, problems: Vec::new() }
    }

    fn problem(&mut self, line: usize, reason: impl Into<String>) {
        self.problems.push(TranscriptProblem { path: self.path.to_owned(), line, reason: reason.into() });
    }

    fn line(&mut self, number: usize, text: &str, is_complete: bool) {
        if let Ok(line) = serde_json::from_str::<HeadLine>(text) {
            self.head = Some(line.head);
        }
        if let Ok(line) = serde_json::from_str::<RecordLine<'_>>(text) {
            match Entry::decode(line.entry.get()) {
                Ok(entry) => self.records.push(Record { seq: line.seq, at: line.at, entry }),
                Err(e) => self.problem(number, e.to_string()),
            }
            return;
        }
        match Message::parse(text) {
            Ok(message) => self.messages.push(message),
            // Other lines of the JSONL store.
            Err(_) if ["{\"item\":", "{\"removed\":", "{\"head\":"].iter().any(|p| text.starts_with(p)) => {}
            Err(_) if !is_complete => self.problem(number, "the line is incomplete: the file ends within a message"),
            Err(e) => self.problem(number, e.to_string()),
        }
    }
}

/// The messages of a session file of the JSONL store. Records that a fork inherits are read from
/// its parent's file in the same directory.
fn fold(path: &Path, reader: &mut TranscriptReader<'_>) -> Result<Vec<Message>> {
    let key = SessionKey { tenant: Tenant::default(), session: SessionId::new("transcript")? };
    let mut all = std::mem::take(&mut reader.records);
    let mut next_parent = current_parent(&all, &reader.head);
    while let Some(parent) = next_parent {
        let parent_path = path.with_file_name(format!("{}.jsonl", session_file_name(&parent.session)));
        let mut parent_reader = TranscriptReader::new(&parent_path);
        for (i, text) in fs::read_to_string(&parent_path).unwrap_or_default().lines().enumerate() {
            parent_reader.line(i + 1, text, true);
        }
        next_parent = current_parent(&parent_reader.records, &parent_reader.head);
        parent_reader.records.retain(|r| r.seq <= parent.seq);
        reader.problems.append(&mut parent_reader.problems);
        let reaches_fork_point = parent_reader.records.last().is_some_and(|r| r.seq == parent.seq);
        // Each parent begins before its fork. Anything else could be a cycle.
        if !reaches_fork_point || parent_reader.records.first().map(|r| r.seq) >= all.first().map(|r| r.seq) {
            let reason = format!(
                "the session is a fork of {}, whose file is not in the same directory; only the messages of the fork are included",
                parent.session
            );
            reader.problem(1, reason);
            break;
        }
        all.splice(0..0, parent_reader.records);
    }
    let session = Session::replay(&key, all)
        .ok_or_else(|| Error::corrupt(path.display(), "the log does not begin with `created`"))?;
    let blob = |id: &BlobId| fs::read(path.with_file_name("blobs").join(id.to_string())).ok().map(Into::into);
    session.messages.iter().map(|m| m.message.attach(blob)).collect()
}

fn io_error(path: &Path, e: std::io::Error) -> Error {
    let path = path.display();
    match e.kind() {
        std::io::ErrorKind::StorageFull => Error::full(path).with_source(e),
        _ => Error::unavailable(format!("{path}: {e}")).with_source(e),
    }
}
