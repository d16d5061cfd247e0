//! Export and import of sessions: `/sessions/{id}/export` and `/sessions/import`.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::http::extract::{SessionPath, TextBody};
use crate::http::query::StrictQuery;
use crate::http::view::{self, CreateErrors, ReadErrors, SessionView};
use crate::sessions;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::value::RawValue;
use std::borrow::Cow;
use tenure::import::{self, ImportFormat, ImportedSession};
use tenure::rules::excerpt;
use tenure::{
    Error, Principal, SessionId,
    session::{AccessScope, Export, RawObject},
};
use utoipa::ToSchema;

/// Export a session
///
/// `tenure`: everything, for import into another installation. `openai`: `{"messages": […]}`. `mistralrs`: what mistral.rs exports and imports.
/// `jsonl`: one message per line. The header `X-Tenure-Left-Out` lists what the format cannot represent.
#[utoipa::path(
    get, path = "/sessions/{id}/export", tag = "transfer", operation_id = "export_session",
    params(
        ("id" = String, Path, description = "The session"),
        ("format" = Option<String>, Query, description = "`tenure` (default), `openai`, `mistralrs` or `jsonl`"),
    ),
    responses(
        (status = 200, description = "The session", content((Object = "application/json"), (String = "application/jsonl"))),
        ReadErrors,
    )
)]
pub async fn export(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
    mut params: StrictQuery,
) -> ApiResult<Response> {
    let principal = caller.authorize_read()?;
    let format = params.one("format")?;
    params.reject_unknown()?;
    let (seq, body) = match format.as_deref().unwrap_or("tenure") {
        "tenure" => {
            let export = app.tenure.browsing(&principal).export(&principal, &id).await?;
            let seq = export.log.last().map_or(0, |r| r.seq);
            return Ok(view::json(StatusCode::OK, Some(seq), view::to_json(&export)));
        }
        "openai" => {
            let list = |s: &tenure::Session| (s.head().seq, format!(r#"{{"messages":{}}}"#, s.messages_json()));
            app.tenure.browsing(&principal).with_session(&principal, &id, list).await?
        }
        "mistralrs" => {
            let session = app.tenure.browsing(&principal).load(&principal, &id).await?;
            let seq = session.head().seq;
            let (body, skipped) = import::to_mistralrs_tagged(&session.into())?;
            let list = if skipped.is_empty() { SKIPPED_BY_MESSAGES } else { SKIPPED_BY_TAGGED_WITH_FIELDS };
            return Ok(with_skipped_header(view::json(StatusCode::OK, Some(seq), body), list));
        }
        "jsonl" => {
            let tenure = app.tenure.browsing(&principal);
            let lines = tenure.with_session(&principal, &id, |s| {
                let lines: String = s.messages.iter().flat_map(|m| [m.message.as_str(), "\n"]).collect();
                (s.head().seq, lines)
            });
            let (seq, lines) = lines.await?;
            let mut response = view::json(StatusCode::OK, Some(seq), lines);
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/jsonl"));
            return Ok(with_skipped_header(response, SKIPPED_BY_MESSAGES));
        }
        other => {
            let message = format!("{other} is not tenure, openai, mistralrs or jsonl", other = excerpt(other));
            return Err(ApiError::invalid("format", message));
        }
    };
    Ok(with_skipped_header(view::json(StatusCode::OK, Some(seq), body), SKIPPED_BY_MESSAGES))
}

/// The response header that lists what the export format cannot represent (D-094).
pub const SKIPPED_HEADER: &str = "x-tenure-left-out";

/// The parts of a session that a list of messages cannot represent.
const SKIPPED_BY_MESSAGES: &str = "info,timestamps,runs,reviews,checkpoints,discarded";

/// The parts of a session that the tagged format of mistral.rs cannot represent if a message has a field that is
/// neither text nor a list of objects. Without such a field, they are those of a list of messages.
const SKIPPED_BY_TAGGED_WITH_FIELDS: &str = "info,timestamps,runs,reviews,checkpoints,discarded,fields";

/// The parts of a session that the response of `GET /v1/sessions/{id}` does not contain.
const SKIPPED_BY_MISTRALRS: &str = "timestamps,runs,reviews,discarded";

fn with_skipped_header(mut response: Response, skipped: &'static str) -> Response {
    response.headers_mut().insert(SKIPPED_HEADER, HeaderValue::from_static(skipped));
    response
}

/// Builds the response of a mistral.rs export, with the header that lists what it cannot represent.
pub(super) fn mistralrs_response(seq: tenure::Seq, export: &Export) -> ApiResult<Response> {
    Ok(with_skipped_header(view::json(StatusCode::OK, Some(seq), mistralrs(export)?), SKIPPED_BY_MISTRALRS))
}

/// Serializes an export in the format of mistral.rs (D-096).
fn mistralrs(export: &Export) -> ApiResult<String> {
    let raw: Box<RawValue> = import::to_mistralrs(export)?;
    Ok(String::from(Box::<str>::from(raw)))
}

/// Parses the sessions in a text. If one of them is invalid, the whole text is rejected.
pub(super) fn read(text: &str, format: Option<ImportFormat>) -> ApiResult<Vec<ImportedSession>> {
    let sessions = import::read(text, format).map_err(|e| ApiError::from(e).or_param("body"))?;
    let sessions: Result<Vec<ImportedSession>, Error> = sessions.into_iter().collect();
    sessions.map_err(|e| ApiError::from(e).or_param("body"))
}

/// The result of an import.
#[derive(Debug, Serialize, ToSchema)]
pub struct ImportedView {
    /// The new sessions, in the order of the body.
    sessions: Vec<SessionView>,
    /// Parts of the import that a session cannot represent.
    #[serde(rename = "left_out")]
    skipped: Vec<LeftOutView>,
    /// Sessions from earlier imports of the same exports. Without `id`, these exports were not imported again.
    duplicate_of: Vec<String>,
}

/// A part of an import that a session cannot represent.
#[derive(Debug, Serialize, ToSchema)]
pub struct LeftOutView {
    /// The session that lacks it.
    pub session_id: String,
    /// Its location in the import.
    #[serde(rename = "place")]
    pub location: String,
    /// What it is, and why it is not in the session.
    #[serde(rename = "why")]
    pub reason: String,
}

/// Converts the parts of an import that a session cannot represent into views (D-094).
pub(super) fn skipped_parts(id: &SessionId, imported: &ImportedSession) -> Vec<LeftOutView> {
    let view = |part: &import::SkippedPart| LeftOutView {
        session_id: id.to_string(),
        location: part.location.clone(),
        reason: part.reason.clone(),
    };
    imported.skipped.iter().map(view).collect()
}

/// Import sessions
///
/// Exports of Tenure, plain OpenAI messages, exports of mistral.rs, transcripts of Claude Code, items of OpenAI's Responses and Conversations
/// APIs, or data exports of ChatGPT; as JSON or JSON lines. An export that was imported before changes nothing, unless `id` is given. The format is detected if it is not given. The id of a session is the `id` in the query or the body, else its original id
/// if that is not taken, else a new one.
#[utoipa::path(
    post, path = "/sessions/import", tag = "transfer", operation_id = "import_sessions",
    params(
        ("id" = Option<String>, Query, description = "The id of the new session, if the body is a single session"),
        ("format" = Option<String>, Query, description = "`tenure`, `openai`, `mistralrs`, `claude-code`, `responses` or `chatgpt`"),
    ),
    request_body(content((Object = "application/json"), (String = "application/jsonl"))),
    responses(
        (status = 200, description = "All sessions had been imported before; nothing was changed", body = ImportedView),
        (status = 201, description = "The sessions were imported", body = ImportedView),
        CreateErrors,
    )
)]
pub async fn import(
    State(app): State<AppState>,
    caller: Caller,
    mut params: StrictQuery,
    lines: TextBody,
) -> ApiResult<Response> {
    let principal = caller.authorize_write()?;
    let format = params.one("format")?.map(|f| f.parse::<ImportFormat>()).transpose()?;
    let mut id = params.one("id")?.map(SessionId::new).transpose().map_err(|e| ApiError::from(e).with_param("id"))?;
    params.reject_unknown()?;
    let (text, body_id) = without_id(lines.as_str())?;
    id = id.or(body_id);
    let mut all = read(&text, format)?;
    if all.is_empty() {
        return Err(ApiError::invalid("body", "the body contains no session"));
    }
    if all.len() > 1 && id.is_some() {
        return Err(ApiError::invalid(
            "id",
            format!("`id` can be set for one session only, and the body contains {}", all.len()),
        ));
    }
    for imported in &mut all {
        imported.skip_unknown_model(|model| app.models.get(model).is_some());
        app.tenure.check_export(&principal, &imported.export)?;
        sessions::check_workspace(&app, &principal, &imported.export.metadata).await?;
    }
    let mut view = ImportedView { sessions: Vec::new(), skipped: Vec::new(), duplicate_of: Vec::new() };
    for imported in all {
        // Other users may import the same export.
        let own = Principal { scope: AccessScope::Own, ..principal.clone() };
        let earlier = app.tenure.find_earlier_imports(&own, &imported.export).await?;
        view.duplicate_of.extend(earlier.iter().map(ToString::to_string));
        // A repeated import changes nothing, unless the caller asks for another session.
        if !earlier.is_empty() && id.is_none() {
            continue;
        }
        let own_id = imported.export.session_id.clone();
        let first_id = id.clone().or(own_id).unwrap_or_else(SessionId::generate);
        let head = match app.tenure.import_new(&principal, &first_id, &imported.export).await {
            // The session's own id is in use, perhaps by an earlier import of it.
            Err(Error::Exists { .. }) if id.is_none() => {
                app.tenure.import_new(&principal, &SessionId::generate(), &imported.export).await?
            }
            result => result?,
        };
        view.skipped.extend(skipped_parts(&head.info.session_id, &imported));
        view.sessions.push(SessionView::from(&head));
    }
    let status = if view.sessions.is_empty() { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, Json(view)).into_response())
}

/// Removes the `id` from the body and returns it: it names the new session and is not part of the export. A
/// body that is not a JSON object is returned unchanged.
fn without_id(text: &str) -> ApiResult<(Cow<'_, str>, Option<SessionId>)> {
    let Ok(mut fields) = serde_json::from_str::<RawObject>(text) else { return Ok((text.into(), None)) };
    let Some(id) = fields.remove("id") else { return Ok((text.into(), None)) };
    let invalid = |reason: String| ApiError::invalid("id", reason);
    match serde_json::from_str::<Option<String>>(id.get()) {
        Ok(Some(id)) => Ok((fields.to_string().into(), Some(SessionId::new(id).map_err(|e| invalid(e.to_string()))?))),
        Ok(None) => Ok((fields.to_string().into(), None)),
        Err(_) => Err(invalid("`id` must be text".to_owned())),
    }
}
