//! Conversion of errors of other layers into API errors: status, stable code and parameter.

use crate::error::ApiError;
use crate::llm::ModelRegistry;
use crate::sessions::SessionError;
use crate::workspace::{METADATA_KEY, WorkspaceError};
use axum::http::StatusCode;

/// The 404 error for an unknown model name. The message lists the configured models.
pub fn unknown_model(models: &ModelRegistry, name: &str) -> ApiError {
    let known: Vec<_> = models.names().collect();
    let message = format!(
        "there is no model or assistant {}; it can be one of: {} (GET /v1/models lists the assistants too)",
        tenure::excerpt(name),
        known.join(", ")
    );
    ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).with_param("model")
}

impl From<WorkspaceError> for ApiError {
    fn from(e: WorkspaceError) -> Self {
        let why = e.to_string();
        match e {
            WorkspaceError::Name(_) => Self::invalid(format!("metadata.{METADATA_KEY}"), why),
            WorkspaceError::Disabled | WorkspaceError::Unnamed(_) => Self::invalid(METADATA_KEY, why),
            WorkspaceError::NotKept(_) => {
                Self::new(StatusCode::CONFLICT, "workspace_not_kept", why).with_param(METADATA_KEY)
            }
            WorkspaceError::Busy => Self::new(StatusCode::CONFLICT, "workspace_busy", why).with_param(METADATA_KEY),
            WorkspaceError::TooLarge { limit, .. } => Self::too_large(limit, why),
            WorkspaceError::Failed(_) => {
                tracing::error!(why, "a workspace failed");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "workspace_unavailable", why).with_param(METADATA_KEY)
            }
        }
    }
}

impl From<SessionError> for ApiError {
    fn from(e: SessionError) -> Self {
        match e {
            SessionError::Store(e) => e.into(),
            SessionError::Workspace(e) => e.into(),
        }
    }
}
