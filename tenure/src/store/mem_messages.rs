//! The message index of the memory and JSONL stores: postings in memory, built when they are first used.
//!
//! Invariant: the postings of a word are the ascending numbers of documents, as differences in a variable
//! number of bytes. A removed document keeps its number until its tenant's postings are compacted.

use crate::store::contract::Commit;
use crate::store::message_index::{
    IndexWord, IndexedMessage, MessageLocation, MessageMatches, MessageQuery, SessionIndexPart, WordRules,
};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionId, SessionKey, Tenant, User};
use std::collections::{BTreeMap, HashMap};
use std::ops::{Bound, RangeBounds};

/// The number of removed documents above which a tenant's postings are compacted, if they are also more
/// than a quarter of all.
const MAX_REMOVED: usize = 1_000;

/// The words of the messages of all tenants.
#[derive(Debug, Default)]
pub(super) struct MemMessages {
    rules: WordRules,
    coverage: Coverage,
    tenants: HashMap<Tenant, TenantMessages>,
}

/// Which sessions are in the index.
#[derive(Clone, Debug, Default, PartialEq)]
enum Coverage {
    /// None, because nothing was searched yet.
    #[default]
    Unused,
    /// All except those from this key on, in the order of keys.
    UpTo(Bound<SessionKey>),
    /// All.
    Complete,
}

/// The messages of one tenant.
#[derive(Debug, Default)]
struct TenantMessages {
    /// The documents by number. `None` means that the document was removed.
    documents: Vec<Option<Document>>,
    /// The session and user of each session number that documents refer to.
    sessions: Vec<(SessionId, User)>,
    by_session: HashMap<SessionId, IndexedSession>,
    words: BTreeMap<Box<str>, Postings>,
    removed: usize,
}

/// The documents of a session by record.
#[derive(Debug)]
struct IndexedSession {
    number: u32,
    documents: BTreeMap<Seq, u32>,
}

/// A message in the index.
#[derive(Clone, Copy, Debug)]
struct Document {
    session: u32,
    seq: Seq,
    position: usize,
}

/// The ascending numbers of the documents that contain a word.
#[derive(Debug, Default)]
struct Postings {
    bytes: Vec<u8>,
    last: u32,
}

impl MemMessages {
    /// Applies the index update of a commit. `inherited` is the latest fork point of the session's forks.
    pub fn apply(&mut self, commit: &Commit, user: &User, inherited: Seq) {
        if self.coverage == Coverage::Unused {
            return;
        }
        let key = commit.head.key();
        let Some(update) = commit.message_index.as_ref().filter(|update| update.rules == self.rules) else {
            if !commit.records.is_empty() {
                self.mark_unindexed(key);
            }
            return;
        };
        let tenant = self.tenants.entry(key.tenant).or_default();
        if let Some(after) = update.discarded_after {
            tenant.remove(&key.session, (Bound::Excluded(after.max(inherited)), Bound::Unbounded));
        }
        update.added.iter().for_each(|message| tenant.add(&key.session, user, message));
    }

    /// Removes a session.
    pub fn remove(&mut self, key: &SessionKey) {
        if let Some(tenant) = self.tenants.get_mut(&key.tenant) {
            tenant.remove(&key.session, (Bound::Unbounded, Bound::Unbounded));
            tenant.by_session.remove(&key.session);
        }
    }

    /// Moves the messages up to a record to a fork that inherits them.
    pub fn inherit(&mut self, from: &SessionKey, fork: &Head, last: Seq) {
        // The fork may be in the index while the inherited messages are not.
        if let Coverage::UpTo(_) = self.coverage {
            self.mark_unindexed(fork.key());
        }
        if let Some(tenant) = self.tenants.get_mut(&from.tenant) {
            tenant.inherit(&from.session, &fork.info.session_id, &fork.user, last);
        }
    }

    /// Finds messages. The first search begins the construction of the index.
    pub fn find(&mut self, query: &MessageQuery) -> MessageMatches {
        if self.coverage == Coverage::Unused {
            *self = Self::empty(query.rules);
        }
        if self.coverage != Coverage::Complete || query.rules != self.rules || query.words.is_empty() {
            return MessageMatches::Unindexed;
        }
        MessageMatches::Found(self.tenants.get(&query.tenant).map(|t| t.find(query)).unwrap_or_default())
    }

    /// Lists the messages of a session.
    pub fn indexed(&self, key: &SessionKey) -> Vec<(Seq, usize)> {
        let Some(tenant) = self.tenants.get(&key.tenant) else { return Vec::new() };
        let documents = tenant.by_session.get(&key.session).into_iter().flat_map(|session| &session.documents);
        documents.filter_map(|(seq, number)| Some((*seq, tenant.documents[*number as usize]?.position))).collect()
    }

    /// Returns the first session that is not in the index. `first` returns the first session in a range of keys.
    pub fn next_unindexed(
        &mut self,
        rules: WordRules,
        first: impl FnOnce(Bound<&SessionKey>) -> Option<SessionKey>,
    ) -> Option<SessionKey> {
        if self.coverage != Coverage::Unused && rules != self.rules {
            *self = Self::empty(rules);
        }
        let Coverage::UpTo(bound) = &self.coverage else { return None };
        let session = first(bound.as_ref());
        if session.is_none() {
            self.coverage = Coverage::Complete;
        }
        session
    }

    /// Replaces the entries of a part of a session's log. `first` returns the first session in a range of keys.
    pub fn replace(
        &mut self,
        part: &SessionIndexPart,
        user: &User,
        first: impl FnOnce(Bound<&SessionKey>) -> Option<SessionKey>,
    ) {
        if self.coverage == Coverage::Unused || part.rules != self.rules {
            return;
        }
        let tenant = self.tenants.entry(part.key.tenant.clone()).or_default();
        let (start, end) = part.range.clone().into_inner();
        tenant.remove(&part.key.session, (Bound::Included(start), Bound::Included(end)));
        part.messages.iter().for_each(|message| tenant.add(&part.key.session, user, message));
        if part.is_last
            && let Coverage::UpTo(bound) = &mut self.coverage
            && first(bound.as_ref()).as_ref() == Some(&part.key)
        {
            *bound = Bound::Excluded(part.key.clone());
        }
    }

    /// An index to which all sessions must be added.
    fn empty(rules: WordRules) -> Self {
        Self { rules, coverage: Coverage::UpTo(Bound::Unbounded), tenants: HashMap::new() }
    }

    /// Returns whether the index was used.
    pub fn is_used(&self) -> bool {
        self.coverage != Coverage::Unused
    }

    /// Records that a session must be indexed again.
    fn mark_unindexed(&mut self, key: SessionKey) {
        match &self.coverage {
            Coverage::UpTo(bound) if (bound.as_ref(), Bound::Unbounded).contains(&key) => {}
            _ => self.coverage = Coverage::UpTo(Bound::Included(key)),
        }
    }
}

impl TenantMessages {
    fn add(&mut self, session: &SessionId, user: &User, message: &IndexedMessage) {
        let number = u32::try_from(self.documents.len()).unwrap_or(u32::MAX);
        let sessions = &mut self.sessions;
        let entry = self.by_session.entry(session.clone()).or_insert_with(|| {
            sessions.push((session.clone(), user.clone()));
            IndexedSession { number: sessions.len() as u32 - 1, documents: BTreeMap::new() }
        });
        let document = Document { session: entry.number, seq: message.seq, position: message.position };
        if let Some(replaced) = entry.documents.insert(message.seq, number) {
            self.documents[replaced as usize] = None;
            self.removed += 1;
        }
        self.documents.push(Some(document));
        for word in &message.words {
            match self.words.get_mut(word.as_str()) {
                Some(postings) => postings.push(number),
                None => {
                    let mut postings = Postings::default();
                    postings.push(number);
                    self.words.insert(word.as_str().into(), postings);
                }
            }
        }
    }

    fn remove(&mut self, session: &SessionId, range: (Bound<Seq>, Bound<Seq>)) {
        let Some(entry) = self.by_session.get_mut(session) else { return };
        let records: Vec<Seq> = entry.documents.range(range).map(|(seq, _)| *seq).collect();
        for seq in records {
            if let Some(number) = entry.documents.remove(&seq) {
                self.documents[number as usize] = None;
                self.removed += 1;
            }
        }
        if self.removed > MAX_REMOVED && self.removed > self.documents.len() / 4 {
            self.compact();
        }
    }

    fn inherit(&mut self, from: &SessionId, to: &SessionId, user: &User, last: Seq) {
        let Some(entry) = self.by_session.get_mut(from) else { return };
        let rest = entry.documents.split_off(&(last + 1));
        let inherited = std::mem::replace(&mut entry.documents, rest);
        let sessions = &mut self.sessions;
        let fork = self.by_session.entry(to.clone()).or_insert_with(|| {
            sessions.push((to.clone(), user.clone()));
            IndexedSession { number: sessions.len() as u32 - 1, documents: BTreeMap::new() }
        });
        for (seq, number) in inherited {
            if let Some(document) = &mut self.documents[number as usize] {
                document.session = fork.number;
            }
            fork.documents.insert(seq, number);
        }
    }

    /// Finds the documents with all words of a query, the last first.
    fn find(&self, query: &MessageQuery) -> Vec<MessageLocation> {
        let mut lists: Vec<Vec<&Postings>> = query.words.iter().map(|word| self.postings(word)).collect();
        // The rarest word first: the others only filter its documents.
        lists.sort_by_key(|list| list.iter().map(|postings| postings.bytes.len()).sum::<usize>());
        let mut lists = lists.iter().map(|list| union(list));
        let Some(mut numbers) = lists.next() else { return Vec::new() };
        for list in lists {
            if numbers.is_empty() {
                break;
            }
            let mut rest = list.into_iter().peekable();
            numbers.retain(|number| {
                while rest.next_if(|other| other < number).is_some() {}
                rest.peek() == Some(number)
            });
        }
        let documents = numbers.iter().rev().filter_map(|number| self.documents[*number as usize]);
        let located = documents.filter_map(|document| {
            let (session, user) = &self.sessions[document.session as usize];
            let location = MessageLocation { session: session.clone(), seq: document.seq, position: document.position };
            query.user.as_ref().is_none_or(|wanted| wanted == user).then_some(location)
        });
        located.take(query.limit).collect()
    }

    /// Returns the postings of a word, or of all words with a prefix.
    fn postings(&self, word: &IndexWord) -> Vec<&Postings> {
        let text = word.text.as_str();
        if !word.is_prefix {
            return self.words.get(text).into_iter().collect();
        }
        let from = self.words.range::<str, _>((Bound::Included(text), Bound::Unbounded));
        from.take_while(|(word, _)| word.starts_with(text)).map(|(_, postings)| postings).collect()
    }

    /// Renumbers the documents without the removed ones.
    fn compact(&mut self) {
        let mut count = 0;
        let renumbered = |document: &Option<Document>| {
            document.map(|_| {
                count += 1;
                count - 1
            })
        };
        let numbers: Vec<Option<u32>> = self.documents.iter().map(renumbered).collect();
        self.words.retain(|_, postings| {
            let mut compacted = Postings::default();
            postings.numbers().filter_map(|number| numbers[number as usize]).for_each(|number| compacted.push(number));
            compacted.bytes.shrink_to_fit();
            *postings = compacted;
            !postings.bytes.is_empty()
        });
        for documents in self.by_session.values_mut().map(|session| &mut session.documents) {
            documents.values_mut().for_each(|number| *number = numbers[*number as usize].unwrap_or(*number));
        }
        self.documents.retain(Option::is_some);
        self.removed = 0;
    }
}

/// Merges postings into ascending numbers without duplicates.
fn union(list: &[&Postings]) -> Vec<u32> {
    let mut numbers: Vec<u32> = list.iter().flat_map(|postings| postings.numbers()).collect();
    if list.len() > 1 {
        numbers.sort_unstable();
        numbers.dedup();
    }
    numbers
}

impl Postings {
    /// Adds a number, which is larger than those before it.
    fn push(&mut self, number: u32) {
        let mut rest = number - self.last;
        self.last = number;
        while rest >= 0x80 {
            self.bytes.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        self.bytes.push(rest as u8);
    }

    /// Iterates over the numbers in ascending order.
    fn numbers(&self) -> impl Iterator<Item = u32> {
        let mut bytes = self.bytes.iter();
        let mut last = 0;
        std::iter::from_fn(move || {
            let mut shift = 0;
            loop {
                let byte = *bytes.next()?;
                last += u32::from(byte & 0x7f) << shift;
                if byte < 0x80 {
                    return Some(last);
                }
                shift += 7;
            }
        })
    }
}
