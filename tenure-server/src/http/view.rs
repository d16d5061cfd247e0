//! Sessions and their parts as clients see them. Messages are put into the answer as the text they are: nothing is parsed or written anew.

mod format;

use crate::error::ErrorBody;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use format::{Times, put_number};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use tenure::{Cached, Checkpoint, Discarded, Head, Outcome, Role, Run, Said, Seq, Session, Summary};
use utoipa::openapi::{Content, Ref, RefOr, ResponseBuilder};
use utoipa::{IntoResponses, ToSchema};

/// A session: what is known of it without its messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionView {
    /// Its id.
    pub id: String,
    /// Its id, by its other name.
    pub session_id: String,
    /// `session`.
    pub object: &'static str,
    /// `active`, `paused`, `expired` or `deleted`.
    pub status: &'static str,
    /// Whose it is.
    pub user: String,
    /// The assistant it belongs to.
    pub assistant_id: Option<String>,
    /// The chat thread that shows it.
    pub thread_id: Option<String>,
    /// The model it talks to.
    pub model: Option<String>,
    /// A title for people.
    pub title: Option<String>,
    /// Words to find it by.
    pub tags: Vec<String>,
    /// Anything else.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    /// When it began.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When anything last happened in it.
    #[schema(format = DateTime)]
    pub updated_at: String,
    /// The last message or run; idle time counts from here.
    #[schema(format = DateTime)]
    pub active_at: String,
    /// What it was forked from.
    pub parent: Option<ParentView>,
    /// The last record of its log; the `ETag`.
    pub seq: Seq,
    /// How many messages it has.
    pub message_count: usize,
    /// How many turns.
    pub turn_count: usize,
}

/// Where a fork left its parent.
#[derive(Debug, Serialize, ToSchema)]
pub struct ParentView {
    /// The session whose log it leans on.
    pub session_id: String,
    /// The last record they share.
    pub seq: Seq,
    /// How many messages they share.
    pub position: usize,
}

impl From<&Head> for SessionView {
    fn from(head: &Head) -> Self {
        let info = &head.info;
        Self {
            id: info.session_id.to_string(),
            session_id: info.session_id.to_string(),
            object: "session",
            status: head.status.as_str(),
            user: head.user.to_string(),
            assistant_id: head.assistant.clone(),
            thread_id: head.thread.clone(),
            model: info.model.clone(),
            title: info.title.clone(),
            tags: info.tags.clone(),
            metadata: info.metadata.clone(),
            created_at: info.created_at.to_string(),
            updated_at: info.updated_at.to_string(),
            active_at: head.active_at.to_string(),
            parent: head.parent.as_ref().map(|p| ParentView {
                session_id: p.session.to_string(),
                seq: p.seq,
                position: p.mark.messages,
            }),
            seq: head.seq,
            message_count: head.mark.messages,
            turn_count: head.mark.turns,
        }
    }
}

/// A page of sessions.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionList {
    /// `list`.
    pub object: &'static str,
    /// The sessions, last active first.
    pub data: Vec<SessionView>,
    /// Where the next page begins; `null` on the last one.
    pub next_cursor: Option<String>,
}

impl From<tenure::Page> for SessionList {
    fn from(page: tenure::Page) -> Self {
        let data = page.heads.iter().map(SessionView::from).collect();
        Self { object: "list", data, next_cursor: page.next.map(|c| c.to_string()) }
    }
}

/// A message in a session.
#[derive(Debug, Serialize, ToSchema)]
pub struct MessageView {
    /// Its place among the messages, from 0.
    pub position: usize,
    /// Its record.
    pub seq: Seq,
    /// When it was said.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// The run that produced it.
    pub run_id: Option<String>,
    /// `true` for an answer that was cut off before its end; else it is left out.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// The record of the assistant message that a user message followed in its own request; left out if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replies_to: Option<Seq>,
    /// What was said, in OpenAI's shape, exactly as it was given.
    #[schema(value_type = Object)]
    pub message: Box<RawValue>,
}

/// Messages, oldest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct MessageList {
    /// `list`.
    pub object: &'static str,
    /// The messages.
    pub data: Vec<MessageView>,
    /// What to give as `after` for the next page; `null` on the last one.
    pub next_cursor: Option<String>,
}

/// A point to come back to.
#[derive(Debug, Serialize, ToSchema)]
pub struct CheckpointView {
    /// Its name.
    pub label: String,
    /// The number of messages before it.
    pub position: usize,
    /// When it was made.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// Whether it was made automatically.
    pub auto: bool,
    /// Its record.
    pub seq: Seq,
    /// The run it was taken in.
    pub run_id: Option<String>,
    /// The step of that run.
    pub step: Option<u64>,
    /// What its maker put there.
    #[schema(value_type = Object)]
    pub state: Map<String, Value>,
}

impl From<&Checkpoint> for CheckpointView {
    fn from(c: &Checkpoint) -> Self {
        Self {
            label: c.label.to_string(),
            position: c.position,
            created_at: c.created_at.to_string(),
            auto: c.auto,
            seq: c.seq,
            run_id: c.run.as_ref().map(ToString::to_string),
            step: c.step,
            state: c.state.clone(),
        }
    }
}

/// The checkpoints of a session, oldest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct CheckpointList {
    /// `list`.
    pub object: &'static str,
    /// All of them.
    pub data: Vec<CheckpointView>,
    /// Always `null`: they come all at once.
    pub next_cursor: Option<String>,
}

/// A checkpoint with the whole state there.
#[derive(Debug, Serialize, ToSchema)]
pub struct CheckpointWhole {
    /// The checkpoint.
    #[serde(flatten)]
    pub checkpoint: CheckpointView,
    /// The messages before it.
    pub messages: Vec<MessageView>,
    /// The tool calls of the last answer that had no result.
    pub pending_tool_calls: Vec<PendingCall>,
    /// The results that the turn had so far.
    pub tool_results: Vec<MessageView>,
    /// The step of the run.
    pub step_index: Option<u64>,
    /// The metadata as it was.
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
}

/// A tool call without a result.
#[derive(Debug, Serialize, ToSchema)]
pub struct PendingCall {
    /// Its id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Its arguments, as the model wrote them.
    pub arguments: String,
    /// Whether it had been begun.
    pub started: bool,
}

/// A summary that models are shown in place of the oldest messages. The messages stay.
#[derive(Debug, Serialize, ToSchema)]
pub struct SummaryView {
    /// What it says.
    pub text: String,
    /// The last record it covers.
    pub upto: Seq,
    /// The number of messages it covers.
    pub position: usize,
    /// When it was written.
    #[schema(format = DateTime)]
    pub created_at: String,
}

impl From<&Summary> for SummaryView {
    fn from(s: &Summary) -> Self {
        Self { text: s.text(), upto: s.upto, position: s.position, created_at: s.at.to_string() }
    }
}

/// One turn of work.
#[derive(Debug, Serialize, ToSchema)]
pub struct RunView {
    /// Its id.
    pub id: String,
    /// `queued`, `running`, `paused` (it waits for a person), `completed`, `failed` or `cancelled`.
    pub status: &'static str,
    /// When it began.
    #[schema(format = DateTime)]
    pub started_at: String,
    /// When it ended.
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// What went wrong.
    pub error: Option<String>,
    /// The same as one stable word.
    pub code: Option<String>,
}

impl RunView {
    /// A run of the session with this card.
    pub fn of(run: &Run, head: &Head) -> Self {
        let free = head.lease.as_ref().is_none_or(|l| l.node.is_empty());
        let status = match run.ended {
            None if !head.reviews.is_empty() => "paused",
            None if free => "queued",
            None => "running",
            Some((_, Outcome::Completed)) => "completed",
            Some((_, Outcome::Failed)) => "failed",
            Some((_, Outcome::Cancelled)) => "cancelled",
        };
        Self {
            id: run.id.to_string(),
            status,
            started_at: run.started_at.to_string(),
            ended_at: run.ended.map(|(at, _)| at.to_string()),
            error: run.error.clone(),
            code: run.code.clone(),
        }
    }
}

/// A tool result in a session's cache.
#[derive(Debug, Serialize, ToSchema)]
pub struct CachedView {
    /// The hash of tool and parameters.
    pub key: String,
    /// The tool.
    pub tool: String,
    /// The parameters.
    pub parameters: Value,
    /// The result.
    pub result: Value,
    /// When it was put there.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When its time is over.
    #[schema(format = DateTime)]
    pub expires_at: Option<String>,
}

impl From<Cached> for CachedView {
    fn from(c: Cached) -> Self {
        let (created_at, expires_at) = (c.created_at.to_string(), c.expires_at.map(|t| t.to_string()));
        Self { key: c.key, tool: c.tool, parameters: c.parameters, result: c.result, created_at, expires_at }
    }
}

/// What one rewind cut off.
#[derive(Debug, Serialize, ToSchema)]
pub struct DiscardedView {
    /// The rewind's record.
    pub seq: Seq,
    /// When.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// The number of messages that were left.
    pub position: usize,
    /// What was cut off, each with the position it had.
    pub messages: Vec<MessageView>,
}

/// What rewinds have cut off, oldest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct DiscardedList {
    /// `list`.
    pub object: &'static str,
    /// One entry for each rewind.
    pub data: Vec<DiscardedView>,
    /// Always `null`: they come all at once.
    pub next_cursor: Option<String>,
}

/// A session, whole.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionWhole {
    /// What is known of it.
    #[serde(flatten)]
    pub session: SessionView,
    /// What has been said, oldest first.
    pub messages: Vec<MessageView>,
    /// The points to come back to, oldest first.
    pub checkpoints: Vec<CheckpointView>,
    /// The runs, oldest first.
    pub runs: Vec<RunView>,
    /// What models are shown in place of the oldest messages.
    pub summary: Option<SummaryView>,
    /// With `include=cache`: tool results that are still good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<Vec<CachedView>>,
    /// With `include=discarded`: what rewinds have cut off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discarded: Option<Vec<DiscardedView>>,
}

/// A place in a session: exactly one of them.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlaceBody {
    /// After the newest checkpoint with this label.
    #[serde(default)]
    pub label: Option<String>,
    /// After so many messages.
    #[serde(default)]
    pub position: Option<usize>,
    /// After so many turns.
    #[serde(default)]
    pub turn: Option<usize>,
}

/// The plain views as JSON text.
pub fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// A [`MessageView`], written without looking into the message, and without `format!`: an answer can hold thousands.
fn put_message(out: &mut String, times: &mut Times, position: usize, said: &Said) {
    out.push_str(r#"{"position":"#);
    put_number(out, position as u64);
    out.push_str(r#","seq":"#);
    put_number(out, said.seq);
    out.push_str(r#","created_at":""#);
    out.push_str(times.text(said.at));
    // Ids need no escapes.
    match &said.run {
        Some(run) => [r#"","run_id":""#, run.as_str(), r#"""#].map(|s| out.push_str(s)),
        None => [r#"","run_id":"#, "null", ""].map(|s| out.push_str(s)),
    };
    if said.partial {
        out.push_str(r#","partial":true"#);
    }
    if let Some(seq) = said.replies_to {
        out.push_str(r#","replies_to":"#);
        put_number(out, seq);
    }
    out.push_str(r#","message":"#);
    out.push_str(said.message.as_str());
    out.push('}');
}

/// Messages as a JSON list; the first is at `position`.
pub fn messages(said: &[Said], position: usize) -> String {
    let mut out = String::new();
    put_messages(&mut out, said, position);
    out
}

fn put_messages(out: &mut String, said: &[Said], position: usize) {
    out.reserve(said.iter().map(|s| s.message.as_str().len() + 160).sum::<usize>() + 2);
    out.push('[');
    let mut times = Times::default();
    for (i, said) in said.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        put_message(out, &mut times, position + i, said);
    }
    out.push(']');
}

/// What rewinds have cut off, as a JSON list.
pub fn discarded(all: &[Discarded]) -> String {
    let one = |d: &Discarded| {
        let cut = messages(&d.messages, d.position);
        format!(r#"{{"seq":{},"created_at":"{}","position":{},"messages":{cut}}}"#, d.seq, d.at, d.position)
    };
    format!("[{}]", all.iter().map(one).collect::<Vec<_>>().join(","))
}

/// A JSON object with more fields at its end.
pub fn with(mut object: String, fields: &[(&str, &str)]) -> String {
    object.pop();
    for (name, value) in fields {
        let _ = write!(object, r#","{name}":"#);
        object.push_str(value);
    }
    object.push('}');
    object
}

/// A list that comes in one answer or in pages.
pub fn list(data: &str, next: Option<String>) -> String {
    format!(r#"{{"object":"list","data":{data},"next_cursor":{}}}"#, text(&next))
}

/// A [`SessionWhole`] without what has to be asked for.
pub fn whole(session: &Session) -> String {
    let checkpoints: Vec<_> = session.checkpoints.iter().map(CheckpointView::from).collect();
    let runs: Vec<_> = session.runs.iter().map(|r| RunView::of(r, session.head())).collect();
    let mut out = text(&SessionView::from(session.head()));
    out.pop();
    out.push_str(r#","messages":"#);
    put_messages(&mut out, &session.messages, 0);
    out.push('}');
    let summary = session.summary().map(SummaryView::from);
    with(out, &[("checkpoints", &text(&checkpoints)), ("runs", &text(&runs)), ("summary", &text(&summary))])
}

/// A [`CheckpointWhole`]: the session as it was at a checkpoint.
pub fn state(checkpoint: &Checkpoint, then: &Session) -> String {
    let role = |m: &Said| m.message.role();
    let turn = then.messages.iter().rposition(|m| role(m) == Role::User).map_or(0, |i| i + 1);
    let results = then.messages[turn..].iter().filter(|m| role(m) == Role::Tool);
    let answered: Vec<_> = results.filter_map(|m| m.message.tool_call_id()).collect();
    let answer = then.messages[turn..].iter().rev().find(|m| role(m) == Role::Assistant);
    let started = |id: &str| {
        let since = answer.map_or(0, |m| m.seq);
        then.runs.iter().flat_map(|r| &r.tools_started).any(|s| s.seq > since && s.call == id)
    };
    let calls = answer.map(|m| m.message.tool_calls()).unwrap_or_default();
    let pending = calls.into_iter().filter(|c| !answered.contains(&c.id)).map(|c| PendingCall {
        started: started(&c.id),
        id: c.id,
        name: c.name,
        arguments: c.arguments,
    });
    let (mut got, mut times) = (String::from("["), Times::default());
    for (i, said) in then.messages.iter().enumerate().skip(turn).filter(|(_, m)| role(m) == Role::Tool) {
        if got.len() > 1 {
            got.push(',');
        }
        put_message(&mut got, &mut times, i, said);
    }
    got.push(']');
    let fields = [
        ("messages", messages(&then.messages, 0)),
        ("pending_tool_calls", text(&pending.collect::<Vec<_>>())),
        ("tool_results", got),
        ("step_index", text(&checkpoint.step)),
        ("metadata", text(&then.info.metadata)),
    ];
    with(text(&CheckpointView::from(checkpoint)), &fields.each_ref().map(|(name, value)| (*name, value.as_str())))
}

/// A text that others send too, not copied.
pub fn shared(text: Arc<str>) -> Bytes {
    struct Text(Arc<str>);
    impl AsRef<[u8]> for Text {
        fn as_ref(&self) -> &[u8] {
            self.0.as_bytes()
        }
    }
    Bytes::from_owner(Text(text))
}

/// JSON text, with the session's `ETag` if there is one.
pub fn json(status: StatusCode, seq: Option<Seq>, body: impl Into<Body>) -> Response {
    let body: Body = body.into();
    let mut response = (status, [(header::CONTENT_TYPE, "application/json")], body).into_response();
    if let Some(tag) = seq.and_then(|seq| HeaderValue::from_str(&format!("\"{seq}\"")).ok()) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

/// A session's card.
pub fn session(status: StatusCode, head: &Head) -> Response {
    let mut response = json(status, Some(head.seq), text(&SessionView::from(head)));
    if status == StatusCode::CREATED
        && let Ok(place) = HeaderValue::from_str(&format!("/sessions/{}", head.info.session_id))
    {
        response.headers_mut().insert(header::LOCATION, place);
    }
    response
}

macro_rules! errors {
    ($($(#[$doc:meta])* $name:ident: $($status:literal)*;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name;

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
                [$($status),*].into_iter().map(|status: u16| (status.to_string(), error(status))).collect()
            }
        }
    )*};
}

errors! {
    /// What can go wrong where nothing is named.
    Asking: 400 401 403 500 503;
    /// What can go wrong where something is looked up.
    Finding: 400 401 403 404 500 503;
    /// What can go wrong where a session in use is read.
    Reading: 400 401 403 404 410 500 503;
    /// What can go wrong where something is made or replaced.
    Making: 400 401 403 404 408 409 410 412 413 415 500 503 507;
    /// What can go wrong where a session is changed without a body.
    Ending: 400 401 403 404 409 410 412 500 503 507;
    /// What can go wrong where a session in use is changed.
    Writing: 400 401 403 404 408 409 410 412 413 415 500 503 507;
}

fn error(status: u16) -> RefOr<utoipa::openapi::Response> {
    let words = match status {
        400 => "Something in the request is wrong; nothing was changed",
        401 => "No key, or an unknown one",
        403 => "The key does not allow it",
        404 => "It is not there",
        408 => "The body came too slowly; nothing was changed",
        409 => "It exists already, is paused, or was changed meanwhile",
        410 => "It has expired or was deleted; restore it",
        412 => "`If-Match` does not hold any more",
        413 => "Over a limit",
        415 => "Not JSON",
        500 => "What is stored there is damaged (`corrupt`)",
        503 => "The store is not available",
        _ => "The disk is full",
    };
    let body = Content::new(Some(Ref::from_schema_name(<ErrorBody as ToSchema>::name())));
    RefOr::T(ResponseBuilder::new().description(words).content("application/json", body).build())
}
