//! The stored messages of a session, with an index that is built on first use.

use crate::rules::session::StoredMessage;
use crate::types::message::{Message, Role};
use std::cell::{Cell, OnceCell};
use std::collections::{HashMap, HashSet};
use std::ops::Deref;

/// Maximum number of equal messages that are considered, the latest ones. A text that occurs more often
/// identifies nothing.
const MAX_EQUAL: usize = 64;

/// Number of recent messages that are scanned, and of lookups that may scan, before the index is built. Most
/// messages that a request names are recent.
const MAX_SCAN: usize = 64;

/// The stored messages of a session and their lazily built index.
pub(super) struct StoredIndex<'a> {
    messages: &'a [StoredMessage],
    index: OnceCell<MessageIndex>,
    /// Number of lookups that may still be done by a scan.
    scans_left: Cell<usize>,
}

/// Positions of messages, ascending: by content, of tool calls by their ids, and of results by the call that
/// they answer.
#[derive(Default)]
struct MessageIndex {
    contents: HashMap<[u8; 32], Vec<usize>>,
    calls: HashMap<String, Vec<usize>>,
    results: HashMap<String, Vec<usize>>,
}

impl Deref for StoredIndex<'_> {
    type Target = [StoredMessage];
    fn deref(&self) -> &[StoredMessage] {
        self.messages
    }
}

impl<'a> StoredIndex<'a> {
    pub fn new(messages: &'a [StoredMessage]) -> Self {
        Self { messages, index: OnceCell::new(), scans_left: Cell::new(MAX_SCAN) }
    }

    /// Returns true if a lookup may scan the most recent messages: only a few times, and not once the index
    /// exists.
    fn may_scan(&self) -> bool {
        let scans_left = self.scans_left.get();
        self.scans_left.set(scans_left.saturating_sub(1));
        scans_left > 0 && self.index.get().is_none()
    }

    /// Returns the index, building it on first use.
    fn index(&self) -> &MessageIndex {
        self.index.get_or_init(|| {
            let mut index = MessageIndex::default();
            for (p, stored) in self.messages.iter().enumerate().filter(|(_, m)| !m.replaces_instructions) {
                match stored.message.tool_call_id_ref() {
                    Some(id) => index.results.entry(id.into_owned()).or_default().push(p),
                    None => {
                        for key in keys(&stored.message) {
                            index.contents.entry(key).or_default().push(p);
                        }
                        for id in stored.message.call_ids() {
                            index.calls.entry(id.into_owned()).or_default().push(p);
                        }
                    }
                }
            }
            index
        })
    }

    /// Returns the positions before `end` of messages equal to this one, ascending. If there are many, only
    /// the latest are considered.
    pub fn same_as(&self, message: &Message, end: usize) -> Vec<usize> {
        let index = self.index();
        let positions = keys(message).into_iter().filter_map(|key| index.contents.get(&key));
        let before = |positions: &Vec<usize>| {
            let upto = positions.partition_point(|p| *p < end);
            positions[upto.saturating_sub(MAX_EQUAL)..upto].to_vec()
        };
        let mut equal: Vec<usize> = positions.flat_map(before).collect();
        equal.sort_unstable();
        equal.dedup();
        equal.retain(|p| self.messages[*p].message.is_same(message));
        equal
    }

    /// Returns the last position before `end` of a message with this call.
    pub fn call_before(&self, id: &str, end: usize) -> Option<usize> {
        let calls = |p: &usize| self.messages[*p].message.call_ids().iter().any(|call| call == id);
        if self.may_scan()
            && let Some(position) = (end.saturating_sub(MAX_SCAN)..end).rev().find(calls)
        {
            return Some(position);
        }
        let positions = self.index().calls.get(id)?;
        positions[..positions.partition_point(|p| *p < end)].last().copied()
    }

    /// Returns the first result of the call at this position.
    pub fn result_of(&self, id: &str, call: usize) -> Option<usize> {
        let answers = |p: &usize| self.messages[*p].message.tool_call_id_ref().as_deref() == Some(id);
        if self.messages.len() - call <= MAX_SCAN && self.may_scan() {
            return (call..self.messages.len()).find(answers);
        }
        let positions = self.index().results.get(id)?;
        positions.get(positions.partition_point(|p| *p < call)).copied()
    }

    /// Returns the last stored result before `end` that answers the same call as this one and is not in
    /// `paired`.
    pub fn result_before(&self, result: &Message, end: usize, paired: &HashSet<usize>) -> Option<usize> {
        let is_result = |p: &usize| self.messages[*p].message.role() == Role::Tool;
        let recent = (end.saturating_sub(MAX_SCAN)..end).rev().take_while(is_result);
        let mut unpaired = recent.filter(|p| !paired.contains(p));
        if let Some(position) = unpaired.find(|p| self.messages[*p].message.is_same(result)) {
            return Some(position);
        }
        let positions = self.index().results.get(&*result.tool_call_id_ref()?)?;
        let before = &positions[..positions.partition_point(|p| *p < end)];
        before.iter().rev().take(MAX_EQUAL).find(|p| !paired.contains(p)).copied()
    }
}

/// Returns the index keys of a message: its tool calls, or its role and text.
pub(super) fn keys(message: &Message) -> Vec<[u8; 32]> {
    let hash = |parts: &[&[u8]]| {
        let mut hash = blake3::Hasher::new();
        for part in parts {
            hash.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        *hash.finalize().as_bytes()
    };
    let calls = if message.role() == Role::Assistant { message.tool_calls() } else { Vec::new() };
    if calls.is_empty() {
        return vec![hash(&[&[message.role() as u8], message.meaning().text.as_bytes()])];
    }
    calls.iter().flat_map(|c| [hash(&[b"id", c.id.as_bytes()]), hash(&[b"name", c.name.as_bytes()])]).collect()
}
