//! The caller of a request: who it is, and what it may do.

use super::keys::{ApiKey, KeyStore, Right};
use super::rate_limit::{Metered, RateLimits, ResponseHeaders, TokenMeter};
use crate::config::KeyLimits;
use crate::error::ApiError;
use crate::headers::header_text;
use axum::http::{HeaderMap, StatusCode, header};
use std::sync::Arc;
use tenure::{AccessScope, HistoryMode, Model, Principal, Quota, QuotaScope, Tenant, User};

/// The caller of a request.
#[derive(Clone, Debug)]
pub struct Caller {
    tenant: Tenant,
    /// Fixed by the key, or named in a header.
    user: Option<User>,
    /// Whether the key is bound to the user.
    bound: bool,
    rights: Vec<Right>,
    history: Option<HistoryMode>,
    key: Option<KeyUse>,
    operator: bool,
}

/// The key that a request was sent with.
#[derive(Clone, Debug)]
struct KeyUse {
    id: String,
    limits: KeyLimits,
}

const USER_HEADER: &str = "x-tenure-user";

/// A call from this process, by an operator who has the store: it needs no key, and names the tenant itself. It travels as an
/// extension of the request, which nothing that comes over a socket can carry.
#[derive(Clone, Debug)]
pub struct LocalAccess(pub Tenant);

/// What a request shows of its sender.
#[derive(Clone, Copy, Debug)]
pub struct Credentials<'a> {
    /// `Authorization` and `X-Tenure-User`.
    pub headers: &'a HeaderMap,
    /// Set for calls from this process.
    pub operator: Option<&'a LocalAccess>,
    /// Gets the headers of the rate limits.
    pub response_headers: Option<&'a ResponseHeaders>,
}

impl Caller {
    /// The caller of a request, which is counted against the limits of its key; `defaults` are the limits of keys that have none.
    pub async fn authenticate(
        credentials: Credentials<'_>,
        keys: &KeyStore,
        defaults: KeyLimits,
        rate_limits: &RateLimits,
    ) -> Result<Self, ApiError> {
        let Credentials { headers, operator, response_headers } = credentials;
        let named = match header_text(headers, USER_HEADER)? {
            Some(user) => Some(User::new(user).map_err(|e| ApiError::invalid("X-Tenure-User", e.to_string()))?),
            None => None,
        };
        let tenant = match operator {
            Some(LocalAccess(tenant)) => Some(tenant.clone()),
            None => (!keys.are_required().await?).then(Tenant::default),
        };
        if let Some(tenant) = tenant {
            let rights = vec![Right::Read, Right::Write, Right::Review, Right::Admin];
            let operator = operator.is_some();
            return Ok(Self { tenant, user: named, bound: false, rights, history: None, key: None, operator });
        }
        let key = find_key(headers, keys).await?;
        if let (Some(bound), Some(named)) = (&key.user, &named)
            && bound != named
        {
            let message = format!("this key acts as user {bound} only; leave X-Tenure-User out");
            return Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message));
        }
        let limits = key.limits.or(defaults);
        rate_limits.admit(&key.id, limits, response_headers)?;
        let bound = key.user.is_some();
        Ok(Self {
            tenant: key.tenant,
            user: key.user.or(named),
            bound,
            rights: key.rights,
            history: key.history,
            key: Some(KeyUse { id: key.id, limits }),
            operator: false,
        })
    }

    /// The id of the key that the request was sent with.
    pub fn key_id(&self) -> Option<&str> {
        self.key.as_ref().map(|key| key.id.as_str())
    }
}

/// The key that a request was sent with, if it is valid.
async fn find_key(headers: &HeaderMap, keys: &KeyStore) -> Result<ApiKey, ApiError> {
    let given = header_text(headers, header::AUTHORIZATION.as_str())?;
    let scheme = given.as_deref().and_then(|v| v.strip_prefix("Bearer ").or(v.strip_prefix("bearer ")));
    let refuse = |message: &str| {
        ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message).with_header(header::WWW_AUTHENTICATE, "Bearer")
    };
    let Some(secret) = scheme.map(str::trim) else {
        return Err(refuse("no key was given; send `Authorization: Bearer KEY` (make one with `tenure keys add`)"));
    };
    let Some(key) = keys.find(secret).await? else {
        return Err(refuse("the key is not known here; it may have been revoked"));
    };
    if key.has_expired(keys.tenure().now()) {
        return Err(refuse("the key has expired; ask an administrator for a new one (`tenure keys rotate`)"));
    }
    Ok(key)
}

impl Caller {
    /// Who the request's share of a limit per principal is counted for: the tenant, and the user if the key is bound to
    /// one. A user that the request names itself does not count: each name would have a share of its own.
    pub fn budget_owner(&self) -> String {
        match self.user.as_ref().filter(|_| self.bound) {
            Some(user) => format!("{}\0{user}", self.tenant),
            None => self.tenant.to_string(),
        }
    }

    fn may(&self, right: Right) -> Result<(), ApiError> {
        if self.rights.contains(&right) || self.rights.contains(&Right::Admin) {
            return Ok(());
        }
        let name = serde_json::to_value(right).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
        let message = format!("this key does not have the right `{name}`");
        Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
    }

    fn principal(&self, user: Option<User>) -> Principal {
        let user = match self.bound {
            true => self.user.clone(),
            false => self.user.clone().or(user),
        };
        // An administrator who names nobody sees the whole tenant.
        let everyone = user.is_none() && self.rights.contains(&Right::Admin);
        let reach = if everyone { AccessScope::Tenant } else { AccessScope::Own };
        Principal { tenant: self.tenant.clone(), user: user.unwrap_or_default(), reach, quota: self.quota() }
    }

    /// What its key may have stored.
    fn quota(&self) -> Option<Quota> {
        let KeyLimits { max_sessions, max_stored_bytes, .. } = self.key.as_ref()?.limits;
        let scope = if self.bound { QuotaScope::User } else { QuotaScope::Tenant };
        let limited = max_sessions.is_some() || max_stored_bytes.is_some();
        limited.then_some(Quota { scope, max_sessions, max_stored_bytes })
    }

    /// How the messages of its requests are merged, if the key says.
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

    /// A reviewer, if it may review: sees what waits in all sessions of the tenant. An administrator of one user without the
    /// right `review` sees that user's sessions.
    pub fn reviews(&self) -> Result<Principal, ApiError> {
        self.may(Right::Review)?;
        let reach = match self.bound && !self.rights.contains(&Right::Review) {
            true => AccessScope::Own,
            false => AccessScope::Tenant,
        };
        Ok(Principal { reach, ..self.principal(None) })
    }

    /// Who reviews, by name: the user that the key is bound to, else the one that is named.
    pub fn reviewer(&self, named: Option<String>) -> Result<String, ApiError> {
        let named = named.map(User::new).transpose().map_err(|e| ApiError::invalid("reviewer", e.to_string()))?;
        match (&self.user, named) {
            (Some(user), Some(named)) if self.bound && *user != named => {
                let message = format!("this key acts as user {user} only; leave `reviewer` out");
                Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
            }
            (user, named) => Ok(named.or(user.clone()).unwrap_or_default().to_string()),
        }
    }

    /// An administrator: of the tenant, or of the user that the key is bound to.
    pub fn administers(&self) -> Result<Principal, ApiError> {
        self.may(Right::Admin)?;
        let reach = if self.bound { AccessScope::Own } else { AccessScope::Tenant };
        Ok(Principal { reach, ..self.principal(None) })
    }

    /// The tenant's administrator. A key that is bound to a user administers only that user.
    pub fn administers_tenant(&self) -> Result<Principal, ApiError> {
        self.may(Right::Admin)?;
        match (&self.user, self.bound) {
            (Some(user), true) => {
                let message =
                    format!("this key administers user {user} only; use an administrator's key of the tenant");
                Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
            }
            _ => Ok(Principal { reach: AccessScope::Tenant, ..self.principal(None) }),
        }
    }

    /// The user that its key is bound to.
    pub fn bound_user(&self) -> Option<&User> {
        self.user.as_ref().filter(|_| self.bound)
    }

    /// Whether it is an operator who has the store itself.
    pub fn is_operator(&self) -> bool {
        self.operator
    }

    /// Refuses a model call if its key has no tokens left this minute.
    pub fn admit_model_call(&self, rate_limits: &Arc<RateLimits>) -> Result<(), ApiError> {
        self.key.as_ref().map_or(Ok(()), |key| rate_limits.admit_tokens(&key.id, key.limits))
    }

    /// A model whose tokens are charged to the caller's key, if it has a limit.
    pub fn metered(&self, rate_limits: &Arc<RateLimits>, model: Arc<dyn Model>) -> Arc<dyn Model> {
        match self.token_meter(rate_limits) {
            Some(meter) => Arc::new(Metered { model, meter }),
            None => model,
        }
    }

    /// Charges the caller's key for tokens, if it has a limit.
    pub fn token_meter(&self, rate_limits: &Arc<RateLimits>) -> Option<TokenMeter> {
        let key = self.key.as_ref()?;
        let limit = key.limits.tokens_per_minute?;
        Some(TokenMeter { limits: rate_limits.clone(), key: key.id.clone(), limit })
    }
}
