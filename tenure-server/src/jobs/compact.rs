//! Summaries of long sessions, written in the background after a turn.

use crate::app::AppState;
use tenure::{CompactionPolicy, Error, Principal, RawObject, SessionId, TurnError};

/// What a model is asked with besides the conversation.
pub fn options(model: &str) -> RawObject {
    let mut options = RawObject::default();
    options.set("model", model);
    options
}

/// After a turn of a session that talks to `model`: if its history has reached its window and its policy says so, a summary is written.
/// Nobody waits for it. If it can not be had, the window cuts, and it is tried again after the next turn.
pub fn after_turn(app: &AppState, who: &Principal, id: &SessionId, policy: CompactionPolicy, model: &str) {
    let name = match policy {
        CompactionPolicy::Off => return,
        CompactionPolicy::On => model.to_owned(),
        CompactionPolicy::With(name) => name,
    };
    let (here, who, session_id) = (app.clone(), who.clone(), id.clone());
    app.tasks.spawn(async move {
        let Some(model) = here.models.get(&name) else {
            return tracing::warn!(%session_id, model = name, "no summary was written: there is no such model");
        };
        let written = tokio::select! {
            written = here.tenure.compact(&who, &session_id, &*model, options(&name), None) => written,
            () = here.tasks.stopping() => return,
        };
        match written {
            Ok(done) if done.messages > 0 => {
                tracing::debug!(%session_id, messages = done.messages, "a summary was written");
            }
            // Somebody is at it already.
            Ok(_) | Err(TurnError::Store(Error::Busy { .. })) => {}
            Err(e) => tracing::warn!(%session_id, code = e.code(), "no summary was written"),
        }
    });
}
