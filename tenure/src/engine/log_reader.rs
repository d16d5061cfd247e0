//! Reads the log of a session backward, through the logs of its ancestors.

use crate::engine::core::Engine;
use crate::store::query::RecordRange;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey};

/// A cursor that moves backward through the log of a session: first through its own records, then
/// through those inherited from its ancestors.
///
/// Records keep their sequence numbers when a concurrent purge moves them from one log to another,
/// so the reader looks at the session's head again and continues where it was.
pub(crate) struct LogReader<'a> {
    engine: &'a Engine,
    /// The session whose log is read.
    head: Head,
    /// The session or ancestor whose own log is being read.
    current: Head,
    /// The last record that has not been read yet.
    position: Seq,
    /// The number of times the store was read.
    reads: usize,
}

impl Engine {
    /// Returns a reader at the end of a session's log.
    pub(crate) fn log_reader(&self, head: Head) -> LogReader<'_> {
        let position = head.seq;
        LogReader { engine: self, current: head.clone(), head, position, reads: 0 }
    }
}

impl LogReader<'_> {
    /// The session whose log is read.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The session or ancestor whose own log is being read.
    pub fn current(&self) -> &Head {
        &self.current
    }

    /// The last record that has not been read yet; 0 at the beginning of the log.
    pub fn position(&self) -> Seq {
        self.position
    }

    /// The number of times the store was read.
    pub fn reads(&self) -> usize {
        self.reads
    }

    /// Continues with the record at `position`, which must not be after those read last: what lies
    /// between was discarded by a rewind, or is to be read again.
    pub fn seek(&mut self, position: Seq) {
        self.position = position;
    }

    /// Reads at most `count` records, newest first, and moves before them. The result is empty at
    /// the beginning of the log. Fails with [`Error::NotFound`] or [`Error::Conflict`] if the
    /// session was purged, or purged and created again.
    pub async fn read(&mut self, count: usize) -> Result<Vec<Record>> {
        loop {
            if self.position < self.current.first {
                match self.move_to_parent().await {
                    Ok(true) => {}
                    Ok(false) => return Ok(Vec::new()),
                    Err(error) => self.reload_head(error).await?,
                }
                continue;
            }
            let range = RecordRange { after: self.current.first - 1, ..RecordRange::back_from(self.position, count) };
            self.reads += 1;
            let records = self.engine.store().records(&self.current.key(), &range).await?;
            match records.last() {
                Some(oldest) => {
                    self.position = oldest.seq - 1;
                    return Ok(records);
                }
                None => {
                    let error = self.engine.missing_record(&self.current, self.position).await;
                    self.reload_head(error).await?;
                }
            }
        }
    }

    /// Moves to the parent of the current session, at the record it was forked from. Returns false
    /// if there is no parent.
    pub async fn move_to_parent(&mut self) -> Result<bool> {
        let Some(parent) = &self.current.parent else { return Ok(false) };
        let key = SessionKey { tenant: self.head.tenant.clone(), session: parent.session.clone() };
        let position = self.position.min(parent.seq);
        self.reads += 1;
        let Some(head) = self.engine.store().head(&key).await? else {
            let reason = format!("the parent session {key} is missing");
            return Err(Error::corrupt(format!("session {}", self.head.key()), reason));
        };
        self.current = head;
        self.position = position;
        Ok(true)
    }

    /// Starts at the session's head again, at the same position, if a concurrent purge has moved
    /// records of its log. Otherwise, the log is damaged: returns `error`.
    async fn reload_head(&mut self, error: Error) -> Result<()> {
        let session_id = self.head.info.session_id.clone();
        let Some(head) = self.engine.store().head(&self.head.key()).await? else {
            return Err(Error::NotFound { session_id });
        };
        if head.info.created_at != self.head.info.created_at {
            return Err(Error::Conflict { session_id, expected: self.head.seq });
        }
        if (head.first, &head.parent) == (self.head.first, &self.head.parent) {
            return Err(error);
        }
        self.current = head.clone();
        self.head = head;
        Ok(())
    }
}
