//! The configured embedding backend.

use super::local::LocalModel;
use super::prefixes::Prefixes;
use super::server::EmbeddingServer;
use crate::config::embeddings::{EmbeddingBackend, Embeddings};
use std::sync::Arc;
use tenure::Embedder;

/// An embedding backend.
#[derive(Clone, Debug, Default)]
pub enum EmbeddingSource {
    /// No embeddings are configured.
    #[default]
    None,
    /// A model in this process, and what it is given before the texts of memories.
    Local(Arc<LocalModel>, Prefixes),
    /// An OpenAI-compatible embedding server, likewise.
    Server(Arc<EmbeddingServer>, Prefixes),
}

impl EmbeddingSource {
    /// Opens the configured backend. A local model is loaded and validated now; a server is contacted on first use.
    pub async fn open(config: &Embeddings) -> anyhow::Result<Self> {
        Ok(match config.backend() {
            EmbeddingBackend::None => Self::None,
            EmbeddingBackend::Local(path) => {
                let path = path.to_owned();
                let model = tokio::task::spawn_blocking(move || LocalModel::load(&path)).await??;
                let prefixes = model.prefixes().clone().or_configured(config);
                Self::Local(Arc::new(model), prefixes)
            }
            EmbeddingBackend::Server(_) => {
                let prefixes = Prefixes::of_family(&config.model).or_configured(config);
                Self::Server(Arc::new(EmbeddingServer::new(config)?), prefixes)
            }
        })
    }

    /// Returns the backend as the library's `Embedder`, or `None` if no embeddings are configured.
    pub fn embedder(&self) -> Option<Embedder> {
        match self.clone() {
            Self::None => None,
            Self::Local(local, prefixes) => {
                Some(Embedder::with_input(prefixes.named(local.name()), move |texts, input| {
                    let (local, texts) = (local.clone(), prefixes.apply(texts, input));
                    async move { Ok(local.embed(texts).await?.0) }
                }))
            }
            Self::Server(server, prefixes) => {
                Some(Embedder::with_input(prefixes.named(server.name()), move |texts, input| {
                    let (server, texts) = (server.clone(), prefixes.apply(texts, input));
                    async move { server.embed(texts).await }
                }))
            }
        }
    }

    /// Returns the local model if it has this name.
    pub fn local(&self, name: &str) -> Option<&Arc<LocalModel>> {
        match self {
            Self::Local(local, _) if local.name() == name => Some(local),
            _ => None,
        }
    }

    /// Returns the name of the local model, or `None` if the backend is not local.
    pub fn local_name(&self) -> Option<&str> {
        match self {
            Self::Local(local, _) => Some(local.name()),
            _ => None,
        }
    }
}
