//! Computes what a commit changes in the message index.

use crate::engine::core::Engine;
use crate::rules::matcher::Matcher;
use crate::rules::message_words::{
    PositionedMessage, discarded_after, indexed_words, searchable_text, titled_records, visible_messages,
};
use crate::rules::redaction::Redaction;
use crate::store::contract::Commit;
use crate::store::message_index::{
    IndexWord, IndexedMessage, MessageIndex, MessageIndexUpdate, MessageMatches, MessageQuery,
};
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, Tenant, User};
use std::sync::Arc;

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
        if !commit.records.iter().any(concerns) && titled_records(&commit.records).is_empty() {
            commit.message_index = Some(MessageIndexUpdate { rules, ..MessageIndexUpdate::default() });
            return Ok(());
        }
        if !self.message_index().is_some_and(MessageIndex::is_used) {
            commit.message_index = None;
            return Ok(());
        }
        let Head { digest, info, .. } = &commit.head;
        let added = self.index_messages(&commit.records, digest.messages, info.title.as_deref()).await?;
        let discarded_after = discarded_after(&commit.records);
        commit.message_index = Some(MessageIndexUpdate { rules, added, discarded_after });
        Ok(())
    }

    /// Computes the words of the messages among consecutive records that are visible after the last of
    /// them, and those of the session's title, oldest first. `messages` is the number of visible messages
    /// after the last record, and `title` the title of the session.
    pub(crate) async fn index_messages(
        &self,
        records: &[Record],
        messages: usize,
        title: Option<&str>,
    ) -> Result<Vec<IndexedMessage>> {
        let bytes: usize = records.iter().map(|record| message_bytes(&record.entry)).sum();
        let redaction = self.options().redaction.clone();
        if bytes <= BLOCKING_BYTES {
            return Ok(indexed(&redaction, records, messages, title));
        }
        let records: Arc<[Record]> = records.into();
        let title = title.map(str::to_owned);
        let work = move || indexed(&redaction, &records, messages, title.as_deref());
        tokio::task::spawn_blocking(work).await.map_err(Error::unavailable_from)
    }
}

fn message_bytes(entry: &Entry) -> usize {
    match entry {
        Entry::Message(entry) => entry.message.text_len(),
        _ => 0,
    }
}

/// The index entries of the messages and titles among records, oldest first.
fn indexed(redaction: &Redaction, records: &[Record], messages: usize, title: Option<&str>) -> Vec<IndexedMessage> {
    let of_message = |PositionedMessage { seq, position, message }| IndexedMessage {
        seq,
        position,
        words: indexed_words(&searchable_text(&redaction.redact_message(message).0)),
    };
    let of_title = |(seq, set): (Seq, Option<&str>)| IndexedMessage {
        seq,
        position: 0,
        words: set.or(title).map(|title| indexed_words(&redaction.apply(title).0)).unwrap_or_default(),
    };
    let titles = titled_records(records).into_iter().map(of_title);
    let mut entries: Vec<_> = visible_messages(records, messages).into_iter().map(of_message).chain(titles).collect();
    entries.sort_by_key(|entry| entry.seq);
    entries
}
