//! API keys: created, listed, rotated, revoked and looked up in the store.

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
use tenure::{HistoryMode, Tenant, Tenure, User};
use tokio::sync::Semaphore;
use utoipa::ToSchema;

/// The tenant that holds the keys of all others. Nobody can have a key for it.
pub const SYSTEM: &str = "tenure:system";
/// How long a key that was read is trusted: one that another process revokes works no longer than this.
const FRESH: SignedDuration = SignedDuration::from_secs(2);
/// How many keys are cached.
const MAX_CACHED: usize = 10_000;
/// How many lookups of unknown keys may use the store at once: whoever has no key must not slow down those who have one.
const MAX_UNKNOWN_LOOKUPS: usize = 4;
/// The last use of a key is recorded at most this often.
const MARK_EVERY: SignedDuration = SignedDuration::from_secs(60);
/// `/readyz` writes to the store at most this often.
const WRITE_EVERY: Duration = Duration::from_secs(5);
/// The item that says that a store has had keys: they stay required, for every node and after every restart.
const REQUIRED: &str = "keys-required";

/// What a key permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// Reading sessions.
    Read,
    /// Writing them, and calling models.
    Write,
    /// Deciding reviews.
    Review,
    /// Everything of the tenant, or of the user that the key is bound to: assistants, keys, erasure, all users' sessions.
    Admin,
}

/// A key to be created.
#[derive(Clone, Debug, Default)]
pub struct NewKey {
    /// Whose data it opens.
    pub tenant: Tenant,
    /// The only user it can act as.
    pub user: Option<User>,
    /// What it permits.
    pub rights: Vec<Right>,
    /// What it is for.
    pub name: Option<String>,
    /// How the messages of its requests are merged, if neither they nor the assistant say.
    pub history: Option<HistoryMode>,
    /// When it stops working.
    pub expires_at: Option<Timestamp>,
    /// Its limits.
    pub limits: KeyLimits,
}

/// A key as it is stored: without the secret.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ApiKey {
    /// The beginning of its hash.
    pub id: String,
    /// The BLAKE3 hash of the secret.
    pub hash: String,
    /// What it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whose data it opens.
    pub tenant: Tenant,
    /// The only user it can act as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
    /// What it permits.
    pub rights: Vec<Right>,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it stops working.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// When it was last used, to the minute.
    #[serde(skip)]
    pub last_used_at: Option<Timestamp>,
    /// How the messages of its requests are merged, if neither they nor the assistant say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<HistoryMode>,
    /// Its limits.
    #[serde(default, skip_serializing_if = "KeyLimits::is_empty")]
    pub limits: KeyLimits,
}

impl ApiKey {
    /// Whether it has stopped working.
    pub fn has_expired(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }

    fn from_item(item: &Item) -> tenure::Result<Self> {
        let key: Self =
            serde_json::from_str(&item.value).map_err(|e| tenure::Error::corrupt(format!("key {}", item.key), e))?;
        Ok(Self { last_used_at: (item.uses > 0).then_some(item.used_at), ..key })
    }
}

/// The keys of a store, with a short-lived cache.
#[derive(Debug)]
pub struct KeyStore {
    tenure: Tenure,
    /// Keys by id, with the time they were read.
    cached: Cache<String, (Timestamp, ApiKey)>,
    /// Whether the store requires keys, with the time it was read.
    required: Mutex<Option<(Timestamp, bool)>>,
    /// Whether this server requires keys whatever the store says.
    always: AtomicBool,
    /// When the last use of each key was recorded.
    marked: Mutex<HashMap<String, Timestamp>>,
    unknown_lookups: Semaphore,
    /// When the store was last written to, to see whether it can be.
    written: Mutex<Option<Stopwatch>>,
}

fn keys_namespace() -> Namespace {
    system_namespace("keys")
}

pub(super) fn system_namespace(name: &str) -> Namespace {
    let tenant = Tenant::new(SYSTEM).unwrap_or_default();
    Namespace { tenant, owner: Owner::Tenant, name: name.to_owned() }
}

pub(super) fn system_item(key: impl Into<String>, value: String, now: Timestamp) -> Item {
    Item::new(key, value, now)
}

/// The hash of a secret, and the id of the key it belongs to.
pub(super) fn hash_of(secret: &str) -> (String, String) {
    let hash = blake3::hash(secret.as_bytes()).to_hex().to_string();
    let id = hash[..12].to_owned();
    (hash, id)
}

impl KeyStore {
    /// The keys in a store.
    pub fn of(tenure: Tenure) -> Self {
        Self {
            tenure,
            cached: Cache::new(MAX_CACHED),
            required: Mutex::default(),
            always: AtomicBool::default(),
            marked: Mutex::default(),
            unknown_lookups: Semaphore::new(MAX_UNKNOWN_LOOKUPS),
            written: Mutex::default(),
        }
    }

    /// The store that holds them.
    pub(super) fn tenure(&self) -> &Tenure {
        &self.tenure
    }

    /// Creates a key. The secret that is returned is shown once and stored nowhere.
    pub async fn add(&self, new: NewKey) -> tenure::Result<(ApiKey, String)> {
        let mut random = [0u8; 32];
        getrandom::fill(&mut random).map_err(|e| tenure::Error::unavailable(format!("no random numbers: {e}")))?;
        let secret = format!("tnr_{}", URL_SAFE_NO_PAD.encode(random));
        Ok((self.add_secret(new, &secret).await?, secret))
    }

    /// Creates a key whose secret is given.
    pub(super) async fn add_secret(&self, new: NewKey, secret: &str) -> tenure::Result<ApiKey> {
        let NewKey { tenant, user, mut rights, name, history, expires_at, limits } = new;
        if tenant.as_str() == SYSTEM {
            return Err(tenure::Error::invalid("tenant", format!("{SYSTEM} is reserved; choose another name")));
        }
        if rights.is_empty() {
            return Err(tenure::Error::invalid("rights", "a key without rights is of no use; list at least one"));
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
        let (hash, id) = hash_of(secret);
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
            (item.used_at, item.uses) = (at, 1);
        }
        self.tenure.store().put(&keys_namespace(), &item, None).await?;
        self.cached.remove(&key.id);
        Ok(())
    }

    /// Replaces a key by a new one with the same settings; the old one works for `grace` longer. A key with an expiry gets a
    /// successor that lives as long as it was meant to.
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

    /// A key by its id, as the store has it.
    pub async fn get(&self, id: &str) -> tenure::Result<Option<ApiKey>> {
        let item = self.tenure.store().get(&keys_namespace(), id, None).await?;
        item.as_ref().map(ApiKey::from_item).transpose()
    }

    /// All keys, oldest first.
    pub async fn list(&self) -> tenure::Result<Vec<ApiKey>> {
        let (mut keys, mut after) = (Vec::new(), None::<String>);
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

    /// From now on requests need a key, also after the last one is revoked.
    async fn require(&self) -> tenure::Result<()> {
        let item = system_item(REQUIRED, "true".to_owned(), self.tenure.now());
        self.tenure.store().put(&system_namespace("auth"), &item, None).await?;
        self.forget_required();
        Ok(())
    }

    /// Accepts requests without a key again, on loopback. Refused while there are keys.
    pub async fn allow_unauthenticated(&self) -> tenure::Result<()> {
        if self.are_there().await? {
            return Err(tenure::Error::invalid("keys", "there are keys; revoke them first (`tenure keys list`)"));
        }
        self.tenure.store().remove(&system_namespace("auth"), REQUIRED).await?;
        self.forget_required();
        Ok(())
    }

    /// Removes a key by its id; whether there was one.
    pub async fn revoke(&self, id: &str) -> tenure::Result<bool> {
        // A store of an older version does not say yet that it has had keys.
        if self.tenure.store().get(&keys_namespace(), id, None).await?.is_some() {
            self.require().await?;
        }
        let removed = self.tenure.store().remove(&keys_namespace(), id).await?;
        self.cached.remove(id);
        self.marked.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        Ok(removed)
    }

    fn forget_required(&self) {
        *self.required.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// From now on this server answers nobody without a key, whatever the store says.
    pub fn always_require(&self) {
        self.always.store(true, Ordering::Relaxed);
    }

    /// Whether requests need a key: there are keys, there have been, or this server always requires them.
    pub async fn are_required(&self) -> tenure::Result<bool> {
        if self.always.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let now = self.tenure.now();
        if let Some((at, required)) = *self.required.lock().unwrap_or_else(PoisonError::into_inner)
            && now.duration_since(at).abs() < FRESH
        {
            return Ok(required);
        }
        let marked = self.tenure.store().get(&system_namespace("auth"), REQUIRED, None).await?.is_some();
        let required = marked || self.are_there().await?;
        *self.required.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, required));
        Ok(required)
    }

    /// Whether there is any key.
    pub async fn are_there(&self) -> tenure::Result<bool> {
        Ok(!self.tenure.store().items(&keys_namespace(), None, 1).await?.is_empty())
    }

    /// The key that a secret belongs to, expired or not. One that is not cached is looked up in the store: it may have been
    /// created a moment ago, by another process.
    pub async fn find(&self, secret: &str) -> tenure::Result<Option<ApiKey>> {
        let (hash, id) = hash_of(secret);
        let is_it = |key: &ApiKey| bool::from(key.hash.as_bytes().ct_eq(hash.as_bytes()));
        let now = self.tenure.now();
        let cached = self.cached.get(&id);
        if let Some((at, key)) = &cached
            && now.duration_since(*at).abs() < FRESH
        {
            return Ok(Some(key.clone()).filter(is_it));
        }
        let lookup = match cached {
            Some(_) => None,
            None => self.unknown_lookups.acquire().await.ok(),
        };
        let found = self.get(&id).await?;
        drop(lookup);
        match found.filter(is_it) {
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

    /// Whether the store can be read and written. It is written to at most every five seconds, so that probes cost little; a
    /// failed write is tried again with the next probe.
    pub async fn check_store(&self) -> tenure::Result<()> {
        self.are_there().await?;
        let written = *self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if written.is_some_and(|at| at.elapsed() < WRITE_EVERY) {
            return Ok(());
        }
        let now = self.tenure.now();
        let item = system_item("ready", format!("\"{now}\""), now);
        self.tenure.store().put(&system_namespace("probe"), &item, None).await?;
        *self.written.lock().unwrap_or_else(PoisonError::into_inner) = Some(Stopwatch::start());
        Ok(())
    }

    /// Whether the use of a key should be recorded now; then [`KeyStore::record_use`] is to be called.
    pub fn is_use_due(&self, id: &str) -> bool {
        let now = self.tenure.now();
        let mut marked = self.marked.lock().unwrap_or_else(PoisonError::into_inner);
        if marked.get(id).is_some_and(|at| now.duration_since(*at).abs() < MARK_EVERY) {
            return false;
        }
        marked.insert(id.to_owned(), now);
        true
    }

    /// Records that a key was used.
    pub async fn record_use(&self, id: &str) {
        if let Err(e) = self.tenure.store().get(&keys_namespace(), id, Some(self.tenure.now())).await {
            tracing::debug!(key = id, error = %e, "the last use of a key was not recorded");
        }
    }
}
