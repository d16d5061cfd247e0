//! `/backup`: everything that the store holds, as one archive.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult, ErrorBody};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tokio::sync::{mpsc, oneshot};

/// The number of chunks that may wait for a slow client.
const CHUNKS: usize = 4;

/// Download a backup
///
/// Everything that the store holds, of all tenants, at one point in time, while the server is in use. The last line has a checksum:
/// an archive without it is incomplete. Needs the right `backup`, which `admin` does not include. One backup at a time.
#[utoipa::path(
    get, path = "/backup", tag = "operations", operation_id = "backup",
    responses(
        (status = 200, description = "The archive, for `tenure restore`", body = String, content_type = "application/jsonl"),
        (status = 400, description = "The store cannot be backed up", body = ErrorBody),
        (status = 401, body = ErrorBody), (status = 403, body = ErrorBody),
        (status = 409, description = "Another backup is in progress", body = ErrorBody),
        (status = 503, body = ErrorBody),
    )
)]
pub async fn download(State(app): State<AppState>, caller: Caller) -> ApiResult<Response> {
    caller.authorize_backup()?;
    let Ok(permit) = app.backup_permit.clone().try_acquire_owned() else {
        let message = "another backup is in progress; wait until it is complete";
        return Err(ApiError::new(StatusCode::CONFLICT, "backup_in_progress", message));
    };
    let (sender, mut chunks) = mpsc::channel(CHUNKS);
    let (outcome_sender, outcome) = oneshot::channel();
    let tenure = app.tenure.clone();
    app.tasks.spawn(async move {
        let _permit = permit;
        let outcome = tenure.backup(sender).await;
        if let Err(error) = &outcome {
            tracing::warn!(%error, "a backup failed");
        }
        drop(outcome_sender.send(outcome));
    });
    // An error before the first chunk is an error response instead of a truncated archive.
    let Some(first) = chunks.recv().await else {
        let failure = match outcome.await {
            Ok(Err(e)) => e,
            _ => tenure::Error::unavailable("the backup ended without data"),
        };
        return Err(failure.into());
    };
    let rest =
        stream::try_unfold((Some(first), chunks, Some(outcome)), |(first, mut chunks, mut outcome)| async move {
            let chunk = match first {
                Some(chunk) => Some(chunk),
                None => chunks.recv().await,
            };
            if let Some(chunk) = chunk {
                return Ok(Some((Bytes::from(chunk), (None, chunks, outcome))));
            }
            match outcome.take() {
                Some(outcome) => match outcome.await {
                    Ok(Ok(_)) => Ok(None),
                    Ok(Err(e)) => Err(e),
                    Err(_) => Err(tenure::Error::unavailable("the backup was aborted")),
                },
                None => Ok(None),
            }
        });
    Ok(([(header::CONTENT_TYPE, "application/jsonl")], Body::from_stream(rest)).into_response())
}
