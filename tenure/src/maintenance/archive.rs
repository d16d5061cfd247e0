//! The archive format of backups: one JSON object per line.
//!
//! ```text
//! {"tenure_backup":1,"format":1,"created_at":"…"}
//! {"session":{…}}                                    a head, then its own records in order
//! {"blob":{"tenant":…,"id":…,"data":base64}}         before the first record that references it
//! {"record":{"seq":1,"at":microseconds,"entry":{…}}}
//! {"item":{"tenant":…,"owner":…,"namespace":…,"item":{…}}}
//! {"end":{"sessions":…,"records":…,"items":…,"blobs":…,"blake3":…}}
//! ```
//!
//! Invariants: a parent precedes its forks; items follow all sessions; the hash in the last line
//! covers every byte before that line.

use crate::store::contract::FORMAT;
use crate::store::item::{Item, Namespace, Owner};
use crate::types::blob::{Blob, BlobId, BlobRef};
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey, Tenant};
use crate::types::log_hash::LogHash;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::{HashMap, HashSet};
use std::io::{BufRead, Read};

/// The version of the archive format.
pub const BACKUP_FORMAT: u32 = 1;

/// Maximum length of a line. The longest lines are those of media and of messages.
const MAX_LINE_BYTES: u64 = 1 << 30;

/// What a backup contains.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupSummary {
    /// The number of sessions.
    pub sessions: u64,
    /// The number of records of their logs.
    pub records: u64,
    /// The number of items: memories, keys, cached results and the like.
    pub items: u64,
    /// The number of blobs.
    pub blobs: u64,
    /// The BLAKE3 hash of the archive without its last line, in hex. Empty while the archive is written
    /// or read.
    pub blake3: String,
}

/// The first line.
#[derive(Serialize, Deserialize)]
pub(super) struct Header {
    tenure_backup: u32,
    format: u32,
    created_at: Timestamp,
}

impl Header {
    pub fn new(created_at: Timestamp) -> Self {
        Self { tenure_backup: BACKUP_FORMAT, format: FORMAT, created_at }
    }
}

/// A line after the first, as it is serialized.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Session(Box<Head>),
    Record { seq: Seq, at: i64, entry: Box<RawValue> },
    Blob { tenant: Tenant, id: BlobId, data: String },
    Item { tenant: Tenant, owner: String, namespace: String, item: Item },
    End(BackupSummary),
}

/// A part of a backup.
pub(super) enum Row {
    Session(Box<Head>),
    Record(Record),
    Blob(Tenant, Blob),
    Item(Namespace, Item),
}

impl Row {
    /// Serializes the row to a line.
    pub fn to_line(&self) -> Result<Vec<u8>> {
        let line = match self {
            Row::Session(head) => Line::Session(head.clone()),
            Row::Record(record) => Line::Record {
                seq: record.seq,
                at: record.at.as_microsecond(),
                entry: RawValue::from_string(record.entry.encode()).map_err(Error::unavailable_from)?,
            },
            Row::Blob(tenant, blob) => {
                Line::Blob { tenant: tenant.clone(), id: blob.id, data: STANDARD.encode(&*blob.bytes) }
            }
            Row::Item(namespace, item) => Line::Item {
                tenant: namespace.tenant.clone(),
                owner: namespace.owner.to_string(),
                namespace: namespace.name.clone(),
                item: item.clone(),
            },
        };
        json_line(&line)
    }
}

/// Serializes the last line.
pub(super) fn end_line(summary: BackupSummary) -> Result<Vec<u8>> {
    json_line(&Line::End(summary))
}

/// Serializes a value to a line.
pub(super) fn json_line(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value).map_err(Error::unavailable_from)?;
    line.push(b'\n');
    Ok(line)
}

/// The media that a record references.
pub(super) fn blob_refs(record: &Record) -> &[BlobRef] {
    match &record.entry {
        Entry::Message(entry) => entry.message.blob_refs(),
        Entry::Compacted { summary: Some(summary), .. } => summary.blob_refs(),
        _ => &[],
    }
}

/// Returns the hash of a log with one more record. A fork that inherited records begins again with
/// its own `created`.
pub(super) fn next_log_hash(hash: LogHash, record: &Record) -> LogHash {
    match record.entry {
        Entry::Created(_) => LogHash::of(record),
        _ => hash.then(record),
    }
}

/// Reads an archive and verifies what it reads: the syntax, the order of rows, complete logs with
/// the hash in their head, parents, media and their hashes, and at the end the counts and the hash
/// of the archive.
pub(super) struct ArchiveReader<R> {
    input: R,
    line: u64,
    hash: blake3::Hasher,
    counts: BackupSummary,
    open: Option<OpenSession>,
    ends: HashMap<SessionKey, Seq>,
    blobs: HashSet<(Tenant, BlobId)>,
    items_began: bool,
}

/// The session whose records are being read.
struct OpenSession {
    head: Box<Head>,
    last: Seq,
    hash: LogHash,
}

impl<R: BufRead> ArchiveReader<R> {
    /// Reads the first line.
    pub fn new(input: R) -> Result<Self> {
        let mut reader = Self {
            input,
            line: 0,
            hash: blake3::Hasher::new(),
            counts: BackupSummary::default(),
            open: None,
            ends: HashMap::new(),
            blobs: HashSet::new(),
            items_began: false,
        };
        let line = reader.read_line()?;
        let header: Header = serde_json::from_slice(&line).map_err(|_| {
            Error::invalid("file", "this is not a backup: its first line is not that of `tenure backup`")
        })?;
        if header.tenure_backup > BACKUP_FORMAT || header.format > FORMAT {
            return Err(Error::invalid(
                "file",
                format!(
                    "the backup has format {}.{}, and this version reads {BACKUP_FORMAT}.{FORMAT}; use a newer version",
                    header.tenure_backup, header.format
                ),
            ));
        }
        reader.hash.update(&line);
        Ok(reader)
    }

    /// Returns what was read so far; after the end, the summary with its hash.
    pub fn summary(&self) -> &BackupSummary {
        &self.counts
    }

    /// Reads the next row. `None` is the end of a complete and intact archive.
    pub fn next_row(&mut self) -> Result<Option<Row>> {
        let line = self.read_line()?;
        let parsed: Line =
            serde_json::from_slice(&line).map_err(|e| self.damage(format!("it cannot be parsed: {e}")))?;
        let row = match parsed {
            Line::End(end) => return self.finish(end).map(|()| None),
            Line::Session(head) => self.session(head)?,
            Line::Record { seq, at, entry } => self.record(seq, at, &entry)?,
            Line::Blob { tenant, id, data } => self.blob(tenant, id, &data)?,
            Line::Item { tenant, owner, namespace, item } => {
                self.close_session()?;
                self.items_began = true;
                self.counts.items += 1;
                let owner = Owner::parse(&owner).ok_or_else(|| self.damage(format!("{owner:?} is not an owner")))?;
                Row::Item(Namespace { tenant, owner, name: namespace }, item)
            }
        };
        self.hash.update(&line);
        Ok(Some(row))
    }

    fn session(&mut self, head: Box<Head>) -> Result<Row> {
        self.close_session()?;
        if self.items_began || self.ends.contains_key(&head.key()) {
            return Err(self.damage(format!("session {} is out of order or repeated", head.key())));
        }
        if let Some(parent) = &head.parent {
            let key = SessionKey { tenant: head.tenant.clone(), session: parent.session.clone() };
            if self.ends.get(&key).is_none_or(|end| *end < parent.seq) {
                return Err(self.damage(format!("the parent of session {} is missing", head.key())));
            }
        }
        self.counts.sessions += 1;
        let last = head.first.saturating_sub(1);
        self.open = Some(OpenSession { head: head.clone(), last, hash: LogHash::default() });
        Ok(Row::Session(head))
    }

    fn record(&mut self, seq: Seq, at: i64, entry: &RawValue) -> Result<Row> {
        let at = Timestamp::from_microsecond(at).map_err(|_| self.damage("its time is out of range"))?;
        let entry = Entry::decode(entry.get()).map_err(|e| self.damage(format!("its entry cannot be read: {e}")))?;
        let record = Record { seq, at, entry };
        let Some(open) = &mut self.open else { return Err(self.damage("a record without a session")) };
        let expected = open.last + 1;
        open.last = seq;
        open.hash = next_log_hash(open.hash, &record);
        let tenant = open.head.tenant.clone();
        if seq != expected {
            return Err(self.damage(format!("record {expected} is missing")));
        }
        if let Some(missing) = blob_refs(&record).iter().find(|r| !self.blobs.contains(&(tenant.clone(), r.id))) {
            return Err(self.damage(format!("blob {} is missing", missing.id)));
        }
        self.counts.records += 1;
        Ok(Row::Record(record))
    }

    fn blob(&mut self, tenant: Tenant, id: BlobId, data: &str) -> Result<Row> {
        let bytes = STANDARD.decode(data).map_err(|e| self.damage(format!("blob {id} is not base64: {e}")))?;
        if BlobId::of(&bytes) != id {
            return Err(self.damage(format!("the bytes of blob {id} do not match its hash")));
        }
        self.counts.blobs += 1;
        self.blobs.insert((tenant.clone(), id));
        Ok(Row::Blob(tenant, Blob { id, bytes: bytes.into() }))
    }

    /// Checks that the log of the session before is complete.
    fn close_session(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let key = open.head.key();
        if open.last != open.head.seq || open.hash != open.head.log_hash {
            return Err(self.damage(format!("the log of session {key} is incomplete or differs from its head")));
        }
        self.ends.insert(key, open.last);
        Ok(())
    }

    fn finish(&mut self, end: BackupSummary) -> Result<()> {
        self.close_session()?;
        self.counts.blake3 = self.hash.finalize().to_hex().to_string();
        if end != self.counts {
            return Err(self.damage("the counts or the checksum of the archive do not match its contents"));
        }
        let mut rest = Vec::new();
        self.input.by_ref().take(1).read_to_end(&mut rest).map_err(Error::unavailable_from)?;
        if rest.is_empty() { Ok(()) } else { Err(self.damage("there is something after the last line")) }
    }

    fn read_line(&mut self) -> Result<Vec<u8>> {
        let mut line = Vec::new();
        self.line += 1;
        self.input.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line).map_err(Error::unavailable_from)?;
        if line.last() != Some(&b'\n') {
            return Err(self.damage("the file ends here: it is incomplete"));
        }
        Ok(line)
    }

    fn damage(&self, reason: impl std::fmt::Display) -> Error {
        Error::corrupt(format!("the backup, line {}", self.line), reason)
    }
}
