//! Purging sessions, and removing items and blobs.
//!
//! The steps of a purge are ordered so that a crash between any two of them leaves a consistent
//! store. First, the heir (the fork with the latest fork point) gets a file with its own copy of
//! the inherited records; until the purge completes, both sessions have them, which is harmless.
//! Then the other forks are re-parented to the heir, one after the other, while both still exist.
//! Then, when no fork reads from the session any more, its file is removed; after a crash before
//! this step, the file is still complete and the purge can be repeated. Blobs are removed last,
//! because opening a store removes unreferenced ones as well (D-001).

use super::file::{failed, remove_file, sync_dir};
use super::open;
use crate::store::jsonl::codec::LineBatch;
use crate::store::jsonl::engine::{JsonlEngine, JsonlState};
use crate::store::jsonl::paths::{self, LogFile};
use crate::types::error::Result;
use crate::types::id::{SessionKey, Tenant};

impl JsonlEngine {
    /// Purges a session. The caller holds the locks of its forks.
    pub(super) fn purge(&self, place: &LogFile, key: &SessionKey) -> Result<()> {
        let estate = {
            let state = self.state();
            let estate = state.index.estate(key);
            let mut forks = estate.heir.iter().map(|(head, _)| head).chain(&estate.others);
            forks.try_for_each(|h| state.intact(&LogFile::session(&h.key())))?;
            if estate.heir.is_some() {
                state.intact(place)?;
            }
            estate
        };
        if let Some((head, upto)) = &estate.heir {
            let heir = LogFile::session(&head.key());
            let (parts, items) = {
                let state = self.state();
                let theirs = state.part(&self.root, place, *upto);
                (
                    theirs.into_iter().chain(state.part(&self.root, &heir, u64::MAX)).collect::<Vec<_>>(),
                    state.items(&heir),
                )
            };
            self.replace(&heir, &parts, Some(head), &items, |state| {
                state.index.inherit_blobs(key, &head.key(), *upto);
                state.index.set(head.clone());
            })?;
        }
        for head in &estate.others {
            let sealed = LineBatch::default().seal(Some(head), &[]);
            self.add(&LogFile::session(&head.key()), &sealed, |state| state.index.set(head.clone()))?;
        }
        self.remove_files(place, Some(key))?;
        let unused = {
            let mut state = self.state();
            state.forget(place);
            state.index.remove(key)
        };
        let dir = paths::blobs_dir(&self.root, &key.tenant);
        for id in &unused {
            let path = paths::blob_file(&self.root, &key.tenant, *id);
            remove_file(&path).map_err(|e| failed(&path, &e))?;
        }
        if unused.is_empty() { Ok(()) } else { sync_dir(&dir).map_err(|e| failed(&dir, &e)) }
    }

    /// Removes all items of an owner, and all of their bytes.
    pub(super) fn clear(&self, place: &LogFile) -> Result<()> {
        let Some(key) = place.key() else {
            self.remove_files(place, None)?;
            let mut state = self.state();
            state.forget(place);
            state.index.clear(&place.tenant, &place.owner);
            return Ok(());
        };
        let (part, head) = {
            let state = self.state();
            state.intact(place)?;
            let touched = state.logs.get(place).is_some_and(|log| log.item_lines > 0);
            (state.part(&self.root, place, u64::MAX).filter(|_| touched), state.index.head(&key).cloned())
        };
        let Some(part) = part else { return Ok(()) };
        self.replace(place, &[part], head.as_ref(), &[], |state| state.index.clear(&place.tenant, &place.owner))
    }

    /// Removes the blobs that no session references.
    pub(super) fn remove_unused_blobs(&self, tenant: &Tenant) -> Result<()> {
        let damaged = self.state().damaged.keys().any(|place| place.tenant == *tenant);
        let used = |id| self.state().index.uses_blob(tenant, id);
        // A session that cannot be read may reference any of the blobs.
        if damaged { Ok(()) } else { open::remove_unused_blobs(&self.root, tenant, used) }
    }

    /// Removes the file of an owner, and the discarded messages of a session.
    fn remove_files(&self, place: &LogFile, key: Option<&SessionKey>) -> Result<()> {
        let (path, dir) = (place.file(&self.root), place.dir(&self.root));
        if !path.exists() {
            return Ok(());
        }
        // The session's own file is removed last: without it, a retry would not look for the other
        // one.
        let discarded = key.map(|key| paths::discarded_file(&self.root, key));
        let removed = discarded.map_or(Ok(()), |file| remove_file(&file)).and_then(|()| remove_file(&path));
        removed.and_then(|()| sync_dir(&dir)).map_err(|e| failed(&path, &e))
    }
}

impl JsonlState {
    fn forget(&mut self, place: &LogFile) {
        self.logs.remove(place);
        self.damaged.remove(place);
        self.broken.remove(place);
    }
}
