//! Content matching: finds the session that a request without a session id continues.
//!
//! Only the principal's own live sessions are considered, and an ambiguous match counts as no
//! match, so that no conversation is ever continued in another one by a guess.

use crate::rules::review_notice::noticed_session_id;
use crate::rules::session::Session;
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::tenure::Tenure;
use crate::types::digest::VisibleHash;
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::{Principal, SessionId};
use crate::types::message::meaning::CallMatch;
use crate::types::message::{Message, Role};
use crate::types::status::Status;

/// The maximum number of sessions that are considered in one lookup. If there are more, the request
/// is not specific enough.
const MAX_CANDIDATES: usize = 64;

/// The maximum number of prefixes of a request that are looked up one by one if many sessions match.
const MAX_PREFIX_QUERIES: usize = 8;

/// The maximum number of tool calls of a request by which sessions are looked up.
const MAX_CALLS: usize = 256;

/// The maximum number of sessions that are loaded to compare them with a window.
const MAX_WINDOW_CANDIDATES: usize = 8;

/// The minimum number of messages of a window. A shorter window must have [`MIN_WINDOW_CHARS`]
/// characters. A client that sends a matching window is shown messages that it did not send, so it
/// must prove to know enough of the conversation.
const MIN_WINDOW_MESSAGES: usize = 3;
/// The minimum number of characters of a window with fewer than [`MIN_WINDOW_MESSAGES`] messages.
const MIN_WINDOW_CHARS: usize = 200;

/// The lookup keys of a request.
#[derive(Debug, Default)]
struct MatchKeys<'a> {
    /// The prefixes of the request that contain an assistant message, longest first.
    prefixes: Vec<PrefixMatch>,
    /// The ids of all tool calls and tool results, sorted.
    calls: Vec<String>,
    /// The visible messages up to the last answer, and the hash of that answer with its question.
    window: Option<(Vec<&'a Message>, VisibleHash)>,
}

/// A prefix of a request.
#[derive(Debug)]
struct PrefixMatch {
    hash: VisibleHash,
    /// Whether the prefix contains an answer; otherwise it contains only a tool call.
    is_answered: bool,
    /// Whether an answer follows the prefix in the request.
    is_followed_by_an_answer: bool,
    /// Whether the prefix is at least as long as a window must be.
    is_specific: bool,
}

impl<'a> MatchKeys<'a> {
    /// Computes the lookup keys of a request.
    fn of(messages: &'a [Message]) -> Self {
        let mut keys = Self::default();
        let mut hash = VisibleHash::default();
        let mut question = None;
        let mut has_assistant = false;
        let mut is_answered = false;
        let mut visible = Vec::new();
        let mut window = None;
        let mut chars = 0;
        let mut answer_count = 0;
        let mut answers = Vec::new();
        for message in messages {
            let role = message.role();
            keys.calls
                .extend(message.call_ids().into_iter().chain(message.tool_call_id_ref()).map(|id| id.into_owned()));
            has_assistant |= role == Role::Assistant;
            if message.is_visible() {
                let meaning = message.meaning();
                hash = hash.then(role, &meaning);
                chars += meaning.text.chars().count();
                visible.push(message);
                match role {
                    Role::User => question = Some(VisibleHash::default().then(role, &meaning)),
                    _ => {
                        is_answered = true;
                        answer_count += 1;
                        window = question.map(|q: VisibleHash| (visible.len(), q.then(role, &meaning)));
                    }
                }
            }
            if has_assistant && !visible.is_empty() && keys.prefixes.last().is_none_or(|p: &PrefixMatch| p.hash != hash)
            {
                let is_specific = visible.len() >= MIN_WINDOW_MESSAGES || chars >= MIN_WINDOW_CHARS;
                let is_followed_by_an_answer = false;
                keys.prefixes.push(PrefixMatch { hash, is_answered, is_followed_by_an_answer, is_specific });
                answers.push(answer_count);
            }
        }
        for (prefix, answers) in keys.prefixes.iter_mut().zip(answers) {
            prefix.is_followed_by_an_answer = answers < answer_count;
        }
        keys.prefixes.reverse();
        keys.window = window.map(|(len, exchange)| {
            visible.truncate(len);
            (visible, exchange)
        });
        keys.calls.sort();
        keys.calls.dedup();
        keys
    }

    /// Returns true if a session issued one of the request's tool calls in its last turn.
    fn has_call_of(&self, head: &Head) -> bool {
        head.digest.calls.iter().any(|id| self.calls.binary_search(id).is_ok())
    }
}

impl Tenure {
    /// Finds the session that these messages continue, by content, among the principal's own live sessions:
    ///
    /// 1. the session whose whole visible conversation is the longest prefix of the messages that
    ///    has an answer or a tool call; ties are broken by the request's tool calls;
    /// 2. otherwise the session that issued one of the request's tool calls in its last turn;
    /// 3. otherwise the session that ends with the request's last answer and its question, and has
    ///    all messages before it in this order, if these are specific enough (D-025).
    ///
    /// An ambiguous match returns `None`.
    pub async fn find(&self, principal: &Principal, messages: &[Message]) -> Result<Option<SessionId>> {
        let keys = MatchKeys::of(messages);
        if keys.prefixes.is_empty() && keys.calls.is_empty() {
            return Ok(None);
        }
        self.engine.ensure_assistants_loaded(&principal.tenant).await?;
        // A review notice is not stored in any session, but names the session that it belongs to (D-026).
        if let Some(id) = messages.iter().rev().find_map(noticed_session_id)
            && self.is_continued(principal, &id, messages).await?
        {
            return Ok(Some(id));
        }
        if let Some(matched) = self.find_by_prefix(principal, &keys, messages).await? {
            return Ok(matched);
        }
        match self.find_by_call(principal, &keys, messages).await? {
            Some(matched) => Ok(matched),
            None => self.find_by_window(principal, &keys).await,
        }
    }

    /// Finds the session that issued the request's tool calls. `None` means that no session did,
    /// `Some(None)` that several did.
    async fn find_by_call(
        &self,
        principal: &Principal,
        keys: &MatchKeys<'_>,
        messages: &[Message],
    ) -> Result<Option<Option<SessionId>>> {
        let matches: Vec<_> = keys.calls.iter().take(MAX_CALLS).map(|id| VisibleHash::of_call(id)).collect();
        let mut heads = self.live_matches(principal, |query| query.matches = matches).await?;
        heads.retain(|head| keys.has_call_of(head));
        if heads.len() > MAX_WINDOW_CANDIDATES {
            return Ok(Some(None));
        }
        // Not every server generates unique ids: the call and its question must agree too, as far
        // as the request has them.
        let mut matched = None;
        for head in heads {
            let session = self.engine.fold(head).await?;
            if issued_calls(&session, messages) && matched.replace(session.head().info.session_id.clone()).is_some() {
                return Ok(Some(None));
            }
        }
        Ok(matched.map(Some))
    }

    /// Finds the session whose conversation is a prefix of the request. `None` means that no
    /// conversation is, `Some(None)` that several are.
    async fn find_by_prefix(
        &self,
        principal: &Principal,
        keys: &MatchKeys<'_>,
        messages: &[Message],
    ) -> Result<Option<Option<SessionId>>> {
        let hashes: Vec<_> = keys.prefixes.iter().map(|p| p.hash).collect();
        if hashes.is_empty() {
            return Ok(None);
        }
        let heads = self.live_matches(principal, |query| query.hashes = hashes).await?;
        let has_media = messages.iter().any(|m| !m.meaning().media.is_empty());
        for (i, prefix) in keys.prefixes.iter().enumerate() {
            let mut equal: Vec<Head> = heads.iter().filter(|h| h.digest.hash == prefix.hash).cloned().collect();
            if heads.len() == MAX_CANDIDATES && i < MAX_PREFIX_QUERIES {
                // The result is full, so sessions of this length may be missing from it.
                equal = self.live_matches(principal, |query| query.hashes = vec![prefix.hash]).await?;
            }
            if !prefix.is_answered {
                equal.retain(|head| keys.has_call_of(head));
            }
            if prefix.is_followed_by_an_answer && !prefix.is_specific {
                // The client has an answer that this session did not give, and the common prefix is
                // not specific enough.
                equal.clear();
            }
            if has_media && !equal.is_empty() {
                // The hash covers texts only: conversations that differ in their media are
                // distinguished here (D-024).
                equal = self.with_same_media(equal, messages).await?;
            }
            if equal.len() > 1 {
                equal.retain(|head| keys.has_call_of(head));
                return Ok(Some(match &equal[..] {
                    [head] => Some(head.info.session_id.clone()),
                    _ => None,
                }));
            }
            if let Some(head) = equal.first() {
                return Ok(Some(Some(head.info.session_id.clone())));
            }
        }
        Ok(None)
    }

    /// Keeps the sessions whose media agree with the messages.
    async fn with_same_media(&self, heads: Vec<Head>, messages: &[Message]) -> Result<Vec<Head>> {
        let mut same = Vec::new();
        for head in heads {
            let session = self.engine.fold(head.clone()).await?;
            let visible = messages.iter().filter(|m| m.is_visible());
            let mut pairs = session.messages.iter().filter(|m| m.message.is_visible()).zip(visible);
            if pairs.all(|(stored, message)| stored.message.is_same(message)) {
                same.push(head);
            }
        }
        Ok(same)
    }

    /// Finds the only session that ends with the request's window.
    async fn find_by_window(&self, principal: &Principal, keys: &MatchKeys<'_>) -> Result<Option<SessionId>> {
        let Some((window, exchange)) = &keys.window else { return Ok(None) };
        let chars: usize = window.iter().map(|m| m.text().chars().count()).sum();
        if window.len() < MIN_WINDOW_MESSAGES && chars < MIN_WINDOW_CHARS {
            return Ok(None);
        }
        let heads = self.live_matches(principal, |query| query.matches = vec![*exchange]).await?;
        if heads.len() > MAX_WINDOW_CANDIDATES {
            return Ok(None);
        }
        let mut matched = None;
        for head in heads.into_iter().filter(|h| h.digest.exchange == Some(*exchange)) {
            let session = self.engine.fold(head).await?;
            if has_in_order(&session, window) && matched.replace(session.head().info.session_id.clone()).is_some() {
                return Ok(None);
            }
        }
        Ok(matched)
    }

    /// Returns true if these messages continue a session of the principal's own. Review notices are ignored.
    async fn is_continued(&self, principal: &Principal, id: &SessionId, messages: &[Message]) -> Result<bool> {
        let head = self.store().head(&principal.key(id)).await?;
        let Some(head) = head.filter(|h| h.user == principal.user && self.engine.status_of(h).is_live()) else {
            return Ok(false);
        };
        let session = self.engine.fold(head).await?;
        let is_stored = |m: &&Message| m.is_visible() && noticed_session_id(m).is_none();
        let mut expected: Vec<&Message> = messages.iter().filter(is_stored).collect();
        let last = expected.iter().rposition(|m| m.role() == Role::Assistant).map_or(0, |i| i + 1);
        expected.truncate(last.max(1));
        Ok(has_in_order(&session, &expected))
    }

    /// Queries the principal's own live sessions that match, newest first.
    async fn live_matches(
        &self,
        principal: &Principal,
        condition: impl FnOnce(&mut SessionQuery),
    ) -> Result<Vec<Head>> {
        let mut query =
            SessionQuery::new(OwnerFilter::User(principal.tenant.clone(), principal.user.clone()), MAX_CANDIDATES);
        query.status = vec![Status::Active, Status::Paused];
        condition(&mut query);
        if query.hashes.is_empty() && query.matches.is_empty() {
            return Ok(Vec::new());
        }
        let mut heads = self.store().heads(&query).await?;
        heads.retain(|head| self.engine.status_of(head).is_live());
        Ok(heads)
    }
}

/// Returns true if a session contains these visible messages in this order.
fn has_in_order(session: &Session, messages: &[&Message]) -> bool {
    let mut stored = session.messages.iter().rev().filter(|m| m.message.is_visible());
    messages.iter().rev().all(|message| stored.any(|m| m.message.is_same(message)))
}

/// Returns true if a session issued one of the request's tool calls: with the same id, name and
/// arguments, after the same question, as far as the request has them.
fn issued_calls(session: &Session, messages: &[Message]) -> bool {
    let question_before = |position: usize| messages[..position].iter().rev().find(|m| m.role() == Role::User);
    let mut calls = messages.iter().enumerate().filter(|(_, m)| !m.call_ids().is_empty()).peekable();
    if calls.peek().is_none() {
        // The request has only results, and their ids have been compared already.
        return true;
    }
    calls.any(|(i, call)| {
        let position = session.messages.iter().rposition(|m| m.message.call_match(call) == Some(CallMatch::Both));
        let Some(position) = position else { return false };
        let stored_question = session.messages[..position].iter().rev().find(|m| m.message.role() == Role::User);
        match (stored_question, question_before(i)) {
            (Some(stored), Some(question)) => stored.message.is_same(question),
            _ => true,
        }
    })
}
