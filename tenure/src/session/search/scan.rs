//! Search without the message index: a backward scan through the messages of each session.

use crate::engine::log_reader::LogReader;
use crate::session::search::cursor::ScanPosition;
use crate::session::search::page::{PageBuilder, SearchCandidate};
use crate::session::search::request::MessageHit;
use crate::store::query::{HeadPage, SessionCursor, SessionQuery};
use crate::tenure::Tenure;
use crate::types::entry::{Entry, MessageEntry, Record};
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::Seq;

/// The number of records that are read in one page.
const RECORDS_PER_PAGE: usize = 128;

/// A backward scan through the messages of a session, from the last to the first.
pub(super) struct BackwardScan<'a> {
    reader: LogReader<'a>,
    /// Messages after this one were searched on an earlier page.
    below: Seq,
    /// The number of messages up to the reader's position.
    messages: usize,
    /// Whether the scan is still seeking the position where an earlier page ended. These reads do
    /// not count towards `max_reads`: otherwise a search through more ancestors than one page may
    /// read would never make progress.
    seeking: bool,
}

impl<'a> BackwardScan<'a> {
    /// Starts a scan at the end of a session, or continues it from a position.
    fn begin(mut reader: LogReader<'a>, scan_position: Option<ScanPosition>) -> Self {
        let mut messages = reader.head().digest.messages;
        if let Some(position) = scan_position.filter(|position| position.seq == reader.head().seq) {
            reader.seek(position.upto.min(reader.head().seq));
            messages = position.messages;
        }
        let below = scan_position.map_or(Seq::MAX, |i| i.upto);
        Self { reader, below, messages, seeking: scan_position.is_some() }
    }

    fn head(&self) -> &Head {
        self.reader.head()
    }

    /// The current position, for the cursor.
    fn position(&self) -> ScanPosition {
        ScanPosition { upto: self.reader.position(), messages: self.messages, seq: self.head().seq }
    }

    /// The messages among records, newest first, up to the next rewind. The scan continues at the
    /// rewind's target: the records between were discarded.
    fn advance(&mut self, records: Vec<Record>) -> Vec<SearchCandidate> {
        let mut candidates = Vec::new();
        for record in records {
            match record.entry {
                Entry::Rewound(rewind) => {
                    self.reader.seek(rewind.to);
                    break;
                }
                Entry::Message(MessageEntry { message, .. }) => {
                    self.messages = self.messages.saturating_sub(1);
                    if record.seq <= self.below {
                        let position = self.messages;
                        let hit = MessageHit { position, seq: record.seq, role: message.role(), at: record.at };
                        candidates.push(SearchCandidate { hit, message });
                    }
                }
                _ => {}
            }
        }
        candidates
    }
}

impl Tenure {
    /// Searches the sessions that a query selects, until one of the bounds is reached. `resumed` is the session in
    /// which the previous page ended.
    pub(super) async fn scan_sessions(
        &self,
        mut query: SessionQuery,
        resumed: Option<(Head, ScanPosition)>,
        page: &mut PageBuilder<'_>,
    ) -> Result<()> {
        let max_sessions = page.request.max_sessions.max(1);
        if let (Some((head, scan_position)), Some(cursor)) = (resumed, query.cursor.clone())
            && !self.scan_session(head, Some(scan_position), &cursor, page).await?
        {
            return Ok(());
        }
        let mut sessions = 0;
        loop {
            let HeadPage { heads, scan_stopped_at: stopped } =
                self.store().page(&query, self.limits().max_scan).await?;
            // The first page of heads does not count, so that each search makes progress by at
            // least one session.
            page.reads += usize::from(sessions > 0);
            let last = heads.len() < query.limit;
            for head in heads {
                if sessions >= max_sessions || page.is_over() {
                    page.set_next(query.cursor.clone(), None);
                    return Ok(());
                }
                sessions += 1;
                let cursor = SessionCursor::of(&head);
                query.cursor = Some(cursor.clone());
                // The stored status may be out of date: sessions may have expired since the last sweep.
                if query.status.contains(&self.engine.status_of(&head))
                    && !self.scan_session(head, None, &cursor, page).await?
                {
                    return Ok(());
                }
            }
            if last {
                page.set_next(stopped, None);
                return Ok(());
            }
        }
    }

    /// Searches one session. Returns true if all of it was searched; otherwise sets the cursor of
    /// the next page.
    async fn scan_session(
        &self,
        head: Head,
        scan_position: Option<ScanPosition>,
        cursor: &SessionCursor,
        page: &mut PageBuilder<'_>,
    ) -> Result<bool> {
        page.page.scanned += 1;
        if scan_position.is_none() {
            page.add_title(&head);
        }
        let mut scan = BackwardScan::begin(self.engine.log_reader(head), scan_position);
        match self.scan_log(&mut scan, page).await {
            Ok(true) => Ok(true),
            Ok(false) => {
                page.set_next(Some(cursor.clone()), Some(scan.position()));
                Ok(false)
            }
            // A damaged session does not prevent the search of the others.
            Err(Error::Corrupt { location, reason, .. }) => {
                page.skip_damaged(scan.head(), &location, &reason);
                Ok(true)
            }
            Err(e) => Err(e),
        }
    }

    /// Scans the log of one session. Returns true if the scan has reached its beginning.
    async fn scan_log(&self, scan: &mut BackwardScan<'_>, page: &mut PageBuilder<'_>) -> Result<bool> {
        while !page.is_over() {
            let Some(records) = read_back(scan, &mut page.reads).await? else { return Ok(true) };
            let candidates = scan.advance(records);
            for (hit, found) in page.find_matches(&self.engine, candidates).await? {
                if page.is_full() {
                    return Ok(false);
                }
                // If this result fills the page, the next page continues right after it.
                let before = (hit.seq - 1, hit.position);
                page.add_hit(scan.head(), Some(hit), found);
                if page.is_full() {
                    scan.reader.seek(before.0);
                    scan.messages = before.1;
                }
            }
            // Yields to other tasks between pages of records.
            tokio::task::yield_now().await;
        }
        Ok(false)
    }
}

/// Reads the next records of the backward scan. `None` means that it has reached the beginning,
/// or that the session was purged meanwhile. Adds the number of store reads to `reads`.
async fn read_back(scan: &mut BackwardScan<'_>, reads: &mut usize) -> Result<Option<Vec<Record>>> {
    let reads_before = scan.reader.reads();
    let records = match scan.reader.read(RECORDS_PER_PAGE).await {
        Err(Error::NotFound { .. } | Error::Conflict { .. }) => Vec::new(),
        other => other?,
    };
    if !scan.seeking {
        *reads += scan.reader.reads() - reads_before;
    }
    scan.seeking = false;
    Ok((!records.is_empty()).then_some(records))
}
