//! The rewinds of all sessions, and the sessions that show a record.

use super::MemIndex;
use crate::store::shown::{RecordLocation, ShownRecord};
use crate::types::entry::{Entry, Record};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionKey, Tenant};
use std::collections::BTreeMap;

impl MemIndex {
    /// Registers the rewinds among records that were appended to a session's log.
    pub fn add_rewinds<'a>(&mut self, key: &SessionKey, records: impl IntoIterator<Item = &'a Record>) {
        for record in records {
            if let Entry::Rewound(rewind) = &record.entry {
                self.rewinds.entry(key.clone()).or_default().insert(record.seq, rewind.to);
            }
        }
    }

    /// Copies the rewinds up to `upto` to the fork that inherits these records.
    pub fn inherit_rewinds(&mut self, from: &SessionKey, inheriting_fork: &SessionKey, upto: Seq) {
        let inherited: BTreeMap<Seq, Seq> = match self.rewinds.get(from) {
            Some(rewinds) => rewinds.range(..=upto).map(|(seq, to)| (*seq, *to)).collect(),
            None => return,
        };
        if !inherited.is_empty() {
            self.rewinds.entry(inheriting_fork.clone()).or_default().extend(inherited);
        }
    }

    /// Returns the sessions that show records, as the store contract defines them.
    pub fn sessions_showing(&self, tenant: &Tenant, records: &[RecordLocation], limit: usize) -> Vec<ShownRecord> {
        let mut shown = Vec::new();
        for (record, location) in records.iter().enumerate() {
            let seq = location.seq;
            let Some(head) = self.head_of(tenant, &location.session) else { continue };
            let mut open = vec![(head, self.discarding_rewind(head, seq))];
            while let Some((head, discarded_by)) = open.pop() {
                if shown.len() >= limit {
                    return shown;
                }
                if discarded_by.is_none() {
                    let session = head.info.session_id.clone();
                    shown.push(ShownRecord { record, session, active_at: head.active_at });
                }
                let forks = self.children.get(&head.key()).into_iter().flatten();
                for fork in forks.filter_map(|id| self.head_of(tenant, id)) {
                    let fork_point = fork.parent.as_ref().map_or(0, |p| p.seq);
                    if fork_point >= seq {
                        // A rewind after the fork point has no effect on the fork.
                        let inherited = discarded_by.filter(|rewind| *rewind <= fork_point);
                        let own = self.discarding_rewind(fork, seq);
                        open.push((fork, inherited.into_iter().chain(own).min()));
                    }
                }
            }
        }
        shown
    }

    /// Returns the first rewind in a session's own log that discards a record.
    fn discarding_rewind(&self, head: &Head, seq: Seq) -> Option<Seq> {
        let rewinds = self.rewinds.get(&head.key())?;
        rewinds.range(seq + 1..).find(|(_, to)| **to < seq).map(|(rewind, _)| *rewind)
    }
}
