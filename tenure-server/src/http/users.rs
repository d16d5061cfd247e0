//! `/users/{id}`: erasure of all data of a user (right to be forgotten).

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::ApiResult;
use crate::http::extract::PathParams;
use crate::http::view::UpdateErrors;
use crate::sessions;
use axum::Json;
use axum::extract::State;
use serde::Serialize;
use tenure::User;
use utoipa::ToSchema;

/// Proof of an erasure.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReceiptView {
    /// The user whose data was erased.
    user: String,
    /// The number of sessions that were purged.
    sessions: usize,
    /// The time of the erasure.
    #[schema(format = DateTime)]
    at: String,
}

/// Erase all data of a user
///
/// Purges all sessions of the user, and deletes their transcripts. Needs the right `admin`. Erasing an unknown user succeeds, with 0 sessions.
#[utoipa::path(
    delete, path = "/users/{id}", tag = "users", operation_id = "erase_user",
    params(("id" = String, Path, description = "The user")),
    responses((status = 200, description = "All data of the user is erased", body = ReceiptView), UpdateErrors)
)]
pub async fn erase(State(app): State<AppState>, caller: Caller, path: PathParams) -> ApiResult<Json<ReceiptView>> {
    let principal = caller.authorize_admin()?;
    let user = User::new(path.get("id")?)?;
    if caller.bound_user().is_some_and(|bound| *bound != user) {
        caller.authorize_tenant_admin()?;
    }
    let receipt = sessions::erase_user(&app, &principal, &user).await?;
    Ok(Json(ReceiptView { user: receipt.user.to_string(), sessions: receipt.sessions, at: receipt.at.to_string() }))
}
