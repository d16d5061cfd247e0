//! Reads logs from the store: a whole log including the records inherited from ancestors, or the
//! newest part of a long log.

use crate::engine::core::Engine;
use crate::rules::session::Session;
use crate::store::query::RecordRange;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::policy::Window;

/// The number of records from which a log is read in two concurrent halves (D-011).
pub(crate) const LONG_LOG: u64 = 1000;

/// The minimum number of records that are read as the newest part of a log.
pub(crate) const MIN_PARTIAL_RECORDS: u64 = 64;

impl Engine {
    /// Loads the newest part of a long session (D-014). Returns `None` if a run needs more than
    /// half of the log, or if the size of the needed part cannot be estimated.
    pub(crate) async fn load_partial(&self, head: &Head, window: &Window) -> Result<Option<Session>> {
        let Some(prefix) = &head.prompt_prefix else { return Ok(None) };
        let records_per_turn = head.seq.div_ceil(head.digest.turns.max(1) as u64);
        let by_turns = window.max_turns.map(|turns| records_per_turn.saturating_mul((turns as u64).saturating_add(3)));
        let by_tokens = window.max_tokens.map(|_| MIN_PARTIAL_RECORDS);
        let by_summary = prefix.summary.map(|(_, upto)| head.seq.saturating_sub(upto) + 2 * records_per_turn);
        let estimate = [by_turns, by_tokens, by_summary].into_iter().flatten().min();
        let Some(mut size) = estimate.map(|size| size.max(MIN_PARTIAL_RECORDS)) else { return Ok(None) };
        let mut since = head.seq + 1;
        let mut newest = Vec::new();
        while size <= head.seq / 2 {
            let from = head.seq + 1 - size;
            let mut more = self.read_range(head, from - 1, since - 1).await?.concat();
            more.append(&mut newest);
            since = from;
            newest = more;
            let mut before = Vec::new();
            for (first, last) in prefix.ranges_before(since) {
                before.extend(self.read_range(head, first - 1, last).await?.concat());
            }
            if let Some(session) = Session::fold_partial(head.clone(), &before, &newest, window) {
                return Ok(Some(session));
            }
            size *= 2;
        }
        Ok(None)
    }

    /// Loads and folds a whole session, including the records inherited from ancestors.
    pub(crate) async fn fold(&self, head: Head) -> Result<Session> {
        let log = self.log(&head).await?;
        Ok(Session::fold(head, log.into_iter().flatten()))
    }

    /// Reads the whole log of a session, including the records inherited from ancestors, oldest
    /// first, in pages.
    pub(crate) async fn log(&self, head: &Head) -> Result<Vec<Vec<Record>>> {
        let log = self.lineage(head).await;
        if log.is_ok() && head.parent.is_none() {
            return log;
        }
        // A concurrent purge may have moved records from one log to another during the read. Then
        // our head has changed too (D-001).
        match self.store().head(&head.key()).await? {
            Some(now) if (now.first, &now.parent) != (head.first, &head.parent) => self.lineage(&now).await,
            Some(_) => log,
            None => Err(Error::NotFound { session_id: head.info.session_id.clone() }),
        }
    }

    /// Reads the logs of a session and of its ancestors, oldest first, in pages. A concurrent purge
    /// may make it fail.
    pub async fn lineage(&self, head: &Head) -> Result<Vec<Vec<Record>>> {
        let mut parts = Vec::new();
        let mut reader = self.log_reader(head.clone());
        loop {
            let current = reader.current();
            parts.push(self.own_records(current, current.first - 1, reader.position()).await?);
            if !reader.move_to_parent().await? {
                break;
            }
        }
        Ok(parts.into_iter().rev().flatten().collect())
    }

    /// Reads records of a session's own log, in pages. A long range is read in two concurrent
    /// halves, because reading is bound by CPU work, not by waiting (D-011).
    pub(crate) async fn own_records(&self, head: &Head, after: u64, upto: u64) -> Result<Vec<Vec<Record>>> {
        if upto.saturating_sub(after) < LONG_LOG {
            return self.read_range(head, after, upto).await;
        }
        let middle = after + (upto - after) / 2;
        let halves = tokio::try_join!(self.read_range(head, after, middle), self.read_range(head, middle, upto));
        halves.map(|(older, newer)| older.into_iter().chain(newer).collect())
    }

    /// Reads the records after `after` up to `upto` of a session's own log, in pages.
    pub async fn read_range(&self, head: &Head, after: u64, upto: u64) -> Result<Vec<Vec<Record>>> {
        let key = head.key();
        let mut pages = Vec::new();
        let mut last = after;
        while last < upto {
            let page = self.store().records(&key, &RecordRange { upto, ..RecordRange::after(last) }).await?;
            let Some(end) = page.last().map(|r| r.seq) else { return Err(self.missing_record(head, last + 1).await) };
            last = end;
            pages.push(page);
        }
        Ok(pages)
    }

    /// The error for a record that is missing although a head promises it. Either the session was
    /// purged, or purged and created again, since the head was read; otherwise the log is damaged.
    pub async fn missing_record(&self, head: &Head, seq: u64) -> Error {
        let key = head.key();
        let session_id = head.info.session_id.clone();
        match self.store().head(&key).await {
            Ok(None) => Error::NotFound { session_id },
            Ok(Some(now)) if now.info.created_at != head.info.created_at || now.seq < head.seq => {
                Error::Conflict { session_id, expected: head.seq }
            }
            Ok(Some(_)) => Error::corrupt(format!("session {key}, record {seq}"), "the record is missing"),
            Err(e) => e,
        }
    }
}
