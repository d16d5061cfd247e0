//! The queue of what is to be written, and whose thread writes it.
//!
//! Whoever brings a step does it itself, with whatever else has queued, if nobody is at it: then no other thread has to wake up
//! for it. Where many write, or where the caller's thread has no time to wait for the disk, a thread of the store's own does it.

use crate::store::sqlite::blocking::Seat;
use crate::store::sqlite::database::File;
use crate::store::sqlite::fault::Done;
use crate::store::sqlite::write_batch::{Job, Left, Purpose, Scribe, Task, Weight, stopped};
use crate::types::error::{Error, Result};
use rusqlite::Connection;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use tokio::sync::{mpsc, oneshot};
use tokio::task;

/// At most so many jobs wait; who brings more waits too.
const MAX_QUEUE: usize = 1024;

/// Takes what is to be written. The thread ends, and the file is closed, when this is dropped.
pub(super) struct Writer {
    jobs: Option<mpsc::Sender<Job>>,
    /// A std mutex: who holds it waits for the disk, and for no task.
    scribe: Arc<Mutex<Scribe>>,
    thread: Option<JoinHandle<()>>,
    /// Held by each mark that is under way.
    marking: Arc<()>,
}

impl Writer {
    pub fn start(file: File, conn: Connection) -> Result<Self> {
        let (jobs, queue) = mpsc::channel(MAX_QUEUE);
        let scribe = Arc::new(Mutex::new(Scribe::new(conn, file, queue)));
        let ours = scribe.clone();
        let thread = thread::Builder::new().name("tenure-sqlite".to_owned());
        let thread = thread.spawn(move || write_for_ever(&ours)).map_err(Error::unavailable)?;
        Ok(Self { jobs: Some(jobs), scribe, thread: Some(thread), marking: Arc::default() })
    }

    /// Does a step in a transaction: wholly or, if it fails, not at all. Durable when it returns.
    pub async fn write<T: Send + 'static>(
        &self,
        work: impl FnMut(&Connection, &File) -> Done<T> + Send + 'static,
    ) -> Result<T> {
        self.step(Weight::Durable, Purpose::Store, work).await
    }

    /// The same for a step that makes room. On a full disk it may use the reserve.
    pub async fn free<T: Send + 'static>(
        &self,
        work: impl FnMut(&Connection, &File) -> Done<T> + Send + 'static,
    ) -> Result<T> {
        self.step(Weight::Durable, Purpose::Free, work).await
    }

    async fn step<T: Send + 'static>(
        &self,
        weight: Weight,
        purpose: Purpose,
        work: impl FnMut(&Connection, &File) -> Done<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, mut answer) = oneshot::channel();
        let mut bell = self.send(Job::Shared(Box::new(Task::new(weight, purpose, work, reply)))).await?;
        if Seat::here().is_some() && self.is_free() {
            // Others may be about to bring theirs, even in the same task: they can share the transaction.
            task::yield_now().await;
            if let Ok(done) = answer.try_recv() {
                bell.thread = None;
                return done;
            }
            if Seat::here().is_some_and(|seat| self.lead(seat) == Left::Nothing) {
                bell.thread = None;
            }
        }
        drop(bell);
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }

    /// Whether nobody is writing, and it were no use to let others gather.
    fn is_free(&self) -> bool {
        self.scribe.try_lock().is_ok_and(|scribe| !scribe.is_crowded())
    }

    /// Does what has queued, if nobody is at it, on this thread.
    fn lead(&self, seat: Seat) -> Left {
        match self.scribe.try_lock() {
            Ok(mut scribe) => seat.wait(|| scribe.share()),
            Err(_) => Left::Something,
        }
    }

    /// Does a step that nobody waits for. It is lost if too much waits already, or in a crash.
    pub fn mark(&self, mut work: impl FnMut(&Connection, &File) -> Done<()> + Send + 'static) {
        let under_way = self.marking.clone();
        let work = move |conn: &Connection, file: &File| {
            let _ = &under_way;
            work(conn, file)
        };
        let job = Job::Shared(Box::new(Task::new(Weight::MayBeLost, Purpose::Store, work, oneshot::channel().0)));
        if let Some(jobs) = &self.jobs
            && jobs.try_send(job).is_ok()
        {
            drop(self.bell());
        }
    }

    /// Waits until the marks that are under way can be seen.
    pub async fn settle(&self) -> Result<()> {
        match Arc::strong_count(&self.marking) {
            1 => Ok(()),
            _ => self.step(Weight::MayBeLost, Purpose::Store, |_, _| Ok(())).await,
        }
    }

    /// Does something outside of any transaction, while nothing else is written here.
    pub async fn alone<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &File) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let work = Box::new(move |conn: &Connection, file: &File| drop(reply.send(work(conn, file))));
        drop(self.send(Job::Alone(work)).await?);
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }

    /// How many jobs wait.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.jobs.as_ref().map_or(0, |jobs| jobs.max_capacity() - jobs.capacity())
    }

    /// Brings a job. It is done when the bell has rung, if not before.
    async fn send(&self, job: Job) -> Result<Bell> {
        let jobs = self.jobs.as_ref().ok_or_else(stopped)?;
        jobs.send(job).await.map_err(|_| stopped())?;
        Ok(self.bell())
    }

    fn bell(&self) -> Bell {
        Bell { thread: self.thread.as_ref().map(|t| t.thread().clone()) }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        drop(self.bell());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Calls the thread that writes when it is dropped: also if whoever brought a job goes away before it is done.
struct Bell {
    thread: Option<Thread>,
}

impl Drop for Bell {
    fn drop(&mut self) {
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }
}

/// The thread: does what has queued whenever the bell rings, until there can be no more.
fn write_for_ever(scribe: &Mutex<Scribe>) {
    let _end = End(scribe);
    while let Ok(mut at_it) = scribe.lock() {
        if at_it.work() == Left::Closed {
            break;
        }
        drop(at_it);
        thread::park();
    }
}

/// Nobody waits for a thread that has ended, not even by a panic.
struct End<'a>(&'a Mutex<Scribe>);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).close();
    }
}
