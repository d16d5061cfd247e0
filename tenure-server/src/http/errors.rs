//! Conversion of errors of other layers into API errors: status, stable code and parameter.

use crate::error::ApiError;
use crate::llm::ModelRegistry;
use crate::sessions::SessionError;
use crate::workspace::{METADATA_KEY, WorkspaceError};
use axum::http::StatusCode;

/// The 404 error for an unknown model name. The message lists the configured models.
pub fn unknown_model(models: &ModelRegistry, name: &str) -> ApiError {
    let names: Vec<_> = models.names().collect();
    let message = format!(
        "no model or assistant {}; configured models: {} (GET /v1/models also lists the assistants)",
        tenure::rules::excerpt(name),
        names.join(", ")
    );
    ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).with_param("model")
}

impl From<WorkspaceError> for ApiError {
    fn from(e: WorkspaceError) -> Self {
        let message = e.to_string();
        match e {
            WorkspaceError::InvalidName(_) => Self::invalid(format!("metadata.{METADATA_KEY}"), message),
            WorkspaceError::Disabled | WorkspaceError::Unnamed(_) => Self::invalid(METADATA_KEY, message),
            WorkspaceError::NotCommitted(_) => {
                Self::new(StatusCode::CONFLICT, "workspace_not_kept", message).with_param(METADATA_KEY)
            }
            WorkspaceError::Busy => Self::new(StatusCode::CONFLICT, "workspace_busy", message).with_param(METADATA_KEY),
            WorkspaceError::TooLarge { limit, .. } => Self::too_large(limit, message),
            WorkspaceError::Failed(_) => {
                tracing::error!(error = message, "workspace operation failed");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "workspace_unavailable", message).with_param(METADATA_KEY)
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
