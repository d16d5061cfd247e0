//! The one who writes: steps in transactions, and their answers.

use crate::store::sqlite::database::File;
use crate::store::sqlite::fault::{Done, Fault};
use crate::types::error::{Error, Result};
use rusqlite::{Connection, ErrorCode};
use tokio::sync::mpsc::{self, error::TryRecvError};
use tokio::sync::oneshot;

/// At most so many jobs share a transaction.
const MAX_BATCH: usize = 256;

/// A transaction that changes more rows than that is followed by a fresh page cache. Without it every later commit read eight to
/// ten pages again; with it, one or two.
const MANY_ROWS: u64 = 1000;

/// After a transaction that was shared, so many others are left to the store's own thread. Where sixteen write, now and then one is
/// early: if it did not wait for the others, half of the syncs would be for one step.
const CROWD: u32 = 16;

/// What can be brought to be done.
pub(super) enum Job {
    /// In a transaction, which others may share.
    Shared(Box<dyn Step>),
    /// Outside of any transaction.
    Alone(Box<Errand>),
}

type Errand = dyn FnOnce(&Connection, &File) + Send;

/// Whether a step must have reached the disk when it is answered.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Weight {
    Durable,
    MayBeLost,
}

/// Whether a step makes room: only such a step may use the space that is kept in reserve for a full disk.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Purpose {
    Store,
    Free,
}

/// A step in a transaction. It may be run again if the transaction was rolled back.
pub(super) trait Step: Send {
    fn weight(&self) -> Weight;
    fn purpose(&self) -> Purpose;
    fn run(&mut self, conn: &Connection, file: &File) -> Done<()>;
    fn answer(self: Box<Self>, outcome: Result<()>);
}

/// A step, and who waits for what comes of it.
pub(super) struct Task<T, F> {
    work: F,
    weight: Weight,
    purpose: Purpose,
    done: Option<T>,
    reply: oneshot::Sender<Result<T>>,
}

impl<T, F> Task<T, F> {
    pub fn new(weight: Weight, purpose: Purpose, work: F, reply: oneshot::Sender<Result<T>>) -> Self {
        Self { work, weight, purpose, done: None, reply }
    }
}

impl<T: Send, F: FnMut(&Connection, &File) -> Done<T> + Send> Step for Task<T, F> {
    fn weight(&self) -> Weight {
        self.weight
    }

    fn purpose(&self) -> Purpose {
        self.purpose
    }

    fn run(&mut self, conn: &Connection, file: &File) -> Done<()> {
        self.done = Some((self.work)(conn, file)?);
        Ok(())
    }

    fn answer(self: Box<Self>, outcome: Result<()>) {
        let Task { done, reply, .. } = *self;
        // Nobody may be waiting any more.
        let _ = reply.send(outcome.and_then(|()| done.ok_or_else(stopped)));
    }
}

pub(super) fn stopped() -> Error {
    Error::unavailable("the thread that writes the SQLite file has stopped; open the store again")
}

/// Does what has queued. It has the only connection that writes.
pub(super) struct Scribe {
    conn: Connection,
    file: File,
    queue: mpsc::Receiver<Job>,
    /// What comes next, if it is no step: it was taken from the queue already.
    alone: Option<Box<Errand>>,
    /// What a COMMIT is worth as the connection is set now.
    weight: Weight,
    /// How many transactions of one step must follow until it counts as alone again.
    crowd: u32,
}

/// What is left of the queue.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Left {
    Nothing,
    Something,
    /// Nothing, and nobody can bring more.
    Closed,
}

/// Why a transaction was rolled back.
enum Stop {
    /// One step can not be done; the others may be.
    Step(Fault),
    /// Nothing can be written.
    All(rusqlite::Error),
}

impl From<rusqlite::Error> for Stop {
    fn from(e: rusqlite::Error) -> Self {
        Stop::All(e)
    }
}

impl Scribe {
    pub fn new(conn: Connection, file: File, queue: mpsc::Receiver<Job>) -> Self {
        Self { conn, file, queue, alone: None, weight: Weight::Durable, crowd: 0 }
    }

    /// Whether many write: then it pays to let them gather.
    pub fn is_crowded(&self) -> bool {
        self.crowd > 0
    }

    /// Does everything that has queued.
    pub fn work(&mut self) -> Left {
        loop {
            let left = self.share();
            match self.alone.take() {
                Some(work) => work(&self.conn, &self.file),
                None if left != Left::Something => return left,
                None => {}
            }
        }
    }

    /// Does the steps that come next in one transaction, as many as may share it.
    pub fn share(&mut self) -> Left {
        let mut batch = Vec::new();
        let mut left = Left::Something;
        while batch.len() < MAX_BATCH && self.alone.is_none() {
            match self.queue.try_recv() {
                Ok(Job::Shared(step)) => batch.push(step),
                Ok(Job::Alone(work)) => self.alone = Some(work),
                Err(end) => {
                    left = if end == TryRecvError::Empty { Left::Nothing } else { Left::Closed };
                    break;
                }
            }
        }
        if batch.is_empty() {
            return left;
        }
        let durable = batch.iter().filter(|step| step.weight() == Weight::Durable).count();
        self.crowd = if durable > 1 { CROWD } else { self.crowd.saturating_sub(1) };
        self.take(batch);
        // More may have come meanwhile.
        if self.queue.is_empty() { left } else { Left::Something }
    }

    /// Takes no more, and forgets what has queued: whoever waits for it is told.
    pub fn close(&mut self) {
        self.queue.close();
        self.alone = None;
        while self.queue.try_recv().is_ok() {}
    }

    /// Does steps in one transaction and answers them.
    fn take(&mut self, mut batch: Vec<Box<dyn Step>>) {
        match self.together(&mut batch) {
            Ok(outcomes) => batch.into_iter().zip(outcomes).for_each(|(step, outcome)| step.answer(outcome)),
            Err(Stop::All(e)) if self.has_reserve_for(&batch, &e) => {
                let (free, others): (Vec<_>, Vec<_>) = batch.into_iter().partition(|s| s.purpose() == Purpose::Free);
                others.into_iter().for_each(|step| step.answer(Err(self.file.error(&e))));
                self.take(free);
                self.file.regain_reserve(&self.conn);
            }
            Err(Stop::All(e)) => batch.into_iter().for_each(|step| step.answer(Err(self.file.error(&e)))),
            Err(Stop::Step(fault)) => match (batch.pop(), batch.is_empty()) {
                (Some(step), true) => step.answer(Err(self.file.told(fault))),
                (last, _) => batch.into_iter().chain(last).for_each(|step| self.take(vec![step])),
            },
        }
    }

    /// Whether the disk is full, somebody makes room, and the reserve was there: it is given up.
    fn has_reserve_for(&self, batch: &[Box<dyn Step>], e: &rusqlite::Error) -> bool {
        let full = matches!(self.file.error(e), Error::Full { .. });
        full && batch.iter().any(|step| step.purpose() == Purpose::Free) && self.file.release_reserve()
    }

    fn together(&mut self, batch: &mut [Box<dyn Step>]) -> Outcome<Vec<Result<()>>> {
        let durable = batch.iter().any(|step| step.weight() == Weight::Durable);
        self.set(if durable { Weight::Durable } else { Weight::MayBeLost })?;
        let outcomes = self.attempt(batch);
        if outcomes.is_err() && !self.conn.is_autocommit() {
            // If even this fails, the next BEGIN says so.
            let _ = self.statement("ROLLBACK");
        }
        outcomes
    }

    /// A transaction that may be lost need not wait for the disk: the next one that does covers it too.
    fn set(&mut self, weight: Weight) -> Outcome<()> {
        if self.weight != weight {
            let level = if weight == Weight::Durable { "FULL" } else { "NORMAL" };
            self.conn.pragma_update(None, "synchronous", level)?;
            self.weight = weight;
        }
        Ok(())
    }

    fn attempt(&self, batch: &mut [Box<dyn Step>]) -> Outcome<Vec<Result<()>>> {
        let before = self.conn.total_changes();
        self.statement("BEGIN IMMEDIATE")?;
        let outcomes = batch.iter_mut().map(|step| self.run(&mut **step)).collect::<Outcome<_>>()?;
        self.statement("COMMIT")?;
        let durable = batch.iter().filter(|step| step.weight() == Weight::Durable).count();
        if durable > 0 {
            metrics::histogram!("tenure_commit_batch_size").record(durable as f64);
        }
        if self.conn.total_changes() - before > MANY_ROWS {
            // It is committed; what becomes of the cache changes nothing.
            let _ = self.conn.release_memory();
        }
        Ok(outcomes)
    }

    fn statement(&self, sql: &str) -> rusqlite::Result<usize> {
        self.conn.prepare_cached(sql)?.execute([])
    }

    /// Does one step. The inner error is a refusal that has changed nothing.
    fn run(&self, step: &mut dyn Step) -> Outcome<Result<()>> {
        let before = self.conn.total_changes();
        match step.run(&self.conn, &self.file) {
            Ok(()) => Ok(Ok(())),
            Err(Fault::Sql(e)) if self.conn.is_autocommit() || is_general(&e) => Err(Stop::All(e)),
            Err(Fault::Told(e)) if self.conn.total_changes() == before => Ok(Err(e)),
            Err(fault) => Err(Stop::Step(fault)),
        }
    }
}

type Outcome<T> = std::result::Result<T, Stop>;

/// Whether an error says nothing about the step that met it.
fn is_general(e: &rusqlite::Error) -> bool {
    use ErrorCode::{DatabaseBusy, DatabaseLocked, DiskFull, OutOfMemory, SystemIoFailure};
    let general = [DiskFull, SystemIoFailure, DatabaseBusy, DatabaseLocked, OutOfMemory];
    e.sqlite_error_code().is_some_and(|code| general.contains(&code))
}
