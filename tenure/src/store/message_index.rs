//! The message index: an optional capability of a store that finds messages by their words.
//!
//! The library computes what is indexed, and decides what matches: the index only finds candidates.
//! Invariant: while the index is complete, it may return messages that do not match, and never misses
//! one that does.

use crate::types::error::Result;
use crate::types::head::LogEnd;
use crate::types::id::{Seq, SessionId, SessionKey, Tenant, User};
use async_trait::async_trait;
use std::ops::RangeInclusive;

/// Identifies the rules by which the library computes words: its tokenizer, and the redaction that is
/// configured. An index contains words of one set of rules only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WordRules(pub u64);

/// An index of the words of messages: an optional capability of a store.
///
/// A commit carries the words of its messages ([`Commit::message_index`]), and the index changes in the
/// same atomic write. A session whose commits do not carry them is unindexed, and the index is incomplete
/// until the session is indexed again ([`MessageIndex::next_unindexed`], [`MessageIndex::replace`]).
///
/// [`Commit::message_index`]: crate::store::Commit::message_index
#[async_trait]
pub trait MessageIndex: Send + Sync {
    /// Finds the messages that contain all words of a query, those that were indexed last first, at
    /// most `limit`. The time and the result depend on the messages of the query's tenant only.
    async fn find(&self, query: &MessageQuery) -> Result<MessageMatches>;

    /// Lists the messages of a session's own log that are in the index, oldest first: record and
    /// position.
    async fn indexed(&self, key: &SessionKey) -> Result<Vec<(Seq, usize)>>;

    /// Returns whether the index stores what commits carry. A store may build its index only when it is
    /// first used; before that, commits need not carry words.
    fn is_used(&self) -> bool {
        true
    }

    /// Returns a session that must be indexed before the index is complete; `None` if it is complete or
    /// not used yet. If the index has words of other rules, it is emptied first, and all sessions are
    /// unindexed.
    async fn next_unindexed(&self, rules: WordRules) -> Result<Option<SessionKey>>;

    /// Replaces the index entries of a part of a session's own log, atomically. [`Error::Conflict`]
    /// unless the log ends at the given record; a session that does not exist is not a conflict.
    ///
    /// [`Error::Conflict`]: crate::Error::Conflict
    async fn replace(&self, part: &SessionIndexPart) -> Result<()>;

    /// Removes the words of removed messages from the files of the store, as far as they are still there, in
    /// a bounded step. Returns whether another step is needed.
    async fn compact(&self) -> Result<bool>;
}

/// A change of the message index, part of a commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessageIndexUpdate {
    /// The rules by which the words were computed.
    pub rules: WordRules,
    /// The messages among the commit's records.
    pub added: Vec<IndexedMessage>,
    /// After a rewind: the session's own messages with a record after this one are removed, except those
    /// up to the latest fork point, which forks still show.
    pub discarded_after: Option<Seq>,
}

/// The position of entries that are not messages: records that set the title of their session.
pub const TITLE_POSITION: usize = i32::MAX as usize;

/// A message as the index stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexedMessage {
    /// The record of the message.
    pub seq: Seq,
    /// The number of messages before it. It is constant as long as the message is visible, and the same
    /// in forks. [`TITLE_POSITION`] for a record that sets the title.
    pub position: usize,
    /// The distinct words of the message, folded. They contain letters, digits and combining marks only.
    pub words: Vec<String>,
}

/// The index entries of a part of a session's own log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionIndexPart {
    /// The rules by which the words were computed. Nothing changes if the index has words of others.
    pub rules: WordRules,
    /// The session.
    pub key: SessionKey,
    /// The end of the log from which the entries were computed.
    pub end: LogEnd,
    /// The records whose messages are replaced.
    pub range: RangeInclusive<Seq>,
    /// The messages in this range.
    pub messages: Vec<IndexedMessage>,
    /// Whether all of the session is indexed after this part.
    pub is_last: bool,
}

/// A search in the message index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageQuery {
    /// The rules by which the words were computed.
    pub rules: WordRules,
    /// The tenant whose messages are searched.
    pub tenant: Tenant,
    /// Finds only messages in sessions of this user. `None` means any user.
    pub user: Option<User>,
    /// The words, all of which a message must contain.
    pub words: Vec<IndexWord>,
    /// Maximum number of messages.
    pub limit: usize,
}

/// A word of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexWord {
    /// The word, folded.
    pub text: String,
    /// Whether the word matches every word that begins with it. A store that cannot find prefixes ignores
    /// the word.
    pub is_prefix: bool,
}

/// The result of a search in the message index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageMatches {
    /// The index cannot answer: it is incomplete or has words of other rules, or the query has no word that
    /// it can use.
    Unindexed,
    /// Messages that contain the words, the last indexed first.
    Found(Vec<MessageLocation>),
}

/// The location of a message: the session in whose own log it is. Forks of the session may show it too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageLocation {
    /// The session.
    pub session: SessionId,
    /// The record of the message.
    pub seq: Seq,
    /// The number of messages before it.
    pub position: usize,
}
