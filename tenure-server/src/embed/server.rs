//! Client of an embedding server.

use super::vector::unit;
use crate::config::embeddings::Embeddings;
use crate::llm::upstream::Upstream;
use serde::Deserialize;
use std::time::Duration;
use tenure::RawObject;

/// Maximum number of characters of a text that are sent: most servers reject more than 8,000 tokens.
const MAX_LETTERS: usize = 8000;

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
        let (dimensions, batch) = (config.dimensions, config.batch);
        // A prefix of a longer vector is not comparable with a shorter vector, so the name includes the dimensions.
        let name = dimensions.map_or(config.model.clone(), |n| format!("{}:{n}", config.model));
        let timeout = config.timeout.duration().unwrap_or(Duration::MAX);
        Ok(Self { name, upstream: Upstream::new(&config.server()?)?, dimensions, timeout, batch })
    }

    /// Returns a unit-length embedding for each text. Texts are sent in batches, each with the configured timeout.
    pub async fn embed(&self, texts: Vec<String>) -> Result<Vec<Vec<f32>>, String> {
        let mut vectors = Vec::with_capacity(texts.len());
        for some in texts.chunks(self.batch) {
            let asked = tokio::time::timeout(self.timeout, self.ask(some)).await;
            let too_long = |_| format!("{} did not answer within {:?} (`embeddings.timeout`)", self.name, self.timeout);
            vectors.extend(asked.map_err(too_long)??);
        }
        Ok(vectors)
    }

    async fn ask(&self, texts: &[String]) -> Result<Vec<Vec<f32>>, String> {
        let input: Vec<&str> = texts.iter().map(|text| first(text, MAX_LETTERS)).collect();
        let mut body = RawObject::default();
        body.set("input", input);
        if let Some(dimensions) = self.dimensions {
            body.set("dimensions", dimensions);
        }
        let (_, answer) = self.upstream.embed(body).await.map_err(|e| e.to_string())?;
        let wrong = |why: &str| format!("the server of {} gave no vectors: {why}", self.name);
        let answer: EmbeddingResponse = serde_json::from_str(&answer).map_err(|e| wrong(&e.to_string()))?;
        let mut vectors = vec![Vec::new(); texts.len()];
        for Embedding { index, embedding } in answer.data {
            let place = vectors.get_mut(index).filter(|place| place.is_empty());
            *place.ok_or_else(|| wrong(&format!("one too many, for text {index}")))? = unit(embedding);
        }
        let length = self.dimensions.unwrap_or(vectors.first().map_or(0, Vec::len));
        match vectors.iter().find(|v| v.len() != length || v.is_empty()) {
            Some(v) => Err(wrong(&format!("one has {} numbers instead of {length}", v.len()))),
            None => Ok(vectors),
        }
    }
}

/// Returns the first `letters` characters of a text.
fn first(text: &str, letters: usize) -> &str {
    text.char_indices().nth(letters).map_or(text, |(end, _)| &text[..end])
}
