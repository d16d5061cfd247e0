//! Extraction of the authenticated caller from a request.

use crate::app::AppState;
use crate::auth::rate_limit::ResponseHeaders;
use crate::auth::{Caller, Credentials, LocalAccess};
use crate::error::ApiError;
use crate::net::connections::Connection;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use std::sync::Arc;

/// Authenticates the caller of a request by its API key or local access. Also schedules the update of the key's
/// last use, marks the connection as authenticated, and stores the caller in the request extensions.
pub async fn authenticate(parts: &mut Parts, app: &AppState) -> Result<Caller, ApiError> {
    let operator = parts.extensions.get::<LocalAccess>();
    let response_headers = parts.extensions.get::<ResponseHeaders>();
    let defaults = app.config.limits.keys;
    let credentials = Credentials { headers: &parts.headers, operator, response_headers };
    let caller = Caller::authenticate(credentials, &app.keys, defaults, &app.rate_limits).await?;
    if let Some(id) = caller.key_id()
        && app.keys.is_use_due(id)
    {
        let state = app.clone();
        let id = id.to_owned();
        app.tasks.spawn(async move { state.keys.record_use(&id).await });
    }
    if let Some(connection) = parts.extensions.get::<Arc<Connection>>() {
        connection.mark_authenticated();
    }
    // `body::read` takes the caller from here: the budget for request bodies is per principal.
    parts.extensions.insert(caller.clone());
    Ok(caller)
}

impl FromRequestParts<AppState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &AppState) -> Result<Self, ApiError> {
        authenticate(parts, app).await
    }
}
