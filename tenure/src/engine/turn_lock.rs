//! One turn at a time: what a second request does while a session is busy.
//!
//! A gate is held for a whole turn, the model's time included. It orders the requests of one process; what several processes
//! write is ordered by the commits themselves.

use crate::types::error::{Error, Result};
use crate::types::id::{Key, RunId};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// What a request does that finds its session busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnBusy {
    /// It waits until the turns before it are done.
    #[default]
    Queue,
    /// It is refused.
    Reject,
    /// It stops the turn that is on, which keeps what it has, and goes on after those who wait already.
    Interrupt,
    /// It goes on in a fork, from where the session was before the turn that is on.
    Branch,
}

/// The gates of the sessions that have a turn on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gates(Arc<Mutex<HashMap<Key, Gate>>>);

#[derive(Debug)]
struct Gate {
    turn: Arc<Semaphore>,
    stop: watch::Sender<Option<Stop>>,
    /// Messages before the turn that is on.
    before: Option<usize>,
    /// The run of that turn.
    run: Option<RunId>,
    /// How many hold it or wait for it.
    interested: usize,
}

/// Why a turn is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// By a request that does not wait for it.
    Interrupted,
    /// By whoever cancelled its run.
    Cancelled,
}

/// The right to take a turn in a session. Dropping it lets the next one in.
#[derive(Debug)]
pub(crate) struct Pass {
    gates: Gates,
    key: Key,
    stop: watch::Receiver<Option<Stop>>,
    has_waited: bool,
    _turn: OwnedSemaphorePermit,
}

/// What the gate says.
#[derive(Debug)]
pub(crate) enum Entered {
    /// Come in.
    Pass(Pass),
    /// Take a fork after so many messages.
    Branch(usize),
}

/// Somebody who waits at a gate, and stops waiting when dropped.
struct Waiting<'a>(Option<(&'a Gates, &'a Key)>);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some((gates, key)) = self.0 {
            gates.leave(key);
        }
    }
}

impl Gates {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Gate>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn leave(&self, key: &Key) {
        let mut all = self.lock();
        if let Some(gate) = all.get_mut(key) {
            gate.interested -= 1;
            if gate.interested == 0 {
                all.remove(key);
            }
        }
    }

    /// Stops the turn that is on if this is its run; whether it is.
    pub fn cancel(&self, key: &Key, run: &RunId) -> bool {
        let all = self.lock();
        let gate = all.get(key).filter(|gate| gate.run.as_ref() == Some(run));
        gate.is_some_and(|gate| {
            gate.stop.send_replace(Some(Stop::Cancelled));
            true
        })
    }

    /// Waits for the right to take a turn. At most `max` wait.
    pub async fn enter(&self, key: &Key, busy: OnBusy, max: usize) -> Result<Entered> {
        self.enter_telling(key, busy, max, || ()).await
    }

    /// The same; `queued` is called if the caller has to wait.
    pub async fn enter_telling(&self, key: &Key, busy: OnBusy, max: usize, queued: impl FnOnce()) -> Result<Entered> {
        let (turn, stop, has_waited) = {
            let mut all = self.lock();
            let gate = all.entry(key.clone()).or_insert_with(|| Gate {
                turn: Arc::new(Semaphore::new(1)),
                stop: watch::channel(None).0,
                before: None,
                run: None,
                interested: 0,
            });
            let has_waited = gate.interested > 0;
            if has_waited {
                match (busy, gate.before) {
                    (OnBusy::Reject, _) => return Err(Error::Busy { session_id: key.session.clone() }),
                    (OnBusy::Branch, Some(before)) => return Ok(Entered::Branch(before)),
                    (OnBusy::Interrupt, _) => drop(gate.stop.send_replace(Some(Stop::Interrupted))),
                    _ => {}
                }
                if gate.interested > max {
                    let what = format!("the queue of session {}", key.session);
                    return Err(Error::TooLarge { what, limit: "max_queue", max: max as u64 });
                }
            }
            gate.interested += 1;
            if has_waited {
                queued();
            }
            (gate.turn.clone(), gate.stop.subscribe(), has_waited)
        };
        let mut waiting = Waiting(Some((self, key)));
        let permit = turn.acquire_owned().await.map_err(|_| Error::unavailable("the gate was closed"))?;
        waiting.0 = None;
        if let Some(gate) = self.lock().get_mut(key) {
            (gate.before, gate.run) = (None, None);
            gate.stop.send_replace(None);
        }
        Ok(Entered::Pass(Pass { gates: self.clone(), key: key.clone(), stop, has_waited, _turn: permit }))
    }
}

impl Pass {
    /// Says how many messages there were before this turn, for those who want to branch off, and which run it is.
    pub fn began(&self, before: usize, run: &RunId) {
        if let Some(gate) = self.gates.lock().get_mut(&self.key) {
            (gate.before, gate.run) = (Some(before), Some(run.clone()));
        }
    }

    /// Says which run this turn goes on with.
    pub fn works_on(&self, run: &RunId) {
        if let Some(gate) = self.gates.lock().get_mut(&self.key) {
            gate.run = Some(run.clone());
        }
    }

    /// Whether others had the session when this request came.
    pub fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Ends when somebody wants this turn to stop.
    pub async fn stopped(&mut self) -> Stop {
        let reason = self.stop.wait_for(Option::is_some).await.ok().and_then(|stop| *stop);
        match reason {
            Some(reason) => reason,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.gates.leave(&self.key);
    }
}
