//! Purging sessions, and removing items and blobs.
//!
//! The steps of a purge are ordered so that a crash between any two of them leaves a consistent
//! store. First, the inheriting fork (the one with the latest fork point) gets a file with its own
//! copy of the inherited records; until the purge completes, both sessions have them, which is
//! harmless. Then the other forks are re-parented to it, one after the other, while both still
//! exist. Then, when no fork reads from the session any more, its file is removed; after a crash
//! before this step, the file is still complete and the purge can be repeated. Blobs are removed
//! last, because opening a store removes unreferenced ones as well (D-001).

use super::file::{io_error, remove_file, sync_dir};
use super::open;
use crate::store::jsonl::codec::LineBatch;
use crate::store::jsonl::engine::{JsonlEngine, JsonlState};
use crate::store::jsonl::paths::{self, LogFile};
use crate::types::error::Result;
use crate::types::id::{SessionKey, Tenant};

impl JsonlEngine {
    /// Purges a session. The caller holds the locks of its forks.
    pub(super) fn purge(&self, log_file: &LogFile, key: &SessionKey) -> Result<()> {
        let inheritance = {
            let state = self.state();
            let inheritance = state.index.fork_inheritance(key);
            let mut forks = inheritance.inheriting_fork.iter().map(|(head, _)| head).chain(&inheritance.reparented);
            forks.try_for_each(|h| state.check_intact(&LogFile::session(&h.key())))?;
            if inheritance.inheriting_fork.is_some() {
                state.check_intact(log_file)?;
            }
            inheritance
        };
        if let Some((head, upto)) = &inheritance.inheriting_fork {
            let fork_file = LogFile::session(&head.key());
            let (parts, items) = {
                let state = self.state();
                let inherited = state.file_part(&self.root, log_file, *upto);
                let own = state.file_part(&self.root, &fork_file, u64::MAX);
                (inherited.into_iter().chain(own).collect::<Vec<_>>(), state.items(&fork_file))
            };
            self.replace(&fork_file, &parts, Some(head), &items, |state| {
                state.index.inherit_blobs(key, &head.key(), *upto);
                state.index.inherit_rewinds(key, &head.key(), *upto);
                state.index.inherit_messages(key, head, *upto);
                state.index.set(head.clone());
            })?;
        }
        for head in &inheritance.reparented {
            let encoded = LineBatch::default().finish(Some(head), &[]);
            let log_file = LogFile::session(&head.key());
            self.append_commit(&log_file, &encoded, |state| state.index.set(head.clone()))?;
        }
        self.remove_files(log_file, Some(key))?;
        let unused = {
            let mut state = self.state();
            state.forget(log_file);
            state.index.remove(key)
        };
        let dir = paths::blobs_dir(&self.root, &key.tenant);
        for id in &unused {
            let path = paths::blob_file(&self.root, &key.tenant, *id);
            remove_file(&path).map_err(|e| io_error(&path, e))?;
        }
        if unused.is_empty() { Ok(()) } else { sync_dir(&dir).map_err(|e| io_error(&dir, e)) }
    }

    /// Removes all items of an owner, and all of their bytes.
    pub(super) fn remove_namespaces(&self, log_file: &LogFile) -> Result<()> {
        let Some(key) = log_file.key() else {
            self.remove_files(log_file, None)?;
            let mut state = self.state();
            state.forget(log_file);
            state.index.remove_namespaces(&log_file.tenant, &log_file.owner);
            return Ok(());
        };
        let (part, head) = {
            let state = self.state();
            state.check_intact(log_file)?;
            let has_item_lines = state.logs.get(log_file).is_some_and(|log| log.item_lines > 0);
            (
                state.file_part(&self.root, log_file, u64::MAX).filter(|_| has_item_lines),
                state.index.head(&key).cloned(),
            )
        };
        let Some(part) = part else { return Ok(()) };
        self.replace(log_file, &[part], head.as_ref(), &[], |state| {
            state.index.remove_namespaces(&log_file.tenant, &log_file.owner)
        })
    }

    /// Removes the blobs that no session references.
    pub(super) fn remove_unused_blobs(&self, tenant: &Tenant) -> Result<()> {
        let damaged = self.state().damaged.keys().any(|log_file| log_file.tenant == *tenant);
        let used = |id| self.state().index.uses_blob(tenant, id);
        // A session that cannot be read may reference any of the blobs.
        if damaged { Ok(()) } else { open::remove_unused_blobs(&self.root, tenant, used) }
    }

    /// Removes the file of an owner, and the discarded messages of a session.
    fn remove_files(&self, log_file: &LogFile, key: Option<&SessionKey>) -> Result<()> {
        let path = log_file.path(&self.root);
        let dir = log_file.dir(&self.root);
        if !path.exists() {
            return Ok(());
        }
        // The session's own file is removed last: without it, a retry would not look for the other
        // one.
        let discarded = key.map(|key| paths::discarded_file(&self.root, key));
        let removed = discarded.map_or(Ok(()), |file| remove_file(&file)).and_then(|()| remove_file(&path));
        removed.and_then(|()| sync_dir(&dir)).map_err(|e| io_error(&path, e))
    }
}

impl JsonlState {
    fn forget(&mut self, log_file: &LogFile) {
        self.logs.remove(log_file);
        self.damaged.remove(log_file);
        self.broken.remove(log_file);
    }
}
