//! Turn locks: at most one turn at a time in a session, and a policy for requests that find it busy.
//!
//! A turn lock is held for a whole turn, including the model's response time. It orders the
//! requests of one process; the writes of several processes are ordered by optimistic concurrency
//! of the commits (D-041).

use crate::types::error::{Error, Result};
use crate::types::id::{RunId, SessionKey};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// The behaviour of a request that finds its session busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnBusy {
    /// The request waits until all earlier turns are done.
    #[default]
    Queue,
    /// The request is rejected.
    Reject,
    /// The request interrupts the turn in progress, whose partial answer is stored, and runs after
    /// the requests that already wait.
    Interrupt,
    /// The request runs in a fork, taken from the state before the turn in progress.
    Branch,
}

/// The turns of a process at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TurnLoad {
    /// The number of sessions with a turn in progress.
    pub running: usize,
    /// The number of requests that wait for an earlier turn of their session.
    pub waiting: usize,
}

/// The turn locks of all sessions with a turn in progress. Clones share the locks.
#[derive(Clone, Debug, Default)]
pub(crate) struct TurnLocks(Arc<Mutex<HashMap<SessionKey, TurnLock>>>);

/// The turn lock of one session.
#[derive(Debug)]
struct TurnLock {
    turn: Arc<Semaphore>,
    stop: watch::Sender<Option<StopReason>>,
    /// The number of messages before the turn in progress. `None` means that the turn has not been
    /// recorded yet.
    messages_before: Option<usize>,
    /// The run of the turn in progress. `None` means that it is not known yet.
    run: Option<RunId>,
    /// The number of requests that hold the lock or wait for it.
    requests: usize,
}

/// The reason why a turn is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// Another request interrupted the turn.
    Interrupted,
    /// The run was cancelled.
    Cancelled,
}

/// A turn guard: the permission to take a turn in a session. Dropping it admits the next request.
#[derive(Debug)]
pub(crate) struct TurnGuard {
    locks: TurnLocks,
    key: SessionKey,
    stop: watch::Receiver<Option<StopReason>>,
    has_waited: bool,
    _turn: OwnedSemaphorePermit,
}

/// The result of acquiring a turn lock.
#[derive(Debug)]
pub(crate) enum Admission {
    /// The lock is held.
    Admitted(TurnGuard),
    /// The session is busy; the request shall run in a fork after this number of messages.
    Branch(usize),
}

/// A waiting request. Dropping it before it is admitted removes it from the queue.
struct Waiter<'a>(Option<(&'a TurnLocks, &'a SessionKey)>);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if let Some((locks, key)) = self.0 {
            locks.release(key);
        }
    }
}

impl TurnLocks {
    fn lock(&self) -> MutexGuard<'_, HashMap<SessionKey, TurnLock>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn release(&self, key: &SessionKey) {
        let mut locks = self.lock();
        if let Some(lock) = locks.get_mut(key) {
            lock.requests -= 1;
            if lock.requests == 0 {
                locks.remove(key);
            }
        }
    }

    /// Counts the turns in progress and the requests that wait for one.
    pub fn load(&self) -> TurnLoad {
        let locks = self.lock();
        let running = locks.len();
        TurnLoad { running, waiting: locks.values().map(|lock| lock.requests.saturating_sub(1)).sum() }
    }

    /// Stops the turn in progress if it belongs to this run. Returns true if it does.
    pub fn cancel(&self, key: &SessionKey, run: &RunId) -> bool {
        let locks = self.lock();
        let lock = locks.get(key).filter(|lock| lock.run.as_ref() == Some(run));
        lock.is_some_and(|lock| {
            lock.stop.send_replace(Some(StopReason::Cancelled));
            true
        })
    }

    /// Acquires the turn lock of a session. At most `max` requests wait.
    pub async fn acquire(&self, key: &SessionKey, busy: OnBusy, max: usize) -> Result<Admission> {
        self.acquire_with_callback(key, busy, max, || ()).await
    }

    /// Like [`TurnLocks::acquire`], and calls `queued` if the caller has to wait. `queued` is called
    /// while the locks are held, so it must not block.
    pub async fn acquire_with_callback(
        &self,
        key: &SessionKey,
        busy: OnBusy,
        max: usize,
        queued: impl FnOnce(),
    ) -> Result<Admission> {
        let (turn, stop, has_waited) = {
            let mut locks = self.lock();
            let lock = locks.entry(key.clone()).or_insert_with(|| TurnLock {
                turn: Arc::new(Semaphore::new(1)),
                stop: watch::channel(None).0,
                messages_before: None,
                run: None,
                requests: 0,
            });
            let has_waited = lock.requests > 0;
            if has_waited {
                match (busy, lock.messages_before) {
                    (OnBusy::Reject, _) => return Err(Error::Busy { session_id: key.session.clone() }),
                    (OnBusy::Branch, Some(messages_before)) => return Ok(Admission::Branch(messages_before)),
                    (OnBusy::Interrupt, _) => drop(lock.stop.send_replace(Some(StopReason::Interrupted))),
                    _ => {}
                }
                if lock.requests > max {
                    let description = format!("the queue of requests waiting for session {}", key.session);
                    return Err(Error::TooLarge { subject: description, limit: "max_queue", max: max as u64 });
                }
            }
            lock.requests += 1;
            if has_waited {
                queued();
            }
            (lock.turn.clone(), lock.stop.subscribe(), has_waited)
        };
        let mut waiting = Waiter(Some((self, key)));
        let permit = turn.acquire_owned().await.map_err(|_| Error::unavailable("the turn lock was closed"))?;
        waiting.0 = None;
        if let Some(lock) = self.lock().get_mut(key) {
            lock.messages_before = None;
            lock.run = None;
            lock.stop.send_replace(None);
        }
        Ok(Admission::Admitted(TurnGuard { locks: self.clone(), key: key.clone(), stop, has_waited, _turn: permit }))
    }
}

impl TurnGuard {
    /// Records the number of messages before this turn, for requests that branch off, and the run
    /// of the turn.
    pub fn record_turn_start(&self, messages_before: usize, run: &RunId) {
        if let Some(lock) = self.locks.lock().get_mut(&self.key) {
            lock.messages_before = Some(messages_before);
            lock.run = Some(run.clone());
        }
    }

    /// Records the run that this turn continues.
    pub fn record_run(&self, run: &RunId) {
        if let Some(lock) = self.locks.lock().get_mut(&self.key) {
            lock.run = Some(run.clone());
        }
    }

    /// Returns true if the session was busy when this request arrived.
    pub fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Waits until this turn is asked to stop. Returns the reason.
    pub async fn stopped(&mut self) -> StopReason {
        let reason = self.stop.wait_for(Option::is_some).await.ok().and_then(|stop| *stop);
        match reason {
            Some(reason) => reason,
            None => std::future::pending().await,
        }
    }
}

impl Drop for TurnGuard {
    fn drop(&mut self) {
        self.locks.release(&self.key);
    }
}
