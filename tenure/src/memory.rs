//! Long-term memory of sessions, users and groups: storage, recall, embeddings, consolidation,
//! retraction.
//!
//! ```
//! use tenure::{Embedder, Options, Tenure};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tenure::Result<()> {
//! // Any function from texts to vectors. Without an embedder, recall ranks by words.
//! let embedder = Embedder::new("length", |texts: Vec<String>| async move {
//!     Ok(texts.iter().map(|text| vec![text.len() as f32, 1.0]).collect())
//! });
//! let tenure = Tenure::open_with("memory:", Options { embedder: Some(embedder), ..Options::default() }).await?;
//! let ada = tenure.user("acme", "ada")?;
//! ada.remember("Ada lives in Bern.").await?;
//! assert_eq!(ada.recall("Where is Bern?", 1).await?.memories.len(), 1);
//! # Ok(())
//! # }
//! ```

pub(crate) mod dream;
pub(crate) mod index;
pub(crate) mod injection;
pub(crate) mod memories;
pub(crate) mod preferences;
pub(crate) mod recall;
pub(crate) mod retract;
pub(crate) mod supersede;
pub(crate) mod tool;
pub(crate) mod vectors;

pub use crate::executors::embedder::EmbeddingInput;
pub use crate::types::memory::{Memory, MemoryKind, MemorySource};
pub use dream::{Dream, DreamRules, PromotedMemory};
pub use memories::{MemoryTarget, NewMemory};
pub use preferences::MAX_PREFERENCES;
pub use recall::{InjectedMemory, MAX_QUESTIONS, RecallHit, RecallResult};
