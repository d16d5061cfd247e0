//! Expires or evicts a session, after the application's hooks have succeeded.

use crate::engine::hooks::{EndReason, SessionEndHook};
use crate::engine::pending_commit::PendingCommit;
use crate::rules::session::Session;
use crate::store::contract::Commit;
use crate::tenure::Tenure;
use crate::types::entry::Entry;
use crate::types::error::{Error, Result};
use crate::types::error_source::{BoxError, ErrorSource};
use crate::types::head::Head;
use crate::types::id::{AccessScope, Principal};
use crate::types::status::Status;

use jiff::{SignedDuration, Timestamp};
use std::future::Future;
use std::sync::Arc;

/// The delay before a session whose hook failed is retried.
const HOOK_RETRY: SignedDuration = SignedDuration::from_mins(1);

impl Tenure {
    /// Registers a callback that is called with each session before it expires or is evicted, at
    /// least once. If it fails, the session stays, and the callback is called again later.
    pub fn on_expire<F, Fut>(&self, hook: F)
    where
        F: Fn(Arc<Session>, EndReason) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let mut hooks = self.shared.hooks.write().unwrap_or_else(|e| e.into_inner());
        hooks.push(SessionEndHook(Arc::new(move |session, end_reason| Box::pin(hook(session, end_reason)))));
    }

    /// Calls the hooks, then marks a session as expired. Returns false if the session became active
    /// meanwhile and was not ended.
    pub(crate) async fn end_session(&self, head: Head, end_reason: EndReason, now: Timestamp) -> Result<bool> {
        let hooks = self.shared.hooks.read().unwrap_or_else(|e| e.into_inner()).clone();
        if !hooks.is_empty() {
            let session = Arc::new(self.engine.attach(self.engine.fold(head.clone()).await?).await?);
            for SessionEndHook(hook) in &hooks {
                if let Err(e) = hook(session.clone(), end_reason).await {
                    self.set_due_at(&head, now.checked_add(HOOK_RETRY).ok()).await?;
                    let error = Error::unavailable(format!("an on_expire hook failed: {e}"));
                    return Err(error.with_source(ErrorSource::boxed(e)));
                }
            }
        }
        let principal =
            Principal { tenant: head.tenant.clone(), user: head.user.clone(), scope: AccessScope::Tenant, quota: None };
        let id = head.info.session_id.clone();
        let ended = self.write_head(&principal, &id, |current, _| {
            if current.active_at != head.active_at || !current.status.is_live() {
                return Ok(PendingCommit::new(Vec::new(), false));
            }
            let reason = (end_reason == EndReason::Evicted).then(|| "over max_sessions".to_owned());
            Ok(PendingCommit::new(vec![Entry::Status { to: Status::Expired, reason, until: None }], true))
        });
        ended.await
    }

    /// Stores in the head when the sweep should process a session next. A lost race is harmless, so
    /// conflicts are ignored.
    pub(crate) async fn set_due_at(&self, head: &Head, due_at: Option<Timestamp>) -> Result<()> {
        let head = Head { due_at, ..head.clone() };
        self.engine.evict(&head.key());
        match self.engine.commit_step(&mut Commit::new(Some(head.end()), Vec::new(), head)).await {
            Err(Error::Conflict { .. } | Error::NotFound { .. }) => Ok(()),
            result => result,
        }
    }
}
