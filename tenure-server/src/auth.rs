//! Who is asking: keys, their rights, and the principal they stand for.
//!
//! A key is 256 random bits and stored as its hash. Without any key the server is open, and listens on loopback only.

use crate::error::ApiError;
use crate::extract::header_text;
use crate::server::Shared;
use axum::extract::FromRequestParts;
use axum::http::{StatusCode, header, request::Parts};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use subtle::ConstantTimeEq;
use tenure::store::{Item, Owner, Shelf};
use tenure::{HistoryMode, Principal, Reach, Tenant, Tenure, User};

/// The tenant whose shelf holds the keys of all others. Nobody can have a key for it.
pub const SYSTEM: &str = "tenure:system";
/// Keys that were read are believed for so long: a revoked one works no longer than this.
const FRESH: SignedDuration = SignedDuration::from_secs(2);

/// What a key allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// Reading sessions.
    Read,
    /// Writing them, and talking to models.
    Write,
    /// Deciding reviews.
    Review,
    /// Everything of the tenant: its assistants, erasing users, all users' sessions.
    Admin,
}

/// A key as it is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Key {
    /// What it is called by: the beginning of its hash.
    pub id: String,
    /// The BLAKE3 hash of the key.
    pub hash: String,
    /// What it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whose data it opens.
    pub tenant: Tenant,
    /// The only user it can act as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
    /// What it allows.
    pub rights: Vec<Right>,
    /// When it was made.
    pub created_at: Timestamp,
    /// How the messages of its requests are read, if neither they nor the assistant say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<HistoryMode>,
}

/// The keys as they were read.
#[derive(Debug)]
struct CachedKeys {
    by_id: HashMap<String, Key>,
    required: bool,
}

/// The keys of a house.
#[derive(Debug)]
pub struct Keys {
    tenure: Tenure,
    known: RwLock<Option<(Timestamp, CachedKeys)>>,
    /// Even if there are none: then nobody gets in.
    needed: AtomicBool,
}

fn shelf() -> Shelf {
    system_shelf("keys")
}

fn system_shelf(name: &str) -> Shelf {
    let tenant = Tenant::new(SYSTEM).unwrap_or_default();
    Shelf { tenant, owner: Owner::Tenant, name: name.to_owned() }
}

/// Says on its shelf that a store has had keys: they stay required, for every node and after every restart.
const REQUIRED: &str = "keys-required";

impl Keys {
    /// The keys kept in a house.
    pub fn of(tenure: Tenure) -> Self {
        Self { tenure, known: RwLock::default(), needed: AtomicBool::default() }
    }

    /// Makes a key. The text that is given back is shown once and kept nowhere.
    pub async fn add(
        &self,
        tenant: Tenant,
        user: Option<User>,
        rights: Vec<Right>,
        name: Option<String>,
        history: Option<HistoryMode>,
    ) -> tenure::Result<(Key, String)> {
        if tenant.as_str() == SYSTEM {
            return Err(tenure::Error::invalid("tenant", format!("{SYSTEM} is not for anybody; choose another name")));
        }
        let mut random = [0u8; 32];
        getrandom::fill(&mut random).map_err(|e| tenure::Error::unavailable(format!("no random numbers: {e}")))?;
        let secret = format!("tnr_{}", URL_SAFE_NO_PAD.encode(random));
        let hash = blake3::hash(secret.as_bytes()).to_hex().to_string();
        let (id, created_at) = (hash[..12].to_owned(), self.tenure.now());
        let key = Key { id: id.clone(), hash, name, tenant, user, rights, created_at, history };
        let value = serde_json::to_string(&key).map_err(tenure::Error::unavailable)?;
        let (text, used_at, uses, expires_at) = (None, created_at, 0, None);
        let item = Item { key: id, value, text, created_at, used_at, uses, expires_at };
        self.require().await?;
        self.tenure.store().put(&shelf(), &item, None).await?;
        self.forget();
        Ok((key, secret))
    }

    /// All keys, oldest first.
    pub async fn list(&self) -> tenure::Result<Vec<Key>> {
        let (mut keys, mut after) = (Vec::new(), None::<String>);
        loop {
            let page = self.tenure.store().items(&shelf(), after.as_deref(), 1000).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for item in &page {
                let key = serde_json::from_str(&item.value);
                keys.push(key.map_err(|e| tenure::Error::corrupt(format!("key {}", item.key), e))?);
            }
        }
        keys.sort_by_key(|k: &Key| k.created_at);
        Ok(keys)
    }

    /// From now on requests need a key, also when the last one is revoked.
    async fn require(&self) -> tenure::Result<()> {
        let now = self.tenure.now();
        let item = Item {
            key: REQUIRED.to_owned(),
            value: "true".to_owned(),
            text: None,
            created_at: now,
            used_at: now,
            uses: 0,
            expires_at: None,
        };
        self.tenure.store().put(&system_shelf("auth"), &item, None).await
    }

    /// Lets requests without a key in again, on loopback. Refused while there are keys.
    pub async fn allow_unauthenticated(&self) -> tenure::Result<()> {
        if !self.list().await?.is_empty() {
            return Err(tenure::Error::invalid("keys", "there are keys; revoke them first (`tenure keys list`)"));
        }
        self.tenure.store().remove(&system_shelf("auth"), REQUIRED).await?;
        self.forget();
        Ok(())
    }

    /// Removes a key by its id; whether there was one.
    pub async fn revoke(&self, id: &str) -> tenure::Result<bool> {
        // A store of an older version does not say yet that it has had keys.
        if self.tenure.store().get(&shelf(), id, None).await?.is_some() {
            self.require().await?;
        }
        let gone = self.tenure.store().remove(&shelf(), id).await?;
        self.forget();
        Ok(gone)
    }

    fn forget(&self) {
        *self.known.write().unwrap_or_else(|e| e.into_inner()) = None;
    }

    /// Looks at the keys as they are now.
    async fn with<R>(&self, look: impl FnOnce(&CachedKeys) -> R) -> tenure::Result<R> {
        let now = self.tenure.now();
        if let Some((at, keys)) = &*self.known.read().unwrap_or_else(|e| e.into_inner())
            && now.duration_since(*at).abs() < FRESH
        {
            return Ok(look(keys));
        }
        let by_id: HashMap<String, Key> = self.list().await?.into_iter().map(|k| (k.id.clone(), k)).collect();
        let marked = self.tenure.store().get(&system_shelf("auth"), REQUIRED, None).await?.is_some();
        let keys = CachedKeys { required: marked || !by_id.is_empty(), by_id };
        let answer = look(&keys);
        *self.known.write().unwrap_or_else(|e| e.into_inner()) = Some((now, keys));
        Ok(answer)
    }

    /// From now on nobody gets in without a key, not even when the last one was revoked.
    pub fn need(&self) {
        self.needed.store(true, Ordering::Relaxed);
    }

    /// Whether requests need a key: there are keys, or there have been.
    pub async fn are_required(&self) -> tenure::Result<bool> {
        Ok(self.needed.load(Ordering::Relaxed) || self.with(|keys| keys.required).await?)
    }

    /// Whether there is any key.
    pub async fn are_there(&self) -> tenure::Result<bool> {
        self.with(|keys| !keys.by_id.is_empty()).await
    }

    /// The key that a secret is, if it is one.
    async fn find(&self, secret: &str) -> tenure::Result<Option<Key>> {
        let hash = blake3::hash(secret.as_bytes()).to_hex().to_string();
        let is_it = |key: &Key| bool::from(key.hash.as_bytes().ct_eq(hash.as_bytes()));
        let known = self.with(|keys| keys.by_id.get(&hash[..12]).filter(|key| is_it(key)).cloned()).await?;
        if known.is_some() {
            return Ok(known);
        }
        // It may have been made a moment ago, or by another process.
        let Some(item) = self.tenure.store().get(&shelf(), &hash[..12], None).await? else { return Ok(None) };
        let key: Key =
            serde_json::from_str(&item.value).map_err(|e| tenure::Error::corrupt(format!("key {}", item.key), e))?;
        self.forget();
        Ok(Some(key).filter(is_it))
    }
}

/// Who is asking, and what they may.
#[derive(Clone, Debug)]
pub struct Caller {
    tenant: Tenant,
    /// Fixed by the key, or named in a header.
    user: Option<User>,
    fixed: bool,
    rights: Vec<Right>,
    history: Option<HistoryMode>,
}

const USER_HEADER: &str = "x-tenure-user";

/// A call from this process, by somebody who has the store in hand: it needs no key, and names the tenant itself. It travels as an
/// extension of the request, which nothing that comes over a socket can carry.
#[derive(Clone, Debug)]
pub struct InHand(pub Tenant);

impl FromRequestParts<Shared> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, ApiError> {
        let named = match header_text(&parts.headers, USER_HEADER)? {
            Some(user) => Some(User::new(user).map_err(|e| ApiError::invalid("X-Tenure-User", e.to_string()))?),
            None => None,
        };
        let tenant = match parts.extensions.get::<InHand>() {
            Some(InHand(tenant)) => Some(tenant.clone()),
            None => (!app.keys.are_required().await?).then(Tenant::default),
        };
        if let Some(tenant) = tenant {
            let rights = vec![Right::Read, Right::Write, Right::Review, Right::Admin];
            return Ok(Self { tenant, user: named, fixed: false, rights, history: None });
        }
        let given = header_text(&parts.headers, header::AUTHORIZATION.as_str())?;
        let given = given.as_deref();
        let secret = given.and_then(|v| v.strip_prefix("Bearer ").or(v.strip_prefix("bearer "))).map(str::trim);
        let refuse = |message: &str| {
            ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
                .with_header(header::WWW_AUTHENTICATE, "Bearer")
        };
        let Some(secret) = secret else {
            return Err(refuse("no key was given; send `Authorization: Bearer KEY` (make one with `tenure keys add`)"));
        };
        let Some(key) = app.keys.find(secret).await? else {
            return Err(refuse("the key is not known here; it may have been revoked"));
        };
        if let (Some(fixed), Some(named)) = (&key.user, &named)
            && fixed != named
        {
            let message = format!("this key acts as user {fixed} only; leave X-Tenure-User out");
            return Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message));
        }
        let fixed = key.user.is_some();
        let (tenant, user, rights) = (key.tenant, key.user.or(named), key.rights);
        Ok(Self { tenant, user, fixed, rights, history: key.history })
    }
}

impl Caller {
    fn may(&self, right: Right) -> Result<(), ApiError> {
        if self.rights.contains(&right) || self.rights.contains(&Right::Admin) {
            return Ok(());
        }
        let name = serde_json::to_value(right).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
        let message = format!("this key does not have the right `{name}`");
        Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
    }

    fn principal(&self, user: Option<User>) -> Principal {
        let user = match self.fixed {
            true => self.user.clone(),
            false => self.user.clone().or(user),
        };
        // Who names nobody and may do everything sees the whole tenant.
        let everyone = user.is_none() && self.rights.contains(&Right::Admin);
        let reach = if everyone { Reach::Tenant } else { Reach::Own };
        Principal { tenant: self.tenant.clone(), user: user.unwrap_or_default(), reach }
    }

    /// How the messages of its requests are read, if the key says.
    pub fn history(&self) -> Option<HistoryMode> {
        self.history
    }

    /// The principal, if it may read.
    pub fn reads(&self) -> Result<Principal, ApiError> {
        self.may(Right::Read).map(|()| self.principal(None))
    }

    /// The principal, if it may write.
    pub fn writes(&self) -> Result<Principal, ApiError> {
        self.may(Right::Write).map(|()| self.principal(None))
    }

    /// The principal, if it may write; `user` is who the body names.
    pub fn writes_as(&self, user: Option<User>) -> Result<Principal, ApiError> {
        self.may(Right::Write).map(|()| self.principal(user))
    }

    /// A reviewer, if it may review: sees what waits in all sessions of the tenant.
    pub fn reviews(&self) -> Result<Principal, ApiError> {
        self.may(Right::Review)?;
        Ok(Principal { reach: Reach::Tenant, ..self.principal(None) })
    }

    /// Who reviews, by name: the user that the key fixes, else the one that is named.
    pub fn reviewer(&self, named: Option<String>) -> Result<String, ApiError> {
        let named = named.map(User::new).transpose().map_err(|e| ApiError::invalid("reviewer", e.to_string()))?;
        match (&self.user, named) {
            (Some(user), Some(named)) if self.fixed && *user != named => {
                let message = format!("this key acts as user {user} only; leave `reviewer` out");
                Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
            }
            (user, named) => Ok(named.or(user.clone()).unwrap_or_default().to_string()),
        }
    }

    /// The tenant's administrator, if it is one.
    pub fn administers(&self) -> Result<Principal, ApiError> {
        self.may(Right::Admin)?;
        Ok(Principal { reach: Reach::Tenant, ..self.principal(None) })
    }
}
