//! Background tasks that the server waits for before it stops.
#![expect(clippy::disallowed_methods, reason = "background tasks are spawned here")]

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Work that outlives its request: a turn is finished although its client has gone away.
#[derive(Debug)]
pub struct Tasks {
    /// Each running task holds a clone.
    running: Arc<()>,
    stopping: watch::Sender<bool>,
}

impl Default for Tasks {
    fn default() -> Self {
        Self { running: Arc::default(), stopping: watch::channel(false).0 }
    }
}

impl Tasks {
    /// Starts a task that the server waits for before it stops.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let running = self.running.clone();
        tokio::spawn(async move {
            task.await;
            drop(running);
        });
    }

    /// Ends when the server is stopping: for tasks that go on until then.
    pub async fn stopping(&self) {
        let mut stopping = self.stopping.subscribe();
        if stopping.wait_for(|s| *s).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Tells tasks to stop.
    pub fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Waits until all have ended.
    pub async fn ended(&self) {
        while Arc::strong_count(&self.running) > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Drives a future on the caller's task, which saves a wake-up; if it is dropped before the future has ended, the rest becomes a
/// background task. A client that disconnects does not end its turn so.
pub struct DetachOnDrop {
    tasks: Arc<Tasks>,
    work: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl DetachOnDrop {
    /// Nothing is done yet.
    pub fn new(tasks: Arc<Tasks>, work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { tasks, work: Some(Box::pin(work)) }
    }

    /// Works until another future has ended; its result.
    pub async fn until<T>(&mut self, other: impl Future<Output = T>) -> T {
        let mut other = pin!(other);
        poll_fn(|context| {
            if self.work.as_mut().is_some_and(|work| work.as_mut().poll(context).is_ready()) {
                self.work = None;
            }
            other.as_mut().poll(context)
        })
        .await
    }
}

impl Drop for DetachOnDrop {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            self.tasks.spawn(work);
        }
    }
}
