//! The client that waits for a run, and what becomes of the run when it goes away.

use crate::app::AppState;
use std::sync::{Arc, Mutex, MutexGuard};
use tenure::{OnDisconnect, OpenRun, Principal, RunId, SessionId};

/// A client that waits for an answer. If it is dropped before the answer was sent, the client has gone away.
pub(super) struct ChatConnection(ChatClient);

/// A waiting client, as the task that works on its run knows it.
#[derive(Clone)]
pub(super) struct ChatClient {
    app: AppState,
    who: Principal,
    state: Arc<Mutex<ClientState>>,
}

#[derive(Default)]
enum ClientState {
    /// Nothing has to be done when it goes away.
    #[default]
    Waiting,
    /// This run is cancelled when it goes away.
    Running(SessionId, RunId),
    /// It went away before its run began.
    Gone,
    Answered,
}

impl ChatConnection {
    pub fn new(app: AppState, who: Principal) -> Self {
        Self(ChatClient { app, who, state: Arc::default() })
    }

    pub fn client(&self) -> ChatClient {
        self.0.clone()
    }

    /// The client has its answer.
    pub fn answered(&self) {
        *self.0.lock() = ClientState::Answered;
    }
}

impl Drop for ChatConnection {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *self.0.lock(), ClientState::Gone);
        if let ClientState::Running(id, run) = state {
            self.0.cancel(id, run);
        }
    }
}

impl ChatClient {
    fn lock(&self) -> MutexGuard<'_, ClientState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Its run begins. What becomes of it is said by the request, else by the assistant, else by the configuration.
    pub fn began(&self, turn: &OpenRun, asked: Option<OnDisconnect>) {
        let rule = asked.or(turn.on_disconnect()).unwrap_or(self.app.config.sessions.on_disconnect);
        if rule == OnDisconnect::Finish {
            return;
        }
        let (id, run) = (turn.session_id.clone(), turn.run.clone());
        let mut state = self.lock();
        match *state {
            ClientState::Gone => self.cancel(id, run),
            _ => *state = ClientState::Running(id, run),
        }
    }

    fn cancel(&self, id: SessionId, run: RunId) {
        let (app, who) = (self.app.clone(), self.who.clone());
        self.app.tasks.spawn(async move {
            if let Err(error) = app.tenure.cancel(&who, &id, &run).await {
                tracing::warn!(session_id = %id, run = %run, %error, "the run of a client that went away was not cancelled");
            }
        });
    }
}
