//! Transcripts: one redacted JSONL file per session, for consumers that read files. Written when a session ends
//! and, if `transcripts.live` is set, continuously.
//!
//! A file is derived from its session, so any damage is repaired by writing it again (D-086). Its modification time
//! is set to the session's update time: a file with a different time is stale or was torn by a crash.

use crate::config::Config;
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
use tenure::session::expand_home;
use tenure::store::{SessionCursor, Store};
use tenure::{
    Error, Message, Principal, Seq, Session, SessionId, Tenant, Tenure, User,
    log::Head,
    policy::Redaction,
    session::{
        AccessScope, JsonlTranscript, OwnerFilter, SessionKey, SessionQuery, Status, file_name, session_file_name,
    },
};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{Mutex, MutexGuard};

/// Interval at which all files are compared with their sessions again after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of cached write positions. A file without one is rewritten completely when its session changes.
const MAX_CACHED: usize = 10_000;

/// Writes and removes transcripts. Cheap to clone.
#[derive(Clone, Debug)]
pub struct TranscriptWriter {
    dir: Option<PathBuf>,
    live: bool,
    /// Cached write position of each file. Holding the lock gives the exclusive right to read a session in order to
    /// write its file, or to remove a file, so a removed file cannot be written again from a stale read.
    cached: Arc<Mutex<HashMap<SessionKey, WrittenTranscript>>>,
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
        let dir = Some(&config.transcripts.dir).filter(|d| !d.is_empty()).map(expand_home);
        let (cached, changes) = Default::default();
        Self { dir, live: config.transcripts.live, cached, changes }
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
        make().with_context(|| format!("transcripts.dir: cannot write to {}", dir.display()))
    }

    /// Registers hooks that write the file of each session before the session ends, and rename it when the session
    /// is archived under another id.
    pub fn install(&self, tenure: &Tenure) {
        if self.dir.is_none() {
            return;
        }
        // Captures the store, not `Tenure` itself: that would be a reference cycle.
        let this = self.clone();
        let store = tenure.store().clone();
        let redaction = tenure.redaction().clone();
        tenure.on_expire(move |session, _| {
            let this = this.clone();
            let store = store.clone();
            let redaction = redaction.clone();
            async move { Ok(this.write_final(&*store, redaction, session).await?) }
        });
        let this = self.clone();
        tenure.on_archive(move |old, new| {
            let this = this.clone();
            async move { Ok(this.rename(&old, &new).await?) }
        });
    }

    /// Renames the file of a session that moves to another id, so that the next session under the old id writes its
    /// own file.
    async fn rename(&self, old: &Head, new: &Head) -> tenure::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let mut cached = self.cached.lock().await;
        cached.remove(&old.key());
        let from = file(dir, old);
        let to = file(dir, new);
        blocking(move || match fs::rename(&from, &to) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(Error::unavailable(format!("{}: {e}", from.display())).with_source(e))
            }
            _ => Ok(()),
        })
        .await
    }

    async fn write_final(&self, store: &dyn Store, redaction: Redaction, session: Arc<Session>) -> tenure::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let key = session.head().key();
        let mut cached = self.cached.lock().await;
        // The session was read before the lock was acquired: it may be deleted by now.
        match store.head(&key).await? {
            Some(head) if head.status.is_live() && head.info.created_at == session.head().info.created_at => {}
            _ => return Ok(()),
        }
        cached.remove(&key);
        let path = file(dir, session.head());
        blocking(move || {
            let messages: Vec<_> = session.messages.iter().map(|m| &m.message).collect();
            write(&path, &redacted(&redaction, messages), session.head().info.updated_at).map(drop)
        })
        .await
    }

    /// Writes new messages of sessions as they are committed, until shutdown. Runs in the background: no request
    /// waits for it, and its errors fail nothing else.
    pub async fn run_loop(&self, tenure: &Tenure, tasks: &Tasks) {
        if !self.live {
            return;
        }
        let mut changes = tenure.subscribe();
        // True at startup, for what an earlier process did not finish, and after a failure.
        let mut behind = true;
        let mut retry = tokio::time::interval(RETRY_INTERVAL);
        loop {
            let mut keys = HashSet::new();
            tokio::select! {
                event = changes.recv() => match event {
                    Ok(key) => drop(keys.insert(key)),
                    Err(RecvError::Lagged(_)) => behind = true,
                    Err(RecvError::Closed) => return,
                },
                _ = retry.tick(), if behind => {
                    tokio::select! {
                        caught_up = self.write_stale(tenure) => behind = !caught_up,
                        () = tasks.wait_for_stop() => break,
                    }
                }
                () = tasks.wait_for_stop() => break,
            }
            behind |= !self.write_all(tenure, &mut changes, keys).await;
        }
        *self.changes.lock().await = Some(changes);
    }

    /// Writes the messages that were committed since [`TranscriptWriter::run_loop`] returned.
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
        let mut complete = true;
        loop {
            match changes.try_recv() {
                Ok(key) => drop(keys.insert(key)),
                Err(TryRecvError::Lagged(_)) => complete = false,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        for key in keys {
            complete &= self.update(tenure, &key).await;
        }
        complete
    }

    /// Writes every live session whose file is stale. Returns true if everything succeeded.
    async fn write_stale(&self, tenure: &Tenure) -> bool {
        let Some(dir) = &self.dir else { return true };
        let mut query = SessionQuery::new(OwnerFilter::AllTenants, 100);
        query.status = vec![Status::Active, Status::Paused];
        let mut complete = true;
        loop {
            let heads = match tenure.store().heads(&query).await {
                Ok(heads) => heads,
                Err(e) => {
                    tracing::warn!(error = %e, "could not compare transcripts with their sessions; retrying");
                    return false;
                }
            };
            for head in &heads {
                if is_behind(&file(dir, head), head) {
                    complete &= self.update(tenure, &head.key()).await;
                }
            }
            match heads.last() {
                Some(last) if heads.len() == query.limit => query.cursor = Some(SessionCursor::of(last)),
                _ => return complete,
            }
        }
    }

    /// Brings one file up to date with its session. Returns true on success.
    async fn update(&self, tenure: &Tenure, key: &SessionKey) -> bool {
        match self.write_changes(tenure, key).await {
            // The session ended meanwhile. The operation that ended it decides about the file.
            Ok(()) | Err(Error::NotFound { .. } | Error::Gone { .. }) => true,
            Err(e) => {
                tracing::warn!(session_id = %key.session, error = %e, "could not write a transcript; retrying");
                false
            }
        }
    }

    async fn write_changes(&self, tenure: &Tenure, key: &SessionKey) -> tenure::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let mut cached = self.cached.lock().await;
        let Some(head) = tenure.store().head(key).await? else { return Ok(()) };
        let principal =
            Principal { tenant: head.tenant.clone(), user: head.user.clone(), scope: AccessScope::Own, quota: None };
        let path = file(dir, &head);
        // The cached position is removed first: it must not be used again if the write fails halfway.
        let previous = cached.remove(key).filter(|w| {
            let same = w.created_at == head.info.created_at && w.messages <= head.digest.messages && w.messages > 0;
            same && fs::metadata(&path).is_ok_and(|m| m.len() == w.bytes)
        });
        if let Some(previous) = previous {
            let new = head.digest.messages - previous.messages;
            let (head, stored) = tenure.last_messages_with_head(&principal, &key.session, new + 1).await?;
            if stored.first().is_some_and(|s| s.seq == previous.last) && head.digest.messages == previous.messages + new
            {
                let last = stored.last().map_or(previous.last, |s| s.seq);
                let stored = stored.into_iter().skip(1).map(|s| s.message).collect();
                let at = head.info.updated_at;
                let messages = head.digest.messages;
                let redaction = tenure.redaction().clone();
                let bytes = blocking(move || append(&path, &redacted(&redaction, stored), at)).await?;
                insert_cached(&mut cached, key, WrittenTranscript { messages, last, bytes, ..previous });
                return Ok(());
            }
        }
        let (head, stored) = tenure.last_messages_with_head(&principal, &key.session, usize::MAX).await?;
        let created_at = head.info.created_at;
        let at = head.info.updated_at;
        let messages = stored.len();
        let last = stored.last().map_or(0, |s| s.seq);
        if stored.is_empty() && !path.exists() {
            return Ok(());
        }
        let redaction = tenure.redaction().clone();
        let rewrite = move || write(&path, &redacted(&redaction, stored.into_iter().map(|s| s.message).collect()), at);
        let bytes = blocking(rewrite).await?;
        insert_cached(&mut cached, key, WrittenTranscript { created_at, messages, last, bytes });
        Ok(())
    }

    /// Runs an operation that deletes a session, then removes its file (D-088).
    pub async fn delete_session_and_transcript(
        &self,
        tenure: &Tenure,
        principal: &Principal,
        id: &SessionId,
        delete: impl Future<Output = tenure::Result<bool>>,
    ) -> tenure::Result<bool> {
        let Some(dir) = &self.dir else { return delete.await };
        let mut cached = self.cached.lock().await;
        let path = match tenure.head(principal, id).await {
            Ok(head) => file(dir, &head),
            Err(Error::NotFound { .. }) => return delete.await,
            Err(e) => return Err(e),
        };
        let deleted = delete.await?;
        cached.remove(&principal.key(id));
        blocking(move || remove(&path).map_err(|e| removal_failed(&path, e))).await.map(|()| deleted)
    }

    /// Removes all files of a user, including those of sessions that ended long ago.
    pub async fn erase(&self, tenant: &Tenant, user: &User) -> tenure::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let _cached = self.cached.lock().await;
        let user_dir = directory(dir, tenant, user);
        blocking(move || match fs::remove_dir_all(&user_dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(removal_failed(&user_dir, e)),
            _ => Ok(()),
        })
        .await
    }
}

fn insert_cached(
    cached: &mut MutexGuard<'_, HashMap<SessionKey, WrittenTranscript>>,
    key: &SessionKey,
    written: WrittenTranscript,
) {
    if cached.len() >= MAX_CACHED {
        cached.clear();
    }
    cached.insert(key.clone(), written);
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> tenure::Result<T> + Send + 'static) -> tenure::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(Error::unavailable(e)))
}

fn removal_failed(path: &Path, e: io::Error) -> Error {
    tracing::error!(path = %path.display(), error = %e, "could not remove a transcript; remove it manually");
    Error::unavailable("deleted from the store, but a transcript could not be removed; the server log has its path")
}

fn redacted(redaction: &Redaction, messages: Vec<impl Borrow<Message>>) -> Vec<Message> {
    messages.iter().map(|m| redaction.redact_message(m.borrow()).0).collect()
}

/// Writes a complete file and returns its length in bytes.
fn write(path: &Path, messages: &[Message], at: Timestamp) -> tenure::Result<u64> {
    let created = path.parent().map_or(Ok(()), private_files::create_dir_all);
    created.map_err(|e| Error::unavailable(format!("{}: {e}", path.display())).with_source(e))?;
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
    stamp().map_err(|e| Error::unavailable(format!("{}: {e}", path.display())).with_source(e))
}

/// Returns true if a file is stale: its modification time differs from its session's update time, or it is missing
/// although the session has messages.
fn is_behind(path: &Path, head: &Head) -> bool {
    match fs::metadata(path).and_then(|m| m.modified()) {
        Ok(at) => {
            Timestamp::try_from(at).map(|t| t.as_microsecond()).ok() != Some(head.info.updated_at.as_microsecond())
        }
        Err(_) => head.digest.messages > 0,
    }
}

/// Removes a file and the temporary files that a crash left while it was being replaced.
fn remove(path: &Path) -> io::Result<()> {
    let ignore_missing = |result: io::Result<()>| match result {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    };
    ignore_missing(fs::remove_file(path))?;
    let (Some(dir), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str())) else { return Ok(()) };
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    for entry in entries.flatten() {
        let is_part = entry
            .file_name()
            .to_str()
            .and_then(|n| n.strip_prefix(name))
            .is_some_and(|rest| rest.starts_with('.') && rest.ends_with(".part"));
        if is_part {
            ignore_missing(fs::remove_file(entry.path()))?;
        }
    }
    Ok(())
}

fn directory(dir: &Path, tenant: &Tenant, user: &User) -> PathBuf {
    dir.join(file_name(tenant.as_str())).join(file_name(user.as_str()))
}

fn file(dir: &Path, head: &Head) -> PathBuf {
    directory(dir, &head.tenant, &head.user).join(format!("{}.jsonl", session_file_name(&head.info.session_id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unwritable_directory_is_reported_at_startup() {
        let config = Config::parse("transcripts: {dir: /dev/null/x}").unwrap();
        let error = format!("{:#}", TranscriptWriter::new(&config).check().unwrap_err());
        assert!(error.contains("transcripts.dir") && error.contains("/dev/null/x"), "{error}");
    }

    #[test]
    fn a_tilde_in_the_configuration_is_the_home_directory() {
        let config = Config::parse("transcripts: {dir: '~/transcripts'}").unwrap();
        assert_eq!(TranscriptWriter::new(&config).dir, Some(expand_home("~").join("transcripts")));
    }

    #[test]
    fn only_the_parts_of_a_file_are_removed_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["a.jsonl", "a.jsonl.1f.part", "a.jsonl.b.jsonl", "a.jsonl.b.part.jsonl", "ab.jsonl"];
        names.iter().for_each(|n| fs::write(dir.path().join(n), "").unwrap());
        remove(&dir.path().join("a.jsonl")).unwrap();
        let mut remaining: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
        remaining.sort();
        assert_eq!(remaining, names[2..]);
    }
}
