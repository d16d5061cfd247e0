//! Vectors of texts, so that they can be found by what they mean. Who makes them is chosen when a house is opened.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

type Made = Pin<Box<dyn Future<Output = Result<Vec<Vec<f32>>, String>> + Send>>;

/// Makes vectors of texts. Cheap to clone.
#[derive(Clone)]
pub struct Embedder {
    name: Arc<str>,
    make: Arc<dyn Fn(Vec<String>) -> Made + Send + Sync>,
}

impl Embedder {
    /// An embedder with a name that stands for its model: vectors of different names are never compared. `make` gives one vector for
    /// each text, all of one length, or says why it can not.
    pub fn new<F, Fut>(name: impl Into<String>, make: F) -> Self
    where
        F: Fn(Vec<String>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<Vec<f32>>, String>> + Send + 'static,
    {
        Self { name: name.into().into(), make: Arc::new(move |texts| Box::pin(make(texts))) }
    }

    /// The name of its model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// One vector for each text, in their order.
    pub async fn embed(&self, texts: Vec<String>) -> Result<Vec<Vec<f32>>, String> {
        let count = texts.len();
        let vectors = (self.make)(texts).await?;
        let length = vectors.first().map_or(0, Vec::len);
        match vectors.len() == count && vectors.iter().all(|v| v.len() == length && v.iter().all(|x| x.is_finite())) {
            true => Ok(vectors),
            false => Err(format!("{} gave vectors that do not fit the {count} texts", self.name)),
        }
    }
}

impl fmt::Debug for Embedder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Embedder({})", self.name)
    }
}
