//! Computes what a commit changes in the message index.

use crate::engine::core::Engine;
use crate::rules::matcher::Matcher;
use crate::rules::message_words::{
    PositionedMessage, discarded_after, indexed_title, indexed_words, searchable_text, visible_messages,
};
use crate::rules::redaction::Redaction;
use crate::store::contract::Commit;
use crate::store::message_index::{
    IndexWord, IndexedMessage, MessageIndex, MessageIndexUpdate, MessageMatches, MessageQuery, TITLE_POSITION,
};
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::id::{Tenant, User};

/// The number of bytes of text above which words are computed on a blocking thread, so that other tasks do
/// not wait.
const BLOCKING_BYTES: usize = 256 << 10;

impl Engine {
    /// The store's message index. `None` if the store has none, or if it is switched off.
    pub fn message_index(&self) -> Option<&dyn MessageIndex> {
        self.store().message_index().filter(|_| self.options().message_index)
    }

    /// Finds messages that contain the words of a query, the last indexed first: candidates that the matcher
    /// must check.
    pub async fn find_messages(
        &self,
        tenant: &Tenant,
        user: Option<&User>,
        matcher: &Matcher,
        limit: usize,
    ) -> Result<MessageMatches> {
        let Some(index) = self.message_index() else { return Ok(MessageMatches::Unindexed) };
        let words = matcher.indexed_words().map(|(text, is_prefix)| IndexWord { text: text.to_owned(), is_prefix });
        let words = words.collect();
        let rules = self.word_rules();
        index.find(&MessageQuery { rules, tenant: tenant.clone(), user: user.cloned(), words, limit }).await
    }

    /// Adds the change of the message index to a commit.
    pub(crate) async fn index_commit(&self, commit: &mut Commit) -> Result<()> {
        let concerns = |record: &Record| matches!(record.entry, Entry::Message(_) | Entry::Rewound(_));
        let rules = self.word_rules();
        let titles = self.title_words(&commit.records, commit.head.info.title.as_deref());
        if !commit.records.iter().any(concerns) && titles.is_empty() {
            commit.message_index = Some(MessageIndexUpdate { rules, ..MessageIndexUpdate::default() });
            return Ok(());
        }
        if !self.message_index().is_some_and(MessageIndex::is_used) {
            commit.message_index = None;
            return Ok(());
        }
        let mut added = self.words_of(visible_messages(&commit.records, commit.head.digest.messages)).await?;
        added.extend(titles);
        added.sort_by_key(|entry| entry.seq);
        let discarded_after = discarded_after(&commit.records);
        commit.message_index = Some(MessageIndexUpdate { rules, added, discarded_after });
        Ok(())
    }

    /// Computes the words of the titles for which records are in the index. `current` is the title of the session.
    pub fn title_words(&self, records: &[Record], current: Option<&str>) -> Vec<IndexedMessage> {
        let entry = |record: &Record| {
            let title = self.options().redaction.apply(indexed_title(record, current)?).0.into_owned();
            Some(IndexedMessage { seq: record.seq, position: TITLE_POSITION, words: indexed_words(&title) })
        };
        records.iter().filter_map(entry).collect()
    }

    /// Computes the words of messages.
    pub async fn words_of(&self, messages: Vec<PositionedMessage>) -> Result<Vec<IndexedMessage>> {
        let bytes: usize = messages.iter().map(|message| message.message.text_len()).sum();
        let redaction = self.options().redaction.clone();
        if bytes <= BLOCKING_BYTES {
            return Ok(indexed(&redaction, messages));
        }
        tokio::task::spawn_blocking(move || indexed(&redaction, messages)).await.map_err(Error::unavailable_from)
    }
}

/// The index entries of messages.
fn indexed(redaction: &Redaction, messages: Vec<PositionedMessage>) -> Vec<IndexedMessage> {
    let entry = |PositionedMessage { seq, position, message }| IndexedMessage {
        seq,
        position,
        words: indexed_words(&searchable_text(&redaction.redact_message(&message).0)),
    };
    messages.into_iter().map(entry).collect()
}
