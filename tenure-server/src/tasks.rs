//! Background tasks. A graceful shutdown waits for all of them.
#![expect(clippy::disallowed_methods, reason = "background tasks are spawned here")]

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Tracks tasks that outlive their request: a turn is completed even if its client has disconnected.
#[derive(Debug)]
pub struct Tasks {
    /// Each running task holds a clone, so the reference count is the number of running tasks plus one.
    running: Arc<()>,
    stopping: watch::Sender<bool>,
}

impl Default for Tasks {
    fn default() -> Self {
        Self { running: Arc::default(), stopping: watch::channel(false).0 }
    }
}

impl Tasks {
    /// Spawns a task that [`Tasks::wait_until_finished`] waits for during shutdown.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let running = self.running.clone();
        tokio::spawn(async move {
            task.await;
            drop(running);
        });
    }

    /// Resolves when shutdown begins. For tasks that run until then.
    pub async fn wait_for_stop(&self) {
        let mut stopping = self.stopping.subscribe();
        if stopping.wait_for(|s| *s).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Signals shutdown to all tasks that await [`Tasks::wait_for_stop`].
    pub fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Waits until all spawned tasks have finished.
    pub async fn wait_until_finished(&self) {
        while Arc::strong_count(&self.running) > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Polls a future on the caller's task, which saves a wake-up. If it is dropped before the future completes, the
/// rest runs as a background task, so a client that disconnects does not cancel its turn.
pub struct DetachOnDrop {
    tasks: Arc<Tasks>,
    work: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl DetachOnDrop {
    /// Wraps a future without polling it.
    pub fn new(tasks: Arc<Tasks>, work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { tasks, work: Some(Box::pin(work)) }
    }

    /// Polls the wrapped future concurrently with `other` until `other` completes, and returns the result of `other`.
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
