//! Turns: who works on a file waits until the one before is done, without holding up a thread.

use crate::store::jsonl::paths::Place;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::OwnedMutexGuard;

/// The files that are being worked on, and who waits for them.
#[derive(Clone, Default)]
pub(super) struct Gates(Arc<Mutex<Map>>);

type Map = HashMap<Place, Arc<tokio::sync::Mutex<()>>>;

/// A turn on a file: nobody else changes it while this is held.
pub(super) struct Turn {
    gates: Gates,
    place: Place,
    guard: Option<OwnedMutexGuard<()>>,
}

impl Gates {
    /// Waits for a turn on a file.
    pub async fn turn(&self, place: Place) -> Turn {
        let gate = self.map().entry(place.clone()).or_default().clone();
        let guard = Some(gate.lock_owned().await);
        Turn { gates: self.clone(), place, guard }
    }

    fn map(&self) -> MutexGuard<'_, Map> {
        self.0.lock().expect("nothing panics while it holds the gates")
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut map = self.gates.map();
        drop(self.guard.take());
        // The map's own reference is the last one if nobody waits.
        if map.get(&self.place).is_some_and(|gate| Arc::strong_count(gate) == 1) {
            map.remove(&self.place);
        }
    }
}
