//! A bounded pool of reader threads, separate from the runtime's blocking threads. Reads therefore
//! queue only behind reads, and the number of threads (each of which retains allocator memory) does
//! not grow with the number of clients (D-032).

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

type ReadJob = Box<dyn FnOnce() + Send>;

/// The thread pool. Threads are started on demand; dropping the pool ends them after the queued
/// jobs have completed.
pub(super) struct Readers {
    shared: Arc<ReadersState>,
    max_threads: usize,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct ReadersState {
    queue: Mutex<ReadQueue>,
    ready: Condvar,
}

#[derive(Default)]
struct ReadQueue {
    jobs: VecDeque<ReadJob>,
    /// The number of threads that wait for a job.
    idle: usize,
    closed: bool,
}

impl Readers {
    pub fn new(max_threads: usize) -> Self {
        Self { shared: Arc::default(), max_threads, threads: Mutex::default() }
    }

    /// Runs a job on one of the threads; a panic ends only that job. Fails if no thread can be
    /// started.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let mut queue = self.shared.queue();
        queue.jobs.push_back(Box::new(job));
        let has_idle_thread = queue.jobs.len() <= queue.idle;
        drop(queue);
        self.shared.ready.notify_one();
        if has_idle_thread {
            return Ok(());
        }
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if threads.len() < self.max_threads {
            let shared = self.shared.clone();
            let thread = thread::Builder::new().name("tenure-read".to_owned()).spawn(move || shared.run_jobs());
            match thread {
                Ok(thread) => threads.push(thread),
                // The existing threads will execute the job.
                Err(e) if !threads.is_empty() => {
                    tracing::warn!(error = %e, "could not start another reader thread; using the existing ones")
                }
                Err(e) => {
                    self.shared.queue().jobs.clear();
                    return Err(e);
                }
            }
        }
        Ok(())
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.shared.queue().closed = true;
        self.shared.ready.notify_all();
        for thread in self.threads.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = thread.join();
        }
    }
}

impl ReadersState {
    fn queue(&self) -> MutexGuard<'_, ReadQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes jobs until the pool is closed and the queue is empty.
    fn run_jobs(&self) {
        let mut queue = self.queue();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                // The caller notices the panic because the result channel is closed.
                let _ = catch_unwind(AssertUnwindSafe(job));
                queue = self.queue();
            } else if queue.closed {
                return;
            } else {
                queue.idle += 1;
                queue = self.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
    }
}
