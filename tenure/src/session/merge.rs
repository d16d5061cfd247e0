//! Merges the messages of a client into a session, without a run.

use crate::engine::pending_commit::PendingCommit;
use crate::rules::reconcile::plan::{IncomingRequest, ReconcilePlan};
use crate::rules::reconcile::reconcile;
use crate::tenure::Tenure;
use crate::types::entry::Entry;
use crate::types::error::Result;
use crate::types::id::{Principal, Seq, SessionId};
use crate::types::message::Message;
use crate::types::policy::HistoryMode;

impl Tenure {
    /// Reconciles a client's messages with a session: discards what the client changed and appends
    /// what is new, in one commit. Returns the plan that was executed (D-021).
    pub async fn reconcile(
        &self,
        principal: &Principal,
        id: &SessionId,
        messages: &[Message],
        history: HistoryMode,
    ) -> Result<ReconcilePlan> {
        let (incoming, blobs) = self.engine.detach(messages)?;
        self.write_session(principal, id, |session, _| {
            self.engine.check_active(session.head())?;
            let plan =
                reconcile(session, &IncomingRequest { messages: &incoming, history, ..IncomingRequest::default() });
            let mut entries = Vec::new();
            if plan.retained < session.messages.len() {
                entries.push(crate::rules::checkpoint::rewind_entry(session, plan.retained));
            }
            let first = session.head().seq + 1 + entries.len() as Seq;
            entries.extend(plan.message_entries(first).into_iter().map(Entry::Message));
            let mut draft = PendingCommit::new(entries, plan);
            let used = draft.reply.append.iter().flat_map(|p| p.message.blob_refs()).map(|c| c.id).collect::<Vec<_>>();
            draft.blobs = blobs.iter().filter(|b| used.contains(&b.id)).cloned().collect();
            Ok(draft)
        })
        .await
    }
}
