//! Background maintenance of memories: computing missing embeddings, and periodic dreams (memory
//! consolidation).

use crate::app::AppState;
use std::collections::BTreeSet;
use std::time::Duration;
use tenure::{AccessScope, Principal, Tenant};

/// Interval between scans for memories without an embedding.
const EMBED_EVERY: Duration = Duration::from_secs(600);

/// Computes missing embeddings periodically until the server stops: of all memories after the embedding model
/// has changed, of a few after the embedder was unavailable.
pub async fn embed_for_ever(app: &AppState) {
    loop {
        tokio::select! {
            () = embed(app) => {}
            () = app.tasks.stopping() => return,
        }
        tokio::select! {
            () = tokio::time::sleep(EMBED_EVERY) => {}
            () = app.tasks.stopping() => return,
        }
    }
}

async fn embed(app: &AppState) {
    let mut done = 0;
    let embedded = app.tenure.embed_all(|n| {
        done += n;
        metrics::counter!("tenure_memories_embedded_total").increment(n as u64);
        if done % 1024 < n {
            tracing::info!(done, "giving memories new vectors");
        }
    });
    match embedded.await {
        Ok(0) => {}
        Ok(done) => tracing::info!(done, "memories have new vectors"),
        Err(e) => tracing::warn!(error = %e, "memories can not be given vectors; it is tried again"),
    }
}

/// Runs dreams for every tenant at the configured interval until the server stops. A dream consolidates memory:
/// it promotes what sessions recalled often to their users. Returns immediately if no interval is configured.
pub async fn dream_for_ever(app: &AppState) {
    let Some(every) = app.config.dreams.every.duration() else { return };
    loop {
        tokio::select! {
            () = tokio::time::sleep(every.max(Duration::from_secs(1))) => {}
            () = app.tasks.stopping() => return,
        }
        for tenant in tenants(app).await {
            let who = Principal { tenant, reach: AccessScope::Tenant, ..Principal::default() };
            match app.tenure.dream(&who, &app.config.dreams.rules(), false).await {
                Ok(dream) if dream.promoted.is_empty() => {}
                Ok(dream) => tracing::info!(dream = dream.id, promoted = dream.promoted.len(), "dreamt"),
                Err(e) => tracing::warn!(error = %e, "a dream was broken off; it is tried again"),
            }
        }
    }
}

/// The tenants to dream for: all that have an API key, and the default tenant, which needs none.
async fn tenants(app: &AppState) -> BTreeSet<Tenant> {
    let keys = app.keys.list().await.unwrap_or_else(|e| {
        tracing::warn!(error = %e, "the keys can not be read: only the default tenant dreams this time");
        Vec::new()
    });
    keys.into_iter().map(|key| key.tenant).chain([Tenant::default()]).collect()
}
