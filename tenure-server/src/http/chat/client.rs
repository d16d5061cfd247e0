//! Detection of client disconnects, and the `on_disconnect` rule for the run: finish or cancel.

use crate::app::AppState;
use std::sync::{Arc, Mutex, MutexGuard};
use tenure::{
    Principal, SessionId,
    policy::OnDisconnect,
    run::{OpenRun, RunId},
};

/// The handler's side of a waiting client. Dropping it before `answered` was called means that the client has
/// disconnected, which applies the `on_disconnect` rule.
pub(super) struct ChatConnection(ChatClient);

/// The turn's side of a waiting client: a handle by which the task that executes the run registers it.
#[derive(Clone)]
pub(super) struct ChatClient {
    app: AppState,
    principal: Principal,
    state: Arc<Mutex<ClientState>>,
}

#[derive(Default)]
enum ClientState {
    /// No run is to be cancelled on disconnect.
    #[default]
    Waiting,
    /// This run is cancelled on disconnect.
    Running(SessionId, RunId),
    /// The client disconnected before its run started.
    Disconnected,
    Answered,
}

impl ChatConnection {
    pub fn new(app: AppState, principal: Principal) -> Self {
        Self(ChatClient { app, principal, state: Arc::default() })
    }

    pub fn client(&self) -> ChatClient {
        self.0.clone()
    }

    /// Marks the response as complete: a later drop is not a disconnect.
    pub fn mark_answered(&self) {
        *self.0.lock() = ClientState::Answered;
    }
}

impl Drop for ChatConnection {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *self.0.lock(), ClientState::Disconnected);
        if let ClientState::Running(id, run) = state {
            self.0.cancel(id, run);
        }
    }
}

impl ChatClient {
    fn lock(&self) -> MutexGuard<'_, ClientState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Registers the client's run. The disconnect rule is taken from the request, else the assistant, else the
    /// configuration. If the rule is `cancel` and the client has already disconnected, the run is cancelled.
    pub fn register_run(&self, turn: &OpenRun, requested: Option<OnDisconnect>) {
        let rule = requested.or(turn.on_disconnect()).unwrap_or(self.app.config.sessions.on_disconnect);
        if rule == OnDisconnect::Finish {
            return;
        }
        let id = turn.session_id().clone();
        let run = turn.run_id().clone();
        let mut state = self.lock();
        match *state {
            ClientState::Disconnected => self.cancel(id, run),
            _ => *state = ClientState::Running(id, run),
        }
    }

    fn cancel(&self, id: SessionId, run: RunId) {
        let app = self.app.clone();
        let principal = self.principal.clone();
        self.app.tasks.spawn(async move {
            if let Err(error) = app.tenure.cancel(&principal, &id, &run).await {
                tracing::warn!(session_id = %id, run = %run, %error, "could not cancel the run of a disconnected client");
            }
        });
    }
}
