//! Moves an expired session to another id, so that a new session can start under the old id
//! (`on_expired: fresh`, D-018).
//!
//! The archive is a fork at the end of the old session, which is then purged: the fork inherits its
//! records, so nothing is copied. The steps are, in this order: the `on_expire` hooks, the entry
//! that marks the session as expired, one commit with the fork and the old session's items, and the
//! purge, which is rejected if anything was written since. A crash between any two steps leaves the
//! old session in place, and the next request repeats the remaining steps. This is idempotent
//! because the id of the archive is derived from the old session.

use crate::engine::hooks::{ArchiveHook, EndReason};
use crate::memory::memories::{BACK_REFERENCES, BackReference, MEMORY};
use crate::memory::recall::RECALLS;
use crate::rules::checkpoint::fork_record;
use crate::rules::session::ResolvedPoint;
use crate::store::contract::Commit;
use crate::store::item::{Item, Namespace, Owner};
use crate::tenure::Tenure;
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::error_source::{BoxError, ErrorSource};
use crate::types::head::Head;
use crate::types::id::{MAX_SESSION_ID_CHARS, Principal, SessionId, SessionKey};
use crate::types::status::Status;
use jiff::Timestamp;
use std::future::Future;
use std::sync::Arc;

/// The namespaces of a session that move with it. Idempotency keys do not move: they belong to the
/// id. The tool cache does not move either: it can be filled again.
const MOVED: [&str; 3] = [MEMORY, BACK_REFERENCES, RECALLS];

/// The number of items that are read in one page.
const PAGE: usize = 256;

impl Tenure {
    /// Registers a callback that is called with the head of an expired session and its head under
    /// the new id, before a new session starts under the old id. It is called at least once. If it
    /// fails, the request that needed the new session fails, and the next request calls it again.
    pub fn on_archive<F, Fut>(&self, hook: F)
    where
        F: Fn(Head, Head) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let mut hooks = self.shared.archive_hooks.write().unwrap_or_else(|e| e.into_inner());
        hooks.push(ArchiveHook(Arc::new(move |old, new| Box::pin(hook(old, new)))));
    }

    /// Expires a session if necessary and moves it to another id. Does nothing if it was restored
    /// or moved concurrently.
    pub(crate) async fn archive(&self, principal: &Principal, id: &SessionId) -> Result<()> {
        let mut head = match self.head(principal, id).await {
            Err(Error::NotFound { .. }) => return Ok(()),
            head => head?,
        };
        if head.status.is_live() && self.engine.status_of(&head) == Status::Expired {
            let now = self.now();
            self.end_session(head, EndReason::Expired, now).await?;
            head = self.head(principal, id).await?;
        }
        if head.status != Status::Expired {
            return Ok(());
        }
        let Some(archive) = self.begin_archive(&head).await? else { return Ok(()) };
        let hooks = self.shared.archive_hooks.read().unwrap_or_else(|e| e.into_inner()).clone();
        for ArchiveHook(hook) in &hooks {
            hook(head.clone(), archive.clone()).await.map_err(|e| {
                Error::unavailable(format!("an on_archive hook failed: {e}")).with_source(ErrorSource::boxed(e))
            })?;
        }
        let key = head.key();
        let purged = self.store().purge_at(&key, head.info.created_at, head.seq).await;
        self.engine.evict(&key);
        self.engine.evict(&archive.key());
        self.shared.memories.evict(&namespace(&key, MEMORY));
        match purged {
            // The session was written to concurrently: it continues, and its archive is a fork like
            // any other.
            Err(Error::Conflict { .. }) => Ok(()),
            Err(e) => Err(e),
            Ok(()) => {
                self.end_tools(&key).await;
                Ok(())
            }
        }
    }

    /// Commits the fork that inherits the records, unless an earlier attempt did. `None` means that
    /// the session no longer exists.
    async fn begin_archive(&self, old: &Head) -> Result<Option<Head>> {
        let at = old.status_at;
        let end = ResolvedPoint { seq: old.seq, position: old.digest.messages, digest: old.digest.clone() };
        let mut created = fork_record(old, &old.info.session_id, end, at);
        if let Entry::Created(created) = &mut created.entry {
            created.original_created_at = Some(old.info.created_at);
        }
        let reason = Some(format!("a new session started under the id {}", old.info.session_id));
        let expired =
            Record { seq: created.seq + 1, at, entry: Entry::Status { to: Status::Expired, reason, until: None } };
        for attempt in 0.. {
            let session = archive_id(&old.info.session_id, at, attempt)?;
            let key = SessionKey { tenant: old.tenant.clone(), session };
            if let Some(existing) = self.store().head(&key).await? {
                // The head of an earlier attempt that was interrupted, or of another session that
                // happens to have this id.
                if existing.info.created_at == old.info.created_at
                    && existing.seq > old.seq
                    && existing.user == old.user
                {
                    return Ok(Some(existing));
                }
                continue;
            }
            let invalid = || Error::invalid("session", "a log must begin with `created`");
            let mut head = Head::begin(&key, &created).ok_or_else(invalid)?;
            head.apply(&expired);
            head.due_at = self.engine.due_at(&head);
            let mut commit = Commit::new(None, vec![created.clone(), expired.clone()], head.clone());
            commit.items = self.items_to_move(&old.key(), &key).await?;
            match self.engine.commit_step(&mut commit).await {
                Ok(()) => return Ok(Some(head)),
                Err(Error::Exists { .. }) => {}
                Err(Error::NotFound { .. }) => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        Ok(None)
    }

    /// The items of a session, changed for the new id.
    async fn items_to_move(&self, from: &SessionKey, to: &SessionKey) -> Result<Vec<(String, Item)>> {
        let mut moved = Vec::new();
        for name in MOVED {
            let namespace = namespace(from, name);
            let mut after = None::<String>;
            loop {
                let page = self.store().items(&namespace, after.as_deref(), PAGE).await?;
                let Some(last) = page.last() else { break };
                after = Some(last.key.clone());
                for item in page {
                    let item = if name == BACK_REFERENCES { moved_back_reference(item, from, to)? } else { item };
                    moved.push((name.to_owned(), item));
                }
            }
        }
        Ok(moved)
    }
}

/// Updates the back reference from the session to a memory: a memory of the session itself moves to
/// the new id.
fn moved_back_reference(item: Item, from: &SessionKey, to: &SessionKey) -> Result<Item> {
    let owner = |key: &SessionKey| Owner::Session(key.session.clone()).to_string();
    let corrupt = |e| Error::corrupt_from(format!("memory back reference {} of session {from}", item.key), e);
    let mut back_reference: BackReference = serde_json::from_str(&item.value).map_err(corrupt)?;
    if back_reference.owner == owner(from) {
        back_reference.owner = owner(to);
    }
    Ok(Item {
        value: serde_json::to_string(&back_reference).expect("a back reference always serializes to JSON"),
        ..item
    })
}

fn namespace(key: &SessionKey, name: &str) -> Namespace {
    Namespace { tenant: key.tenant.clone(), owner: Owner::Session(key.session.clone()), name: name.to_owned() }
}

/// The id of the archive: `ID:20260213T101112.123456Z`, with the time at which the session expired.
/// A long id is truncated, and made unique by its hash.
fn archive_id(id: &SessionId, at: Timestamp, attempt: usize) -> Result<SessionId> {
    let mut suffix = format!(":{}", at.strftime("%Y%m%dT%H%M%S%.6fZ"));
    if attempt > 0 {
        suffix.push_str(&format!("-{attempt}"));
    }
    let id = id.as_str();
    if id.chars().count() + suffix.len() <= MAX_SESSION_ID_CHARS {
        return Ok(SessionId::new(format!("{id}{suffix}"))?);
    }
    let hash = &blake3::hash(id.as_bytes()).to_hex()[..16];
    let prefix: String = id.chars().take(MAX_SESSION_ID_CHARS - suffix.len() - hash.len() - 1).collect();
    Ok(SessionId::new(format!("{prefix}:{hash}{suffix}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_an_archive_is_valid_and_distinguishes_sessions() {
        let at: Timestamp = "2026-02-13T10:11:12.123456Z".parse().unwrap();
        let named = |id: &str, attempt| archive_id(&SessionId::new(id).unwrap(), at, attempt).unwrap().to_string();
        assert_eq!(named("chat", 0), "chat:20260213T101112.123456Z");
        assert_eq!(named("chat", 2), "chat:20260213T101112.123456Z-2");
        let (a, b) = (format!("{}a", "x".repeat(127)), format!("{}b", "x".repeat(127)));
        assert_eq!(named(&a, 0).len(), MAX_SESSION_ID_CHARS);
        assert_eq!(named(&"会".repeat(128), 0).chars().count(), MAX_SESSION_ID_CHARS);
        assert_ne!(named(&a, 0), named(&b, 0));
        assert_ne!(named(&a, 0), named(&a, 1));
    }
}
