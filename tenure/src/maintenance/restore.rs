//! Restores a backup into an empty store.

use crate::maintenance::archive::{ArchiveReader, BackupSummary, Row, blob_refs, next_log_hash};
use crate::store::contract::{Commit, Store};
use crate::tenure::Tenure;
use crate::types::blob::{Blob, BlobId};
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::{Head, LogEnd};
use crate::types::id::Tenant;
use crate::types::log_hash::LogHash;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Maximum number of records and of bytes that one commit writes.
const MAX_COMMIT_RECORDS: usize = 1000;
const MAX_COMMIT_BYTES: usize = 8 << 20;

/// Maximum number of writes in progress. A store combines concurrent writes.
const MAX_WRITES: usize = 64;

/// The number of messages that one step of building the message index adds.
const INDEX_STEP: usize = 10_000;

/// The number of rows between two reports of progress.
const PROGRESS_ROWS: u64 = 1000;

/// Reads a backup to its end and verifies it: checksum, complete logs, parents and media. `progress`
/// is called with what was read so far. Blocks the thread.
pub fn verify_backup(file: &Path, mut progress: impl FnMut(&BackupSummary)) -> Result<BackupSummary> {
    let mut reader = open_archive(file)?;
    let mut rows = 0;
    while reader.next_row()?.is_some() {
        rows += 1;
        if rows % PROGRESS_ROWS == 0 {
            progress(reader.summary());
        }
    }
    Ok(reader.summary().clone())
}

fn open_archive(file: &Path) -> Result<ArchiveReader<BufReader<File>>> {
    let opened = File::open(file).map_err(|e| Error::invalid("file", format!("{}: {e}", file.display())))?;
    ArchiveReader::new(BufReader::with_capacity(1 << 20, opened))
}

impl Tenure {
    /// Restores a backup into this store, which must be empty. The backup is verified while it is
    /// read; call [`verify_backup`] first, so that a damaged one changes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the store is not empty or is not durable. After any other error the
    /// store may contain a part of the backup, and must be removed.
    pub async fn restore_backup(&self, file: &Path, mut progress: impl FnMut(&BackupSummary)) -> Result<BackupSummary> {
        check_empty(&**self.store()).await?;
        let path = file.to_owned();
        let (sender, mut rows) = mpsc::channel(256);
        let reader = tokio::task::spawn_blocking(move || {
            let mut reader = open_archive(&path)?;
            while let Some(row) = reader.next_row()? {
                if sender.blocking_send(row).is_err() {
                    break;
                }
            }
            Ok::<_, Error>(reader.summary().clone())
        });
        let mut restoration = Restoration::new(self.store().clone());
        let mut counts = BackupSummary::default();
        let mut received = 0;
        while let Some(row) = rows.recv().await {
            match &row {
                Row::Session(_) => counts.sessions += 1,
                Row::Record(_) => counts.records += 1,
                Row::Blob(..) => counts.blobs += 1,
                Row::Item(..) => counts.items += 1,
            }
            restoration.apply(row).await?;
            received += 1;
            if received % PROGRESS_ROWS == 0 {
                progress(&counts);
            }
        }
        // The last session is complete only if the archive is.
        let summary = reader.await.map_err(|_| Error::unavailable("reading the backup panicked"))??;
        restoration.finish().await?;
        // The commits carry no words: at that time, the forks that show a message are not known.
        while self.maintain_message_index(INDEX_STEP).await? {}
        Ok(summary)
    }
}

/// Returns an error unless the store is durable and contains nothing.
async fn check_empty(store: &dyn Store) -> Result<()> {
    let Some(snapshots) = store.snapshots() else {
        return Err(Error::invalid("store", "a store in memory cannot be restored: it would be lost at once"));
    };
    let snapshot = snapshots.snapshot().await?;
    let found = match (snapshot.heads(None, 1).await?.first(), snapshot.items(None, 1).await?.first()) {
        (Some(head), _) => format!("session {}", head.key()),
        (None, Some((namespace, _))) => {
            format!("an item of {} in the namespace {} of tenant {}", namespace.owner, namespace.name, namespace.tenant)
        }
        (None, None) => return Ok(()),
    };
    Err(Error::invalid("store", format!("the store is not empty: it contains {found}; restore into a new store")))
}

/// A restoration in progress.
struct Restoration {
    store: Arc<dyn Store>,
    /// Writes that do not depend on each other.
    writes: FuturesUnordered<BoxFuture<'static, Result<()>>>,
    session: Option<SessionPart>,
    /// Blobs that were read and whose record was not committed yet.
    blobs: HashMap<(Tenant, BlobId), Blob>,
}

/// A session whose records are being read. Its head is that of the whole log.
struct SessionPart {
    head: Box<Head>,
    /// The end of what was committed. `None`: nothing was.
    base: Option<LogEnd>,
    records: Vec<Record>,
    bytes: usize,
    hash: LogHash,
    blobs: Vec<Blob>,
}

impl SessionPart {
    /// Takes the records that were read as a commit.
    fn commit(&mut self) -> Option<Commit> {
        let last = self.records.last()?.seq;
        let head = Head { seq: last, log_hash: self.hash, ..(*self.head).clone() };
        let base = self.base.replace(head.end());
        self.bytes = 0;
        let blobs = std::mem::take(&mut self.blobs);
        Some(Commit { blobs, ..Commit::new(base, std::mem::take(&mut self.records), head) })
    }
}

impl Restoration {
    fn new(store: Arc<dyn Store>) -> Self {
        Self { store, writes: FuturesUnordered::new(), session: None, blobs: HashMap::new() }
    }

    async fn apply(&mut self, row: Row) -> Result<()> {
        match row {
            Row::Session(head) => {
                self.end_session().await?;
                // Its parent may still be in progress.
                if head.parent.is_some() {
                    self.wait_for_writes(0).await?;
                }
                self.session = Some(SessionPart {
                    head,
                    base: None,
                    records: Vec::new(),
                    bytes: 0,
                    hash: LogHash::default(),
                    blobs: Vec::new(),
                });
                Ok(())
            }
            Row::Blob(tenant, blob) => {
                self.blobs.insert((tenant, blob.id), blob);
                Ok(())
            }
            Row::Record(record) => self.record(record).await,
            Row::Item(namespace, item) => {
                if self.session.is_some() {
                    self.end_session().await?;
                    // The sessions of the items that follow must exist.
                    self.wait_for_writes(0).await?;
                }
                let store = self.store.clone();
                self.write(Box::pin(async move { store.put(&namespace, &item, None).await })).await
            }
        }
    }

    async fn record(&mut self, record: Record) -> Result<()> {
        let references: Vec<BlobId> = blob_refs(&record).iter().map(|r| r.id).collect();
        let Some(part) = &mut self.session else { return Ok(()) };
        let is_full = part.records.len() >= MAX_COMMIT_RECORDS || part.bytes >= MAX_COMMIT_BYTES;
        // A commit references its blobs from its first record on, so the record that references a
        // blob begins a commit.
        if (is_full || !references.is_empty())
            && let Some(commit) = part.commit()
        {
            self.store.commit(&commit).await?;
        }
        for id in references {
            let blob = self.find_blob(id).await?;
            if let Some(part) = &mut self.session {
                part.bytes += blob.bytes.len();
                part.blobs.push(blob);
            }
        }
        let Some(part) = &mut self.session else { return Ok(()) };
        part.hash = next_log_hash(part.hash, &record);
        part.bytes += record.entry.encode().len();
        part.records.push(record);
        Ok(())
    }

    /// Returns a blob that was just read, or that an earlier session has stored.
    async fn find_blob(&mut self, id: BlobId) -> Result<Blob> {
        let tenant = self.session.as_ref().map(|part| part.head.tenant.clone()).unwrap_or_default();
        if let Some(blob) = self.blobs.remove(&(tenant.clone(), id)) {
            return Ok(blob);
        }
        let stored = self.session.as_ref().and_then(|part| part.blobs.iter().find(|b| b.id == id).cloned());
        if let Some(blob) = stored {
            return Ok(blob);
        }
        self.wait_for_writes(0).await?;
        match self.store.blob(&tenant, &id).await? {
            Some(bytes) => Ok(Blob { id, bytes }),
            None => Err(Error::corrupt("the restored store", format!("blob {id} is missing"))),
        }
    }

    /// Writes the rest of the session, concurrently with others.
    async fn end_session(&mut self) -> Result<()> {
        let Some(mut part) = self.session.take() else { return Ok(()) };
        let Some(commit) = part.commit() else { return Ok(()) };
        let store = self.store.clone();
        self.write(Box::pin(async move { store.commit(&commit).await })).await
    }

    async fn write(&mut self, write: BoxFuture<'static, Result<()>>) -> Result<()> {
        self.writes.push(write);
        self.wait_for_writes(MAX_WRITES).await
    }

    /// Waits until at most `max` writes are in progress.
    async fn wait_for_writes(&mut self, max: usize) -> Result<()> {
        while self.writes.len() > max
            && let Some(outcome) = self.writes.next().await
        {
            outcome?;
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<()> {
        self.end_session().await?;
        self.wait_for_writes(0).await
    }
}
