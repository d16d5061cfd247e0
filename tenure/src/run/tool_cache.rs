//! The cache of tool results, per session. A call with the same tool and equal parameters is
//! answered from the cache until the entry expires (by the policy's `ttl`) or is evicted.

use crate::store::item::{Item, Namespace, Owner};
use crate::tenure::Tenure;
use crate::types::canonical_json::{Nulls, canonical};
use crate::types::error::{Error, Result};
use crate::types::id::{Principal, SessionId};
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;
use serde_json::Value;

/// The name of the namespace of a session's cached tool results.
pub(crate) const CACHE: &str = "cache";

/// A cached tool result.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CachedToolResult {
    /// The hash of tool name and parameters.
    pub key: String,
    /// The name of the tool.
    pub tool: String,
    /// The parameters of the call.
    pub parameters: Value,
    /// The tool's result.
    pub result: Value,
    /// The time when the result was stored.
    pub created_at: Timestamp,
    /// The time when the entry expires. `None` means never.
    pub expires_at: Option<Timestamp>,
}

/// The cache key of a tool call: a BLAKE3 hash over the tool's name and its parameters as canonical
/// JSON, so that equivalent spellings share a key.
pub fn cache_key(tool: &str, parameters: &Value) -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(&(tool.len() as u64).to_le_bytes()).update(tool.as_bytes());
    hash.update(canonical(parameters, Nulls::Keep).as_bytes());
    hash.finalize().to_hex().to_string()
}

impl Tenure {
    /// Returns an unexpired result and updates its last-use time.
    pub async fn cache_get(
        &self,
        principal: &Principal,
        id: &SessionId,
        tool: &str,
        parameters: &Value,
    ) -> Result<Option<CachedToolResult>> {
        self.engine.ensure_assistants_loaded(&principal.tenant).await?;
        let head = self.head(principal, id).await?;
        self.engine.check_live(&head)?;
        let now = self.now();
        let key = cache_key(tool, parameters);
        let item = self.store().get(&cache_namespace(principal, id), &key, Some(now)).await?;
        let item = item.filter(|i| is_fresh(i, now));
        let outcome = if item.is_some() { "hit" } else { "miss" };
        metrics::counter!("tenure_tool_cache_total", "found" => outcome).increment(1);
        item.map(|i| decode(&i, id)).transpose()
    }

    /// Stores a result with the `ttl` of the assistant's policy. Beyond `max_entries`, the least
    /// recently used entry is evicted.
    pub async fn cache_put(
        &self,
        principal: &Principal,
        id: &SessionId,
        tool: &str,
        parameters: &Value,
        result: &Value,
    ) -> Result<()> {
        self.engine.ensure_assistants_loaded(&principal.tenant).await?;
        let head = self.head(principal, id).await?;
        self.engine.check_live(&head)?;
        let policy = self.policy(&head.tenant, head.assistant.as_deref()).cache;
        let now = self.now();
        let value = serde_json::json!([tool, parameters, result]).to_string();
        let max = self.limits().max_item_bytes;
        if value.len() > max {
            let subject = format!("the result of tool {tool:?}");
            return Err(Error::TooLarge { subject, limit: "max_item_bytes", max: max as u64 });
        }
        if policy.max_entries == 0 {
            return Ok(());
        }
        let ttl = SignedDuration::try_from(policy.ttl).unwrap_or(SignedDuration::MAX);
        let key = cache_key(tool, parameters);
        let expires_at = now.checked_add(ttl).ok();
        let item = Item { expires_at, ..Item::new(key, value, now) };
        self.store().put(&cache_namespace(principal, id), &item, Some(policy.max_entries)).await
    }

    /// The number of cached tool results of all sessions, including expired ones that have not been removed.
    /// The cost may be proportional to the number of all stored items.
    pub async fn cache_size(&self) -> Result<u64> {
        self.store().count_items(CACHE).await
    }

    /// Lists all unexpired results of a session.
    pub async fn cache_entries(&self, principal: &Principal, id: &SessionId) -> Result<Vec<CachedToolResult>> {
        self.head(principal, id).await?;
        let now = self.now();
        let namespace = cache_namespace(principal, id);
        let mut all = Vec::new();
        let mut after = None::<String>;
        loop {
            let page = self.store().items(&namespace, after.as_deref(), 1000).await?;
            let Some(last) = page.last() else { return Ok(all) };
            after = Some(last.key.clone());
            for item in page.iter().filter(|i| is_fresh(i, now)) {
                all.push(decode(item, id)?);
            }
        }
    }
}

fn cache_namespace(principal: &Principal, id: &SessionId) -> Namespace {
    Namespace { tenant: principal.tenant.clone(), owner: Owner::Session(id.clone()), name: CACHE.to_owned() }
}

fn is_fresh(item: &Item, now: Timestamp) -> bool {
    !item.is_expired(now)
}

fn decode(item: &Item, id: &SessionId) -> Result<CachedToolResult> {
    let (tool, parameters, result) = serde_json::from_str(&item.value)
        .map_err(|e| Error::corrupt_from(format!("cache of session {id}, key {}", item.key), e))?;
    Ok(CachedToolResult {
        key: item.key.clone(),
        tool,
        parameters,
        result,
        created_at: item.created_at,
        expires_at: item.expires_at,
    })
}
