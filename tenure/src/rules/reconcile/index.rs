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
const NEAR: usize = 64;

/// The stored messages of a session and their lazily built index.
pub(super) struct StoredIndex<'a> {
    messages: &'a [StoredMessage],
    index: OnceCell<MessageIndex>,
    /// Number of lookups that may still be done by a scan.
    near: Cell<usize>,
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
        Self { messages, index: OnceCell::new(), near: Cell::new(NEAR) }
    }

    /// Returns true if a lookup may scan the most recent messages: only a few times, and not once the index
    /// exists.
    fn looks_near(&self) -> bool {
        let left = self.near.get();
        self.near.set(left.saturating_sub(1));
        left > 0 && self.index.get().is_none()
    }

    /// Returns the index, building it on first use.
    fn index(&self) -> &MessageIndex {
        self.index.get_or_init(|| {
            let mut index = MessageIndex::default();
            for (p, said) in self.messages.iter().enumerate().filter(|(_, m)| !m.lead) {
                match said.message.answers() {
                    Some(id) => index.results.entry(id.into_owned()).or_default().push(p),
                    None => {
                        for key in keys(&said.message) {
                            index.contents.entry(key).or_default().push(p);
                        }
                        for id in said.message.call_ids() {
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
        let places = keys(message).into_iter().filter_map(|key| index.contents.get(&key));
        let before = |places: &Vec<usize>| {
            let upto = places.partition_point(|p| *p < end);
            places[upto.saturating_sub(MAX_EQUAL)..upto].to_vec()
        };
        let mut found: Vec<usize> = places.flat_map(before).collect();
        found.sort_unstable();
        found.dedup();
        found.retain(|p| self.messages[*p].message.is_same(message));
        found
    }

    /// Returns the last position before `end` of a message with this call.
    pub fn call_before(&self, id: &str, end: usize) -> Option<usize> {
        let calls = |p: &usize| self.messages[*p].message.call_ids().iter().any(|call| call == id);
        if self.looks_near()
            && let Some(near) = (end.saturating_sub(NEAR)..end).rev().find(calls)
        {
            return Some(near);
        }
        let places = self.index().calls.get(id)?;
        places[..places.partition_point(|p| *p < end)].last().copied()
    }

    /// Returns the first result of the call at this position.
    pub fn result_of(&self, id: &str, call: usize) -> Option<usize> {
        let answers = |p: &usize| self.messages[*p].message.answers().as_deref() == Some(id);
        if self.messages.len() - call <= NEAR && self.looks_near() {
            return (call..self.messages.len()).find(answers);
        }
        let places = self.index().results.get(id)?;
        places.get(places.partition_point(|p| *p < call)).copied()
    }

    /// Returns the last stored result before `end` that answers the same call as this one and is not in
    /// `taken`.
    pub fn result_before(&self, result: &Message, end: usize, taken: &HashSet<usize>) -> Option<usize> {
        let is_result = |p: &usize| self.messages[*p].message.role() == Role::Tool;
        let near = (end.saturating_sub(NEAR)..end).rev().take_while(is_result);
        if let Some(near) = near.filter(|p| !taken.contains(p)).find(|p| self.messages[*p].message.is_same(result)) {
            return Some(near);
        }
        let places = self.index().results.get(&*result.answers()?)?;
        let before = &places[..places.partition_point(|p| *p < end)];
        before.iter().rev().take(MAX_EQUAL).find(|p| !taken.contains(p)).copied()
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
