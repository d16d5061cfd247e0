//! Backups: writes everything that a store holds to an archive, while the store is in use.

use crate::maintenance::archive::{BackupSummary, Header, Row, blob_refs, end_line, json_line};
use crate::store::query::RecordRange;
use crate::store::snapshot::Snapshot;
use crate::tenure::Tenure;
use crate::types::blob::{Blob, BlobId};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{SessionKey, Tenant};
use std::collections::{BTreeMap, HashMap, HashSet};
use tokio::sync::mpsc::Sender;

/// The number of heads or items that are read in one page.
const PAGE: usize = 1000;

/// The size from which on a chunk is sent, in bytes.
const CHUNK_BYTES: usize = 256 << 10;

impl Tenure {
    /// Writes a backup of all tenants, as of the moment of the call, in chunks of bytes. The format
    /// is the same for every store, so it can be restored into a store of another kind. Returns
    /// what it contains after the last chunk was sent.
    ///
    /// It contains everything: sessions with their complete logs, media, memories, keys (their
    /// hashes), idempotency keys and cached results. The store may be in use meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the store has no snapshots (`memory:`), and [`Error::Corrupt`], which
    /// names the location, if a session is damaged: such a backup could not be restored.
    pub async fn backup(&self, chunks: Sender<Vec<u8>>) -> Result<BackupSummary> {
        let Some(snapshots) = self.store().snapshots() else {
            let message = "this store cannot be backed up: a store in memory has nothing that outlives its process";
            return Err(Error::invalid("store", message));
        };
        let snapshot = snapshots.snapshot().await?;
        let mut archive = ArchiveWriter {
            chunks,
            buffer: Vec::new(),
            hash: blake3::Hasher::new(),
            counts: BackupSummary::default(),
            blobs: HashSet::new(),
        };
        archive.write(json_line(&Header::new(self.now()))?).await?;
        let mut forks = Vec::new();
        let mut after: Option<SessionKey> = None;
        loop {
            let heads = snapshot.heads(after.as_ref(), PAGE).await?;
            let Some(last) = heads.last() else { break };
            after = Some(last.key());
            for head in heads {
                if head.parent.is_some() {
                    forks.push(head);
                } else {
                    archive.session(&*snapshot, head).await?;
                }
            }
        }
        for head in parents_first(forks) {
            archive.session(&*snapshot, head).await?;
        }
        let mut after = None;
        loop {
            let items = snapshot.items(after.as_ref().map(|(n, k): &(_, String)| (n, k.as_str())), PAGE).await?;
            let Some((namespace, item)) = items.last() else { break };
            after = Some((namespace.clone(), item.key.clone()));
            for (namespace, item) in items {
                archive.counts.items += 1;
                archive.row(Row::Item(namespace, item)).await?;
            }
        }
        archive.finish().await
    }
}

/// Orders forks so that each follows its parent, if that is a fork as well. Forks without their
/// parent come last; the reader reports them.
fn parents_first(forks: Vec<Head>) -> Vec<Head> {
    let mut waiting: HashMap<SessionKey, Vec<Head>> = HashMap::new();
    let keys: HashSet<SessionKey> = forks.iter().map(Head::key).collect();
    let mut ready: Vec<Head> = Vec::new();
    for head in forks {
        let parent =
            head.parent.as_ref().map(|p| SessionKey { tenant: head.tenant.clone(), session: p.session.clone() });
        match parent.filter(|key| keys.contains(key)) {
            Some(key) => waiting.entry(key).or_default().push(head),
            None => ready.push(head),
        }
    }
    let mut next = 0;
    while next < ready.len() {
        let children = waiting.remove(&ready[next].key()).unwrap_or_default();
        ready.extend(children);
        next += 1;
    }
    // A cycle of parents: only in a damaged store.
    let rest: BTreeMap<_, _> = waiting.into_iter().collect();
    ready.extend(rest.into_values().flatten());
    ready
}

/// An archive that is being written.
struct ArchiveWriter {
    chunks: Sender<Vec<u8>>,
    buffer: Vec<u8>,
    hash: blake3::Hasher,
    counts: BackupSummary,
    /// The blobs that are in the archive already.
    blobs: HashSet<(Tenant, BlobId)>,
}

impl ArchiveWriter {
    async fn session(&mut self, snapshot: &dyn Snapshot, head: Head) -> Result<()> {
        let key = head.key();
        let end = head.seq;
        let mut last = head.first.saturating_sub(1);
        self.counts.sessions += 1;
        self.row(Row::Session(Box::new(head))).await?;
        while last < end {
            let records = snapshot.records(&key, &RecordRange { upto: end, ..RecordRange::after(last) }).await?;
            let Some(last_record) = records.last() else {
                return Err(Error::corrupt(format!("session {key}"), format!("record {} is missing", last + 1)));
            };
            last = last_record.seq;
            for record in records {
                for blob_ref in blob_refs(&record) {
                    self.blob(snapshot, &key, blob_ref.id).await?;
                }
                self.counts.records += 1;
                self.row(Row::Record(record)).await?;
            }
        }
        Ok(())
    }

    /// Writes a blob unless the archive has it.
    async fn blob(&mut self, snapshot: &dyn Snapshot, key: &SessionKey, id: BlobId) -> Result<()> {
        if !self.blobs.insert((key.tenant.clone(), id)) {
            return Ok(());
        }
        let Some(bytes) = snapshot.blob(&key.tenant, &id).await? else {
            return Err(Error::corrupt(format!("session {key}"), format!("it references blob {id}, which is missing")));
        };
        self.counts.blobs += 1;
        self.row(Row::Blob(key.tenant.clone(), Blob { id, bytes })).await
    }

    async fn row(&mut self, row: Row) -> Result<()> {
        self.write(row.to_line()?).await
    }

    async fn write(&mut self, line: Vec<u8>) -> Result<()> {
        self.hash.update(&line);
        self.buffer.extend_from_slice(&line);
        if self.buffer.len() >= CHUNK_BYTES { self.send().await } else { Ok(()) }
    }

    async fn send(&mut self) -> Result<()> {
        let chunk = std::mem::take(&mut self.buffer);
        self.chunks.send(chunk).await.map_err(|_| Error::unavailable("the backup was aborted by its receiver"))
    }

    async fn finish(mut self) -> Result<BackupSummary> {
        self.counts.blake3 = self.hash.finalize().to_hex().to_string();
        self.buffer.extend_from_slice(&end_line(self.counts.clone())?);
        self.send().await?;
        Ok(self.counts)
    }
}
