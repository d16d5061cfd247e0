//! The storage engine: the JSONL files and the in-memory index of their contents.
//!
//! Invariant: the index never shows a commit that is not yet durable on disk.

use super::file::{
    AppendFailure, ByteSpan, FilePart, append, compose, io_error, read_records, sync_dir, write_atomically,
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
    dir_synced: bool,
}

/// Damage that was found in a file.
pub(super) struct Damage {
    pub location: String,
    pub reason: String,
}

impl JsonlEngine {
    pub fn new(root: PathBuf, lock: File, state: JsonlState) -> Self {
        Self { root, state: Mutex::new(state), counter: AtomicU64::new(0), _lock: lock }
    }

    pub fn state(&self) -> MutexGuard<'_, JsonlState> {
        self.state.lock().expect("no code panics while holding this lock")
    }

    /// Commits: checks the preconditions, writes new blobs, appends to the session's file and
    /// updates the index, in this order. A head that equals the fold of the previous head and the
    /// records is not written. A failure to append the copy of the discarded messages is only
    /// logged.
    pub fn commit(&self, log_file: &LogFile, commit: &Commit) -> Result<()> {
        let (stored, new_head, new_blobs) = {
            let state = self.state();
            state.check_intact(log_file)?;
            state.index.check(commit)?;
            let tenant = &log_file.tenant;
            let new_blobs: Vec<_> = commit.blobs.iter().filter(|b| !state.index.uses_blob(tenant, b.id)).collect();
            (state.index.head(&commit.head.key()).cloned(), state.index.head_after(commit), new_blobs)
        };
        self.write_blobs(&log_file.tenant, &new_blobs)?;
        let mut batch = LineBatch::default();
        commit.items.iter().for_each(|(namespace, item)| batch.item(namespace, item));
        commit.records.iter().for_each(|r| batch.record(r.seq, r.at, &r.entry.encode()));
        let implied = fold_head(stored, &new_head.key(), &commit.records);
        let is_named_by_head = commit.base.is_none() && log_file.needs_head();
        let head = (implied.as_ref() != Some(&new_head) || is_named_by_head).then_some(&new_head);
        let blobs: BTreeSet<_> = commit.blobs.iter().map(|b| b.id).collect();
        if !batch.is_empty() || head.is_some() || !blobs.is_empty() {
            let encoded = batch.finish(head, &blobs.into_iter().collect::<Vec<_>>());
            self.append_commit(log_file, &encoded, |state| state.index.apply(commit))?;
        }
        self.rewrite_if_mostly_dead(log_file);
        self.copy_discarded(commit, &new_head);
        Ok(())
    }

    /// Appends a commit to a file. After it is durable, `update` changes the rest of the state under
    /// the same lock.
    pub fn append_commit(
        &self,
        log_file: &LogFile,
        encoded: &EncodedCommit,
        update: impl FnOnce(&mut JsonlState),
    ) -> Result<()> {
        let path = log_file.path(&self.root);
        let dir = log_file.dir(&self.root);
        let (len, dir_synced) = {
            let state = self.state();
            if state.broken.contains(log_file) {
                let reason =
                    format!("{}: an earlier failed write could not be truncated; reopen the store", path.display());
                return Err(Error::unavailable(reason));
            }
            state.logs.get(log_file).map_or((0, false), |log| (log.len, log.dir_synced))
        };
        if len == 0 {
            self.make_dir(&dir)?;
        }
        let appended = append(&path, len, &encoded.bytes, (!dir_synced).then_some(&dir));
        let mut state = self.state();
        match appended {
            Ok(()) => {}
            Err(AppendFailure::Undone(error)) => return Err(io_error(&path, error)),
            Err(AppendFailure::Partial(error)) => {
                state.broken.insert(log_file.clone());
                let reason = format!("{}: {error}; reopen the store", path.display());
                return Err(Error::unavailable(reason).with_source(error));
            }
        }
        let log = state.logs.entry(log_file.clone()).or_default();
        log.first = if len == 0 { encoded.first } else { log.first };
        log.offsets.extend(encoded.offsets.iter().map(|offset| len + offset));
        log.len = len + encoded.bytes.len() as u64;
        log.item_lines += encoded.items;
        log.dir_synced = true;
        update(&mut state);
        Ok(())
    }

    /// Reads a page of records at the offsets in the index.
    pub fn records(&self, log_file: &LogFile, range: &RecordRange) -> Result<Vec<Record>> {
        let spans = {
            let state = self.state();
            state.check_intact(log_file)?;
            state.logs.get(log_file).map(|log| log.spans(range)).unwrap_or_default()
        };
        if spans.is_empty() {
            return Ok(Vec::new());
        }
        let mut records = read_records(&log_file.path(&self.root), &spans)?;
        if range.order == ReadDirection::Backward {
            records.reverse();
        }
        Ok(records)
    }

    /// Appends an item, and tombstones for the items that it evicts.
    pub fn put(&self, log_file: &LogFile, namespace: &Namespace, item: &Item, max_items: Option<usize>) -> Result<()> {
        let mut batch = LineBatch::default();
        let evicted = {
            let state = self.state();
            state.check_intact(log_file)?;
            state.index.check_namespace(namespace)?;
            if !state.logs.contains_key(log_file) {
                batch.owner(&log_file.owner);
            }
            state.index.keys_to_evict(namespace, &item.key, max_items)
        };
        evicted.iter().for_each(|key| batch.removed_item(&namespace.name, key));
        batch.item(&namespace.name, item);
        let update = |state: &mut JsonlState| {
            for key in &evicted {
                state.index.remove_item(namespace, key);
            }
            state.index.put(namespace, item.clone());
        };
        self.append_commit(log_file, &batch.finish(None, &[]), update)?;
        self.rewrite_if_mostly_dead(log_file);
        Ok(())
    }

    /// Removes those of the given items of one file that still exist and satisfy the condition.
    /// Returns the number removed.
    pub fn remove(
        &self,
        log_file: &LogFile,
        mut items: Vec<(Namespace, String)>,
        condition: impl Fn(&Item) -> bool,
    ) -> Result<usize> {
        {
            let state = self.state();
            state.check_intact(log_file)?;
            items.retain(|(namespace, key)| state.index.item(namespace, key).is_some_and(&condition));
        }
        if items.is_empty() {
            return Ok(0);
        }
        let mut batch = LineBatch::default();
        items.iter().for_each(|(namespace, key)| batch.removed_item(&namespace.name, key));
        let update = |state: &mut JsonlState| {
            for (namespace, key) in &items {
                state.index.remove_item(namespace, key);
            }
        };
        self.append_commit(log_file, &batch.finish(None, &[]), update)?;
        self.rewrite_if_mostly_dead(log_file);
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
            Ok(_) => Err(Error::corrupt(path.display(), "the contents do not match the hash in the file name")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(io_error(&path, e)),
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
            write_atomically(&temporary, &path, &blob.bytes).map_err(|e| io_error(&path, e))?;
        }
        sync_dir(&dir).map_err(|e| io_error(&dir, e))
    }

    /// Creates a directory of the store, and makes it durable.
    fn make_dir(&self, dir: &Path) -> Result<()> {
        let Some(parent) = dir.parent().filter(|_| dir != self.root && !self.state().dirs.contains(dir)) else {
            return Ok(());
        };
        self.make_dir(parent)?;
        let created = match private_files::create_dir(dir) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            created => created,
        };
        created.and_then(|()| sync_dir(parent)).map_err(|e| io_error(dir, e))?;
        self.state().dirs.insert(dir.to_owned());
        Ok(())
    }

    /// Rewrites a file if most of its item lines are dead. A failure is only logged, because the
    /// next write tries again.
    fn rewrite_if_mostly_dead(&self, log_file: &LogFile) {
        let (dead, live) = self.state().dead_and_live(log_file);
        if dead > MAX_DEAD
            && dead > live
            && let Err(error) = self.rewrite(log_file)
        {
            tracing::warn!(path = %log_file.path(&self.root).display(), %error, "could not compact the file; removed items still take up space");
        }
    }

    /// Rewrites a file with its records and its live items only.
    pub fn rewrite(&self, log_file: &LogFile) -> Result<()> {
        let part = self.state().file_part(&self.root, log_file, Seq::MAX);
        let items = self.state().items(log_file);
        match (part, log_file.key()) {
            (Some(part), Some(key)) => {
                let head = self.state().index.head(&key).cloned();
                self.replace(log_file, &[part], head.as_ref(), &items, |_| {})
            }
            (Some(_), None) if items.is_empty() => self.remove_namespaces(log_file),
            (Some(_), None) => self.replace(log_file, &[], None, &items, |_| {}),
            (None, _) => Ok(()),
        }
    }

    /// Replaces a file atomically (write, verify, rename) by one of records, items and a head.
    /// `update` changes the rest of the state under the same lock.
    pub fn replace(
        &self,
        log_file: &LogFile,
        parts: &[FilePart],
        head: Option<&Head>,
        items: &[(String, Arc<Item>)],
        update: impl FnOnce(&mut JsonlState),
    ) -> Result<()> {
        let path = log_file.path(&self.root);
        let dir = log_file.dir(&self.root);
        let mut temporary = path.clone().into_os_string();
        temporary.push(paths::TEMPORARY);
        let temporary = PathBuf::from(temporary);
        let mut last = LineBatch::default();
        if log_file.key().is_none() {
            last.owner(&log_file.owner);
        }
        items.iter().for_each(|(namespace, item)| last.item(namespace, item));
        let written = compose(&temporary, parts, &last.finish(head, &[]).bytes).and_then(|()| {
            // Verifies the new file by replaying it before anything depends on it.
            match replay(&temporary, log_file).map_err(|e| io_error(&temporary, e))? {
                (contents, LogTail::Clean) if contents.head.as_ref().map(Head::key) == head.map(Head::key) => {
                    Ok(contents)
                }
                _ => Err(Error::corrupt(
                    path.display(),
                    "the rewritten file failed verification; the old file is unchanged",
                )),
            }
        });
        let contents =
            match written.and_then(|c| fs::rename(&temporary, &path).map(|()| c).map_err(|e| io_error(&path, e))) {
                Ok(contents) => contents,
                Err(error) => {
                    drop(fs::remove_file(&temporary));
                    return Err(error);
                }
            };
        {
            let mut state = self.state();
            state.logs.insert(log_file.clone(), SessionLog::from_recovered(contents));
            state.broken.remove(log_file);
            update(&mut state);
        }
        sync_dir(&dir).map_err(|e| io_error(&dir, e))
    }
}

impl JsonlState {
    /// Returns an error if the file is damaged.
    pub fn check_intact(&self, log_file: &LogFile) -> Result<()> {
        match self.damaged.get(log_file) {
            Some(damage) => Err(Error::corrupt(&damage.location, &damage.reason)),
            None => Ok(()),
        }
    }

    /// Returns the items of a file, each with the name of its namespace.
    pub fn items(&self, log_file: &LogFile) -> Vec<(String, Arc<Item>)> {
        let owned = self.index.namespaces_of(&log_file.tenant, &log_file.owner);
        owned.flat_map(|(namespace, items)| items.values().map(|i| (namespace.name.clone(), i.clone()))).collect()
    }

    /// Returns the number of dead item lines of a file, and the number of live items.
    fn dead_and_live(&self, log_file: &LogFile) -> (usize, usize) {
        let live = self.index.namespaces_of(&log_file.tenant, &log_file.owner).map(|(_, items)| items.len()).sum();
        let lines = self.logs.get(log_file).map_or(0, |log| log.item_lines);
        (lines.saturating_sub(live), live)
    }

    pub fn files_with_dead_lines(&self) -> Vec<LogFile> {
        self.logs.keys().filter(|log_file| self.has_dead_lines(log_file)).cloned().collect()
    }

    pub fn has_dead_lines(&self, log_file: &LogFile) -> bool {
        self.dead_and_live(log_file).0 > 0
    }

    /// Describes the records of a file up to `upto`, for copying.
    pub fn file_part(&self, root: &Path, log_file: &LogFile, upto: Seq) -> Option<FilePart> {
        self.logs.get(log_file).map(|log| FilePart { path: log_file.path(root), len: log.len, upto })
    }
}

impl SessionLog {
    pub fn from_recovered(contents: Recovered) -> Self {
        let Recovered { first, offsets, len, item_lines, .. } = contents;
        Self { first, offsets, len, item_lines, dir_synced: false }
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
fn fold_head(stored: Option<Head>, key: &SessionKey, records: &[Record]) -> Option<Head> {
    let (mut head, rest) = match (stored, records) {
        (Some(head), all) => (head, all),
        (None, [first, rest @ ..]) => (Head::begin(key, first)?, rest),
        (None, []) => return None,
    };
    rest.iter().for_each(|record| head.apply(record));
    Some(head)
}
