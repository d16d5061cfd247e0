//! The thread that writes.

use super::file::File;
use super::{Done, Fault};
use crate::error::{Error, Result};
use rusqlite::{Connection, ErrorCode};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use tokio::sync::{mpsc, oneshot};

/// At most so many jobs wait; who brings more waits too.
const MAX_QUEUE: usize = 1024;

/// At most so many jobs share a transaction.
const MAX_BATCH: usize = 256;

/// A transaction that changes more rows than that is followed by a fresh page cache. Without it every later commit read eight to
/// ten pages again; with it, one or two.
const MANY_ROWS: u64 = 1000;

/// Sends jobs to the thread that writes. The thread ends, and the file is closed, when this is dropped.
pub(super) struct Writer {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Held by each mark that is under way.
    marking: Arc<()>,
}

/// What the thread does.
enum Job {
    /// In a transaction, which others may share.
    Shared(Box<dyn Step>),
    /// Outside of any transaction.
    Alone(Box<Errand>),
}

type Errand = dyn FnOnce(&Connection, &File) + Send;

/// Whether a step must have reached the disk when it is answered.
#[derive(Clone, Copy, PartialEq)]
enum Weight {
    Durable,
    MayBeLost,
}

/// A step in a transaction. It may be run again if the transaction was rolled back.
trait Step: Send {
    fn weight(&self) -> Weight;
    fn run(&mut self, conn: &Connection, file: &File) -> Done<()>;
    fn answer(self: Box<Self>, outcome: Result<()>);
}

struct Task<T, F> {
    work: F,
    weight: Weight,
    done: Option<T>,
    reply: oneshot::Sender<Result<T>>,
}

impl<T: Send, F: FnMut(&Connection, &File) -> Done<T> + Send> Step for Task<T, F> {
    fn weight(&self) -> Weight {
        self.weight
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

impl Writer {
    pub fn start(file: File, conn: Connection) -> Result<Self> {
        let (jobs, queue) = mpsc::channel(MAX_QUEUE);
        let thread = thread::Builder::new().name("tenure-sqlite".to_owned());
        let scribe = Scribe { conn, file, weight: Weight::Durable };
        let thread = thread.spawn(move || scribe.work(queue)).map_err(Error::unavailable)?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), marking: Arc::default() })
    }

    /// Does a step in a transaction: wholly or, if it fails, not at all. Durable when it returns.
    pub async fn write<T: Send + 'static>(
        &self,
        work: impl FnMut(&Connection, &File) -> Done<T> + Send + 'static,
    ) -> Result<T> {
        self.step(Weight::Durable, work).await
    }

    async fn step<T: Send + 'static>(
        &self,
        weight: Weight,
        work: impl FnMut(&Connection, &File) -> Done<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.send(Job::Shared(Box::new(Task { work, weight, done: None, reply }))).await?;
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }

    /// Does a step that nobody waits for. It is lost if too much waits already, or in a crash.
    pub fn mark(&self, mut work: impl FnMut(&Connection, &File) -> Done<()> + Send + 'static) {
        let under_way = self.marking.clone();
        let work = move |conn: &Connection, file: &File| {
            let _ = &under_way;
            work(conn, file)
        };
        let task = Task { work, weight: Weight::MayBeLost, done: None, reply: oneshot::channel().0 };
        if let Some(jobs) = &self.jobs {
            let _ = jobs.try_send(Job::Shared(Box::new(task)));
        }
    }

    /// Waits until the marks that are under way can be seen.
    pub async fn settle(&self) -> Result<()> {
        match Arc::strong_count(&self.marking) {
            1 => Ok(()),
            _ => self.step(Weight::MayBeLost, |_, _| Ok(())).await,
        }
    }

    /// Does something outside of any transaction, while nothing else is written here.
    pub async fn alone<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &File) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let work = Box::new(move |conn: &Connection, file: &File| drop(reply.send(work(conn, file))));
        self.send(Job::Alone(work)).await?;
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }

    /// How many jobs wait.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.jobs.as_ref().map_or(0, |jobs| jobs.max_capacity() - jobs.capacity())
    }

    async fn send(&self, job: Job) -> Result<()> {
        let jobs = self.jobs.as_ref().ok_or_else(stopped)?;
        jobs.send(job).await.map_err(|_| stopped())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn stopped() -> Error {
    Error::unavailable("the thread that writes the SQLite file has stopped; open the store again")
}

/// The thread's own side.
struct Scribe {
    conn: Connection,
    file: File,
    /// What a COMMIT is worth as the connection is set now.
    weight: Weight,
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
    fn work(mut self, mut queue: mpsc::Receiver<Job>) {
        let mut next = None;
        while let Some(job) = next.take().or_else(|| queue.blocking_recv()) {
            let first = match job {
                Job::Shared(step) => step,
                Job::Alone(work) => {
                    work(&self.conn, &self.file);
                    continue;
                }
            };
            let mut batch = vec![first];
            while batch.len() < MAX_BATCH {
                match queue.try_recv() {
                    Ok(Job::Shared(step)) => batch.push(step),
                    Ok(alone) => {
                        next = Some(alone);
                        break;
                    }
                    Err(_) => break,
                }
            }
            self.take(batch);
        }
    }

    /// Does steps in one transaction and answers them.
    fn take(&mut self, mut batch: Vec<Box<dyn Step>>) {
        match self.together(&mut batch) {
            Ok(outcomes) => batch.into_iter().zip(outcomes).for_each(|(step, outcome)| step.answer(outcome)),
            Err(Stop::All(e)) => batch.into_iter().for_each(|step| step.answer(Err(self.file.error(&e)))),
            Err(Stop::Step(fault)) => match (batch.pop(), batch.is_empty()) {
                (Some(step), true) => step.answer(Err(self.file.told(fault))),
                (last, _) => batch.into_iter().chain(last).for_each(|step| self.take(vec![step])),
            },
        }
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
