//! What makes vectors, as it is configured.

use super::local::LocalModel;
use super::server::EmbeddingServer;
use crate::config::embeddings::{EmbeddingBackend, Embeddings};
use std::sync::Arc;
use tenure::Embedder;

/// What makes vectors.
#[derive(Clone, Debug, Default)]
pub enum EmbeddingSource {
    /// Nothing.
    #[default]
    None,
    /// A model in this process.
    Local(Arc<LocalModel>),
    /// A server.
    Server(Arc<EmbeddingServer>),
}

impl EmbeddingSource {
    /// As it is configured. A local model is read and checked now, a server asked when it is needed.
    pub async fn open(config: &Embeddings) -> anyhow::Result<Self> {
        Ok(match config.which() {
            EmbeddingBackend::None => Self::None,
            EmbeddingBackend::Local(path) => {
                let path = path.to_owned();
                Self::Local(Arc::new(tokio::task::spawn_blocking(move || LocalModel::load(&path)).await??))
            }
            EmbeddingBackend::Server(_) => Self::Server(Arc::new(EmbeddingServer::new(config)?)),
        })
    }

    /// For the library.
    pub fn embedder(&self) -> Option<Embedder> {
        match self.clone() {
            Self::None => None,
            Self::Local(local) => Some(Embedder::new(local.name().to_owned(), move |texts| {
                let local = local.clone();
                async move { local.embed(texts).await.map(|(vectors, _)| vectors) }
            })),
            Self::Server(server) => Some(Embedder::new(server.name().to_owned(), move |texts| {
                let server = server.clone();
                async move { server.embed(texts).await }
            })),
        }
    }

    /// The model in this process, if this is its name.
    pub fn local(&self, name: &str) -> Option<&Arc<LocalModel>> {
        match self {
            Self::Local(local) if local.name() == name => Some(local),
            _ => None,
        }
    }

    /// The name of the model in this process.
    pub fn local_name(&self) -> Option<&str> {
        match self {
            Self::Local(local) => Some(local.name()),
            _ => None,
        }
    }
}
