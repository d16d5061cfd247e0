//! Reading a whole file: what is in it, and whether it is in order.

use crate::store::item::Item;
use crate::store::jsonl::codec::{Commits, Line, Next, any_commit};
use crate::store::jsonl::paths::{Place, parse_owner};
use crate::types::blob::BlobId;
use crate::types::entry::Record;
use crate::types::head::Head;
use crate::types::id::{Key, Seq};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// What is in a file.
#[derive(Default)]
pub(super) struct Contents {
    pub head: Option<Head>,
    /// The first record.
    pub first: Seq,
    /// Where each record begins.
    pub offsets: Vec<u64>,
    /// Where the last whole commit ends.
    pub len: u64,
    /// Items by shelf and key.
    pub items: BTreeMap<(String, String), Item>,
    /// How many lines are about items.
    pub item_lines: usize,
    /// The blobs used, and from which record on.
    pub blobs: Vec<(BlobId, Seq)>,
    pub owner: Option<String>,
}

/// How a file ends.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// With a whole commit.
    Clean,
    /// With bytes of a commit that was never finished.
    Torn { bytes: u64, line: usize },
    /// It does not matter: something before it is damaged.
    Damaged { line: usize, why: String },
}

/// Reads the file of a place.
pub(super) fn replay(path: &Path, place: &Place) -> io::Result<(Contents, End)> {
    let file = File::open(path)?;
    let mut commits = Commits::new(&file);
    let mut contents = Contents::default();
    let key = place.key();
    let end = loop {
        match commits.next()? {
            Next::End => break End::Clean,
            Next::Bad => break bad_end(&file, commits.at, commits.line)?,
            Next::Whole => {}
        }
        if let Err((line, why)) = contents.take(&commits, key.as_ref()) {
            return Ok((contents, End::Damaged { line: commits.line + line, why }));
        }
    };
    match contents.misfit(place) {
        Some(why) => Ok((contents, End::Damaged { line: 1, why: why.to_owned() })),
        None => Ok((contents, end)),
    }
}

/// What to think of bytes that are no commit.
fn bad_end(mut file: &File, at: u64, line: usize) -> io::Result<End> {
    let bytes = file.metadata()?.len().saturating_sub(at);
    file.seek(SeekFrom::Start(at))?;
    if any_commit(file.take(bytes))? {
        return Ok(End::Damaged { line, why: "a commit's checksum is wrong, and whole ones follow it".to_owned() });
    }
    Ok(End::Torn { bytes, line })
}

impl Contents {
    /// Takes a commit in; an error says what is wrong in which of its lines.
    fn take<R: Read>(&mut self, commit: &Commits<R>, key: Option<&Key>) -> Result<(), (usize, String)> {
        let (mut at, mut from) = (commit.at, None);
        for (number, bytes) in commit.lines().enumerate() {
            let wrong = |why: String| (number, why);
            let line = Line::parse(bytes).map_err(wrong)?;
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

    fn record(&mut self, record: &Record, at: u64, key: Option<&Key>) -> Result<(), String> {
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

    /// The last record.
    fn last(&self) -> Seq {
        (self.first + self.offsets.len() as u64).saturating_sub(1)
    }

    /// Why this can not be the file of that place.
    fn misfit(&self, place: &Place) -> Option<&'static str> {
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
