//! The write queue, and the choice of the thread that executes it.
//!
//! A caller that may block and finds the writer free executes its own write, together with all
//! queued ones, because this saves a thread wake-up. Under concurrent load, or where the caller's
//! thread must not block, a dedicated writer thread does it (D-031). Invariant: the holder of the
//! lock on `WriteExecutor` is the only writer.

use crate::store::sqlite::blocking::BlockingContext;
use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::StoreResult;
use crate::store::sqlite::write_batch::{
    QueueState, WriteDurability, WriteExecutor, WriteJob, WritePurpose, WriteTask, writer_stopped,
};
use crate::types::error::{Error, Result};
use rusqlite::Connection;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use tokio::sync::{mpsc, oneshot};
use tokio::task;

/// Capacity of the write queue. Callers that submit more jobs wait (backpressure).
const MAX_QUEUE: usize = 1024;

/// The handle to the write queue. Dropping it ends the writer thread and closes the file.
pub(super) struct Writer {
    jobs: Option<mpsc::Sender<WriteJob>>,
    /// A std mutex: its holder blocks on the disk, but never awaits a task.
    executor: Arc<Mutex<WriteExecutor>>,
    thread: Option<JoinHandle<()>>,
    /// Cloned by each pending use mark, so that its reference count shows whether marks are
    /// pending.
    pending_uses: Arc<()>,
}

impl Writer {
    /// Starts the writer thread with the connection that writes.
    pub fn start(file: Database, conn: Connection) -> Result<Self> {
        let (jobs, queue) = mpsc::channel(MAX_QUEUE);
        let executor = Arc::new(Mutex::new(WriteExecutor::new(conn, file, queue)));
        let thread_executor = executor.clone();
        let thread = thread::Builder::new().name("tenure-sqlite".to_owned());
        let thread = thread.spawn(move || run_writer_thread(&thread_executor)).map_err(Error::unavailable_from)?;
        Ok(Self { jobs: Some(jobs), executor, thread: Some(thread), pending_uses: Arc::default() })
    }

    /// Executes a write in a transaction: it is applied completely or, on an error, not at all.
    /// Durable when it returns.
    pub async fn write<T: Send + 'static>(
        &self,
        work: impl FnMut(&Connection, &Database) -> StoreResult<T> + Send + 'static,
    ) -> Result<T> {
        self.submit_and_wait(WriteDurability::Durable, WritePurpose::Store, work).await
    }

    /// Executes a write that frees space, with the guarantees of [`Writer::write`]. On a full disk
    /// it may use the reserve file.
    pub async fn write_freeing_space<T: Send + 'static>(
        &self,
        work: impl FnMut(&Connection, &Database) -> StoreResult<T> + Send + 'static,
    ) -> Result<T> {
        self.submit_and_wait(WriteDurability::Durable, WritePurpose::Free, work).await
    }

    async fn submit_and_wait<T: Send + 'static>(
        &self,
        durability: WriteDurability,
        purpose: WritePurpose,
        work: impl FnMut(&Connection, &Database) -> StoreResult<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, mut outcome_receiver) = oneshot::channel();
        let mut wake = self.send(WriteJob::Shared(Box::new(WriteTask::new(durability, purpose, work, reply)))).await?;
        if BlockingContext::current().is_some() && self.is_free() {
            // Other writers may be about to submit, even in the same task: yielding lets them share
            // the transaction.
            task::yield_now().await;
            if let Ok(outcome) = outcome_receiver.try_recv() {
                wake.thread = None;
                return outcome;
            }
            if BlockingContext::current().is_some_and(|context| self.run_batch_here(context) == QueueState::Empty) {
                wake.thread = None;
            }
        }
        drop(wake);
        outcome_receiver.await.unwrap_or_else(|_| Err(writer_stopped()))
    }

    /// Returns whether no write is in progress and waiting for a larger batch would not pay.
    fn is_free(&self) -> bool {
        self.executor.try_lock().is_ok_and(|executor| !executor.is_contended())
    }

    /// Executes the queued jobs on this thread, if no other thread is doing so.
    fn run_batch_here(&self, context: BlockingContext) -> QueueState {
        match self.executor.try_lock() {
            Ok(mut executor) => context.run_blocking(|| executor.run_batch()),
            Err(_) => QueueState::NotEmpty,
        }
    }

    /// Submits a write without waiting for it. It is dropped if the queue is full, and may be lost
    /// in a crash.
    pub fn submit_unsynced(&self, mut work: impl FnMut(&Connection, &Database) -> StoreResult<()> + Send + 'static) {
        let pending_use = self.pending_uses.clone();
        self.submit_background(move |conn: &Connection, file: &Database| {
            let _ = &pending_use;
            work(conn, file)
        });
    }

    /// Submits work that no read depends on, without waiting for it. It is dropped if the queue is full,
    /// and may be lost in a crash.
    pub fn submit_background(&self, work: impl FnMut(&Connection, &Database) -> StoreResult<()> + Send + 'static) {
        let job = WriteJob::Shared(Box::new(WriteTask::new(
            WriteDurability::MayBeLost,
            WritePurpose::Store,
            work,
            oneshot::channel().0,
        )));
        if let Some(jobs) = &self.jobs
            && jobs.try_send(job).is_ok()
        {
            drop(self.wake_on_drop());
        }
    }

    /// Waits until all pending use marks are visible to readers.
    pub async fn flush_unsynced(&self) -> Result<()> {
        match Arc::strong_count(&self.pending_uses) {
            1 => Ok(()),
            _ => self.submit_and_wait(WriteDurability::MayBeLost, WritePurpose::Store, |_, _| Ok(())).await,
        }
    }

    /// Executes exclusive work outside of any transaction, while no other write of this process
    /// runs.
    pub async fn run_exclusive<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &Database) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, outcome_receiver) = oneshot::channel();
        let work = Box::new(move |conn: &Connection, file: &Database| drop(reply.send(work(conn, file))));
        drop(self.send(WriteJob::Exclusive(work)).await?);
        outcome_receiver.await.unwrap_or_else(|_| Err(writer_stopped()))
    }

    /// The number of queued jobs.
    #[cfg(test)]
    pub fn queued_jobs(&self) -> usize {
        self.jobs.as_ref().map_or(0, |jobs| jobs.max_capacity() - jobs.capacity())
    }

    /// Submits a job, waiting if the queue is full. Dropping the returned `WakeOnDrop` wakes the writer
    /// thread, which executes the job unless it has been executed by then.
    async fn send(&self, job: WriteJob) -> Result<WakeOnDrop> {
        let jobs = self.jobs.as_ref().ok_or_else(writer_stopped)?;
        jobs.send(job).await.map_err(|_| writer_stopped())?;
        Ok(self.wake_on_drop())
    }

    fn wake_on_drop(&self) -> WakeOnDrop {
        WakeOnDrop { thread: self.thread.as_ref().map(|t| t.thread().clone()) }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        drop(self.wake_on_drop());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Wakes the writer thread on drop, so that a queued job is executed even if the caller is
/// cancelled.
struct WakeOnDrop {
    thread: Option<Thread>,
}

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }
}

/// The writer thread: executes the queue each time it is woken, until the queue is closed.
fn run_writer_thread(executor: &Mutex<WriteExecutor>) {
    let _end = WriterEnd(executor);
    while let Ok(mut locked) = executor.lock() {
        if locked.run_queue() == QueueState::Closed {
            break;
        }
        drop(locked);
        thread::park();
    }
}

/// Closes the queue when the writer thread ends, even by a panic, so that no caller waits forever.
struct WriterEnd<'a>(&'a Mutex<WriteExecutor>);

impl Drop for WriterEnd<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).close();
    }
}
