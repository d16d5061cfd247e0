//! Executes a whole turn, or resumes one after a crash: the operations for applications that bring their own
//! model and tools.

use crate::run::begin::TurnStart;
use crate::run::executors::{Executors, TurnError, TurnOutcome};
use crate::run::request::RunRequest;
use crate::tenure::Tenure;
use crate::types::id::{Principal, SessionId};

impl Tenure {
    /// Executes one turn in a session, which is created if it does not exist: stores the messages,
    /// calls the model, executes the tool calls that it requests, and stores every step before the
    /// next one starts. A request with a known idempotency key returns the stored answer.
    pub async fn run(
        &self,
        principal: &Principal,
        id: &SessionId,
        request: RunRequest<'_>,
    ) -> Result<TurnOutcome, TurnError> {
        let RunRequest { mut turn, executors } = request;
        turn.session = Some(id.clone());
        match self.begin_turn(principal, turn).await? {
            TurnStart::Run(open_run) => open_run.execute(executors).await,
            TurnStart::AlreadyAnswered { session_id, run, replay } => {
                let seq = self.head(principal, &session_id).await?.seq;
                Ok(replay.outcome(session_id, run, seq)?)
            }
        }
    }

    /// Resumes the session's run if no process executes it: its process has died, or it waited for a
    /// review that is now decided. Returns `None` if there is no such run, or if another process
    /// still holds its lease. A run that cannot be resumed is ended as failed.
    pub async fn resume(
        &self,
        principal: &Principal,
        id: &SessionId,
        executors: Executors<'_>,
    ) -> Result<Option<TurnOutcome>, TurnError> {
        let head = self.head(principal, id).await?;
        match self.claim_orphaned_run(&head).await? {
            Some(open_run) => open_run.execute(executors).await.map(Some),
            None => Ok(None),
        }
    }
}
