//! Transcripts: one redacted JSONL file per session, for consumers that read files. Written when a session ends
//! and, if `transcripts.live` is set, continuously.
//!
//! A file is derived from its session, so any damage is repaired by writing it again (D-086). Its modification time
//! is set to the session's update time: a file with a different time is stale or was torn by a crash.

use crate::config::Config;
use crate::names::file_name;
use crate::tasks::Tasks;
use anyhow::Context;
use jiff::Timestamp;
use std::borrow::Borrow;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tenure::private_files;
use tenure::store::{SessionCursor, Store};
use tenure::{
    AccessScope, Error, Head, JsonlTranscript, Message, OwnerFilter, Principal, Redaction, Seq, Session, SessionId,
    SessionKey, SessionQuery, Status, Tenant, Tenure, User,
};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{Mutex, MutexGuard};

/// Interval at which all files are compared with their sessions again after a failure.
const AGAIN: Duration = Duration::from_secs(5);
/// Maximum number of cached write positions. A file without one is rewritten completely when its session changes.
const MAX_KNOWN: usize = 10_000;

/// Writes and removes transcripts. Cheap to clone.
#[derive(Clone, Debug)]
pub struct TranscriptWriter {
    dir: Option<PathBuf>,
    live: bool,
    /// Cached write position of each file. Holding the lock gives the exclusive right to read a session in order to
    /// write its file, or to remove a file, so a removed file cannot be written again from a stale read.
    known: Arc<Mutex<HashMap<SessionKey, WrittenTranscript>>>,
    /// The change subscription, handed over from `follow` to `finish`.
    changes: Arc<Mutex<Option<Receiver<SessionKey>>>>,
}

/// Write position of a transcript file.
#[derive(Clone, Copy, Debug)]
struct WrittenTranscript {
    /// Creation time of the session, which distinguishes sessions that reuse an id.
    created_at: Timestamp,
    messages: usize,
    /// Sequence number of the last written message. While that record exists, so do all messages before it.
    last: Seq,
    bytes: u64,
}

impl TranscriptWriter {
    /// Creates a writer from the configuration. Without `transcripts.dir` it does nothing.
    pub fn new(config: &Config) -> Self {
        let dir = Some(&config.transcripts.dir).filter(|d| !d.is_empty()).map(PathBuf::from);
        let (known, changes) = Default::default();
        Self { dir, live: config.transcripts.live, known, changes }
    }

    /// Creates the directory and a probe file in it, so that a configuration error is reported at startup and not
    /// when the first session ends.
    pub fn check(&self) -> anyhow::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let probe = dir.join(".tenure-probe");
        let make = || {
            private_files::create_dir_all(dir)
                .and_then(|()| fs::write(&probe, ""))
                .and_then(|()| fs::remove_file(&probe))
        };
        make().with_context(|| format!("transcripts.dir: can not write to {}", dir.display()))
    }

    /// Registers hooks that write the file of each session before the session ends, and rename it when the session
    /// is archived under another id.
    pub fn install(&self, tenure: &Tenure) {
        if self.dir.is_none() {
            return;
        }
        // Captures the store, not `Tenure` itself: that would be a reference cycle.
        let (this, store, redaction) = (self.clone(), tenure.store().clone(), tenure.redaction().clone());
        tenure.on_expire(move |session, _| {
            let (this, store, redaction) = (this.clone(), store.clone(), redaction.clone());
            async move { this.keep(&*store, redaction, session).await.map_err(|e| e.to_string()) }
        });
        let this = self.clone();
        tenure.on_archive(move |old, new| {
            let this = this.clone();
            async move { this.rename(&old, &new).await.map_err(|e| e.to_string()) }
        });
    }

    /// Renames the file of a session that moves to another id, so that the next session under the old id writes its
    /// own file.
    async fn rename(&self, old: &Head, new: &Head) -> tenure::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let mut known = self.known.lock().await;
        known.remove(&old.key());
        let (from, to) = (file(dir, old), file(dir, new));
        blocking(move || match fs::rename(&from, &to) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::unavailable(format!("{}: {e}", from.display())))
            }
            _ => Ok(()),
        })
        .await
    }

    async fn keep(&self, store: &dyn Store, redaction: Redaction, session: Arc<Session>) -> tenure::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let key = session.head().key();
        let mut known = self.known.lock().await;
        // The session was read before the lock was acquired: it may be deleted by now.
        match store.head(&key).await? {
            Some(head) if head.status.is_live() && head.info.created_at == session.info.created_at => {}
            _ => return Ok(()),
        }
        known.remove(&key);
        let path = file(dir, session.head());
        blocking(move || {
            let said: Vec<_> = session.messages.iter().map(|m| &m.message).collect();
            write(&path, &redacted(&redaction, said), session.info.updated_at).map(drop)
        })
        .await
    }

    /// Writes new messages of sessions as they are committed, until shutdown. Runs in the background: no request
    /// waits for it, and its errors fail nothing else.
    pub async fn follow(&self, tenure: &Tenure, tasks: &Tasks) {
        if !self.live {
            return;
        }
        let mut changes = tenure.changes();
        // True at startup, for what an earlier process did not finish, and after a failure.
        let (mut behind, mut again) = (true, tokio::time::interval(AGAIN));
        loop {
            let mut keys = HashSet::new();
            tokio::select! {
                heard = changes.recv() => match heard {
                    Ok(key) => drop(keys.insert(key)),
                    Err(RecvError::Lagged(_)) => behind = true,
                    Err(RecvError::Closed) => return,
                },
                _ = again.tick(), if behind => {
                    tokio::select! {
                        mended = self.catch_up(tenure) => behind = !mended,
                        () = tasks.stopping() => break,
                    }
                }
                () = tasks.stopping() => break,
            }
            behind |= !self.write_all(tenure, &mut changes, keys).await;
        }
        *self.changes.lock().await = Some(changes);
    }

    /// Writes the messages that were committed since [`TranscriptWriter::follow`] returned.
    pub async fn finish(&self, tenure: &Tenure) {
        if let Some(mut changes) = self.changes.lock().await.take() {
            // A failure here is repaired at the next start.
            self.write_all(tenure, &mut changes, HashSet::new()).await;
        }
    }

    /// Writes the given sessions and all that have changed meanwhile. Returns true if everything succeeded.
    async fn write_all(
        &self,
        tenure: &Tenure,
        changes: &mut Receiver<SessionKey>,
        mut keys: HashSet<SessionKey>,
    ) -> bool {
        let mut well = true;
        loop {
            match changes.try_recv() {
                Ok(key) => drop(keys.insert(key)),
                Err(TryRecvError::Lagged(_)) => well = false,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        for key in keys {
            well &= self.bring_up(tenure, &key).await;
        }
        well
    }

    /// Writes every live session whose file is stale. Returns true if everything succeeded.
    async fn catch_up(&self, tenure: &Tenure) -> bool {
        let Some(dir) = &self.dir else { return true };
        let mut query = SessionQuery::new(OwnerFilter::Everyone, 100);
        query.status = vec![Status::Active, Status::Paused];
        let mut well = true;
        loop {
            let heads = match tenure.store().heads(&query).await {
                Ok(heads) => heads,
                Err(e) => {
                    tracing::warn!(error = %e, "transcripts can not be compared with their sessions; it is tried again");
                    return false;
                }
            };
            for head in &heads {
                if is_behind(&file(dir, head), head) {
                    well &= self.bring_up(tenure, &head.key()).await;
                }
            }
            match heads.last() {
                Some(last) if heads.len() == query.limit => query.cursor = Some(SessionCursor::of(last)),
                _ => return well,
            }
        }
    }

    /// Brings one file up to date with its session. Returns true on success.
    async fn bring_up(&self, tenure: &Tenure, key: &SessionKey) -> bool {
        match self.write_new(tenure, key).await {
            // The session ended meanwhile. The operation that ended it decides about the file.
            Ok(()) | Err(Error::NotFound { .. } | Error::Gone { .. }) => true,
            Err(e) => {
                tracing::warn!(session_id = %key.session, error = %e, "a transcript could not be written; it is tried again");
                false
            }
        }
    }

    async fn write_new(&self, tenure: &Tenure, key: &SessionKey) -> tenure::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let mut known = self.known.lock().await;
        let Some(head) = tenure.store().head(key).await? else { return Ok(()) };
        let who =
            Principal { tenant: head.tenant.clone(), user: head.user.clone(), reach: AccessScope::Own, quota: None };
        let path = file(dir, &head);
        // The cached position is removed first: it must not be used again if the write fails halfway.
        let before = known.remove(key).filter(|w| {
            let same = w.created_at == head.info.created_at && w.messages <= head.mark.messages && w.messages > 0;
            same && fs::metadata(&path).is_ok_and(|m| m.len() == w.bytes)
        });
        if let Some(before) = before {
            let new = head.mark.messages - before.messages;
            let (head, said) = tenure.last_messages(&who, &key.session, new + 1).await?;
            if said.first().is_some_and(|s| s.seq == before.last) && head.mark.messages == before.messages + new {
                let last = said.last().map_or(before.last, |s| s.seq);
                let (said, at) = (said.into_iter().skip(1).map(|s| s.message).collect(), head.info.updated_at);
                let (messages, redaction) = (head.mark.messages, tenure.redaction().clone());
                let bytes = blocking(move || append(&path, &redacted(&redaction, said), at)).await?;
                note(&mut known, key, WrittenTranscript { messages, last, bytes, ..before });
                return Ok(());
            }
        }
        let (head, said) = tenure.last_messages(&who, &key.session, usize::MAX).await?;
        let (created_at, at, messages) = (head.info.created_at, head.info.updated_at, said.len());
        let last = said.last().map_or(0, |s| s.seq);
        if said.is_empty() && !path.exists() {
            return Ok(());
        }
        let redaction = tenure.redaction().clone();
        let whole = move || write(&path, &redacted(&redaction, said.into_iter().map(|s| s.message).collect()), at);
        let bytes = blocking(whole).await?;
        note(&mut known, key, WrittenTranscript { created_at, messages, last, bytes });
        Ok(())
    }

    /// Runs an operation that deletes a session, then removes its file (D-088).
    pub async fn take_away(
        &self,
        tenure: &Tenure,
        who: &Principal,
        id: &SessionId,
        delete: impl Future<Output = tenure::Result<bool>>,
    ) -> tenure::Result<bool> {
        let Some(dir) = &self.dir else { return delete.await };
        let mut known = self.known.lock().await;
        let path = match tenure.head(who, id).await {
            Ok(head) => file(dir, &head),
            Err(Error::NotFound { .. }) => return delete.await,
            Err(e) => return Err(e),
        };
        let deleted = delete.await?;
        known.remove(&who.key(id));
        blocking(move || remove(&path).map_err(|e| left_behind(&path, e))).await.map(|()| deleted)
    }

    /// Removes all files of a user, including those of sessions that ended long ago.
    pub async fn erase(&self, tenant: &Tenant, user: &User) -> tenure::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let _known = self.known.lock().await;
        let theirs = directory(dir, tenant, user);
        blocking(move || match fs::remove_dir_all(&theirs) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(left_behind(&theirs, e)),
            _ => Ok(()),
        })
        .await
    }
}

fn note(
    known: &mut MutexGuard<'_, HashMap<SessionKey, WrittenTranscript>>,
    key: &SessionKey,
    written: WrittenTranscript,
) {
    if known.len() >= MAX_KNOWN {
        known.clear();
    }
    known.insert(key.clone(), written);
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> tenure::Result<T> + Send + 'static) -> tenure::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(Error::unavailable(e)))
}

fn left_behind(path: &Path, e: io::Error) -> Error {
    tracing::error!(path = %path.display(), error = %e, "a transcript could not be removed; remove it by hand");
    Error::unavailable("it is gone from the store, but a transcript could not be removed; the log says which")
}

fn redacted(redaction: &Redaction, messages: Vec<impl Borrow<Message>>) -> Vec<Message> {
    messages.iter().map(|m| redaction.message(m.borrow()).0).collect()
}

/// Writes a complete file and returns its length in bytes.
fn write(path: &Path, messages: &[Message], at: Timestamp) -> tenure::Result<u64> {
    let made = path.parent().map_or(Ok(()), private_files::create_dir_all);
    made.map_err(|e| Error::unavailable(format!("{}: {e}", path.display())))?;
    JsonlTranscript::write(path, messages)?;
    stamp(path, at)
}

/// Appends messages to a file and returns its length in bytes.
fn append(path: &Path, messages: &[Message], at: Timestamp) -> tenure::Result<u64> {
    if !messages.is_empty() {
        JsonlTranscript::append(path, messages)?;
    }
    stamp(path, at)
}

/// Sets the modification time of a complete file to its session's update time, and returns its length in bytes.
fn stamp(path: &Path, at: Timestamp) -> tenure::Result<u64> {
    let stamp = || -> io::Result<u64> {
        let file = fs::OpenOptions::new().append(true).open(path)?;
        file.set_modified(SystemTime::from(at))?;
        Ok(file.metadata()?.len())
    };
    stamp().map_err(|e| Error::unavailable(format!("{}: {e}", path.display())))
}

/// Returns true if a file is stale: its modification time differs from its session's update time, or it is missing
/// although the session has messages.
fn is_behind(path: &Path, head: &Head) -> bool {
    match fs::metadata(path).and_then(|m| m.modified()) {
        Ok(at) => {
            Timestamp::try_from(at).map(|t| t.as_microsecond()).ok() != Some(head.info.updated_at.as_microsecond())
        }
        Err(_) => head.mark.messages > 0,
    }
}

/// Removes a file and the temporary files that a crash left while it was being replaced.
fn remove(path: &Path) -> io::Result<()> {
    let gone = |done: io::Result<()>| match done {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    };
    gone(fs::remove_file(path))?;
    let (Some(dir), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str())) else { return Ok(()) };
    let Ok(beside) = fs::read_dir(dir) else { return Ok(()) };
    for other in beside.flatten() {
        let part = other
            .file_name()
            .to_str()
            .and_then(|n| n.strip_prefix(name))
            .is_some_and(|rest| rest.starts_with('.') && rest.ends_with(".part"));
        if part {
            gone(fs::remove_file(other.path()))?;
        }
    }
    Ok(())
}

fn directory(dir: &Path, tenant: &Tenant, user: &User) -> PathBuf {
    dir.join(file_name(tenant.as_str())).join(file_name(user.as_str()))
}

fn file(dir: &Path, head: &Head) -> PathBuf {
    directory(dir, &head.tenant, &head.user).join(format!("{}.jsonl", file_name(head.info.session_id.as_str())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_not_be_written_to_is_told_at_once() {
        let config = Config::parse("transcripts: {dir: /dev/null/x}").unwrap();
        let error = format!("{:#}", TranscriptWriter::new(&config).check().unwrap_err());
        assert!(error.contains("transcripts.dir") && error.contains("/dev/null/x"), "{error}");
    }

    #[test]
    fn only_the_parts_of_a_file_go_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["a.jsonl", "a.jsonl.1f.part", "a.jsonl.b.jsonl", "a.jsonl.b.part.jsonl", "ab.jsonl"];
        names.iter().for_each(|n| fs::write(dir.path().join(n), "").unwrap());
        remove(&dir.path().join("a.jsonl")).unwrap();
        let mut left: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        assert_eq!(left, names[2..]);
    }
}
