//! The human-readable file of the messages that rewinds discarded, next to the session's log.
//!
//! Invariant: the file is a copy. A failure to write it is only logged, because the messages are still
//! in the log.

use super::file::{append_copy, io_error};
use crate::rules::session::Session;
use crate::store::contract::Commit;
use crate::store::jsonl::engine::JsonlEngine;
use crate::store::jsonl::paths::{self, LogFile};
use crate::store::query::RecordRange;
use crate::types::blob::BlobId;
use crate::types::entry::{Entry, Record};
use crate::types::error::Result;
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey};
use crate::types::message::Message;

impl JsonlEngine {
    /// Appends the messages that an applied commit discarded to their file. `head` is the session's
    /// head after the commit.
    pub fn copy_discarded(&self, commit: &Commit, head: &Head) {
        let path = paths::discarded_file(&self.root, &head.key());
        let copied = self.discarded_by(commit, head).and_then(|messages| {
            if messages.is_empty() {
                return Ok(());
            }
            append_copy(&path, messages.iter().map(|m| m.as_str())).map_err(|e| io_error(&path, e))
        });
        if let Err(error) = copied {
            tracing::warn!(path = %path.display(), %error, "could not append the discarded messages to their file; they are still in the log");
        }
    }

    /// Returns the messages that an applied commit discarded, with their media. They follow from the
    /// log after the earliest target of the commit's rewinds.
    fn discarded_by(&self, commit: &Commit, head: &Head) -> Result<Vec<Message>> {
        let targets = commit.records.iter().filter_map(|record| match &record.entry {
            Entry::Rewound(rewind) => Some(rewind.to),
            _ => None,
        });
        let (Some(base), Some(target)) = (commit.base, targets.min()) else { return Ok(Vec::new()) };
        let mut session = Session::empty(head.clone());
        let mut discarded = Vec::new();
        for record in self.log_after(head, target)? {
            let messages = session.apply_to_lists(&record);
            if record.seq > base.seq {
                discarded.extend(messages.into_iter().map(|stored| stored.message));
            }
        }
        let blob = |id: &BlobId| self.blob(&head.tenant, *id).ok().flatten();
        Ok(discarded.into_iter().map(|m| m.attach(blob).unwrap_or(m)).collect())
    }

    /// Reads the records after `after`, including those of the session's ancestors, oldest first.
    fn log_after(&self, head: &Head, after: Seq) -> Result<Vec<Record>> {
        let mut parts = Vec::new();
        let mut current = head.clone();
        let mut upto = head.seq;
        loop {
            parts.push(self.own_records(&LogFile::session(&current.key()), after, upto)?);
            let Some(parent) = current.parent.take().filter(|parent| parent.seq > after) else { break };
            let key = SessionKey { tenant: current.tenant.clone(), session: parent.session };
            upto = upto.min(parent.seq);
            let Some(parent_head) = self.state().index.head(&key).cloned() else { break };
            current = parent_head;
        }
        Ok(parts.into_iter().rev().flatten().collect())
    }

    /// Reads the records of one file after `after` up to `upto`.
    fn own_records(&self, log_file: &LogFile, after: Seq, upto: Seq) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        let mut last = after;
        loop {
            let page = self.records(log_file, &RecordRange { upto, ..RecordRange::after(last) })?;
            let Some(end) = page.last().map(|record| record.seq) else { return Ok(records) };
            last = end;
            records.extend(page);
        }
    }
}
