//! Group commit: executes queued writes in shared transactions and sends their results.
//!
//! Invariant: a write is acknowledged only after the transaction that contains it has committed.

use crate::store::sqlite::database::Database;
use crate::store::sqlite::fault::{StoreFault, StoreResult};
use crate::types::error::{Error, Result};
use rusqlite::{Connection, ErrorCode};
use tokio::sync::mpsc::{self, error::TryRecvError};
use tokio::sync::oneshot;

/// Maximum number of jobs in one transaction.
const MAX_BATCH: usize = 256;

/// Number of changed rows above which a transaction is followed by releasing the page cache.
/// Without this every later commit read eight to ten pages again; with it, one or two.
const MANY_ROWS: u64 = 1000;

/// Number of transactions, after a batched one, that are left to the writer thread instead of the
/// caller's. Under load this lets writers accumulate: of sixteen writers, one is occasionally
/// early, and if it committed at once, half of the fsyncs would be for a single write.
const CROWD: u32 = 16;

/// A job for the writer.
pub(super) enum WriteJob {
    /// A write in a transaction, which other writes may share.
    Shared(Box<dyn WriteStep>),
    /// Exclusive work outside of any transaction.
    Alone(Box<ExclusiveJob>),
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
    fn weight(&self) -> WriteDurability;
    fn purpose(&self) -> WritePurpose;
    fn run(&mut self, conn: &Connection, file: &Database) -> StoreResult<()>;
    fn answer(self: Box<Self>, outcome: Result<()>);
}

/// A write, together with the channel for its result.
pub(super) struct WriteTask<T, F> {
    work: F,
    weight: WriteDurability,
    purpose: WritePurpose,
    done: Option<T>,
    reply: oneshot::Sender<Result<T>>,
}

impl<T, F> WriteTask<T, F> {
    pub fn new(weight: WriteDurability, purpose: WritePurpose, work: F, reply: oneshot::Sender<Result<T>>) -> Self {
        Self { work, weight, purpose, done: None, reply }
    }
}

impl<T: Send, F: FnMut(&Connection, &Database) -> StoreResult<T> + Send> WriteStep for WriteTask<T, F> {
    fn weight(&self) -> WriteDurability {
        self.weight
    }

    fn purpose(&self) -> WritePurpose {
        self.purpose
    }

    fn run(&mut self, conn: &Connection, file: &Database) -> StoreResult<()> {
        self.done = Some((self.work)(conn, file)?);
        Ok(())
    }

    fn answer(self: Box<Self>, outcome: Result<()>) {
        let WriteTask { done, reply, .. } = *self;
        // The caller may have been cancelled.
        let _ = reply.send(outcome.and_then(|()| done.ok_or_else(stopped)));
    }
}

/// The error after the writer thread has ended.
pub(super) fn stopped() -> Error {
    Error::unavailable("the thread that writes the SQLite file has stopped; open the store again")
}

/// The executor of the write queue. It owns the only connection that writes.
pub(super) struct WriteExecutor {
    conn: Connection,
    file: Database,
    queue: mpsc::Receiver<WriteJob>,
    /// Exclusive work that was already taken from the queue, and is executed next.
    alone: Option<Box<ExclusiveJob>>,
    /// The durability of a COMMIT with the connection's current `synchronous` setting.
    weight: WriteDurability,
    /// The number of transactions with a single write that must follow before the load counts as
    /// low again.
    crowd: u32,
}

/// The state of the queue after a batch.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum QueueState {
    Nothing,
    Something,
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
        Self { conn, file, queue, alone: None, weight: WriteDurability::Durable, crowd: 0 }
    }

    /// Returns whether writers are concurrent, so that letting them accumulate pays.
    pub fn is_crowded(&self) -> bool {
        self.crowd > 0
    }

    /// Executes all queued jobs.
    pub fn work(&mut self) -> QueueState {
        loop {
            let left = self.share();
            match self.alone.take() {
                Some(work) => work(&self.conn, &self.file),
                None if left != QueueState::Something => return left,
                None => {}
            }
        }
    }

    /// Executes the next queued writes in one transaction, at most [`MAX_BATCH`].
    pub fn share(&mut self) -> QueueState {
        let mut batch = Vec::new();
        let mut left = QueueState::Something;
        while batch.len() < MAX_BATCH && self.alone.is_none() {
            match self.queue.try_recv() {
                Ok(WriteJob::Shared(step)) => batch.push(step),
                Ok(WriteJob::Alone(work)) => self.alone = Some(work),
                Err(end) => {
                    left = if end == TryRecvError::Empty { QueueState::Nothing } else { QueueState::Closed };
                    break;
                }
            }
        }
        if batch.is_empty() {
            return left;
        }
        let durable = batch.iter().filter(|step| step.weight() == WriteDurability::Durable).count();
        self.crowd = if durable > 1 { CROWD } else { self.crowd.saturating_sub(1) };
        self.take(batch);
        // More jobs may have been queued in the meantime.
        if self.queue.is_empty() { left } else { QueueState::Something }
    }

    /// Closes the queue and drops the queued jobs, which notifies their callers of the failure.
    pub fn close(&mut self) {
        self.queue.close();
        self.alone = None;
        while self.queue.try_recv().is_ok() {}
    }

    /// Executes writes in one transaction and sends their results. A batch in which one write fails
    /// is retried one write at a time.
    fn take(&mut self, mut batch: Vec<Box<dyn WriteStep>>) {
        match self.together(&mut batch) {
            Ok(outcomes) => batch.into_iter().zip(outcomes).for_each(|(step, outcome)| step.answer(outcome)),
            Err(BatchAbort::All(e)) if self.has_reserve_for(&batch, &e) => {
                let (free, others): (Vec<_>, Vec<_>) =
                    batch.into_iter().partition(|s| s.purpose() == WritePurpose::Free);
                others.into_iter().for_each(|step| step.answer(Err(self.file.error(&e))));
                self.take(free);
                self.file.regain_reserve(&self.conn);
            }
            Err(BatchAbort::All(e)) => batch.into_iter().for_each(|step| step.answer(Err(self.file.error(&e)))),
            Err(BatchAbort::Step(fault)) => match (batch.pop(), batch.is_empty()) {
                (Some(step), true) => step.answer(Err(self.file.told(fault))),
                (last, _) => batch.into_iter().chain(last).for_each(|step| self.take(vec![step])),
            },
        }
    }

    /// Returns whether the disk is full, the batch contains a write that frees space, and the
    /// reserve file existed; deletes that file.
    fn has_reserve_for(&self, batch: &[Box<dyn WriteStep>], e: &rusqlite::Error) -> bool {
        let full = matches!(self.file.error(e), Error::Full { .. });
        full && batch.iter().any(|step| step.purpose() == WritePurpose::Free) && self.file.release_reserve()
    }

    /// Executes writes in one transaction, which is rolled back on failure.
    fn together(&mut self, batch: &mut [Box<dyn WriteStep>]) -> BatchOutcome<Vec<Result<()>>> {
        let durable = batch.iter().any(|step| step.weight() == WriteDurability::Durable);
        self.set(if durable { WriteDurability::Durable } else { WriteDurability::MayBeLost })?;
        let outcomes = self.attempt(batch);
        if outcomes.is_err() && !self.conn.is_autocommit() {
            // If even the rollback fails, the next BEGIN reports it.
            let _ = self.statement("ROLLBACK");
        }
        outcomes
    }

    /// Sets `synchronous`: a transaction that may be lost does not wait for an fsync; the next
    /// durable one covers it as well.
    fn set(&mut self, weight: WriteDurability) -> BatchOutcome<()> {
        if self.weight != weight {
            let level = if weight == WriteDurability::Durable { "FULL" } else { "NORMAL" };
            self.conn.pragma_update(None, "synchronous", level)?;
            self.weight = weight;
        }
        Ok(())
    }

    /// Executes and commits one transaction. The outcomes are in the order of the writes.
    fn attempt(&self, batch: &mut [Box<dyn WriteStep>]) -> BatchOutcome<Vec<Result<()>>> {
        let before = self.conn.total_changes();
        self.statement("BEGIN IMMEDIATE")?;
        let outcomes = batch.iter_mut().map(|step| self.run(&mut **step)).collect::<BatchOutcome<_>>()?;
        self.statement("COMMIT")?;
        let durable = batch.iter().filter(|step| step.weight() == WriteDurability::Durable).count();
        if durable > 0 {
            metrics::histogram!("tenure_commit_batch_size").record(durable as f64);
        }
        if self.conn.total_changes() - before > MANY_ROWS {
            // The transaction is committed, so a failure to release the cache is harmless.
            let _ = self.conn.release_memory();
        }
        Ok(outcomes)
    }

    fn statement(&self, sql: &str) -> rusqlite::Result<usize> {
        self.conn.prepare_cached(sql)?.execute([])
    }

    /// Executes one write. The inner error is a rejection that has changed nothing.
    fn run(&self, step: &mut dyn WriteStep) -> BatchOutcome<Result<()>> {
        let before = self.conn.total_changes();
        match step.run(&self.conn, &self.file) {
            Ok(()) => Ok(Ok(())),
            Err(StoreFault::Sql(e)) if self.conn.is_autocommit() || is_general(&e) => Err(BatchAbort::All(e)),
            Err(StoreFault::Told(e)) if self.conn.total_changes() == before => Ok(Err(e)),
            Err(fault) => Err(BatchAbort::Step(fault)),
        }
    }
}

type BatchOutcome<T> = std::result::Result<T, BatchAbort>;

/// Returns whether an error is unrelated to the write that encountered it, such as a full disk.
fn is_general(e: &rusqlite::Error) -> bool {
    use ErrorCode::{DatabaseBusy, DatabaseLocked, DiskFull, OutOfMemory, SystemIoFailure};
    let general = [DiskFull, SystemIoFailure, DatabaseBusy, DatabaseLocked, OutOfMemory];
    e.sqlite_error_code().is_some_and(|code| general.contains(&code))
}
