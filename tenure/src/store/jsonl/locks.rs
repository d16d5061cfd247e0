//! Asynchronous locks per file: writers of one file are serialized, without blocking a thread.

use crate::store::jsonl::paths::LogFile;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::OwnedMutexGuard;

/// The locks of all files that are in use. A lock exists only while it is held or waited for.
#[derive(Clone, Default)]
pub(super) struct FileLocks(Arc<Mutex<LockMap>>);

type LockMap = HashMap<LogFile, Arc<tokio::sync::Mutex<()>>>;

/// The guard of a file lock: no other task changes the file while it is held.
pub(super) struct FileLockGuard {
    locks: FileLocks,
    log_file: LogFile,
    guard: Option<OwnedMutexGuard<()>>,
}

impl FileLocks {
    /// Waits for the lock of a file.
    pub async fn lock(&self, log_file: LogFile) -> FileLockGuard {
        let lock = self.map().entry(log_file.clone()).or_default().clone();
        let guard = Some(lock.lock_owned().await);
        FileLockGuard { locks: self.clone(), log_file, guard }
    }

    fn map(&self) -> MutexGuard<'_, LockMap> {
        self.0.lock().expect("no code panics while holding this lock")
    }
}

impl Drop for FileLockGuard {
    fn drop(&mut self) {
        let mut map = self.locks.map();
        drop(self.guard.take());
        // If the map holds the only reference, no task waits for the lock.
        if map.get(&self.log_file).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            map.remove(&self.log_file);
        }
    }
}
