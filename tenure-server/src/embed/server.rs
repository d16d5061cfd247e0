//! Client of an embedding server.

use super::vector::normalize;
use crate::config::embeddings::Embeddings;
use crate::llm::upstream::Upstream;
use serde::Deserialize;
use std::time::Duration;
use tenure::BoxError;
use tenure::session::RawObject;

/// Maximum number of characters of a text that are sent: most servers reject more than 8,000 tokens.
const MAX_CHARS: usize = 8000;

/// An OpenAI-compatible embedding server.
#[derive(Debug)]
pub struct EmbeddingServer {
    name: String,
    upstream: Upstream,
    dimensions: Option<usize>,
    timeout: Duration,
    batch: usize,
}

/// The deserialized fields of a response.
#[derive(Deserialize)]
struct EmbeddingResponse {
    data: Vec<Embedding>,
}

#[derive(Deserialize)]
struct Embedding {
    index: usize,
    embedding: Vec<f32>,
}

impl EmbeddingServer {
    /// Returns the name of the embedding space: the model's name, with the number of dimensions if that is configured.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Creates a client from the configuration. The server is contacted on first use.
    pub fn new(config: &Embeddings) -> anyhow::Result<Self> {
        let dimensions = config.dimensions;
        let batch = config.batch;
        // A prefix of a longer vector is not comparable with a shorter vector, so the name includes the dimensions.
        let name = dimensions.map_or(config.model.clone(), |n| format!("{}:{n}", config.model));
        let timeout = config.timeout.duration().unwrap_or(Duration::MAX);
        Ok(Self { name, upstream: Upstream::new(&config.server()?)?, dimensions, timeout, batch })
    }

    /// Returns a unit-length embedding for each text. Texts are sent in batches, each with the configured timeout.
    pub async fn embed(&self, texts: Vec<String>) -> Result<Vec<Vec<f32>>, BoxError> {
        let mut vectors = Vec::with_capacity(texts.len());
        for batch in texts.chunks(self.batch) {
            let response = tokio::time::timeout(self.timeout, self.request_embeddings(batch)).await;
            let too_long =
                |_| format!("{} did not respond within {:?} (`embeddings.timeout`)", self.name, self.timeout);
            vectors.extend(response.map_err(too_long)??);
        }
        Ok(vectors)
    }

    async fn request_embeddings(&self, texts: &[String]) -> Result<Vec<Vec<f32>>, BoxError> {
        let input: Vec<&str> = texts.iter().map(|text| truncate(text, MAX_CHARS)).collect();
        let mut body = RawObject::default();
        body.set("input", input);
        if let Some(dimensions) = self.dimensions {
            body.set("dimensions", dimensions);
        }
        let (_, response) = self.upstream.embed(body).await?;
        let invalid_response =
            |reason: &str| format!("invalid response of the embedding server for {}: {reason}", self.name);
        let response: EmbeddingResponse =
            serde_json::from_str(&response).map_err(|e| invalid_response(&e.to_string()))?;
        let mut vectors = vec![Vec::new(); texts.len()];
        for Embedding { index, embedding } in response.data {
            let slot = vectors.get_mut(index).filter(|slot| slot.is_empty());
            *slot.ok_or_else(|| invalid_response(&format!("unexpected or duplicate embedding for text {index}")))? =
                normalize(embedding);
        }
        let length = self.dimensions.unwrap_or(vectors.first().map_or(0, Vec::len));
        match vectors.iter().find(|v| v.len() != length || v.is_empty()) {
            Some(v) => {
                Err(invalid_response(&format!("an embedding has {} dimensions instead of {length}", v.len())).into())
            }
            None => Ok(vectors),
        }
    }
}

/// Returns the first `max_chars` characters of a text.
fn truncate(text: &str, max_chars: usize) -> &str {
    text.char_indices().nth(max_chars).map_or(text, |(end, _)| &text[..end])
}
