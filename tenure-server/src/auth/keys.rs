//! API keys: creation, listing, rotation, revocation and cached lookup in the store. Only hashes of secrets are
//! persisted (D-101).

use crate::clock::Stopwatch;
use crate::config::KeyLimits;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::{SignedDuration, Timestamp};
use quick_cache::sync::Cache;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use subtle::ConstantTimeEq;
use tenure::store::{Item, Namespace, Owner};
use tenure::{Tenant, Tenure, User, policy::HistoryMode};
use tokio::sync::Semaphore;
use utoipa::ToSchema;

/// The reserved tenant whose namespaces hold the keys of all tenants. No key can be created for it.
pub const SYSTEM_TENANT: &str = "tenure:system";
/// Lifetime of a cached key. A key revoked by another process is accepted for at most this long.
const CACHE_TTL: SignedDuration = SignedDuration::from_secs(2);
/// Maximum number of cached keys.
const MAX_CACHED: usize = 10_000;
/// Maximum number of concurrent store lookups for unknown keys, so that clients without a key cannot slow down
/// clients with one.
const MAX_UNKNOWN_LOOKUPS: usize = 4;
/// Minimum interval between two records of a key's last use.
const USE_RECORD_INTERVAL: SignedDuration = SignedDuration::from_secs(60);
/// Minimum interval between two test writes of `/readyz`.
const WRITE_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The item that records that a store has had keys. While it exists, keys are required on every node and after
/// every restart.
const REQUIRED_KEY: &str = "keys-required";

/// A right that a key grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// Reading sessions.
    Read,
    /// Writing sessions, and calling models.
    Write,
    /// Deciding reviews.
    Review,
    /// Everything of the tenant, or of the user that the key is bound to: assistants, keys, erasure, all users' sessions.
    Admin,
    /// Downloading a backup of all tenants. `admin` does not include it, and only an operator with direct access to
    /// the store, or a caller who has the right, can grant it.
    Backup,
}

/// The settings of a key to create.
#[derive(Clone, Debug, Default)]
pub struct NewKey {
    /// The tenant whose data it grants access to.
    pub tenant: Tenant,
    /// The only user it can act as. `None` means any user of the tenant.
    pub user: Option<User>,
    /// The rights it grants; at least one.
    pub rights: Vec<Right>,
    /// A description of its purpose, at most 100 printable characters.
    pub name: Option<String>,
    /// How request messages are merged with the stored history if neither the request nor the assistant sets it.
    pub history: Option<HistoryMode>,
    /// When it expires. `None` means never.
    pub expires_at: Option<Timestamp>,
    /// Its rate limits and quotas.
    pub limits: KeyLimits,
}

/// A key as it is persisted: without the secret.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ApiKey {
    /// The first 12 hex digits of `hash`.
    pub id: String,
    /// The BLAKE3 hash of the secret, in hex.
    pub hash: String,
    /// A description of its purpose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The tenant whose data it grants access to.
    pub tenant: Tenant,
    /// The only user it can act as. `None` means any user of the tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
    /// The rights it grants.
    pub rights: Vec<Right>,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it expires. `None` means never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// When it was last used, to the minute. `None` means never.
    #[serde(skip)]
    pub last_used_at: Option<Timestamp>,
    /// How request messages are merged with the stored history if neither the request nor the assistant sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<HistoryMode>,
    /// Its rate limits and quotas.
    #[serde(default, skip_serializing_if = "KeyLimits::is_empty")]
    pub limits: KeyLimits,
}

impl ApiKey {
    /// Returns true if the key has expired at `now`.
    pub fn has_expired(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }

    fn from_item(item: &Item) -> tenure::Result<Self> {
        let key: Self = serde_json::from_str(&item.value)
            .map_err(|e| tenure::Error::corrupt_from(format!("key {}", item.key), e))?;
        Ok(Self { last_used_at: (item.uses > 0).then_some(item.used_at), ..key })
    }
}

/// The API keys of a store, with a short-lived cache.
#[derive(Debug)]
pub struct KeyStore {
    tenure: Tenure,
    /// Cached keys by id, with the time each was read.
    cached: Cache<String, (Timestamp, ApiKey)>,
    /// Cached answer to whether the store requires keys, with the time it was read.
    required: Mutex<Option<(Timestamp, bool)>>,
    /// True if this server requires keys even if the store does not.
    always_required: AtomicBool,
    /// When the last use of each key was last recorded.
    last_recorded_uses: Mutex<HashMap<String, Timestamp>>,
    unknown_lookups: Semaphore,
    /// When the last test write of `/readyz` succeeded.
    last_write_check: Mutex<Option<Stopwatch>>,
}

fn keys_namespace() -> Namespace {
    system_namespace("keys")
}

pub(super) fn system_namespace(name: &str) -> Namespace {
    let tenant = Tenant::new(SYSTEM_TENANT).unwrap_or_default();
    Namespace { tenant, owner: Owner::Tenant, name: name.to_owned() }
}

pub(super) fn system_item(key: impl Into<String>, value: String, now: Timestamp) -> Item {
    Item::new(key, value, now)
}

/// Returns the hash of a secret and the id of the key it belongs to.
pub(super) fn hash_secret(secret: &str) -> (String, String) {
    let hash = blake3::hash(secret.as_bytes()).to_hex().to_string();
    let id = hash[..12].to_owned();
    (hash, id)
}

impl KeyStore {
    /// Opens the keys of a store.
    pub fn new(tenure: Tenure) -> Self {
        Self {
            tenure,
            cached: Cache::new(MAX_CACHED),
            required: Mutex::default(),
            always_required: AtomicBool::default(),
            last_recorded_uses: Mutex::default(),
            unknown_lookups: Semaphore::new(MAX_UNKNOWN_LOOKUPS),
            last_write_check: Mutex::default(),
        }
    }

    /// The store that holds the keys.
    pub(super) fn tenure(&self) -> &Tenure {
        &self.tenure
    }

    /// Creates a key with a random secret. The secret is returned once and never persisted.
    pub async fn add(&self, new: NewKey) -> tenure::Result<(ApiKey, String)> {
        let mut random = [0u8; 32];
        getrandom::fill(&mut random)
            .map_err(|e| tenure::Error::unavailable(format!("no random numbers: {e}")).with_source(e))?;
        let secret = format!("tnr_{}", URL_SAFE_NO_PAD.encode(random));
        Ok((self.add_secret(new, &secret).await?, secret))
    }

    /// Creates a key with the given secret.
    pub(super) async fn add_secret(&self, new: NewKey, secret: &str) -> tenure::Result<ApiKey> {
        let NewKey { tenant, user, mut rights, name, history, expires_at, limits } = new;
        if tenant.as_str() == SYSTEM_TENANT {
            return Err(tenure::Error::invalid("tenant", format!("{SYSTEM_TENANT} is reserved; choose another name")));
        }
        if rights.is_empty() {
            return Err(tenure::Error::invalid("rights", "a key needs at least one right"));
        }
        let name = name.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
        if name.as_ref().is_some_and(|name| name.chars().count() > 100 || name.chars().any(char::is_control)) {
            return Err(tenure::Error::invalid("name", "a key's name has at most 100 printable characters"));
        }
        rights.sort_unstable();
        rights.dedup();
        let created_at = self.tenure.now();
        if expires_at.is_some_and(|at| at <= created_at) {
            return Err(tenure::Error::invalid("expires_at", "it must be in the future"));
        }
        let (hash, id) = hash_secret(secret);
        let last_used_at = None;
        let key =
            ApiKey { id, hash, name, tenant, user, rights, created_at, expires_at, last_used_at, history, limits };
        self.require().await?;
        self.put(&key).await?;
        Ok(key)
    }

    async fn put(&self, key: &ApiKey) -> tenure::Result<()> {
        let value = serde_json::to_string(key).map_err(tenure::Error::unavailable)?;
        let mut item = system_item(&key.id, value, key.created_at);
        if let Some(at) = key.last_used_at {
            item.used_at = at;
            item.uses = 1;
        }
        self.tenure.store().put(&keys_namespace(), &item, None).await?;
        self.cached.remove(&key.id);
        Ok(())
    }

    /// Replaces a key with a new one that has the same settings; the old key stays valid for `grace`. The successor
    /// of a key with an expiry gets the same lifetime, counted from now. Returns `None` if there is no such key.
    pub async fn rotate(&self, id: &str, grace: Duration) -> tenure::Result<Option<(ApiKey, String)>> {
        let Some(mut old) = self.get(id).await? else { return Ok(None) };
        let now = self.tenure.now();
        let new = NewKey {
            tenant: old.tenant.clone(),
            user: old.user.clone(),
            rights: old.rights.clone(),
            name: old.name.clone(),
            history: old.history,
            expires_at: old.expires_at.and_then(|at| now.checked_add(at.duration_since(old.created_at)).ok()),
            limits: old.limits,
        };
        let created = self.add(new).await?;
        if grace.is_zero() {
            self.revoke(id).await?;
            return Ok(Some(created));
        }
        let end = SignedDuration::try_from(grace).ok().and_then(|grace| now.checked_add(grace).ok());
        old.expires_at = [old.expires_at, end].into_iter().flatten().min();
        self.put(&old).await?;
        Ok(Some(created))
    }

    /// Reads a key by its id from the store, bypassing the cache.
    pub async fn get(&self, id: &str) -> tenure::Result<Option<ApiKey>> {
        let item = self.tenure.store().get(&keys_namespace(), id, None).await?;
        item.as_ref().map(ApiKey::from_item).transpose()
    }

    /// Lists all keys, oldest first.
    pub async fn list(&self) -> tenure::Result<Vec<ApiKey>> {
        let mut keys = Vec::new();
        let mut after = None::<String>;
        loop {
            let page = self.tenure.store().items(&keys_namespace(), after.as_deref(), 1000).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for item in &page {
                keys.push(ApiKey::from_item(item)?);
            }
        }
        keys.sort_by_key(|k: &ApiKey| k.created_at);
        Ok(keys)
    }

    /// Persists that requests need a key from now on, also after the last key is revoked.
    async fn require(&self) -> tenure::Result<()> {
        let item = system_item(REQUIRED_KEY, "true".to_owned(), self.tenure.now());
        self.tenure.store().put(&system_namespace("auth"), &item, None).await?;
        self.forget_required();
        Ok(())
    }

    /// Accepts unauthenticated requests again, on loopback. Fails while there are keys.
    pub async fn allow_unauthenticated(&self) -> tenure::Result<()> {
        if self.has_keys().await? {
            return Err(tenure::Error::invalid("keys", "there are keys; revoke them first (`tenure keys list`)"));
        }
        self.tenure.store().remove(&system_namespace("auth"), REQUIRED_KEY).await?;
        self.forget_required();
        Ok(())
    }

    /// Removes a key by its id. Returns false if there was none.
    pub async fn revoke(&self, id: &str) -> tenure::Result<bool> {
        // The flag may be missing although there is a key: `allow_unauthenticated` may have removed it while the
        // key was created.
        if self.tenure.store().get(&keys_namespace(), id, None).await?.is_some() {
            self.require().await?;
        }
        let removed = self.tenure.store().remove(&keys_namespace(), id).await?;
        self.cached.remove(id);
        self.last_recorded_uses.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        Ok(removed)
    }

    fn forget_required(&self) {
        *self.required.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Makes this server require keys from now on, regardless of the store.
    pub fn always_require(&self) {
        self.always_required.store(true, Ordering::Relaxed);
    }

    /// Returns true if requests need a key: the store has keys or has had some, or this server always requires
    /// them.
    pub async fn are_required(&self) -> tenure::Result<bool> {
        if self.always_required.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let now = self.tenure.now();
        if let Some((at, required)) = *self.required.lock().unwrap_or_else(PoisonError::into_inner)
            && now.duration_since(at).abs() < CACHE_TTL
        {
            return Ok(required);
        }
        let required = self.read_required().await?;
        *self.required.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, required));
        Ok(required)
    }

    /// Like [`KeyStore::are_required`], read from the store. It leaves the cache as it is: a server that looks once
    /// when it starts enforces a key that is created right afterwards.
    pub async fn read_required(&self) -> tenure::Result<bool> {
        if self.always_required.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let flag_is_set = self.tenure.store().get(&system_namespace("auth"), REQUIRED_KEY, None).await?.is_some();
        Ok(flag_is_set || self.has_keys().await?)
    }

    /// Returns true if there is at least one key.
    pub async fn has_keys(&self) -> tenure::Result<bool> {
        Ok(!self.tenure.store().items(&keys_namespace(), None, 1).await?.is_empty())
    }

    /// Finds the key that a secret belongs to, expired or not. A key that is not cached is looked up in the store,
    /// because another process may just have created it.
    pub async fn find(&self, secret: &str) -> tenure::Result<Option<ApiKey>> {
        let (hash, id) = hash_secret(secret);
        let matches_hash = |key: &ApiKey| bool::from(key.hash.as_bytes().ct_eq(hash.as_bytes()));
        let now = self.tenure.now();
        let cached = self.cached.get(&id);
        if let Some((at, key)) = &cached
            && now.duration_since(*at).abs() < CACHE_TTL
        {
            return Ok(Some(key.clone()).filter(matches_hash));
        }
        let lookup = match cached {
            Some(_) => None,
            None => self.unknown_lookups.acquire().await.ok(),
        };
        let stored = self.get(&id).await?;
        drop(lookup);
        match stored.filter(matches_hash) {
            Some(key) => {
                self.cached.insert(id, (now, key.clone()));
                Ok(Some(key))
            }
            None => {
                self.cached.remove(&id);
                Ok(None)
            }
        }
    }

    /// Checks that the store can be read and written. The write happens at most every five seconds, so that probes
    /// are cheap; after a failed write the next probe retries it.
    pub async fn check_store(&self) -> tenure::Result<()> {
        self.has_keys().await?;
        let last_write = *self.last_write_check.lock().unwrap_or_else(PoisonError::into_inner);
        if last_write.is_some_and(|at| at.elapsed() < WRITE_CHECK_INTERVAL) {
            return Ok(());
        }
        let now = self.tenure.now();
        let item = system_item("ready", format!("\"{now}\""), now);
        self.tenure.store().put(&system_namespace("probe"), &item, None).await?;
        *self.last_write_check.lock().unwrap_or_else(PoisonError::into_inner) = Some(Stopwatch::start());
        Ok(())
    }

    /// Returns true if the use of a key should be recorded now; the caller then calls [`KeyStore::record_use`].
    pub fn is_use_due(&self, id: &str) -> bool {
        let now = self.tenure.now();
        let mut recorded = self.last_recorded_uses.lock().unwrap_or_else(PoisonError::into_inner);
        if recorded.get(id).is_some_and(|at| now.duration_since(*at).abs() < USE_RECORD_INTERVAL) {
            return false;
        }
        recorded.insert(id.to_owned(), now);
        true
    }

    /// Records the time of a key's last use.
    pub async fn record_use(&self, id: &str) {
        if let Err(e) = self.tenure.store().get(&keys_namespace(), id, Some(self.tenure.now())).await {
            tracing::debug!(key = id, error = %e, "the last use of a key was not recorded");
        }
    }
}
