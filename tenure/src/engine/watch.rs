//! Change notifications: tasks that wait for a session to change, in this process and in others.

use crate::engine::observer::CommitObserver;
use crate::store::contract::{Commit, Store};
use crate::types::entry::Entry;
use crate::types::id::Key;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::broadcast;
use tokio::sync::futures::Notified;

/// How long to wait before a session is looked at again that another process may have changed, if nobody tells.
pub(crate) const LOOK: Duration = Duration::from_millis(250);

/// The same, if other processes tell: they may forget to.
pub(crate) const LOOK_ANYWAY: Duration = Duration::from_secs(1);

/// So many changes wait for whoever is told of all; of those that are slower it is told that something was missed.
pub(crate) const NEWS: usize = 4096;

/// Those who wait for a session to change, and how many.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    pub all: Mutex<HashMap<Key, (usize, Arc<Changes>)>>,
    /// Whether other processes tell; known once somebody asked.
    pub told: OnceLock<bool>,
    /// Who wants to hear of every session, if anybody does.
    pub news: OnceLock<broadcast::Sender<Key>>,
}

/// Changes of one session.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// By anybody.
    pub any: Notify,
    /// By another process.
    pub elsewhere: Notify,
}

/// Somebody who waits for a session to change.
pub(crate) struct Watch<'a> {
    pub watchers: &'a Watchers,
    pub key: Key,
    pub changes: Arc<Changes>,
}

impl Watchers {
    pub fn lock(&self) -> MutexGuard<'_, HashMap<Key, (usize, Arc<Changes>)>> {
        self.all.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// This process has changed a session.
    pub fn tell(&self, key: &Key) {
        if let Some((_, changes)) = self.lock().get(key) {
            changes.any.notify_waiters();
        }
        if let Some(news) = self.news.get() {
            // Nobody listens any more, or somebody does.
            let _ = news.send(key.clone());
        }
    }

    /// Another process has changed a session, or perhaps any.
    pub fn tell_elsewhere(&self, key: Option<&Key>) {
        let all = self.lock();
        for (_, (_, changes)) in all.iter().filter(|(k, _)| key.is_none_or(|key| key == *k)) {
            changes.any.notify_waiters();
            changes.elsewhere.notify_waiters();
        }
    }
}

impl Watch<'_> {
    /// Until another process has changed the session.
    pub fn elsewhere(&self) -> Notified<'_> {
        self.changes.elsewhere.notified()
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let mut all = self.watchers.lock();
        if let Some((waiting, _)) = all.get_mut(&self.key) {
            *waiting -= 1;
            if *waiting == 0 {
                all.remove(&self.key);
            }
        }
    }
}

impl CommitObserver for Watchers {
    fn committed(&self, store: &dyn Store, commit: &Commit) {
        if commit.records.is_empty() {
            return;
        }
        let key = commit.head.key();
        self.tell(&key);
        // No other process waits for a session without a run.
        let ended = || commit.records.iter().any(|r| matches!(r.entry, Entry::RunEnded { .. }));
        if commit.head.run.is_some() || ended() {
            store.tell(&key);
        }
    }
}
