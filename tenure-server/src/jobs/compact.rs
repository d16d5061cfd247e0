//! Automatic compaction: summaries of long sessions, written in the background after a turn (D-067).

use crate::app::AppState;
use tenure::{Error, Principal, SessionId, policy::CompactionPolicy, run::TurnError, session::RawObject};

/// The model options of a summary request: only the model's name.
pub fn options(model: &str) -> RawObject {
    let mut options = RawObject::default();
    options.set("model", model);
    options
}

/// Starts the compaction that may follow a turn: if the session's history has reached its window and its policy
/// enables compaction, a summary is written in the background. `model` is the model of the turn. The request
/// does not wait for it; on failure the window truncates the history, and compaction is retried after the next
/// turn.
pub fn after_turn(app: &AppState, principal: &Principal, id: &SessionId, policy: CompactionPolicy, model: &str) {
    let name = match policy {
        CompactionPolicy::Off => return,
        CompactionPolicy::On => model.to_owned(),
        CompactionPolicy::With(name) => name,
    };
    let app_handle = app.clone();
    let principal = principal.clone();
    let session_id = id.clone();
    app.tasks.spawn(async move {
        let Some(model) = app_handle.models.get(&name) else {
            return tracing::warn!(%session_id, model = name, "no summary was written: the compaction model is not configured");
        };
        let result = tokio::select! {
            result = app_handle.tenure.compact(&principal, &session_id, &*model, options(&name), None) => result,
            () = app_handle.tasks.wait_for_stop() => return,
        };
        match result {
            Ok(compaction) if compaction.messages > 0 => {
                tracing::debug!(%session_id, messages = compaction.messages, "summary written");
            }
            // Nothing to compact, or another compaction of the session is in progress.
            Ok(_) | Err(TurnError::Store(Error::Busy { .. })) => {}
            Err(e) => tracing::warn!(%session_id, code = e.code(), "could not write a summary; retrying after the next turn"),
        }
    });
}
