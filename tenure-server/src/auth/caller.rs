//! The authenticated caller of a request, and the authorization checks that turn it into a `Principal`.

use super::keys::{ApiKey, KeyStore, Right};
use super::rate_limit::{Metered, RateLimits, ResponseHeaders, TokenMeter};
use crate::config::KeyLimits;
use crate::error::ApiError;
use crate::headers::header_text;
use axum::http::{HeaderMap, StatusCode, header};
use std::sync::Arc;
use tenure::{
    Model, Principal, Tenant, User,
    maintenance::{Quota, QuotaScope},
    policy::HistoryMode,
    session::AccessScope,
};

/// The authenticated caller of a request: its tenant, user, rights and limits.
#[derive(Clone, Debug)]
pub struct Caller {
    tenant: Tenant,
    /// The user the key is bound to, or the one named in `X-Tenure-User`.
    user: Option<User>,
    /// True if the key is bound to `user`.
    bound: bool,
    rights: Vec<Right>,
    history: Option<HistoryMode>,
    key: Option<KeyUse>,
    operator: bool,
}

/// The id and effective limits of the key that authenticated a request.
#[derive(Clone, Debug)]
struct KeyUse {
    id: String,
    limits: KeyLimits,
}

const USER_HEADER: &str = "x-tenure-user";

/// Marks a request as issued inside this process by an operator with direct access to the store. Such a request
/// needs no key and chooses its own tenant. It is a request extension, which cannot be set by anything received
/// over a socket.
#[derive(Clone, Debug)]
pub struct LocalAccess(pub Tenant);

/// The parts of a request that authentication reads.
#[derive(Clone, Copy, Debug)]
pub struct Credentials<'a> {
    /// The request headers; `Authorization` and `X-Tenure-User` are read.
    pub headers: &'a HeaderMap,
    /// Set for requests issued inside this process.
    pub operator: Option<&'a LocalAccess>,
    /// Collects the rate limit headers for the response.
    pub response_headers: Option<&'a ResponseHeaders>,
}

impl Caller {
    /// Authenticates a request and counts it against the rate limits of its key. `defaults` are the limits that
    /// apply where the key has none of its own.
    pub async fn authenticate(
        credentials: Credentials<'_>,
        keys: &KeyStore,
        defaults: KeyLimits,
        rate_limits: &RateLimits,
    ) -> Result<Self, ApiError> {
        let Credentials { headers, operator, response_headers } = credentials;
        let requested_user = match header_text(headers, USER_HEADER)? {
            Some(user) => Some(User::new(user).map_err(|e| ApiError::invalid("X-Tenure-User", e.to_string()))?),
            None => None,
        };
        let tenant = match operator {
            Some(LocalAccess(tenant)) => Some(tenant.clone()),
            None => (!keys.are_required().await?).then(Tenant::default),
        };
        if let Some(tenant) = tenant {
            let rights = vec![Right::Read, Right::Write, Right::Review, Right::Admin, Right::Backup];
            let operator = operator.is_some();
            return Ok(Self { tenant, user: requested_user, bound: false, rights, history: None, key: None, operator });
        }
        let key = find_key(headers, keys).await?;
        tracing::Span::current().record("key", key.id.as_str()).record("tenant", key.tenant.as_str());
        if let (Some(bound), Some(requested_user)) = (&key.user, &requested_user)
            && bound != requested_user
        {
            let message = format!("this key acts as user {bound} only; leave X-Tenure-User out");
            return Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message));
        }
        let limits = key.limits.or(defaults);
        rate_limits.admit(&key.id, limits, response_headers)?;
        let bound = key.user.is_some();
        Ok(Self {
            tenant: key.tenant,
            user: key.user.or(requested_user),
            bound,
            rights: key.rights,
            history: key.history,
            key: Some(KeyUse { id: key.id, limits }),
            operator: false,
        })
    }

    /// Id of the key that authenticated the request. `None` means that no key was needed.
    pub fn key_id(&self) -> Option<&str> {
        self.key.as_ref().map(|key| key.id.as_str())
    }
}

/// Looks up the key in the `Authorization` header. Fails with 401 if it is missing, unknown or expired.
async fn find_key(headers: &HeaderMap, keys: &KeyStore) -> Result<ApiKey, ApiError> {
    let authorization = header_text(headers, header::AUTHORIZATION.as_str())?;
    let bearer = authorization.as_deref().and_then(|v| v.strip_prefix("Bearer ").or(v.strip_prefix("bearer ")));
    let refuse = |message: &str| {
        ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message).with_header(header::WWW_AUTHENTICATE, "Bearer")
    };
    let Some(secret) = bearer.map(str::trim) else {
        return Err(refuse(
            "the request has no API key; send `Authorization: Bearer KEY` (create one with `tenure keys add`)",
        ));
    };
    let Some(key) = keys.find(secret).await? else {
        return Err(refuse("unknown API key; it may have been revoked"));
    };
    if key.has_expired(keys.tenure().now()) {
        return Err(refuse("the key has expired; ask an administrator for a new one (`tenure keys rotate`)"));
    }
    Ok(key)
}

impl Caller {
    /// Owner of the request's share of a per-principal limit: the tenant, plus the user if the key is bound to one.
    /// A user that the request names itself is ignored, because every name would get a share of its own (D-108).
    pub fn budget_owner(&self) -> String {
        match self.user.as_ref().filter(|_| self.bound) {
            Some(user) => format!("{}\0{user}", self.tenant),
            None => self.tenant.to_string(),
        }
    }

    fn require_right(&self, right: Right) -> Result<(), ApiError> {
        if self.rights.contains(&right) || self.rights.contains(&Right::Admin) {
            return Ok(());
        }
        let name = serde_json::to_value(right).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
        let message = format!("this key does not have the right `{name}`");
        Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
    }

    fn principal(&self, user: Option<User>) -> Principal {
        let user = if self.bound { self.user.clone() } else { self.user.clone().or(user) };
        // An administrator who names no user gets access to the whole tenant.
        let tenant_wide = user.is_none() && self.rights.contains(&Right::Admin);
        let reach = if tenant_wide { AccessScope::Tenant } else { AccessScope::Own };
        // For the log line of the request.
        let span = tracing::Span::current();
        span.record("tenant", self.tenant.as_str());
        if let Some(user) = &user {
            span.record("user", user.as_str());
        }
        Principal { tenant: self.tenant.clone(), user: user.unwrap_or_default(), scope: reach, quota: self.quota() }
    }

    /// The storage quota of the key. `None` means unlimited.
    fn quota(&self) -> Option<Quota> {
        let KeyLimits { max_sessions, max_stored_bytes, .. } = self.key.as_ref()?.limits;
        let scope = if self.bound { QuotaScope::User } else { QuotaScope::Tenant };
        let limited = max_sessions.is_some() || max_stored_bytes.is_some();
        limited.then_some(Quota { scope, max_sessions, max_stored_bytes })
    }

    /// The key's default for merging request messages with the stored history. `None` means that the key sets none.
    pub fn history(&self) -> Option<HistoryMode> {
        self.history
    }

    /// Returns the principal for a read, or 403 without the right `read`.
    pub fn authorize_read(&self) -> Result<Principal, ApiError> {
        self.require_right(Right::Read).map(|()| self.principal(None))
    }

    /// Returns the principal for a write, or 403 without the right `write`.
    pub fn authorize_write(&self) -> Result<Principal, ApiError> {
        self.require_right(Right::Write).map(|()| self.principal(None))
    }

    /// Returns the principal for a write, or 403 without the right `write`. `user` is the user named in the request
    /// body; it applies only if neither the key nor the header names one.
    pub fn authorize_write_as(&self, user: Option<User>) -> Result<Principal, ApiError> {
        self.require_right(Right::Write).map(|()| self.principal(user))
    }

    /// Returns the principal of a reviewer, or 403 without the right `review`. A reviewer sees the pending reviews
    /// of all sessions of the tenant; an administrator bound to one user and without the right `review` sees only
    /// that user's sessions.
    pub fn authorize_review(&self) -> Result<Principal, ApiError> {
        self.require_right(Right::Review)?;
        let reach =
            if self.bound && !self.rights.contains(&Right::Review) { AccessScope::Own } else { AccessScope::Tenant };
        Ok(Principal { scope: reach, ..self.principal(None) })
    }

    /// Returns the reviewer's name for the audit trail: the user the key is bound to, else `requested_user`, else
    /// the user in the header. Naming a user other than the bound one is refused with 403.
    pub fn reviewer(&self, requested_user: Option<String>) -> Result<String, ApiError> {
        let requested_user =
            requested_user.map(User::new).transpose().map_err(|e| ApiError::invalid("reviewer", e.to_string()))?;
        match (&self.user, requested_user) {
            (Some(user), Some(requested_user)) if self.bound && *user != requested_user => {
                let message = format!("this key acts as user {user} only; leave `reviewer` out");
                Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
            }
            (user, requested_user) => Ok(requested_user.or(user.clone()).unwrap_or_default().to_string()),
        }
    }

    /// Returns the principal of an administrator, or 403 without the right `admin`. Its scope is the tenant, or the
    /// user the key is bound to.
    pub fn authorize_admin(&self) -> Result<Principal, ApiError> {
        self.require_right(Right::Admin)?;
        let reach = if self.bound { AccessScope::Own } else { AccessScope::Tenant };
        Ok(Principal { scope: reach, ..self.principal(None) })
    }

    /// Returns the principal of the tenant's administrator, or 403. A key that is bound to a user administers only
    /// that user and is refused.
    pub fn authorize_tenant_admin(&self) -> Result<Principal, ApiError> {
        self.require_right(Right::Admin)?;
        match (&self.user, self.bound) {
            (Some(user), true) => {
                let message =
                    format!("this key administers user {user} only; use an administrator's key of the tenant");
                Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
            }
            _ => Ok(Principal { scope: AccessScope::Tenant, ..self.principal(None) }),
        }
    }

    /// Returns 403 unless the caller may download a backup. It contains the data of all tenants, so the right is
    /// separate from `admin`, which is a tenant's.
    pub fn authorize_backup(&self) -> Result<(), ApiError> {
        if self.rights.contains(&Right::Backup) && !self.bound {
            return Ok(());
        }
        let message = "this key does not have the right `backup`, or is bound to a user; create one with \
                       `tenure keys add --rights backup` where the store is";
        Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
    }

    /// Returns 403 if a key with these rights has more than the caller may pass on.
    pub fn authorize_granting(&self, rights: &[Right]) -> Result<(), ApiError> {
        if rights.contains(&Right::Backup) { self.authorize_backup() } else { Ok(()) }
    }

    /// The user the key is bound to, if it is bound.
    pub fn bound_user(&self) -> Option<&User> {
        self.user.as_ref().filter(|_| self.bound)
    }

    /// Returns true if the request was issued by an operator with direct access to the store.
    pub fn is_operator(&self) -> bool {
        self.operator
    }

    /// Rejects a model call with 429 if the key has no tokens left in its `tokens_per_minute` bucket.
    pub fn admit_model_call(&self, rate_limits: &Arc<RateLimits>) -> Result<(), ApiError> {
        self.key.as_ref().map_or(Ok(()), |key| rate_limits.admit_tokens(&key.id, key.limits))
    }

    /// Wraps a model so that its tokens are charged to the caller's key. Returns the model unchanged if the key has
    /// no token limit.
    pub fn metered(&self, rate_limits: &Arc<RateLimits>, model: Arc<dyn Model>) -> Arc<dyn Model> {
        match self.token_meter(rate_limits) {
            Some(meter) => Arc::new(Metered { model, meter }),
            None => model,
        }
    }

    /// Returns a meter that charges tokens to the caller's key, or `None` if the key has no token limit.
    pub fn token_meter(&self, rate_limits: &Arc<RateLimits>) -> Option<TokenMeter> {
        let key = self.key.as_ref()?;
        let limit = key.limits.tokens_per_minute?;
        Some(TokenMeter { limits: rate_limits.clone(), key: key.id.clone(), limit })
    }
}
