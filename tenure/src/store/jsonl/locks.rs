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
pub(super) struct FileTurn {
    gates: FileLocks,
    place: LogFile,
    guard: Option<OwnedMutexGuard<()>>,
}

impl FileLocks {
    /// Waits for the lock of a file.
    pub async fn turn(&self, place: LogFile) -> FileTurn {
        let gate = self.map().entry(place.clone()).or_default().clone();
        let guard = Some(gate.lock_owned().await);
        FileTurn { gates: self.clone(), place, guard }
    }

    fn map(&self) -> MutexGuard<'_, LockMap> {
        self.0.lock().expect("nothing panics while it holds the gates")
    }
}

impl Drop for FileTurn {
    fn drop(&mut self) {
        let mut map = self.gates.map();
        drop(self.guard.take());
        // If the map holds the only reference, no task waits for the lock.
        if map.get(&self.place).is_some_and(|gate| Arc::strong_count(gate) == 1) {
            map.remove(&self.place);
        }
    }
}
