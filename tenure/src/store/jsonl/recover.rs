//! Replaying a whole file: its contents, and whether it is intact, torn or damaged.
//!
//! Invariant: a torn end (an interrupted write) is distinguished from damage, because only the
//! former may be truncated.

use crate::store::item::Item;
use crate::store::jsonl::codec::{CommitReader, LogLine, NextCommit, contains_commit};
use crate::store::jsonl::paths::{LogFile, parse_owner};
use crate::types::blob::BlobId;
use crate::types::decode_error::DecodeError;
use crate::types::entry::{Entry, Record};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// The contents of a file.
#[derive(Default)]
pub(super) struct Recovered {
    pub head: Option<Head>,
    /// The sequence number of the first record.
    pub first: Seq,
    /// The byte offset of each record.
    pub offsets: Vec<u64>,
    /// The byte offset of the end of the last complete commit.
    pub len: u64,
    /// Items by namespace and key.
    pub items: BTreeMap<(String, String), Item>,
    /// The number of lines about items, live and dead.
    pub item_lines: usize,
    /// The referenced blobs, each with the record from which on it is referenced.
    pub blobs: Vec<(BlobId, Seq)>,
    /// The rewinds.
    pub rewinds: Vec<Record>,
    pub owner: Option<String>,
}

/// The state of the end of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LogTail {
    /// The file ends in a complete commit.
    Clean,
    /// The file ends in bytes of an unfinished commit.
    Torn { bytes: u64, line: usize },
    /// The file is damaged before its end.
    Damaged { line: usize, reason: String },
}

/// Replays the file of an owner.
pub(super) fn replay(path: &Path, log_file: &LogFile) -> io::Result<(Recovered, LogTail)> {
    let file = File::open(path)?;
    let mut commits = CommitReader::new(&file);
    let mut contents = Recovered::default();
    let key = log_file.key();
    let end = loop {
        match commits.next()? {
            NextCommit::End => break LogTail::Clean,
            NextCommit::Invalid => break classify_tail(&file, commits.offset, commits.line)?,
            NextCommit::Valid => {}
        }
        if let Err((line, reason)) = contents.apply_commit(&commits, key.as_ref()) {
            return Ok((contents, LogTail::Damaged { line: commits.line + line, reason }));
        }
    };
    match contents.mismatch(log_file) {
        Some(reason) => Ok((contents, LogTail::Damaged { line: 1, reason: reason.to_owned() })),
        None => Ok((contents, end)),
    }
}

/// Classifies bytes that are not a valid commit: a torn end, or damage if valid commits follow.
fn classify_tail(mut file: &File, offset: u64, line: usize) -> io::Result<LogTail> {
    let bytes = file.metadata()?.len().saturating_sub(offset);
    file.seek(SeekFrom::Start(offset))?;
    if contains_commit(file.take(bytes))? {
        return Ok(LogTail::Damaged {
            line,
            reason: "checksum mismatch in a commit that valid commits follow".to_owned(),
        });
    }
    Ok(LogTail::Torn { bytes, line })
}

impl Recovered {
    /// Applies a commit. An error contains the index of the invalid line in the commit, and the
    /// reason.
    fn apply_commit<R: Read>(
        &mut self,
        commit: &CommitReader<R>,
        key: Option<&SessionKey>,
    ) -> Result<(), (usize, String)> {
        let mut offset = commit.offset;
        let mut from = None;
        for (number, bytes) in commit.lines().enumerate() {
            let at_line = |e: DecodeError| (number, e.to_string());
            let line = LogLine::parse(bytes).map_err(at_line)?;
            if let Some(record) = line.decode().map_err(at_line)? {
                from.get_or_insert(record.seq);
                self.record(&record, offset, key).map_err(|reason| (number, reason))?;
            }
            if let Some(put) = line.item {
                self.item_lines += 1;
                self.items.insert((put.namespace, put.item.key.clone()), put.item);
            }
            if let Some(removed) = line.removed {
                self.item_lines += 1;
                self.items.remove(&(removed.namespace, removed.key));
            }
            self.owner = self.owner.take().or(line.owner);
            self.head = line.head.or_else(|| self.head.take());
            let from = from.unwrap_or(self.last());
            self.blobs.extend(line.blobs.into_iter().map(|id| (id, from)));
            offset += bytes.len() as u64;
        }
        self.len = offset;
        Ok(())
    }

    /// Applies a record: checks that its sequence number is contiguous, and folds it into the head.
    fn record(&mut self, record: &Record, offset: u64, key: Option<&SessionKey>) -> Result<(), String> {
        if self.offsets.is_empty() {
            self.first = record.seq;
            self.head = key.and_then(|key| Head::begin(key, record));
        } else {
            let want = self.last() + 1;
            if record.seq != want {
                return Err(format!("expected record {}, found record {}", want, record.seq));
            }
            if let Some(head) = &mut self.head {
                head.apply(record);
            }
        }
        if matches!(record.entry, Entry::Rewound(_)) {
            self.rewinds.push(record.clone());
        }
        self.offsets.push(offset);
        Ok(())
    }

    /// Returns the sequence number of the last record.
    fn last(&self) -> Seq {
        (self.first + self.offsets.len() as u64).saturating_sub(1)
    }

    /// Returns the reason for which this cannot be the file of that owner, if there is one.
    fn mismatch(&self, log_file: &LogFile) -> Option<&'static str> {
        match (log_file.key(), &self.head) {
            _ if self.len == 0 => None,
            (Some(key), Some(head)) if head.key() == key && head.seq == self.last() => None,
            (Some(_), Some(_)) => Some("the head does not match this log"),
            (Some(_), None) => Some("the head is missing"),
            (None, _) => {
                let owner = self.owner.as_deref().and_then(parse_owner);
                (owner.as_ref() != Some(&log_file.owner))
                    .then_some("the first line does not name the owner of this file")
            }
        }
    }
}
