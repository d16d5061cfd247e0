//! Replaying a whole file: its contents, and whether it is intact, torn or damaged.
//!
//! Invariant: a torn end (an interrupted write) is distinguished from damage, because only the
//! former may be truncated.

use crate::store::item::Item;
use crate::store::jsonl::codec::{CommitReader, LogLine, NextCommit, any_commit};
use crate::store::jsonl::paths::{LogFile, parse_owner};
use crate::types::blob::BlobId;
use crate::types::entry::Record;
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
    Damaged { line: usize, why: String },
}

/// Replays the file of an owner.
pub(super) fn replay(path: &Path, place: &LogFile) -> io::Result<(Recovered, LogTail)> {
    let file = File::open(path)?;
    let mut commits = CommitReader::new(&file);
    let mut contents = Recovered::default();
    let key = place.key();
    let end = loop {
        match commits.next()? {
            NextCommit::End => break LogTail::Clean,
            NextCommit::Bad => break bad_end(&file, commits.at, commits.line)?,
            NextCommit::Whole => {}
        }
        if let Err((line, why)) = contents.take(&commits, key.as_ref()) {
            return Ok((contents, LogTail::Damaged { line: commits.line + line, why }));
        }
    };
    match contents.misfit(place) {
        Some(why) => Ok((contents, LogTail::Damaged { line: 1, why: why.to_owned() })),
        None => Ok((contents, end)),
    }
}

/// Classifies bytes that are not a valid commit: a torn end, or damage if valid commits follow.
fn bad_end(mut file: &File, at: u64, line: usize) -> io::Result<LogTail> {
    let bytes = file.metadata()?.len().saturating_sub(at);
    file.seek(SeekFrom::Start(at))?;
    if any_commit(file.take(bytes))? {
        return Ok(LogTail::Damaged { line, why: "a commit's checksum is wrong, and whole ones follow it".to_owned() });
    }
    Ok(LogTail::Torn { bytes, line })
}

impl Recovered {
    /// Applies a commit. An error contains the index of the invalid line in the commit, and the
    /// reason.
    fn take<R: Read>(&mut self, commit: &CommitReader<R>, key: Option<&SessionKey>) -> Result<(), (usize, String)> {
        let (mut at, mut from) = (commit.at, None);
        for (number, bytes) in commit.lines().enumerate() {
            let wrong = |why: String| (number, why);
            let line = LogLine::parse(bytes).map_err(wrong)?;
            if let Some(record) = line.decode().map_err(wrong)? {
                from.get_or_insert(record.seq);
                self.record(&record, at, key).map_err(wrong)?;
            }
            if let Some(put) = line.item {
                self.item_lines += 1;
                self.items.insert((put.shelf, put.item.key.clone()), put.item);
            }
            if let Some(gone) = line.gone {
                self.item_lines += 1;
                self.items.remove(&(gone.shelf, gone.key));
            }
            self.owner = self.owner.take().or(line.owner);
            self.head = line.head.or_else(|| self.head.take());
            let from = from.unwrap_or(self.last());
            self.blobs.extend(line.blobs.into_iter().map(|id| (id, from)));
            at += bytes.len() as u64;
        }
        self.len = at;
        Ok(())
    }

    /// Applies a record: checks that its sequence number is contiguous, and folds it into the head.
    fn record(&mut self, record: &Record, at: u64, key: Option<&SessionKey>) -> Result<(), String> {
        if self.offsets.is_empty() {
            self.first = record.seq;
            self.head = key.and_then(|key| Head::begin(key, record));
        } else {
            let want = self.last() + 1;
            if record.seq != want {
                return Err(format!("record {} is missing, {} is in its place", want, record.seq));
            }
            if let Some(head) = &mut self.head {
                head.apply(record);
            }
        }
        self.offsets.push(at);
        Ok(())
    }

    /// Returns the sequence number of the last record.
    fn last(&self) -> Seq {
        (self.first + self.offsets.len() as u64).saturating_sub(1)
    }

    /// Returns the reason for which this cannot be the file of that owner, if there is one.
    fn misfit(&self, place: &LogFile) -> Option<&'static str> {
        match (place.key(), &self.head) {
            _ if self.len == 0 => None,
            (Some(key), Some(head)) if head.key() == key && head.seq == self.last() => None,
            (Some(_), Some(_)) => Some("the index card does not belong to this log"),
            (Some(_), None) => Some("there is no index card"),
            (None, _) => {
                let owner = self.owner.as_deref().and_then(parse_owner);
                (owner.as_ref() != Some(&place.owner)).then_some("the first line does not name the owner of this file")
            }
        }
    }
}
