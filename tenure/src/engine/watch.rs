//! Change notifications: subscriptions to changes of a session, made by this process or by others.

use crate::engine::observer::CommitObserver;
use crate::store::contract::{Commit, Store};
use crate::types::entry::Entry;
use crate::types::id::SessionKey;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::broadcast;
use tokio::sync::futures::Notified;

/// The poll interval when the store has no change notifications.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The fallback poll interval when the store has change notifications, which are best effort.
pub(crate) const FALLBACK_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The buffer size of the subscription to all changes. A slower subscriber loses changes and gets
/// an error that says so.
pub(crate) const CHANGE_BUFFER_SIZE: usize = 4096;

/// The subscriptions to changes, with the number of subscribers of each session.
#[derive(Debug, Default)]
pub(crate) struct ChangeHub {
    /// The sessions with subscribers.
    pub sessions: Mutex<HashMap<SessionKey, (usize, Arc<SessionSignal>)>>,
    /// Whether the store delivers change notifications of other processes. Set when it is first needed.
    pub has_notifications: OnceLock<bool>,
    /// The channel of all changes. Empty until the first subscription.
    pub all_changes: OnceLock<broadcast::Sender<SessionKey>>,
}

/// The change signals of one session.
#[derive(Debug, Default)]
pub(crate) struct SessionSignal {
    /// Signals changes by any process.
    pub any: Notify,
    /// Signals changes by other processes.
    pub remote: Notify,
}

/// A subscription to changes of one session. Dropping it unsubscribes.
pub(crate) struct Subscription<'a> {
    /// The subscriptions that this one belongs to.
    pub hub: &'a ChangeHub,
    /// The session.
    pub key: SessionKey,
    /// The change signals of the session.
    pub signal: Arc<SessionSignal>,
}

impl ChangeHub {
    /// Locks the subscriptions.
    pub fn lock(&self) -> MutexGuard<'_, HashMap<SessionKey, (usize, Arc<SessionSignal>)>> {
        self.sessions.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Notifies subscribers of a change by this process.
    pub fn notify(&self, key: &SessionKey) {
        if let Some((_, signal)) = self.lock().get(key) {
            signal.any.notify_waiters();
        }
        if let Some(sender) = self.all_changes.get() {
            // An error means that there is no subscriber any more, which is harmless.
            let _ = sender.send(key.clone());
        }
    }

    /// Notifies subscribers of a change by another process. `None` means that notifications may
    /// have been lost, so all subscribers are notified.
    pub fn notify_remote_change(&self, key: Option<&SessionKey>) {
        let sessions = self.lock();
        for (_, (_, signal)) in sessions.iter().filter(|(k, _)| key.is_none_or(|key| key == *k)) {
            signal.any.notify_waiters();
            signal.remote.notify_waiters();
        }
    }
}

impl Subscription<'_> {
    /// Waits until another process has changed the session.
    pub fn remote_change(&self) -> Notified<'_> {
        self.signal.remote.notified()
    }
}

impl Drop for Subscription<'_> {
    fn drop(&mut self) {
        let mut sessions = self.hub.lock();
        if let Some((subscribers, _)) = sessions.get_mut(&self.key) {
            *subscribers -= 1;
            if *subscribers == 0 {
                sessions.remove(&self.key);
            }
        }
    }
}

impl CommitObserver for ChangeHub {
    fn committed(&self, store: &dyn Store, commit: &Commit) {
        if commit.records.is_empty() {
            return;
        }
        let key = commit.head.key();
        self.notify(&key);
        // Other processes only wait for sessions with a run, so only these are notified.
        let ended = || commit.records.iter().any(|r| matches!(r.entry, Entry::RunEnded { .. }));
        if let Some(notifier) = store.notifier()
            && (commit.head.run.is_some() || ended())
        {
            notifier.notify(&key);
        }
    }
}
