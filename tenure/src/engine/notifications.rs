//! Waiting for sessions to change: notifications where the store has them, polling otherwise.

use crate::engine::core::Engine;
use crate::engine::watch::{CHANGE_BUFFER_SIZE, FALLBACK_POLL_INTERVAL, POLL_INTERVAL, Subscription};
use crate::types::error::Result;
use crate::types::id::{Principal, Seq, SessionId, SessionKey};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

impl Engine {
    /// Waits until a session may have changed after the record `seen`. It may also return without a
    /// change, so callers check again.
    pub async fn wait_for_change(&self, principal: &Principal, id: &SessionId, seen: Seq) -> Result<()> {
        let subscription = self.watch(&principal.key(id));
        let notified = subscription.signal.any.notified();
        tokio::pin!(notified);
        notified.as_mut().enable();
        if self.head(principal, id).await?.seq > seen {
            return Ok(());
        }
        let poll_interval = if self.spawn_listener_once() { FALLBACK_POLL_INTERVAL } else { POLL_INTERVAL };
        let _ = tokio::time::timeout(poll_interval, notified).await;
        Ok(())
    }

    /// Subscribes to the keys of all sessions that this process creates or writes to from now on.
    /// Each key is sent after its commit. A slow receiver loses keys and gets an error that says
    /// so.
    pub fn subscribe(&self) -> broadcast::Receiver<SessionKey> {
        self.watchers().all_changes.get_or_init(|| broadcast::channel(CHANGE_BUFFER_SIZE).0).subscribe()
    }

    /// Registers a waiter for changes of one session. Dropping it unregisters it.
    pub(crate) fn watch(&self, key: &SessionKey) -> Subscription<'_> {
        self.spawn_listener_once();
        let watchers = self.watchers();
        let signal = {
            let mut sessions = watchers.lock();
            let (subscribers, signal) = sessions.entry(key.clone()).or_default();
            *subscribers += 1;
            signal.clone()
        };
        Subscription { hub: watchers, key: key.clone(), signal }
    }

    /// Returns true if the store delivers change notifications of other processes. The first call
    /// starts the task that forwards them to local waiters.
    #[expect(clippy::disallowed_methods, reason = "the task ends when the engine is dropped, and nothing awaits it")]
    pub fn spawn_listener_once(&self) -> bool {
        *self.watchers().has_notifications.get_or_init(|| {
            let Some(mut notifications) = self.store().notifier().and_then(|n| n.subscribe()) else { return false };
            let state = self.downgrade();
            tokio::spawn(async move {
                loop {
                    let key = match notifications.recv().await {
                        Ok(key) => key,
                        Err(RecvError::Lagged(_)) => None,
                        Err(RecvError::Closed) => return,
                    };
                    let Some(state) = state.upgrade() else { return };
                    state.watchers.notify_remote_change(key.as_ref());
                }
            });
            true
        })
    }
}
