//! `/keys`: management of API keys by administrators. Secrets are returned only when a key is created or
//! rotated.

use crate::app::AppState;
use crate::auth::{ApiKey, Caller, NewKey, Right};
use crate::config::KeyLimits;
use crate::error::{ApiError, ApiResult};
use crate::http::extract::{JsonBody, PathParams};
use crate::http::query::StrictQuery;
use crate::http::view::{CreateErrors, ListErrors, LookupErrors};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tenure::{
    User,
    policy::{HistoryMode, HumanDuration},
    rules::excerpt,
};
use utoipa::ToSchema;

/// A key, without its secret.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeyView {
    /// Its id: the beginning of its hash.
    pub id: String,
    /// `key`.
    pub object: &'static str,
    /// A description of its purpose.
    pub name: Option<String>,
    /// The tenant it grants access to.
    pub tenant: String,
    /// The only user it can act as.
    pub user: Option<String>,
    /// The rights it grants.
    pub rights: Vec<Right>,
    /// How the messages of its requests are merged: `auto`, `full` or `append`.
    #[schema(value_type = Option<String>)]
    pub history: Option<HistoryMode>,
    /// Its own limits; omitted ones are as configured under `limits.keys`.
    pub limits: KeyLimits,
    /// When it was created.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When it expires.
    #[schema(format = DateTime)]
    pub expires_at: Option<String>,
    /// When it was last used, to the minute.
    #[schema(format = DateTime)]
    pub last_used_at: Option<String>,
    /// The secret: only in the response that creates it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

impl KeyView {
    fn new(key: ApiKey, secret: Option<String>) -> Self {
        Self {
            id: key.id,
            object: "key",
            name: key.name,
            tenant: key.tenant.to_string(),
            user: key.user.map(|user| user.to_string()),
            rights: key.rights,
            history: key.history,
            limits: key.limits,
            created_at: key.created_at.to_string(),
            expires_at: key.expires_at.map(|at| at.to_string()),
            last_used_at: key.last_used_at.map(|at| at.to_string()),
            key: secret,
        }
    }
}

/// All keys.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeyList {
    /// `list`.
    object: &'static str,
    /// The keys, oldest first.
    data: Vec<KeyView>,
    /// Always `null`: the list is complete.
    next_cursor: Option<String>,
}

/// A key to be created.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KeyInput {
    /// A description of its purpose.
    name: Option<String>,
    /// The only user it can act as; any user if omitted.
    user: Option<String>,
    /// The rights it grants; `read` and `write` if omitted.
    rights: Option<Vec<Right>>,
    /// How the messages of its requests are merged: `auto`, `full` or `append`.
    #[schema(value_type = Option<String>)]
    history: Option<HistoryMode>,
    /// When it expires (RFC 3339); never if omitted.
    #[schema(value_type = Option<String>, format = DateTime)]
    expires_at: Option<Timestamp>,
    /// Its own limits.
    limits: KeyLimits,
}

/// Options of a key rotation.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rotation {
    /// How long the old key stays valid, such as `24h`; default `1h`; `0s` revokes it immediately.
    #[schema(value_type = Option<String>)]
    grace: Option<HumanDuration>,
}

/// A key that was revoked.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeyRevoked {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// Whether the caller may administer a key: it must belong to the caller's tenant, unless the caller is an
/// operator, and to the caller's user if the caller's own key is bound to one.
fn administers(caller: &Caller, tenant: &tenure::Tenant, key: &ApiKey) -> bool {
    let tenant = caller.is_operator() || key.tenant == *tenant;
    tenant && caller.bound_user().is_none_or(|user| key.user.as_ref() == Some(user))
}

/// Looks up the key that a path names. Keys that the caller may not administer are reported as not found.
async fn find(app: &AppState, caller: &Caller, path: &PathParams) -> ApiResult<ApiKey> {
    let principal = caller.authorize_admin()?;
    let id = path.get("id")?;
    let key = app.keys.get(id).await?.filter(|key| administers(caller, &principal.tenant, key));
    key.ok_or_else(|| ApiError::not_found(format!("there is no key {}; GET /keys lists them", excerpt(id))))
}

/// List keys
///
/// Without their secrets. Needs the right `admin`; a key that is bound to a user lists that user's keys.
#[utoipa::path(
    get, path = "/keys", tag = "keys", operation_id = "list_keys",
    responses((status = 200, description = "All keys, oldest first", body = KeyList), ListErrors)
)]
pub async fn list(State(app): State<AppState>, caller: Caller, mut params: StrictQuery) -> ApiResult<Json<KeyList>> {
    let principal = caller.authorize_admin()?;
    // Operators with direct access to the store may list the keys of all tenants with `tenant=*`.
    let all = caller.is_operator() && params.one("tenant")?.as_deref() == Some("*");
    params.reject_unknown()?;
    let keys = app.keys.list().await?.into_iter();
    let keys =
        keys.filter(|key| administers(&caller, &principal.tenant, key) && (all || key.tenant == principal.tenant));
    let data = keys.map(|key| KeyView::new(key, None)).collect();
    Ok(Json(KeyList { object: "list", data, next_cursor: None }))
}

/// Create a key
///
/// Only this response contains the secret, `key`. The key is valid immediately, on every node. Needs the right `admin`; a key that is bound to
/// a user creates keys of that user.
#[utoipa::path(
    post, path = "/keys", tag = "keys", operation_id = "create_key",
    request_body(content = KeyInput),
    responses((status = 201, description = "The key, with its secret", body = KeyView), CreateErrors)
)]
pub async fn create(
    State(app): State<AppState>,
    caller: Caller,
    JsonBody(body): JsonBody<KeyInput>,
) -> ApiResult<(StatusCode, Json<KeyView>)> {
    let principal = caller.authorize_admin()?;
    let requested = body.user.map(User::new).transpose()?;
    let user = match (caller.bound_user(), requested) {
        (Some(bound), Some(requested)) if *bound != requested => {
            let message = format!("this key administers user {bound} only; leave `user` out");
            return Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message).with_param("user"));
        }
        (Some(bound), _) => Some(bound.clone()),
        (None, requested) => requested,
    };
    caller.authorize_granting(body.rights.as_deref().unwrap_or_default())?;
    let new = NewKey {
        tenant: principal.tenant,
        user,
        rights: body.rights.unwrap_or_else(|| vec![Right::Read, Right::Write]),
        name: body.name,
        history: body.history,
        expires_at: body.expires_at,
        limits: body.limits,
    };
    let (key, secret) = app.keys.add(new).await?;
    Ok((StatusCode::CREATED, Json(KeyView::new(key, Some(secret)))))
}

/// Revoke a key
///
/// The key becomes invalid on this node immediately, on other nodes within two seconds. Keys stay required when the last one is revoked.
#[utoipa::path(
    delete, path = "/keys/{id}", tag = "keys", operation_id = "revoke_key",
    params(("id" = String, Path, description = "The key's id")),
    responses((status = 200, description = "The key was revoked", body = KeyRevoked), LookupErrors)
)]
pub async fn revoke(State(app): State<AppState>, caller: Caller, path: PathParams) -> ApiResult<Json<KeyRevoked>> {
    let key = find(&app, &caller, &path).await?;
    app.keys.revoke(&key.id).await?;
    Ok(Json(KeyRevoked { id: key.id, object: "key.deleted", deleted: true }))
}

/// Rotate a key
///
/// Creates a key with the same settings; the old one stays valid for `grace` (default: one hour). Only this response contains the new
/// secret, `key`.
#[utoipa::path(
    post, path = "/keys/{id}/rotate", tag = "keys", operation_id = "rotate_key",
    params(("id" = String, Path, description = "The key's id")),
    request_body(content = Rotation),
    responses((status = 201, description = "The new key, with its secret", body = KeyView), CreateErrors)
)]
pub async fn rotate(
    State(app): State<AppState>,
    caller: Caller,
    path: PathParams,
    JsonBody(body): JsonBody<Rotation>,
) -> ApiResult<(StatusCode, Json<KeyView>)> {
    let key = find(&app, &caller, &path).await?;
    caller.authorize_granting(&key.rights)?;
    let grace = body.grace.unwrap_or(HumanDuration::of(std::time::Duration::from_secs(3600)));
    let Some(grace) = grace.duration() else {
        return Err(ApiError::invalid("grace", "`grace` must be finite, such as 24h"));
    };
    let Some((key, secret)) = app.keys.rotate(&key.id, grace).await? else {
        return Err(ApiError::not_found("the key was revoked concurrently"));
    };
    Ok((StatusCode::CREATED, Json(KeyView::new(key, Some(secret)))))
}
