//! `/search`: full-text search over the messages and titles of all sessions.

use crate::app::AppState;
use crate::auth::Caller;
use crate::error::{ApiError, ApiResult};
use crate::http::query::StrictQuery;
use crate::http::view::ListErrors;
use axum::Json;
use axum::extract::State;
use serde::Serialize;
use tenure::rules::excerpt;
use tenure::{
    Role, Seq,
    session::{SearchCursor, SearchHit, SearchPage, SearchRequest, SearchSort},
};
use utoipa::ToSchema;

/// A matching message, or a session whose title matches.
#[derive(Debug, Serialize, ToSchema)]
pub struct MatchView {
    /// `match`.
    object: &'static str,
    /// The session.
    session_id: String,
    /// The user who owns the session.
    user: String,
    /// Its title.
    title: Option<String>,
    /// When it was last active.
    #[schema(format = DateTime)]
    active_at: String,
    /// The message's position, from 0. If the title matched, this and the next three fields are `null`.
    position: Option<usize>,
    /// The sequence number of the message's record.
    seq: Option<Seq>,
    /// The role of the message.
    #[schema(value_type = Option<String>)]
    role: Option<Role>,
    /// The time of the message.
    #[schema(format = DateTime)]
    created_at: Option<String>,
    /// The part of the text that matched, redacted. Plain text, not HTML: escape it before rendering it as HTML.
    snippet: String,
    /// The positions of the matches in the snippet: `[from, to]` in characters (Unicode code points), `to` exclusive.
    #[schema(value_type = Vec<Vec<usize>>)]
    highlights: Vec<(usize, usize)>,
}

impl From<SearchHit> for MatchView {
    fn from(hit: SearchHit) -> Self {
        let message = hit.message.as_ref();
        Self {
            object: "match",
            session_id: hit.session_id.to_string(),
            user: hit.user.to_string(),
            active_at: hit.active_at.to_string(),
            position: message.map(|m| m.position),
            seq: message.map(|m| m.seq),
            role: message.map(|m| m.role),
            created_at: message.map(|m| m.at.to_string()),
            title: hit.title,
            snippet: hit.snippet,
            highlights: hit.highlights,
        }
    }
}

/// A page of search results.
#[derive(Debug, Serialize, ToSchema)]
pub struct MatchList {
    /// `list`.
    object: &'static str,
    /// The matches.
    data: Vec<MatchView>,
    /// The cursor of the next page; `null` on the last one. A page without matches may be followed by one with matches.
    next_cursor: Option<String>,
    /// The number of sessions examined for this page.
    #[serde(rename = "looked_at")]
    scanned: usize,
    /// Whether the page ended at a scan limit, before it had `limit` matches; continue with `next_cursor`. With `sort=relevance`: whether
    /// there are older matches that were not ranked.
    #[serde(rename = "cut")]
    truncated: bool,
    /// Sessions that were skipped because their data is corrupt.
    damaged: Vec<String>,
}

impl From<SearchPage> for MatchList {
    fn from(page: SearchPage) -> Self {
        Self {
            object: "list",
            data: page.hits.into_iter().map(MatchView::from).collect(),
            next_cursor: page.next.map(|c| c.to_string()),
            scanned: page.scanned,
            truncated: page.truncated,
            damaged: page.damaged.iter().map(ToString::to_string).collect(),
        }
    }
}

/// Search messages and titles
///
/// Searches messages, tool calls and titles. Results are ordered by the session's last activity, within a session newest message first; with
/// `sort=relevance` the best of the newest 1,000 come first. All words must occur in one message, ignoring case and accents; `"words in
/// quotes"` match a phrase, `begin*` a prefix. Discarded messages and redacted text are not found. A page ends after `limit` matches or at a
/// scan limit: continue with `next_cursor` until it is `null`. The other parameters select sessions, as in `GET /sessions`.
#[utoipa::path(
    get, path = "/search", tag = "sessions", operation_id = "search_sessions",
    params(
        ("q" = String, Query, description = "The search query"),
        ("role" = Option<String>, Query, description = "Only messages with this role: `user`, `assistant`, `tool`, `system` or `developer`"),
        ("sort" = Option<String>, Query, description = "`time` (default) or `relevance`"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100, description = "Maximum number of matches per page; default 20"),
        ("cursor" = Option<String>, Query, description = "`next_cursor` of the previous page"),
        ("assistant_id" = Option<String>, Query, description = "In sessions of this assistant"),
        ("thread_id" = Option<String>, Query, description = "In sessions of this chat thread"),
        ("user" = Option<String>, Query, description = "In sessions of this user; for administrators"),
        ("status" = Option<String>, Query, description = "`active`, `paused`, `expired`, `deleted`; several with commas"),
        ("created_after" = Option<String>, Query, description = "In sessions created at or after this RFC 3339 time"),
        ("created_before" = Option<String>, Query, description = "In sessions created before this RFC 3339 time"),
        ("tag" = Option<Vec<String>>, Query, description = "In sessions with this tag; repeatable, all must match"),
        ("title" = Option<String>, Query, description = "In sessions whose title contains this text (case-insensitive)"),
    ),
    responses((status = 200, description = "A page", body = MatchList), ListErrors)
)]
pub async fn find(State(app): State<AppState>, caller: Caller, mut params: StrictQuery) -> ApiResult<Json<MatchList>> {
    let principal = caller.authorize_read()?;
    let text = params.one("q")?.ok_or_else(|| ApiError::invalid("q", "`q` is missing; send the search terms"))?;
    let role = params.one("role")?.map(|word| parse_role(&word)).transpose()?;
    let sort = params.one("sort")?.map_or(Ok(SearchSort::Time), |word| parse_sort(&word))?;
    let cursor = params.one("cursor")?.map(|c| c.parse::<SearchCursor>()).transpose()?;
    if params.one("offset")?.is_some() {
        return Err(ApiError::invalid("offset", "\"offset\" is not a parameter of this route; use `cursor`"));
    }
    let query = params.into_session_query(&principal, app.config.limits.max_page)?;
    let search = SearchRequest { role, sort, cursor, query, ..SearchRequest::new(text, 0) };
    Ok(Json(app.tenure.browsing(&principal).search_sessions(&principal, &search).await?.into()))
}

fn parse_sort(word: &str) -> ApiResult<SearchSort> {
    match word {
        "time" => Ok(SearchSort::Time),
        "relevance" => Ok(SearchSort::Relevance),
        _ => Err(ApiError::invalid("sort", format!("{word} is not time or relevance", word = excerpt(word)))),
    }
}

fn parse_role(word: &str) -> ApiResult<Role> {
    let valid = "user, assistant, tool, system or developer";
    serde_json::from_value(word.into())
        .map_err(|_| ApiError::invalid("role", format!("{word} is not {valid}", word = excerpt(word))))
}
