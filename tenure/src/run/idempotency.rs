//! Idempotency keys of turns. A request with a known key and an equal body is answered with the
//! stored response instead of being executed again (D-047); a different body is an error.

use crate::engine::idempotency::reply_item;
use crate::run::executors::StoredAnswer;
use crate::store::item::{Namespace, Owner};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::id::{Principal, RunId, SessionId, SessionKey};
use serde::{Deserialize, Serialize};

/// Namespace of the used idempotency keys, per user.
const KEYS: &str = "turn-keys";
/// Namespace of the stored responses, per session.
pub(crate) const ANSWERS: &str = "turn-answers";
/// The run that a request with an idempotency key started.
#[derive(Serialize, Deserialize)]
pub(crate) struct StartedRun {
    /// The session of the run.
    pub session: SessionId,
    /// The run that the request started.
    pub run: RunId,
}

impl Tenure {
    /// Returns the run that an earlier request with this key and body started. `None` if there is
    /// none or the key has expired; [`Error::KeyReused`](crate::Error::KeyReused) if that request
    /// had a different body.
    pub(crate) async fn find_started_run(
        &self,
        principal: &Principal,
        keyed: Option<&(String, String)>,
    ) -> Result<Option<StartedRun>> {
        let Some((key, body)) = keyed else { return Ok(None) };
        self.engine.find_reply(&key_namespace(principal), key, body).await
    }

    /// Stores the session and run that a request with this key starts.
    pub(crate) async fn store_started_run(
        &self,
        principal: &Principal,
        key: &str,
        body: &str,
        started: &StartedRun,
    ) -> Result<()> {
        let item = reply_item(key, body, started, self.now());
        self.store().put(&key_namespace(principal), &item, None).await
    }

    /// Returns the stored response of a run, if there is one.
    pub(crate) async fn stored_answer(
        &self,
        principal: &Principal,
        started: &StartedRun,
    ) -> Result<Option<Box<StoredAnswer>>> {
        let namespace = Namespace {
            tenant: principal.tenant.clone(),
            owner: Owner::Session(started.session.clone()),
            name: ANSWERS.to_owned(),
        };
        let Some(item) = self.store().get(&namespace, started.run.as_str(), None).await? else { return Ok(None) };
        let answer = serde_json::from_str(&item.value)
            .map_err(|e| Error::corrupt_from(format!("the stored answer of run {}", started.run), e))?;
        Ok(Some(Box::new(answer)))
    }
}

/// The lock key under which requests with the same idempotency key are serialized.
pub(crate) fn idempotency_lock_key(principal: &Principal, key: &str) -> Result<SessionKey> {
    let hash = blake3::hash(format!("{}\0{key}", principal.user).as_bytes());
    Ok(principal.key(&SessionId::new(hash.to_hex().as_str())?))
}

fn request_hash(principal: &Principal, key: &str, body: &str) -> blake3::Hash {
    blake3::hash(format!("{}\0{}\0{key}\0{body}", principal.tenant, principal.user).as_bytes())
}

/// The session id of a request that names no session, derived from its idempotency key. All nodes
/// derive the same id.
pub(crate) fn derive_session_id(principal: &Principal, key: &str, body: &str) -> SessionId {
    SessionId::new(&request_hash(principal, key, body).to_hex()[..32]).unwrap_or_else(|_| SessionId::generate())
}

/// The run id of a request, derived from its idempotency key. All nodes derive the same id.
pub(crate) fn derive_run_id(principal: &Principal, key: &str, body: &str) -> RunId {
    RunId::of_request(&request_hash(principal, key, body))
}

fn key_namespace(principal: &Principal) -> Namespace {
    Namespace { tenant: principal.tenant.clone(), owner: Owner::User(principal.user.clone()), name: KEYS.to_owned() }
}
