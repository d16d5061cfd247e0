//! Group commit: executes queued writes in shared transactions and sends their results.
//!
//! Invariant: a write is acknowledged only after the transaction that contains it has committed.

use crate::store::sqlite::database::{Database, is_disk_full};
use crate::store::sqlite::fault::{StoreFault, StoreResult};
use crate::types::error::{Error, Result};
use rusqlite::{Connection, ErrorCode};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{self, error::TryRecvError};
use tokio::sync::oneshot;

/// Maximum number of jobs in one transaction.
const MAX_BATCH: usize = 256;

/// Number of changed rows above which a transaction is followed by releasing the page cache.
/// Without this every later commit read eight to ten pages again; with it, one or two.
const CACHE_RELEASE_ROWS: u64 = 1000;

/// Number of transactions, after a batched one, that are left to the writer thread instead of the
/// caller's. Under load this lets writers accumulate: of sixteen writers, one is occasionally
/// early, and if it committed at once, half of the fsyncs would be for a single write.
const CONTENTION_COUNTDOWN: u32 = 16;

/// A job for the writer.
pub(super) enum WriteJob {
    /// A write in a transaction, which other writes may share.
    Shared(Box<dyn WriteStep>),
    /// Exclusive work outside of any transaction.
    Exclusive(Box<ExclusiveJob>),
}

/// Exclusive work on the writer's connection.
type ExclusiveJob = dyn FnOnce(&Connection, &Database) + Send;

/// The durability of a write: whether it must be on disk before it is acknowledged.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum WriteDurability {
    Durable,
    MayBeLost,
}

/// The purpose of a write: only one that frees space may use the reserve file on a full disk.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum WritePurpose {
    Store,
    Free,
}

/// A write in a transaction. It may be executed again after the transaction was rolled back.
pub(super) trait WriteStep: Send {
    fn durability(&self) -> WriteDurability;
    fn purpose(&self) -> WritePurpose;
    fn run(&mut self, conn: &Connection, file: &Database) -> StoreResult<()>;
    fn send_outcome(self: Box<Self>, outcome: Result<()>);
}

/// A write, together with the channel for its result.
pub(super) struct WriteTask<T, F> {
    work: F,
    durability: WriteDurability,
    purpose: WritePurpose,
    value: Option<T>,
    reply: oneshot::Sender<Result<T>>,
}

impl<T, F> WriteTask<T, F> {
    pub fn new(durability: WriteDurability, purpose: WritePurpose, work: F, reply: oneshot::Sender<Result<T>>) -> Self {
        Self { work, durability, purpose, value: None, reply }
    }
}

impl<T: Send, F: FnMut(&Connection, &Database) -> StoreResult<T> + Send> WriteStep for WriteTask<T, F> {
    fn durability(&self) -> WriteDurability {
        self.durability
    }

    fn purpose(&self) -> WritePurpose {
        self.purpose
    }

    fn run(&mut self, conn: &Connection, file: &Database) -> StoreResult<()> {
        self.value = Some((self.work)(conn, file)?);
        Ok(())
    }

    fn send_outcome(self: Box<Self>, outcome: Result<()>) {
        let WriteTask { value, reply, .. } = *self;
        // The caller may have been cancelled.
        let _ = reply.send(outcome.and_then(|()| value.ok_or_else(writer_stopped)));
    }
}

/// The error after the writer thread has ended.
pub(super) fn writer_stopped() -> Error {
    Error::unavailable("the SQLite writer thread has stopped; reopen the store")
}

/// The executor of the write queue. It owns the only connection that writes.
pub(super) struct WriteExecutor {
    conn: Connection,
    file: Database,
    queue: mpsc::Receiver<WriteJob>,
    /// Exclusive work that was already taken from the queue, and is executed next.
    exclusive: Option<Box<ExclusiveJob>>,
    /// The durability of a COMMIT with the connection's current `synchronous` setting.
    durability: WriteDurability,
    /// The number of transactions with a single write that must follow before the load counts as
    /// low again.
    contention: u32,
    /// The number of batches executed so far.
    batches: u64,
}

/// The state of the queue after a batch.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum QueueState {
    Empty,
    NotEmpty,
    /// The queue is empty and closed.
    Closed,
}

/// The reason for which a transaction was rolled back.
enum BatchAbort {
    /// One write failed; the others may succeed without it.
    Step(StoreFault),
    /// The transaction itself failed, so that no write can succeed.
    All(rusqlite::Error),
}

impl From<rusqlite::Error> for BatchAbort {
    fn from(e: rusqlite::Error) -> Self {
        BatchAbort::All(e)
    }
}

impl WriteExecutor {
    pub fn new(conn: Connection, file: Database, queue: mpsc::Receiver<WriteJob>) -> Self {
        Self { conn, file, queue, exclusive: None, durability: WriteDurability::Durable, contention: 0, batches: 0 }
    }

    /// Returns whether writers are concurrent, so that letting them accumulate pays.
    pub fn is_contended(&self) -> bool {
        self.contention > 0
    }

    /// The number of batches executed so far, including failed ones.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Truncates the write-ahead log, unless another connection uses it. Returns whether it did.
    pub fn truncate_wal(&self) -> Result<bool> {
        self.file.try_truncate_wal(&self.conn, Duration::ZERO)
    }

    /// Executes all queued jobs.
    pub fn run_queue(&mut self) -> QueueState {
        loop {
            let state = self.run_batch();
            match self.exclusive.take() {
                Some(work) => work(&self.conn, &self.file),
                None if state != QueueState::NotEmpty => return state,
                None => {}
            }
        }
    }

    /// Executes the next queued writes in one transaction, at most [`MAX_BATCH`].
    pub fn run_batch(&mut self) -> QueueState {
        let mut batch = Vec::new();
        let mut state = QueueState::NotEmpty;
        while batch.len() < MAX_BATCH && self.exclusive.is_none() {
            match self.queue.try_recv() {
                Ok(WriteJob::Shared(step)) => batch.push(step),
                Ok(WriteJob::Exclusive(work)) => self.exclusive = Some(work),
                Err(error) => {
                    state = if error == TryRecvError::Empty { QueueState::Empty } else { QueueState::Closed };
                    break;
                }
            }
        }
        if batch.is_empty() {
            return state;
        }
        let durable_count = batch.iter().filter(|step| step.durability() == WriteDurability::Durable).count();
        self.contention = if durable_count > 1 { CONTENTION_COUNTDOWN } else { self.contention.saturating_sub(1) };
        self.batches += 1;
        self.execute(batch);
        // More jobs may have been queued in the meantime.
        if self.queue.is_empty() { state } else { QueueState::NotEmpty }
    }

    /// Closes the queue and drops the queued jobs, which notifies their callers of the failure.
    pub fn close(&mut self) {
        self.queue.close();
        self.exclusive = None;
        while self.queue.try_recv().is_ok() {}
    }

    /// Executes writes in one transaction and sends their results. A batch in which one write fails
    /// is retried one write at a time.
    fn execute(&mut self, mut batch: Vec<Box<dyn WriteStep>>) {
        match self.execute_in_transaction(&mut batch) {
            Ok(outcomes) => batch.into_iter().zip(outcomes).for_each(|(step, outcome)| step.send_outcome(outcome)),
            Err(BatchAbort::All(e)) if self.has_reserve_for(&batch, &e) => {
                let (freeing, rejected): (Vec<_>, Vec<_>) =
                    batch.into_iter().partition(|s| s.purpose() == WritePurpose::Free);
                self.reject(rejected, e);
                self.execute(freeing);
                self.file.restore_reserve(&self.conn);
            }
            Err(BatchAbort::All(e)) => self.reject(batch, e),
            Err(BatchAbort::Step(fault)) => match (batch.pop(), batch.is_empty()) {
                (Some(step), true) => step.send_outcome(Err(self.file.fault_to_error(fault))),
                (last, _) => batch.into_iter().chain(last).for_each(|step| self.execute(vec![step])),
            },
        }
    }

    /// Sends one error to the callers of several writes.
    fn reject(&self, batch: Vec<Box<dyn WriteStep>>, e: rusqlite::Error) {
        let e = Arc::new(e);
        batch.into_iter().for_each(|step| step.send_outcome(Err(self.file.shared_error(&e))));
    }

    /// Returns whether the disk is full, the batch contains a write that frees space, and the
    /// reserve file existed; deletes that file.
    fn has_reserve_for(&self, batch: &[Box<dyn WriteStep>], e: &rusqlite::Error) -> bool {
        is_disk_full(e) && batch.iter().any(|step| step.purpose() == WritePurpose::Free) && self.file.release_reserve()
    }

    /// Executes writes in one transaction, which is rolled back on failure.
    fn execute_in_transaction(&mut self, batch: &mut [Box<dyn WriteStep>]) -> BatchOutcome<Vec<Result<()>>> {
        let has_durable = batch.iter().any(|step| step.durability() == WriteDurability::Durable);
        self.set_durability(if has_durable { WriteDurability::Durable } else { WriteDurability::MayBeLost })?;
        let outcomes = self.try_transaction(batch);
        if outcomes.is_err() && !self.conn.is_autocommit() {
            // If even the rollback fails, the next BEGIN reports it.
            let _ = self.statement("ROLLBACK");
        }
        outcomes
    }

    /// Sets `synchronous`: a transaction that may be lost does not wait for an fsync; the next
    /// durable one covers it as well.
    fn set_durability(&mut self, durability: WriteDurability) -> BatchOutcome<()> {
        if self.durability != durability {
            let level = if durability == WriteDurability::Durable { "FULL" } else { "NORMAL" };
            self.conn.pragma_update(None, "synchronous", level)?;
            self.durability = durability;
        }
        Ok(())
    }

    /// Executes and commits one transaction. The outcomes are in the order of the writes.
    fn try_transaction(&self, batch: &mut [Box<dyn WriteStep>]) -> BatchOutcome<Vec<Result<()>>> {
        let changes_before = self.conn.total_changes();
        self.statement("BEGIN IMMEDIATE")?;
        let outcomes = batch.iter_mut().map(|step| self.run_step(&mut **step)).collect::<BatchOutcome<_>>()?;
        self.statement("COMMIT")?;
        let durable_count = batch.iter().filter(|step| step.durability() == WriteDurability::Durable).count();
        if durable_count > 0 {
            metrics::histogram!("tenure_commit_batch_size").record(durable_count as f64);
        }
        if self.conn.total_changes() - changes_before > CACHE_RELEASE_ROWS {
            // The transaction is committed, so a failure to release the cache is harmless.
            let _ = self.conn.release_memory();
        }
        Ok(outcomes)
    }

    fn statement(&self, sql: &str) -> rusqlite::Result<usize> {
        self.conn.prepare_cached(sql)?.execute([])
    }

    /// Executes one write. The inner error is a rejection that has changed nothing.
    fn run_step(&self, step: &mut dyn WriteStep) -> BatchOutcome<Result<()>> {
        let changes_before = self.conn.total_changes();
        match step.run(&self.conn, &self.file) {
            Ok(()) => Ok(Ok(())),
            Err(StoreFault::Sql(e)) if self.conn.is_autocommit() || is_unrelated_to_write(&e) => {
                Err(BatchAbort::All(e))
            }
            Err(StoreFault::Rejected(e)) if self.conn.total_changes() == changes_before => Ok(Err(e)),
            Err(fault) => Err(BatchAbort::Step(fault)),
        }
    }
}

type BatchOutcome<T> = std::result::Result<T, BatchAbort>;

/// Returns whether an error is unrelated to the write that encountered it, such as a full disk.
fn is_unrelated_to_write(e: &rusqlite::Error) -> bool {
    use ErrorCode::{DatabaseBusy, DatabaseLocked, DiskFull, OutOfMemory, SystemIoFailure};
    let codes = [DiskFull, SystemIoFailure, DatabaseBusy, DatabaseLocked, OutOfMemory];
    e.sqlite_error_code().is_some_and(|code| codes.contains(&code))
}
