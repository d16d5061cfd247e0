//! The storage engine: the JSONL files and the in-memory index of their contents.
//!
//! Invariant: the index never shows a commit that is not yet durable on disk.

use super::file::{
    AppendFailure, ByteSpan, FilePart, append, append_copy, compose, failed, read_records, sync_dir, write_whole,
};
use crate::private_files;
use crate::store::contract::{Commit, MAX_PAGE_BYTES};
use crate::store::item::{Item, Namespace};
use crate::store::jsonl::codec::{EncodedCommit, LineBatch};
use crate::store::jsonl::paths::{self, LogFile};
use crate::store::jsonl::recover::{LogTail, Recovered, replay};
use crate::store::mem_index::MemIndex;
use crate::store::query::{ReadDirection, RecordRange};
use crate::types::blob::{Blob, BlobId};
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey, Tenant};
use crate::types::message::Message;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A file with more dead item lines (of removed or replaced items) than this, and more dead than
/// live ones, is rewritten.
const MAX_DEAD: usize = 1_000;

/// The storage engine. Its methods block on the disk, so they are called only from threads that may
/// block.
pub(super) struct JsonlEngine {
    pub root: PathBuf,
    /// A std mutex: never held during disk I/O.
    state: Mutex<JsonlState>,
    /// For unique names of temporary files.
    counter: AtomicU64,
    _lock: File,
}

/// The in-memory state: the index of all sessions and items, and the state of each file.
#[derive(Default)]
pub(super) struct JsonlState {
    pub index: MemIndex,
    pub logs: HashMap<LogFile, SessionLog>,
    /// Files that cannot be read, with the damage found in them.
    pub damaged: HashMap<LogFile, Damage>,
    /// Files that may end in part of a commit that could not be truncated. Appending to them is
    /// rejected until the store is reopened.
    pub broken: HashSet<LogFile>,
    /// Directories whose entry in their parent has been fsynced.
    pub dirs: HashSet<PathBuf>,
}

/// The index of one JSONL file.
#[derive(Default)]
pub(super) struct SessionLog {
    /// The sequence number of the first record; 0 if there are no records.
    first: Seq,
    /// The byte offset of each record.
    offsets: Vec<u64>,
    /// The byte offset of the end of the last commit.
    len: u64,
    /// The number of lines about items, live and dead.
    pub item_lines: usize,
    /// Whether the file's directory entry has been fsynced. Unknown, hence `false`, for a file that
    /// was found on opening.
    lasting: bool,
}

/// Damage that was found in a file.
pub(super) struct Damage {
    pub at: String,
    pub why: String,
}

impl JsonlEngine {
    pub fn new(root: PathBuf, lock: File, state: JsonlState) -> Self {
        Self { root, state: Mutex::new(state), counter: AtomicU64::new(0), _lock: lock }
    }

    pub fn state(&self) -> MutexGuard<'_, JsonlState> {
        self.state.lock().expect("nothing panics while it holds the state")
    }

    /// Commits: checks the preconditions, writes new blobs, appends to the session's file and
    /// updates the index, in this order. A head that equals the fold of the previous head and the
    /// records is not written. A failure to append the copy of the discarded messages is only
    /// logged.
    pub fn commit(&self, place: &LogFile, commit: &Commit) -> Result<()> {
        let (stored, card, new_blobs) = {
            let state = self.state();
            state.intact(place)?;
            state.index.check(commit)?;
            let tenant = &place.tenant;
            let new_blobs: Vec<_> = commit.blobs.iter().filter(|b| !state.index.uses_blob(tenant, b.id)).collect();
            (state.index.head(&commit.head.key()).cloned(), state.index.card(commit), new_blobs)
        };
        self.write_blobs(&place.tenant, &new_blobs)?;
        let mut batch = LineBatch::default();
        commit.items.iter().for_each(|(shelf, item)| batch.item(shelf, item));
        commit.records.iter().for_each(|r| batch.record(r.seq, r.at, &r.entry.encode()));
        let implied = follow(stored, &card.key(), &commit.records);
        let head = (implied.as_ref() != Some(&card)).then_some(&card);
        let blobs: BTreeSet<_> = commit.blobs.iter().map(|b| b.id).collect();
        if !batch.is_empty() || head.is_some() || !blobs.is_empty() {
            let sealed = batch.seal(head, &blobs.into_iter().collect::<Vec<_>>());
            self.add(place, &sealed, |state| state.index.apply(commit))?;
        }
        self.tidy(place);
        if !commit.cut.is_empty() {
            let path = paths::discarded_file(&self.root, &card.key());
            let blob = |id: &BlobId| self.blob(&card.tenant, *id).ok().flatten();
            let whole = |m: &Message| m.attach(blob).unwrap_or_else(|_| m.clone());
            let cut: Vec<Message> = commit.cut.iter().map(whole).collect();
            if let Err(error) = append_copy(&path, cut.iter().map(|m| m.as_str())) {
                tracing::warn!(path = %path.display(), %error, "discarded messages are only in the log, not in their file");
            }
        }
        Ok(())
    }

    /// Appends a commit to a file. After it is durable, `then` updates the rest of the state under
    /// the same lock.
    pub fn add(&self, place: &LogFile, sealed: &EncodedCommit, then: impl FnOnce(&mut JsonlState)) -> Result<()> {
        let (path, dir) = (place.file(&self.root), place.dir(&self.root));
        let (len, lasting) = {
            let state = self.state();
            if state.broken.contains(place) {
                let why = format!("{}: an earlier write could not be taken back; reopen the store", path.display());
                return Err(Error::unavailable(why));
            }
            state.logs.get(place).map_or((0, false), |log| (log.len, log.lasting))
        };
        if len == 0 {
            self.make_dir(&dir)?;
        }
        let added = append(&path, len, &sealed.bytes, (!lasting).then_some(&dir));
        let mut state = self.state();
        match added {
            Ok(()) => {}
            Err(AppendFailure::Nothing(error)) => return Err(failed(&path, &error)),
            Err(AppendFailure::Half(error)) => {
                state.broken.insert(place.clone());
                return Err(Error::unavailable(format!("{}: {error}; reopen the store", path.display())));
            }
        }
        let log = state.logs.entry(place.clone()).or_default();
        log.first = if len == 0 { sealed.first } else { log.first };
        log.offsets.extend(sealed.offsets.iter().map(|offset| len + offset));
        log.len = len + sealed.bytes.len() as u64;
        log.item_lines += sealed.items;
        log.lasting = true;
        then(&mut state);
        Ok(())
    }

    /// Reads a page of records at the offsets in the index.
    pub fn records(&self, place: &LogFile, range: &RecordRange) -> Result<Vec<Record>> {
        let spans = {
            let state = self.state();
            state.intact(place)?;
            state.logs.get(place).map(|log| log.spans(range)).unwrap_or_default()
        };
        if spans.is_empty() {
            return Ok(Vec::new());
        }
        let mut records = read_records(&place.file(&self.root), &spans)?;
        if range.order == ReadDirection::Backward {
            records.reverse();
        }
        Ok(records)
    }

    /// Appends an item, and tombstones for the items that it evicts.
    pub fn put(&self, place: &LogFile, shelf: &Namespace, item: &Item, keep: Option<usize>) -> Result<()> {
        let mut batch = LineBatch::default();
        let gone = {
            let state = self.state();
            state.intact(place)?;
            state.index.check_shelf(shelf)?;
            if !state.logs.contains_key(place) {
                batch.owner(&place.owner);
            }
            state.index.crowded_out(shelf, &item.key, keep)
        };
        gone.iter().for_each(|key| batch.gone(&shelf.name, key));
        batch.item(&shelf.name, item);
        let then = |state: &mut JsonlState| {
            for key in &gone {
                state.index.remove_item(shelf, key);
            }
            state.index.put(shelf, item.clone());
        };
        self.add(place, &batch.seal(None, &[]), then)?;
        self.tidy(place);
        Ok(())
    }

    /// Removes those of the given items of one file that still exist and satisfy the condition.
    /// Returns the number removed.
    pub fn remove(
        &self,
        place: &LogFile,
        mut items: Vec<(Namespace, String)>,
        when: impl Fn(&Item) -> bool,
    ) -> Result<usize> {
        {
            let state = self.state();
            state.intact(place)?;
            items.retain(|(shelf, key)| state.index.item(shelf, key).is_some_and(&when));
        }
        if items.is_empty() {
            return Ok(0);
        }
        let mut batch = LineBatch::default();
        items.iter().for_each(|(shelf, key)| batch.gone(&shelf.name, key));
        let then = |state: &mut JsonlState| {
            for (shelf, key) in &items {
                state.index.remove_item(shelf, key);
            }
        };
        self.add(place, &batch.seal(None, &[]), then)?;
        self.tidy(place);
        Ok(items.len())
    }

    /// Reads a blob and verifies its hash.
    pub fn blob(&self, tenant: &Tenant, id: BlobId) -> Result<Option<Arc<[u8]>>> {
        if !self.state().index.uses_blob(tenant, id) {
            return Ok(None);
        }
        let path = paths::blob_file(&self.root, tenant, id);
        match fs::read(&path) {
            Ok(bytes) if BlobId::of(&bytes) == id => Ok(Some(bytes.into())),
            Ok(_) => Err(Error::corrupt(path.display(), "its bytes are not those that its name says")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(&path, &e)),
        }
    }

    /// Writes blobs before the commit that references them. If the commit fails, they are orphans,
    /// which the next opening removes.
    fn write_blobs(&self, tenant: &Tenant, blobs: &[&Blob]) -> Result<()> {
        if blobs.is_empty() {
            return Ok(());
        }
        let dir = paths::blobs_dir(&self.root, tenant);
        self.make_dir(&dir)?;
        for blob in blobs {
            let path = paths::blob_file(&self.root, tenant, blob.id);
            // Concurrent commits may write the same blob, each to its own temporary file.
            let number = self.counter.fetch_add(1, Ordering::Relaxed);
            let temporary = dir.join(format!("{}.{number}{}", blob.id, paths::TEMPORARY));
            write_whole(&temporary, &path, &blob.bytes).map_err(|e| failed(&path, &e))?;
        }
        sync_dir(&dir).map_err(|e| failed(&dir, &e))
    }

    /// Creates a directory of the store, and makes it durable.
    fn make_dir(&self, dir: &Path) -> Result<()> {
        let Some(parent) = dir.parent().filter(|_| dir != self.root && !self.state().dirs.contains(dir)) else {
            return Ok(());
        };
        self.make_dir(parent)?;
        let made = match private_files::create_dir(dir) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        };
        made.and_then(|()| sync_dir(parent)).map_err(|e| failed(dir, &e))?;
        self.state().dirs.insert(dir.to_owned());
        Ok(())
    }

    /// Rewrites a file if most of its item lines are dead. A failure is only logged, because the
    /// next write tries again.
    fn tidy(&self, place: &LogFile) {
        let (dead, live) = self.state().dead_and_live(place);
        if dead > MAX_DEAD
            && dead > live
            && let Err(error) = self.rewrite(place)
        {
            tracing::warn!(path = %place.file(&self.root).display(), %error, "removed items still take space in their file");
        }
    }

    /// Rewrites a file with its records and its live items only.
    pub fn rewrite(&self, place: &LogFile) -> Result<()> {
        let part = self.state().part(&self.root, place, Seq::MAX);
        let items = self.state().items(place);
        match (part, place.key()) {
            (Some(part), Some(key)) => {
                let head = self.state().index.head(&key).cloned();
                self.replace(place, &[part], head.as_ref(), &items, |_| {})
            }
            (Some(_), None) if items.is_empty() => self.clear(place),
            (Some(_), None) => self.replace(place, &[], None, &items, |_| {}),
            (None, _) => Ok(()),
        }
    }

    /// Replaces a file atomically (write, verify, rename) by one of records, items and a head.
    /// `then` updates the rest of the state under the same lock.
    pub fn replace(
        &self,
        place: &LogFile,
        parts: &[FilePart],
        head: Option<&Head>,
        items: &[(String, Arc<Item>)],
        then: impl FnOnce(&mut JsonlState),
    ) -> Result<()> {
        let (path, dir) = (place.file(&self.root), place.dir(&self.root));
        let mut temporary = path.clone().into_os_string();
        temporary.push(paths::TEMPORARY);
        let temporary = PathBuf::from(temporary);
        let mut last = LineBatch::default();
        if place.key().is_none() {
            last.owner(&place.owner);
        }
        items.iter().for_each(|(shelf, item)| last.item(shelf, item));
        let written = compose(&temporary, parts, &last.seal(head, &[]).bytes).and_then(|()| {
            // Verifies the new file by replaying it before anything depends on it.
            match replay(&temporary, place).map_err(|e| failed(&temporary, &e))? {
                (contents, LogTail::Clean) if contents.head.as_ref().map(Head::key) == head.map(Head::key) => {
                    Ok(contents)
                }
                _ => Err(Error::corrupt(path.display(), "it could not be written anew without a change")),
            }
        });
        let contents =
            match written.and_then(|c| fs::rename(&temporary, &path).map(|()| c).map_err(|e| failed(&path, &e))) {
                Ok(contents) => contents,
                Err(error) => {
                    drop(fs::remove_file(&temporary));
                    return Err(error);
                }
            };
        {
            let mut state = self.state();
            state.logs.insert(place.clone(), SessionLog::found(contents));
            state.broken.remove(place);
            then(&mut state);
        }
        sync_dir(&dir).map_err(|e| failed(&dir, &e))
    }
}

impl JsonlState {
    /// Returns an error if the file is damaged.
    pub fn intact(&self, place: &LogFile) -> Result<()> {
        match self.damaged.get(place) {
            Some(damage) => Err(Error::corrupt(&damage.at, &damage.why)),
            None => Ok(()),
        }
    }

    /// Returns the items of a file, each with the name of its namespace.
    pub fn items(&self, place: &LogFile) -> Vec<(String, Arc<Item>)> {
        let shelves = self.index.shelves(&place.tenant, &place.owner);
        shelves.flat_map(|(shelf, items)| items.values().map(|i| (shelf.name.clone(), i.clone()))).collect()
    }

    /// Returns the number of dead item lines of a file, and the number of live items.
    fn dead_and_live(&self, place: &LogFile) -> (usize, usize) {
        let live = self.index.shelves(&place.tenant, &place.owner).map(|(_, items)| items.len()).sum();
        let lines = self.logs.get(place).map_or(0, |log| log.item_lines);
        (lines.saturating_sub(live), live)
    }

    pub fn with_dead_lines(&self) -> Vec<LogFile> {
        self.logs.keys().filter(|place| self.has_dead_lines(place)).cloned().collect()
    }

    pub fn has_dead_lines(&self, place: &LogFile) -> bool {
        self.dead_and_live(place).0 > 0
    }

    /// Describes the records of a file up to `upto`, for copying.
    pub fn part(&self, root: &Path, place: &LogFile, upto: Seq) -> Option<FilePart> {
        self.logs.get(place).map(|log| FilePart { path: place.file(root), len: log.len, upto })
    }
}

impl SessionLog {
    pub fn found(contents: Recovered) -> Self {
        let Recovered { first, offsets, len, item_lines, .. } = contents;
        Self { first, offsets, len, item_lines, lasting: false }
    }

    /// Returns the byte ranges of the records of one page, in file order.
    fn spans(&self, range: &RecordRange) -> Vec<ByteSpan> {
        let index = |seq: Seq| usize::try_from(seq).unwrap_or(usize::MAX).min(self.offsets.len());
        let from = index((range.after.saturating_add(1)).saturating_sub(self.first));
        let to = index(range.upto.saturating_add(1).saturating_sub(self.first)).max(from);
        let span = |i: usize| ByteSpan {
            seq: self.first + i as u64,
            start: self.offsets[i],
            end: self.offsets.get(i + 1).copied().unwrap_or(self.len),
        };
        let mut bytes = 0;
        let fits = |span: &ByteSpan| {
            let first = bytes == 0;
            bytes += span.end - span.start;
            first || bytes <= MAX_PAGE_BYTES as u64
        };
        match range.order {
            ReadDirection::Forward => (from..to).map(span).take(range.limit).take_while(fits).collect(),
            ReadDirection::Backward => {
                let mut spans: Vec<_> = (from..to).rev().map(span).take(range.limit).take_while(fits).collect();
                spans.reverse();
                spans
            }
        }
    }
}

/// Folds records into a head. The result is the head that a reader of the file derives, so it need
/// not be stored.
fn follow(stored: Option<Head>, key: &SessionKey, records: &[Record]) -> Option<Head> {
    let (mut head, rest) = match (stored, records) {
        (Some(head), all) => (head, all),
        (None, [first, rest @ ..]) => (Head::begin(key, first)?, rest),
        (None, []) => return None,
    };
    rest.iter().for_each(|record| head.apply(record));
    Some(head)
}
