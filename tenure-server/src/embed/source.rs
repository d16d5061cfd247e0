//! The configured embedding backend.

use super::local::LocalModel;
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
    /// A model in this process.
    Local(Arc<LocalModel>),
    /// An OpenAI-compatible embedding server.
    Server(Arc<EmbeddingServer>),
}

impl EmbeddingSource {
    /// Opens the configured backend. A local model is loaded and validated now; a server is contacted on first use.
    pub async fn open(config: &Embeddings) -> anyhow::Result<Self> {
        Ok(match config.backend() {
            EmbeddingBackend::None => Self::None,
            EmbeddingBackend::Local(path) => {
                let path = path.to_owned();
                Self::Local(Arc::new(tokio::task::spawn_blocking(move || LocalModel::load(&path)).await??))
            }
            EmbeddingBackend::Server(_) => Self::Server(Arc::new(EmbeddingServer::new(config)?)),
        })
    }

    /// Returns the backend as the library's `Embedder`, or `None` if no embeddings are configured.
    pub fn embedder(&self) -> Option<Embedder> {
        match self.clone() {
            Self::None => None,
            Self::Local(local) => Some(Embedder::new(local.name().to_owned(), move |texts| {
                let local = local.clone();
                async move { Ok(local.embed(texts).await?.0) }
            })),
            Self::Server(server) => Some(Embedder::new(server.name().to_owned(), move |texts| {
                let server = server.clone();
                async move { server.embed(texts).await }
            })),
        }
    }

    /// Returns the local model if it has this name.
    pub fn local(&self, name: &str) -> Option<&Arc<LocalModel>> {
        match self {
            Self::Local(local) if local.name() == name => Some(local),
            _ => None,
        }
    }

    /// Returns the name of the local model, or `None` if the backend is not local.
    pub fn local_name(&self) -> Option<&str> {
        match self {
            Self::Local(local) => Some(local.name()),
            _ => None,
        }
    }
}
