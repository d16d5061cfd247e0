//! Keeps the message index complete: indexes sessions that are not in it, in bounded steps.

use crate::engine::core::Engine;
use crate::rules::message_words::{PositionedMessage, ShownMessages};
use crate::store::message_index::{IndexedMessage, MessageIndex, SessionIndexPart};
use crate::store::query::{OwnerFilter, RecordRange, SessionQuery};
use crate::types::entry::{Entry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey};
use std::ops::RangeInclusive;

/// The number of records that are read in one page, which is one write of the index.
const PAGE: usize = 256;

/// The number of times that indexing a session begins again because a rewind or a purge changed it.
const MAX_ATTEMPTS: usize = 3;

impl Engine {
    /// Indexes sessions that are not in the message index, and removes the words of removed messages from
    /// the files of the store. Ends after the session with which `max_messages` is reached. Returns whether
    /// more remains to be done.
    pub async fn maintain_message_index(&self, max_messages: usize) -> Result<bool> {
        let Some(index) = self.message_index() else { return Ok(false) };
        let mut messages = 0;
        while messages < max_messages.max(1) {
            let Some(key) = index.next_unindexed(self.word_rules()).await? else {
                return index.compact().await;
            };
            messages += self.index_session(&key).await?.max(1);
        }
        Ok(true)
    }

    /// Indexes all messages of a session's own log again. Returns their number.
    pub async fn index_session(&self, key: &SessionKey) -> Result<usize> {
        let Some(index) = self.message_index() else { return Ok(0) };
        let mut attempts = 1;
        loop {
            let Some(head) = self.store().head(key).await? else { return Ok(0) };
            match self.index_log(index, head.clone()).await {
                Err(Error::Conflict { .. }) if attempts < MAX_ATTEMPTS => attempts += 1,
                Err(Error::Corrupt { location, reason, .. }) => {
                    tracing::warn!(session_id = %key.session, location, reason, "a session is not searchable because its log is damaged");
                    let part = self.index_part(&head, 0..=Seq::MAX, Vec::new());
                    return index.replace(&part).await.map(|()| 0);
                }
                outcome => return outcome,
            }
        }
    }

    /// Indexes a session's own log.
    async fn index_log(&self, index: &dyn MessageIndex, mut head: Head) -> Result<usize> {
        let shown = self.shown_messages(&head).await?;
        let mut rest = shown.iter().peekable();
        let mut after = 0;
        loop {
            let page = self.page_after(&head, after).await?;
            let Some(last) = page.last().map(|record| record.seq) else { return Ok(shown.len()) };
            let titles = self.title_words(&page, head.info.title.as_deref());
            let mut messages = Vec::new();
            for record in page {
                if let Entry::Message(entry) = record.entry
                    && let Some((seq, position)) = rest.next_if(|(seq, _)| *seq == record.seq)
                {
                    messages.push(PositionedMessage { seq: *seq, position: *position, message: entry.message });
                }
            }
            let mut words = self.words_of(messages).await?;
            words.extend(titles);
            words.sort_by_key(|entry| entry.seq);
            let mut part = self.index_part(&head, after + 1..=last, words);
            while let Err(error) = index.replace(&part).await {
                head = match error {
                    Error::Conflict { .. } => self.grown_head(&head).await?,
                    error => return Err(error),
                };
                // The records that were added are in the index already.
                part = SessionIndexPart { end: head.end(), ..part };
            }
            if part.is_last {
                return Ok(shown.len());
            }
            after = last;
        }
    }

    /// The part of a session's own log with these records.
    fn index_part(&self, head: &Head, range: RangeInclusive<Seq>, messages: Vec<IndexedMessage>) -> SessionIndexPart {
        let is_last = *range.end() >= head.seq;
        SessionIndexPart { rules: self.word_rules(), key: head.key(), end: head.end(), range, messages, is_last }
    }

    /// Returns the current head of a session whose log has only grown. It is a conflict if it was rewound,
    /// or if it is another session by now.
    async fn grown_head(&self, known: &Head) -> Result<Head> {
        let conflict = || Error::Conflict { session_id: known.info.session_id.clone(), expected: known.seq };
        let head = self.store().head(&known.key()).await?.ok_or_else(conflict)?;
        if head.info.created_at != known.info.created_at || head.first != known.first {
            return Err(conflict());
        }
        let mut after = known.seq;
        while after < head.seq {
            let page = self.page_after(&head, after).await?;
            let is_rewind = |record: &Record| matches!(record.entry, Entry::Rewound(_));
            after = match page.last() {
                Some(last) if !page.iter().any(is_rewind) => last.seq,
                _ => return Err(conflict()),
            };
        }
        Ok(head)
    }

    /// Returns the messages of a session's own log that it or one of its forks shows: record and position.
    pub async fn shown_messages(&self, head: &Head) -> Result<Vec<(Seq, usize)>> {
        let shown = self.fold_shown(head, Vec::new()).await?;
        if !shown.has_rewind {
            return Ok(shown.finish());
        }
        let mut forks = SessionQuery::new(OwnerFilter::Tenant(head.tenant.clone()), usize::MAX);
        forks.parent = Some(head.info.session_id.clone());
        let forks = self.store().heads(&forks).await?;
        let fork_points = forks.iter().filter_map(|fork| Some(fork.parent.as_ref()?.seq)).collect();
        Ok(self.fold_shown(head, fork_points).await?.finish())
    }

    async fn fold_shown(&self, head: &Head, fork_points: Vec<Seq>) -> Result<ShownMessages> {
        let mut shown = ShownMessages::with_forks(fork_points);
        let mut after = 0;
        loop {
            let page = self.page_after(head, after).await?;
            let Some(last) = page.last().map(|record| record.seq) else { return Ok(shown) };
            page.iter().for_each(|record| shown.push(record));
            after = last;
        }
    }

    async fn page_after(&self, head: &Head, after: Seq) -> Result<Vec<Record>> {
        let range = RecordRange { upto: head.seq, limit: PAGE, ..RecordRange::after(after) };
        self.store().records(&head.key(), &range).await
    }
}
