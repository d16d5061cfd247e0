//! Background maintenance of memories: computing missing embeddings, and periodic dreams (memory
//! consolidation).

use crate::app::AppState;
use std::collections::BTreeSet;
use std::time::Duration;
use tenure::{Principal, Tenant, session::AccessScope};

/// Interval between scans for memories without an embedding.
const EMBED_EVERY: Duration = Duration::from_secs(600);

/// Computes missing embeddings periodically until the server stops: of all memories after the embedding model
/// has changed, of a few after the embedder was unavailable.
pub async fn embed_loop(app: &AppState) {
    loop {
        tokio::select! {
            () = embed(app) => {}
            () = app.tasks.wait_for_stop() => return,
        }
        tokio::select! {
            () = tokio::time::sleep(EMBED_EVERY) => {}
            () = app.tasks.wait_for_stop() => return,
        }
    }
}

async fn embed(app: &AppState) {
    let mut count = 0;
    let embedded = app.tenure.embed_all(|n| {
        count += n;
        metrics::counter!("tenure_memories_embedded_total").increment(n as u64);
        if count % 1024 < n {
            tracing::info!(count, "computing embeddings of memories");
        }
    });
    match embedded.await {
        Ok(0) => {}
        Ok(count) => tracing::info!(count, "computed embeddings of memories"),
        Err(e) => tracing::warn!(error = %e, "could not compute embeddings of memories; retrying"),
    }
}

/// Runs dreams for every tenant at the configured interval until the server stops. A dream consolidates memory:
/// it promotes what sessions recalled often to their users. Returns immediately if no interval is configured.
pub async fn dream_loop(app: &AppState) {
    let Some(every) = app.config.dreams.every.duration() else { return };
    loop {
        tokio::select! {
            () = tokio::time::sleep(every.max(Duration::from_secs(1))) => {}
            () = app.tasks.wait_for_stop() => return,
        }
        for tenant in tenants(app).await {
            let principal = Principal { tenant, scope: AccessScope::Tenant, ..Principal::default() };
            match app.tenure.dream(&principal, &app.config.dreams.rules(), false).await {
                Ok(dream) if dream.promoted.is_empty() => {}
                Ok(dream) => tracing::info!(dream = dream.id, promoted = dream.promoted.len(), "dream finished"),
                Err(e) => tracing::warn!(error = %e, "a dream failed; retrying at the next interval"),
            }
        }
    }
}

/// The tenants to dream for: all that have an API key, and the default tenant, which needs none.
async fn tenants(app: &AppState) -> BTreeSet<Tenant> {
    let keys = app.keys.list().await.unwrap_or_else(|e| {
        tracing::warn!(error = %e, "could not read the API keys: dreaming for the default tenant only");
        Vec::new()
    });
    keys.into_iter().map(|key| key.tenant).chain([Tenant::default()]).collect()
}
