//! Search with the message index: it names the messages that contain the words, and only these are read.

use crate::session::search::cursor::ScanPosition;
use crate::session::search::page::{PageBuilder, SearchCandidate};
use crate::session::search::request::MessageHit;
use crate::store::message_index::{MessageLocation, MessageMatches, TITLE_POSITION};
use crate::store::query::{OwnerFilter, RecordRange, SessionCursor, SessionQuery};
use crate::store::shown::RecordLocation;
use crate::tenure::Tenure;
use crate::types::entry::{Entry, MessageEntry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionId, SessionKey};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

/// Maximum number of messages that the index may find for a search. If more messages contain the words, a scan finds
/// a page of them sooner.
const MAX_CANDIDATES: usize = 2_000;
/// Maximum number of sessions that show these messages, counted once for each message.
const MAX_SHOWN: usize = 20_000;
/// Maximum number of records between two candidates that are read together.
const MAX_GAP: Seq = 16;
/// Maximum number of candidates that are read together.
const MAX_READ_AHEAD: usize = 32;

/// The messages that the index found, by the sessions that show them.
pub(super) struct Candidates {
    /// The sessions, last active first.
    sessions: Vec<SessionCursor>,
    /// Of each session, the messages, newest first; none if only its title is a candidate.
    messages: HashMap<SessionId, Vec<MessageLocation>>,
}

impl Tenure {
    /// Asks the message index for the messages that may match. `None` means that a scan must find them: there is no
    /// index, it cannot answer, or there are too many.
    pub(super) async fn find_candidates(
        &self,
        query: &SessionQuery,
        page: &PageBuilder<'_>,
    ) -> Result<Option<Candidates>> {
        let (tenant, user) = match &query.owner {
            OwnerFilter::User(tenant, user) => (tenant, Some(user)),
            OwnerFilter::Tenant(tenant) => (tenant, None),
            OwnerFilter::AllTenants => return Ok(None),
        };
        let found = self.engine.find_messages(tenant, user, &page.matcher, MAX_CANDIDATES + 1).await?;
        let MessageMatches::Found(found) = found else { return Ok(None) };
        if found.len() > MAX_CANDIDATES {
            return Ok(None);
        }
        let records: Vec<RecordLocation> =
            found.iter().map(|l| RecordLocation { session: l.session.clone(), seq: l.seq }).collect();
        let shown = match records.is_empty() {
            true => Vec::new(),
            false => self.store().sessions_showing(tenant, &records, MAX_SHOWN + 1).await?,
        };
        if shown.len() > MAX_SHOWN {
            return Ok(None);
        }
        let mut sessions = BTreeMap::new();
        let mut messages: HashMap<SessionId, Vec<MessageLocation>> = HashMap::new();
        for shown in shown {
            let location = &found[shown.record];
            let of_session = messages.entry(shown.session.clone()).or_default();
            if location.position != TITLE_POSITION {
                of_session.push(location.clone());
            }
            let position = SessionCursor { active_at: shown.active_at, session: shown.session };
            sessions.insert(Reverse(position), ());
        }
        messages.values_mut().for_each(|of_session| of_session.sort_by_key(|l| Reverse(l.seq)));
        Ok(Some(Candidates { sessions: sessions.into_keys().map(|Reverse(position)| position).collect(), messages }))
    }

    /// Searches the candidates in the sessions that a query selects, until one of the bounds is reached. `resumed` is
    /// the session in which the previous page ended.
    pub(super) async fn search_candidates(
        &self,
        mut query: SessionQuery,
        resumed: Option<(Head, ScanPosition)>,
        mut candidates: Candidates,
        page: &mut PageBuilder<'_>,
    ) -> Result<()> {
        if let Some(cursor) = query.cursor.clone() {
            candidates.sessions.retain(|position| *position < cursor);
            if let Some((head, scan_position)) = resumed {
                let messages = candidates.messages.remove(&cursor.session).unwrap_or_default();
                let more = !candidates.sessions.is_empty();
                if !self.search_session(&head, messages, Some(scan_position), more, &cursor, page).await? {
                    return Ok(());
                }
            }
        }
        let mut sessions = 0;
        let batches = candidates.sessions.chunks(query.limit);
        let count = batches.len();
        for (batch_number, batch) in (1..).zip(batches) {
            let wanted = batch.iter().map(|position| position.session.clone()).collect();
            let heads = self.store().page(&SessionQuery { sessions: wanted, ..query.clone() }, usize::MAX).await?.heads;
            // The first page of heads does not count, so that each search makes progress by at least one session.
            page.reads += usize::from(batch_number > 1);
            let in_batch = heads.len();
            for (number, head) in (1..).zip(heads) {
                if sessions >= page.request.max_sessions.max(1) || page.is_over() {
                    page.set_next(query.cursor, None);
                    return Ok(());
                }
                sessions += 1;
                let cursor = SessionCursor::of(&head);
                query.cursor = Some(cursor.clone());
                // The stored status may be out of date: sessions may have expired since the last sweep.
                if !query.status.contains(&self.engine.status_of(&head)) {
                    continue;
                }
                let messages = candidates.messages.remove(&cursor.session).unwrap_or_default();
                let more = batch_number < count || number < in_batch;
                if !self.search_session(&head, messages, None, more, &cursor, page).await? {
                    return Ok(());
                }
            }
            // All sessions of the batch were filtered out, or were active again since.
            query.cursor = query.cursor.into_iter().chain(batch.last().cloned()).min();
            if page.is_over() && batch_number < count {
                page.set_next(query.cursor, None);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Searches the candidates of one session. Returns true if the search continues with the next session; otherwise
    /// sets the cursor of the next page. `more` tells whether there is another session.
    async fn search_session(
        &self,
        head: &Head,
        mut messages: Vec<MessageLocation>,
        scan_position: Option<ScanPosition>,
        more: bool,
        cursor: &SessionCursor,
        page: &mut PageBuilder<'_>,
    ) -> Result<bool> {
        page.page.scanned += 1;
        match scan_position {
            Some(position) => messages.retain(|location| location.seq <= position.upto),
            None => page.add_title(head),
        }
        // Records up to this one have not been searched yet.
        let mut position = ScanPosition { upto: head.seq, messages: head.digest.messages, seq: head.seq };
        let mut rest = &messages[..];
        while !rest.is_empty() && !page.is_over() {
            let (group, later) = rest.split_at(group_len(rest));
            let group = match self.read_candidates(head, group, page).await {
                // A damaged session does not prevent the search of the others.
                Err(Error::Corrupt { location, reason, .. }) => {
                    page.skip_damaged(head, &location, &reason);
                    return Ok(true);
                }
                group => group?,
            };
            rest = later;
            let last = group.last().map(|candidate| (candidate.hit.seq, candidate.hit.position));
            let mut found = page.find_matches(&self.engine, group).await?.into_iter().peekable();
            while let Some((hit, matched)) = found.next() {
                let (seq, before) = (hit.seq, hit.position);
                page.add_hit(head, Some(hit), matched);
                if page.is_full() && found.peek().is_some() {
                    let position = ScanPosition { upto: seq - 1, messages: before, ..position };
                    page.set_next(Some(cursor.clone()), Some(position));
                    return Ok(false);
                }
            }
            if let Some((seq, before)) = last {
                position = ScanPosition { upto: seq - 1, messages: before, ..position };
            }
        }
        if !rest.is_empty() {
            page.set_next(Some(cursor.clone()), Some(position));
            return Ok(false);
        }
        if page.is_over() && more {
            page.set_next(Some(cursor.clone()), None);
            return Ok(false);
        }
        Ok(true)
    }

    /// Reads messages that are close to each other in one log, newest first.
    async fn read_candidates(
        &self,
        head: &Head,
        group: &[MessageLocation],
        page: &mut PageBuilder<'_>,
    ) -> Result<Vec<SearchCandidate>> {
        let (Some(newest), Some(oldest)) = (group.first(), group.last()) else { return Ok(Vec::new()) };
        let key = SessionKey { tenant: head.tenant.clone(), session: newest.session.clone() };
        let mut records: HashMap<Seq, Record> = HashMap::new();
        let mut upto = newest.seq;
        while upto >= oldest.seq {
            let count = (upto - oldest.seq + 1) as usize;
            let range = RecordRange { after: oldest.seq - 1, ..RecordRange::back_from(upto, count) };
            page.reads += 1;
            let part = self.store().records(&key, &range).await?;
            let Some(last) = part.last() else { break };
            upto = last.seq - 1;
            records.extend(part.into_iter().map(|record| (record.seq, record)));
        }
        let mut candidates = Vec::with_capacity(group.len());
        for location in group {
            let record = match records.remove(&location.seq) {
                Some(record) => Some(record),
                // A concurrent purge has moved the record to another log of the session's ancestors.
                None => self.read_moved(head, location.seq, page).await?,
            };
            if let Some(Record { seq, at, entry: Entry::Message(MessageEntry { message, .. }) }) = record {
                let hit = MessageHit { position: location.position, seq, role: message.role(), at };
                candidates.push(SearchCandidate { hit, message });
            }
        }
        Ok(candidates)
    }

    /// Reads a record of a session, wherever in its lineage it is. `None` means that the session was purged.
    async fn read_moved(&self, head: &Head, seq: Seq, page: &mut PageBuilder<'_>) -> Result<Option<Record>> {
        let mut reader = self.engine.log_reader(head.clone());
        reader.seek(seq);
        let records = reader.read(1).await;
        page.reads += reader.reads();
        match records {
            Err(Error::NotFound { .. } | Error::Conflict { .. }) => Ok(None),
            records => Ok(records?.pop()),
        }
    }
}

/// The number of candidates at the beginning of a list that are read together: they are close to each other in one log.
fn group_len(messages: &[MessageLocation]) -> usize {
    let near = |pair: &[MessageLocation]| {
        pair[0].session == pair[1].session && pair[0].seq.saturating_sub(pair[1].seq) <= MAX_GAP
    };
    1 + messages.windows(2).take(MAX_READ_AHEAD - 1).take_while(|pair| near(pair)).count()
}
