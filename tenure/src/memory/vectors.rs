//! Embedding vectors of memories. A vector is stored with its memory, quantized to one byte per dimension.

use crate::executors::embedder::{Embedder, EmbeddingInput};
use crate::memory::memories::decode_memory;
use crate::store::item::{Item, Namespace};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::error_source::{BoxError, ErrorSource};
use crate::types::memory::MemoryRecord;
use crate::types::vector::Vector;
use futures_util::future::try_join_all;
use std::time::Duration;

/// Timeout for the embedding of a question or of one memory. When a question exceeds it, the recall
/// falls back to word search.
const EMBED_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for the embedding of a batch of memories, for which no request waits.
const BATCH_TIMEOUT: Duration = Duration::from_secs(300);
/// Number of texts per embedding request.
pub(crate) const BATCH: usize = 32;

impl Tenure {
    /// Computes the vector of a text. `None` if there is no embedder or it fails: the memory is
    /// then found by word search, and embedded later.
    pub(crate) async fn vector_of(&self, text: &str) -> Option<Vec<f32>> {
        let embedder = self.engine.options().embedder.as_ref()?;
        match embed(embedder, vec![text.to_owned()], EmbeddingInput::Passage, EMBED_TIMEOUT).await {
            Ok(vectors) => vectors.into_iter().next(),
            Err(e) => {
                tracing::warn!(reason = %e, "could not embed a memory; it is found by words only until it is embedded");
                None
            }
        }
    }

    /// Converts a vector of the current model into its stored form.
    pub(crate) fn quantized(&self, vector: Option<&[f32]>) -> Option<Vector> {
        Some(Vector::new(self.engine.options().embedder.as_ref()?.name(), vector?))
    }

    /// Computes the vectors of questions, or the reason why there are none: recall then ranks by words.
    pub(crate) async fn question_vectors(&self, questions: &[String]) -> Result<Vec<Vec<f32>>, String> {
        let Some(embedder) = self.engine.options().embedder.as_ref() else {
            return Err("no embedder is configured".to_owned());
        };
        let vectors = embed(embedder, questions.to_vec(), EmbeddingInput::Query, EMBED_TIMEOUT).await;
        vectors.map_err(|e| e.to_string())
    }

    /// Computes missing vectors (of the current model) for the memories of a namespace, and returns
    /// how many were computed. `on_batch` is called after each batch.
    pub(crate) async fn embed_namespace(
        &self,
        namespace: &Namespace,
        embedder: &Embedder,
        on_batch: &mut impl FnMut(usize),
    ) -> Result<usize> {
        let mut after = None::<String>;
        let mut count = 0;
        loop {
            let page = self.store().items(namespace, after.as_deref(), BATCH * 4).await?;
            let Some(last) = page.last() else { return Ok(count) };
            after = Some(last.key.clone());
            let mut missing = Vec::new();
            for item in page {
                let record = decode_memory(&item)?;
                let has_vector = record.vector.is_some_and(|v| v.model == embedder.name());
                missing.extend((!has_vector).then_some((item.key, record.text)));
            }
            for batch in missing.chunks(BATCH) {
                let texts = batch.iter().map(|(_, text)| text.clone()).collect();
                let vectors = embed(embedder, texts, EmbeddingInput::Passage, BATCH_TIMEOUT).await;
                let vectors = vectors.map_err(|e| Error::unavailable_from(ErrorSource::boxed(e)))?;
                // Written concurrently, so that a store can combine the writes.
                let writes = batch
                    .iter()
                    .zip(vectors)
                    .map(|((id, _), vector)| self.store_vector(namespace, id, Vector::new(embedder.name(), &vector)));
                try_join_all(writes).await?;
                count += batch.len();
                on_batch(batch.len());
            }
        }
    }

    async fn store_vector(&self, namespace: &Namespace, id: &str, vector: Vector) -> Result<()> {
        let _memory_guard = self.shared.memories.lock_memory(id).await;
        // The memory may have been removed in the meantime.
        let Some(item) = self.store().get(namespace, id, None).await? else { return Ok(()) };
        let record = MemoryRecord { vector: Some(vector), ..decode_memory(&item)? };
        let item = Item { value: crate::memory::memories::encode_memory(&record), ..item };
        self.store().put(namespace, &item, None).await?;
        self.memory_changed(namespace, id).await
    }

    /// Computes missing vectors (of the current model) for all memories of users and groups, and
    /// returns how many were computed. Memories can be recalled concurrently. Memories of sessions
    /// are embedded when they are recalled.
    pub async fn embed_all(&self, mut on_batch: impl FnMut(usize)) -> Result<usize> {
        let Some(embedder) = self.engine.options().embedder.as_ref() else { return Ok(0) };
        let mut count = 0;
        for namespace in self.memory_namespaces().await? {
            count += self.embed_namespace(&namespace, embedder, &mut on_batch).await?;
        }
        Ok(count)
    }
}

async fn embed(
    embedder: &Embedder,
    texts: Vec<String>,
    input: EmbeddingInput,
    timeout: Duration,
) -> Result<Vec<Vec<f32>>, BoxError> {
    let timed_out = |_| format!("embedder {} timed out after {timeout:?}", embedder.name());
    tokio::time::timeout(timeout, embedder.embed(texts, input)).await.map_err(timed_out)?
}
