//! Appends messages to a session: atomically, and optionally idempotent or under a condition.

use crate::engine::idempotency::reply_item;
use crate::engine::pending_commit::PendingCommit;
use crate::store::item::{Namespace, Owner};
use crate::tenure::Tenure;
use crate::types::entry::{Entry, MessageEntry};
use crate::types::error::{Error, Result};
use crate::types::id::{Principal, RunId, Seq, SessionId};
use crate::types::message::Message;
use serde::{Deserialize, Serialize};

/// A request to append messages.
///
/// ```
/// use tenure::{Append, Error, Message, Tenure};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> tenure::Result<()> {
/// # let tenure = Tenure::open("memory:").await?;
/// # let session = tenure.user("acme", "ada")?.create_session().await?;
/// let once = Append { idempotency_key: Some("order-7".into()), ..Append::from(Message::user("buy")) };
/// let first = session.append(once.clone()).await?;
/// assert_eq!(session.append(once).await?, first, "a retry is not executed again");
///
/// let stale = Append { if_match: Some(first.seq - 1), ..Append::from(Message::user("sell")) };
/// assert!(matches!(session.append(stale).await, Err(Error::Conflict { .. })));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Append {
    /// The messages, in order.
    pub messages: Vec<Message>,
    /// The run that produced the messages.
    pub run: Option<RunId>,
    /// Appends only if the log ends at this record; otherwise it is a conflict. `None` means no condition.
    pub if_match: Option<Seq>,
    /// An idempotency key: requests with the same key and the same messages are executed once, and
    /// all get the same answer.
    pub idempotency_key: Option<String>,
    /// Whether an automatic checkpoint is set after the messages.
    pub checkpoint: AutoCheckpoint,
}

/// When an append sets an automatic checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AutoCheckpoint {
    /// After an answer that ends a turn.
    #[default]
    Turn,
    /// Never.
    Off,
}

impl From<Message> for Append {
    fn from(message: Message) -> Self {
        vec![message].into()
    }
}

impl<const N: usize> From<[Message; N]> for Append {
    fn from(messages: [Message; N]) -> Self {
        Vec::from(messages).into()
    }
}

impl From<Vec<Message>> for Append {
    fn from(messages: Vec<Message>) -> Self {
        Self { messages, ..Self::default() }
    }
}

/// The result of an append.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AppendResult {
    /// The end of the log after the append.
    pub seq: Seq,
    /// The position of the first new message.
    pub position: usize,
    /// The number of messages after the append.
    pub messages: usize,
}

/// Whether a request with an idempotency key was executed before.
enum EarlierAppend {
    /// The request was executed, with this answer.
    Executed(AppendResult),
    /// The request was not executed, as long as the log ends at this record.
    NotExecuted(Seq),
    /// The request has no idempotency key.
    NoKey,
}

/// The name of the namespace for idempotency keys of a session.
const IDEMPOTENCY: &str = "idempotency";

impl Tenure {
    /// Appends messages to a session atomically. They are durable when it returns.
    pub async fn append(
        &self,
        principal: &Principal,
        id: &SessionId,
        append: impl Into<Append>,
    ) -> Result<AppendResult> {
        let append: Append = append.into();
        let (stored, blobs) = self.engine.detach(&append.messages)?;
        let body = append.idempotency_key.is_some().then(|| body_hash(&append.messages));
        for _ in 0..=self.limits().max_retries {
            let unchanged_since = match self.find_earlier_append(principal, id, &append, body.as_deref()).await? {
                EarlierAppend::Executed(result) => return Ok(result),
                EarlierAppend::NotExecuted(seq) => Some(seq),
                EarlierAppend::NoKey => None,
            };
            let written = self.write_head(principal, id, |head, now| {
                self.engine.check_active(head)?;
                // With an idempotency key, a concurrent writer may have executed this very request:
                // check the key again.
                if let Some(expected) =
                    [append.if_match, unchanged_since].into_iter().flatten().find(|e| *e != head.seq)
                {
                    return Err(Error::Conflict { session_id: id.clone(), expected });
                }
                let entry = |m: &Message| {
                    Entry::Message(MessageEntry { run: append.run.clone(), ..MessageEntry::from(m.clone()) })
                };
                let mut entries: Vec<Entry> = stored.iter().map(entry).collect();
                let position = head.digest.messages;
                if append.checkpoint == AutoCheckpoint::Turn {
                    entries.extend(crate::rules::checkpoint::automatic_checkpoint(head, &stored, append.run.as_ref()));
                }
                let seq = head.seq + entries.len() as Seq;
                let appended = AppendResult { seq, position, messages: position + stored.len() };
                let mut draft = PendingCommit::new(entries, appended.clone());
                draft.blobs = blobs.clone();
                if let (Some(key), Some(body)) = (&append.idempotency_key, &body) {
                    draft.items.push((IDEMPOTENCY.to_owned(), reply_item(key, body, &appended, now)));
                }
                Ok(draft)
            });
            match written.await {
                Err(Error::Conflict { .. }) if body.is_some() && append.if_match.is_none() => {}
                result => return result,
            }
        }
        Err(Error::Conflict { session_id: id.clone(), expected: append.if_match.unwrap_or_default() })
    }

    async fn find_earlier_append(
        &self,
        principal: &Principal,
        id: &SessionId,
        append: &Append,
        body: Option<&str>,
    ) -> Result<EarlierAppend> {
        let (Some(key), Some(body)) = (&append.idempotency_key, body) else { return Ok(EarlierAppend::NoKey) };
        let seq = self.head(principal, id).await?.seq;
        let namespace = Namespace {
            tenant: principal.tenant.clone(),
            owner: Owner::Session(id.clone()),
            name: IDEMPOTENCY.to_owned(),
        };
        let reply = self.engine.find_reply(&namespace, key, body).await?;
        Ok(reply.map_or(EarlierAppend::NotExecuted(seq), EarlierAppend::Executed))
    }
}

fn body_hash(messages: &[Message]) -> String {
    let mut hash = blake3::Hasher::new();
    for message in messages {
        hash.update(message.as_str().as_bytes()).update(b"\n");
    }
    hash.finalize().to_hex().to_string()
}
