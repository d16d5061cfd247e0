//! The audit trail: `/sessions/{id}/audit` and `/audit`.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::http::extract::SessionPath;
use crate::http::query::StrictQuery;
use crate::http::view::{ListErrors, LookupErrors};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::Serialize;
use serde_json::Value;
use tenure::review::{AuditRange, AuditedDecision, Decision};
use tenure::rules::excerpt;
use utoipa::ToSchema;

/// One decision of the audit trail.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuditedView {
    /// The session.
    session_id: String,
    /// The sequence number of its record in the session's log.
    seq: u64,
    /// When it was made.
    #[schema(format = DateTime)]
    timestamp: String,
    /// The review.
    review_id: String,
    /// The step that was under review.
    step: String,
    /// `approved`, `rejected` or `corrected`.
    #[schema(value_type = String)]
    decision: Decision,
    /// Who decided.
    reviewer: String,
    /// The reviewer's reason.
    notes: Option<String>,
    /// The arguments to use instead, if corrected.
    #[schema(value_type = Option<Object>)]
    arguments: Option<Value>,
    /// The hash of the previous decision; `null` in decisions of versions that did not link them.
    previous: Option<String>,
    /// The BLAKE3 hash of this decision.
    hash: String,
    /// Whether it was imported: it was recorded by the exporting installation, not by this one.
    imported: bool,
    /// Whether it fits the hash chain.
    verified: bool,
}

impl From<AuditedDecision> for AuditedView {
    fn from(d: AuditedDecision) -> Self {
        Self {
            session_id: d.session.to_string(),
            seq: d.seq,
            timestamp: d.at.to_string(),
            review_id: d.decided.review.to_string(),
            step: d.decided.step,
            decision: d.decided.decision,
            reviewer: d.decided.reviewer,
            notes: d.decided.notes,
            arguments: d.decided.arguments,
            previous: d.decided.previous.map(|h| h.to_string()),
            hash: d.hash.to_string(),
            imported: d.imported,
            verified: d.broken.is_none(),
        }
    }
}

/// The audit trail of a session.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuditView {
    /// The session.
    session_id: String,
    /// Whether the hash chain is unbroken.
    verified: bool,
    /// The first position at which it is broken.
    broken: Option<BrokenView>,
    /// The decisions, oldest first; for a fork, including its parent's part.
    decisions: Vec<AuditedView>,
}

/// The position at which a hash chain is broken.
#[derive(Debug, Serialize, ToSchema)]
pub struct BrokenView {
    /// The sequence number of the record.
    seq: u64,
    /// The error found there.
    #[serde(rename = "why")]
    reason: String,
}

/// The audit trail of a session
///
/// Every decision in the session's log, including those that were discarded by a rewind, whatever the session's status.
#[utoipa::path(
    get, path = "/sessions/{id}/audit", tag = "audit", operation_id = "audit_session",
    params(("id" = String, Path, description = "The session")),
    responses((status = 200, description = "The audit trail", body = AuditView), LookupErrors)
)]
pub async fn session(
    State(app): State<AppState>,
    caller: Caller,
    SessionPath(id): SessionPath,
) -> ApiResult<Json<AuditView>> {
    let principal = caller.authorize_read()?;
    let trail = app.tenure.browsing(&principal).audit(&principal, &id).await?;
    Ok(Json(AuditView {
        session_id: id.to_string(),
        verified: trail.broken.is_none(),
        broken: trail.broken.map(|(seq, reason)| BrokenView { seq, reason }),
        decisions: trail.decisions.into_iter().map(AuditedView::from).collect(),
    }))
}

/// The format of an audit export.
#[derive(Clone, Copy)]
enum AuditForm {
    Jsonl,
    Csv,
}

const COLUMNS: &str =
    "session_id,seq,timestamp,review_id,step,decision,reviewer,notes,arguments,previous,hash,imported,verified";

/// Export the audit trail of the tenant
///
/// Every decision in the logs of all sessions, one per line, ordered by session. Needs the right `admin`.
#[utoipa::path(
    get, path = "/audit", tag = "audit", operation_id = "export_audit",
    params(
        ("from" = Option<String>, Query, description = "Made at or after this time: RFC 3339, or a date (midnight UTC)"),
        ("to" = Option<String>, Query, description = "Made before this time: RFC 3339, or a date (midnight UTC)"),
        ("format" = Option<String>, Query, description = "`jsonl` (default) or `csv`"),
    ),
    responses(
        (status = 200, description = "The decisions", content((AuditedView = "application/jsonl"), (String = "text/csv"))),
        ListErrors,
    )
)]
pub async fn export(State(app): State<AppState>, caller: Caller, mut params: StrictQuery) -> ApiResult<Response> {
    let principal = caller.authorize_admin()?;
    let range = AuditRange { from: params.time("from")?, to: params.time("to")? };
    let form = match params.one("format")?.as_deref() {
        None | Some("jsonl") => AuditForm::Jsonl,
        Some("csv") => AuditForm::Csv,
        Some(other) => {
            return Err(ApiError::invalid("format", format!("{other} is not jsonl or csv", other = excerpt(other))));
        }
    };
    params.reject_unknown()?;
    let mut export = app.tenure.browsing(&principal).audit_export(&principal, range);
    // Read before the response starts, so that an unavailable store yields an error response instead of a
    // truncated stream.
    let first = export.next().await?;
    let (content_type, header_row) = match form {
        AuditForm::Jsonl => ("application/jsonl", String::new()),
        AuditForm::Csv => ("text/csv; charset=utf-8", format!("{COLUMNS}\r\n")),
    };
    let first_lines = header_row + &lines(form, first.unwrap_or_default());
    let rest = stream::try_unfold(export, move |mut export| async move {
        let page = export.next().await?;
        Ok::<_, tenure::Error>(page.map(|page| (Bytes::from(lines(form, page)), export)))
    });
    use futures_util::StreamExt;
    let all = stream::iter([Ok(Bytes::from(first_lines))]).chain(rest);
    Ok(([(header::CONTENT_TYPE, content_type)], Body::from_stream(all)).into_response())
}

fn lines(form: AuditForm, page: Vec<AuditedDecision>) -> String {
    let line = |decision: AuditedDecision| {
        let view = AuditedView::from(decision);
        match form {
            AuditForm::Jsonl => serde_json::to_string(&view).unwrap_or_default() + "\n",
            AuditForm::Csv => csv(&view),
        }
    };
    page.into_iter().map(line).collect()
}

/// Renders a decision as one line of CSV (RFC 4180).
fn csv(view: &AuditedView) -> String {
    let fields = [
        view.session_id.clone(),
        view.seq.to_string(),
        view.timestamp.clone(),
        view.review_id.clone(),
        view.step.clone(),
        view.decision.as_str().to_owned(),
        view.reviewer.clone(),
        view.notes.clone().unwrap_or_default(),
        view.arguments.as_ref().map(ToString::to_string).unwrap_or_default(),
        view.previous.clone().unwrap_or_default(),
        view.hash.clone(),
        view.imported.to_string(),
        view.verified.to_string(),
    ];
    fields.iter().map(|f| escape_field(f)).collect::<Vec<_>>().join(",") + "\r\n"
}

/// Escapes a CSV field. Values that spreadsheets would evaluate as a formula are prefixed with an apostrophe
/// (protection against CSV injection).
fn escape_field(text: &str) -> String {
    let formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let text = if formula { format!("'{text}") } else { text.to_owned() };
    if text.contains(['"', ',', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_fields_are_quoted_and_are_no_formulas() {
        for (text, want) in [
            ("plain", "plain"),
            ("", ""),
            ("a,b", "\"a,b\""),
            ("say \"hi\"", "\"say \"\"hi\"\"\""),
            ("two\nlines", "\"two\nlines\""),
            ("=1+1", "'=1+1"),
            ("+1", "'+1"),
            ("-1", "'-1"),
            ("@SUM(A1)", "'@SUM(A1)"),
            ("=\"a\",1", "\"'=\"\"a\"\",1\""),
        ] {
            assert_eq!(escape_field(text), want);
        }
    }
}
