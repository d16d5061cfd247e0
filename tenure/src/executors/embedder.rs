//! The embedder: a callback that computes embedding vectors of texts for similarity search. It is
//! configured when a `Tenure` is opened.

use crate::types::error_source::BoxError;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

type EmbeddingFuture = Pin<Box<dyn Future<Output = Result<Vec<Vec<f32>>, BoxError>> + Send>>;

/// What texts are embedded for. Some models are trained to embed questions and stored texts
/// differently, for example by a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EmbeddingInput {
    /// Questions, whose nearest passages are searched for.
    Query,
    /// Texts that are stored, to be found later.
    Passage,
}

/// Computes embedding vectors. Cheap to clone.
///
/// ```
/// use tenure::Embedder;
/// use tenure::memory::EmbeddingInput;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tenure::BoxError> {
/// let embedder = Embedder::new("length", |texts: Vec<String>| async move {
///     Ok(texts.iter().map(|text| vec![text.len() as f32]).collect())
/// });
/// assert_eq!(embedder.embed(vec!["abc".into()], EmbeddingInput::Query).await?, vec![vec![3.0]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Embedder {
    name: Arc<str>,
    compute: Arc<dyn Fn(Vec<String>, EmbeddingInput) -> EmbeddingFuture + Send + Sync>,
}

impl Embedder {
    /// Creates an embedder of a model that embeds questions and stored texts alike. `name`
    /// identifies the model: vectors of different names are never compared. `compute` returns one
    /// vector per text, all of the same length, or an error.
    pub fn new<F, Fut>(name: impl Into<String>, compute: F) -> Self
    where
        F: Fn(Vec<String>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<Vec<f32>>, BoxError>> + Send + 'static,
    {
        Self::with_input(name, move |texts, _| compute(texts))
    }

    /// Creates an embedder whose callback receives what the texts are embedded for. Otherwise like
    /// [`Embedder::new`]. Another treatment of either input, such as another prefix, requires
    /// another `name`.
    pub fn with_input<F, Fut>(name: impl Into<String>, compute: F) -> Self
    where
        F: Fn(Vec<String>, EmbeddingInput) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<Vec<f32>>, BoxError>> + Send + 'static,
    {
        Self { name: name.into().into(), compute: Arc::new(move |texts, input| Box::pin(compute(texts, input))) }
    }

    /// The name of the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns one vector per text, in the same order. Fails if the callback returns a wrong number
    /// of vectors, different lengths, or values that are not finite.
    pub async fn embed(&self, texts: Vec<String>, input: EmbeddingInput) -> Result<Vec<Vec<f32>>, BoxError> {
        let count = texts.len();
        let vectors = (self.compute)(texts, input).await?;
        let length = vectors.first().map_or(0, Vec::len);
        if vectors.len() == count && vectors.iter().all(|v| v.len() == length && v.iter().all(|x| x.is_finite())) {
            Ok(vectors)
        } else {
            let reason =
                format!("embedder {} must return {count} finite vectors of equal length, one per text", self.name);
            Err(reason.into())
        }
    }
}

impl fmt::Debug for Embedder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Embedder({})", self.name)
    }
}
