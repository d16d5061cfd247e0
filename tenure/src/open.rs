//! Opens a store, and wires the parts that react to each other's commits.

use crate::engine::options::Options;
use crate::memory::retract::RetractMemories;
use crate::store;
use crate::store::contract::{OpenRepair, Store};
use crate::tenure::{EndTools, Tenure};
use crate::types::error::Result;
use std::sync::Arc;

impl Tenure {
    /// Opens a store by its URL, with default options: `memory:`, `jsonl:DIR`, `sqlite:FILE` or
    /// `postgres://…`.
    pub async fn open(url: &str) -> Result<Self> {
        Self::open_with(url, Options::default()).await
    }

    /// Opens a store by its URL, with the given options. Repairs that were necessary are logged.
    pub async fn open_with(url: &str, options: Options) -> Result<Self> {
        let (store, repairs) = store::open::open(url).await?;
        for repair in &repairs {
            tracing::warn!(
                location = repair.location,
                repair = repair.description,
                "damage was repaired while the store was opened"
            );
        }
        Ok(Self::wire(store, options, repairs))
    }

    /// Creates a handle on a store that is already open.
    pub fn with_store(store: Arc<dyn Store>, options: Options) -> Self {
        Self::wire(store, options, Vec::new())
    }

    fn wire(store: Arc<dyn Store>, options: Options, repairs: Vec<OpenRepair>) -> Self {
        Self::build(store, options, repairs, vec![Arc::new(RetractMemories), Arc::new(EndTools)])
    }
}
