//! The in-memory index that the memory and JSONL stores share: heads, items and blob references.
//!
//! Invariant: all secondary indexes agree with the heads after every method. No I/O and no locks.

mod shown;

use crate::store::contract::Commit;
use crate::store::item::{Item, Namespace, Owner};
use crate::store::mem_messages::MemMessages;
use crate::store::message_index::{MessageMatches, MessageQuery, SessionIndexPart, WordRules};
use crate::store::query::{HeadPage, OwnerFilter, SessionCursor, SessionOrder, SessionQuery};
use crate::types::blob::BlobId;
use crate::types::digest::VisibleHash;
use crate::types::error::{Error, Result};
use crate::types::head::Head;
use crate::types::id::{Seq, SessionId, SessionKey, Tenant, User};
use crate::types::status::Status;
use jiff::Timestamp;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;

/// Heads, items and blob references, with secondary indexes for queries.
#[derive(Default)]
pub(super) struct MemIndex {
    heads: BTreeMap<SessionKey, Head>,
    newest: HashMap<(Tenant, User), BTreeSet<(Timestamp, SessionId)>>,
    /// Sessions of a whole tenant, ordered by activity like `newest`.
    newest_of_all: HashMap<Tenant, BTreeSet<(Timestamp, SessionId)>>,
    labels: HashMap<(Tenant, String), BTreeSet<SessionId>>,
    threads: HashMap<(Tenant, String), BTreeSet<SessionId>>,
    hashes: HashMap<(Tenant, VisibleHash), BTreeSet<SessionId>>,
    matches: HashMap<(Tenant, VisibleHash), BTreeSet<SessionId>>,
    children: HashMap<SessionKey, BTreeSet<SessionId>>,
    /// The rewinds in each session's own log: their records, and the records that they went back to.
    rewinds: HashMap<SessionKey, BTreeMap<Seq, Seq>>,
    namespaces: BTreeMap<Namespace, ItemSpace>,
    /// The blobs that each session references, with the first record that does.
    uses: HashMap<SessionKey, BTreeMap<BlobId, Seq>>,
    /// The number of sessions that reference a blob.
    counts: HashMap<(Tenant, BlobId), usize>,
    messages: MemMessages,
}

/// Fork inheritance: the new heads of the forks of a session that is purged (D-001).
#[derive(Debug, PartialEq)]
pub(super) struct ForkInheritance {
    /// The fork that inherits the session's records up to a fork point, and takes its place.
    pub inheriting_fork: Option<(Head, Seq)>,
    /// The forks that are only re-parented.
    pub reparented: Vec<Head>,
}

impl MemIndex {
    pub fn head(&self, key: &SessionKey) -> Option<&Head> {
        self.heads.get(key)
    }

    /// Counts the sessions by status.
    pub fn count(&self) -> Vec<(Status, u64)> {
        let states = [Status::Active, Status::Paused, Status::Expired, Status::Deleted];
        let mut counts = states.map(|status| (status, 0));
        for head in self.heads.values() {
            counts.iter_mut().filter(|(status, _)| *status == head.status).for_each(|(_, n)| *n += 1);
        }
        counts.to_vec()
    }

    /// Counts the items of all namespaces with a name.
    pub fn count_items(&self, name: &str) -> u64 {
        let named = self.namespaces.iter().filter(|(namespace, _)| namespace.name == name);
        named.map(|(_, space)| space.items.len() as u64).sum()
    }

    /// Checks the preconditions of a commit, as the store contract defines them.
    pub fn check(&self, commit: &Commit) -> Result<()> {
        commit.check()?;
        let key = commit.head.key();
        let missing = |session_id: SessionId| Error::NotFound { session_id };
        match (commit.base, self.heads.get(&key)) {
            (None, Some(_)) => return Err(Error::Exists { session_id: key.session }),
            (Some(_), None) => return Err(missing(key.session)),
            (Some(end), Some(head)) if head.end() != end || head.info.created_at != commit.head.info.created_at => {
                return Err(Error::Conflict { session_id: key.session, expected: end.seq });
            }
            _ => {}
        }
        if commit.base.is_none()
            && let Some(parent) = &commit.head.parent
        {
            let parent_key = SessionKey { tenant: key.tenant, session: parent.session.clone() };
            if self.heads.get(&parent_key).is_none_or(|p| p.seq < parent.seq) {
                return Err(missing(parent_key.session));
            }
        }
        Ok(())
    }

    /// Returns the head after a commit. `first` and `parent` keep their stored values: a purge may
    /// have changed them since the writer loaded the session, without moving the end of its log.
    pub fn head_after(&self, commit: &Commit) -> Head {
        match (commit.base, self.heads.get(&commit.head.key())) {
            (Some(_), Some(h)) => Head { first: h.first, parent: h.parent.clone(), ..commit.head.clone() },
            _ => commit.head.clone(),
        }
    }

    /// Applies a commit, except for its records.
    pub fn apply(&mut self, commit: &Commit) {
        let key = commit.head.key();
        self.set(self.head_after(commit));
        for (name, item) in &commit.items {
            let owner = Owner::Session(key.session.clone());
            self.put(&Namespace { tenant: key.tenant.clone(), owner, name: name.clone() }, item.clone());
        }
        self.add_rewinds(&key, &commit.records);
        self.use_blobs(&key, commit.blobs.iter().map(|b| b.id), commit.first());
        self.index_messages(commit);
    }

    /// Inserts a head or replaces the one with the same key.
    pub fn set(&mut self, head: Head) {
        let key = head.key();
        self.unlink(&key);
        let tenant = &key.tenant;
        let id = &key.session;
        let position = (head.active_at, id.clone());
        self.newest_of_all.entry(tenant.clone()).or_default().insert(position.clone());
        self.newest.entry((tenant.clone(), head.user.clone())).or_default().insert(position);
        for label in head.labels() {
            self.labels.entry((tenant.clone(), label)).or_default().insert(id.clone());
        }
        if let Some(thread) = &head.thread {
            self.threads.entry((tenant.clone(), thread.clone())).or_default().insert(id.clone());
        }
        self.hashes.entry((tenant.clone(), head.digest.hash)).or_default().insert(id.clone());
        for key in head.digest.match_keys() {
            self.matches.entry((tenant.clone(), key)).or_default().insert(id.clone());
        }
        if let Some(parent) = parent_key(&head) {
            self.children.entry(parent).or_default().insert(id.clone());
        }
        self.heads.insert(key, head);
    }

    /// Removes a session with its items and blob references. Returns the blobs that no session
    /// references any more.
    pub fn remove(&mut self, key: &SessionKey) -> Vec<BlobId> {
        self.unlink(key);
        self.heads.remove(key);
        self.rewinds.remove(key);
        self.messages.remove(key);
        self.remove_namespaces(&key.tenant, &Owner::Session(key.session.clone()));
        let uses = self.uses.remove(key).unwrap_or_default();
        uses.into_keys().filter(|blob| self.release(&key.tenant, *blob)).collect()
    }

    /// Removes a head from all secondary indexes.
    fn unlink(&mut self, key: &SessionKey) {
        let Some(head) = self.heads.get(key) else { return };
        let tenant = &key.tenant;
        let id = &key.session;
        remove_value(&mut self.newest, &(tenant.clone(), head.user.clone()), &(head.active_at, id.clone()));
        remove_value(&mut self.newest_of_all, tenant, &(head.active_at, id.clone()));
        for label in head.labels() {
            remove_value(&mut self.labels, &(tenant.clone(), label), id);
        }
        if let Some(thread) = &head.thread {
            remove_value(&mut self.threads, &(tenant.clone(), thread.clone()), id);
        }
        remove_value(&mut self.hashes, &(tenant.clone(), head.digest.hash), id);
        for key in head.digest.match_keys() {
            remove_value(&mut self.matches, &(tenant.clone(), key), id);
        }
        if let Some(parent) = parent_key(head) {
            remove_value(&mut self.children, &parent, id);
        }
    }

    /// Returns the heads that match a query, in its order.
    pub fn heads(&self, query: &SessionQuery) -> Vec<Head> {
        let after = |head: &&Head| match (&query.cursor, query.order) {
            (Some(c), SessionOrder::Newest) => (head.active_at, &head.info.session_id) < (c.active_at, &c.session),
            _ => true,
        };
        let page = |candidates: &mut dyn Iterator<Item = &Head>| -> Vec<Head> {
            candidates
                .filter(after)
                .filter(|h| query.matches(h))
                .skip(query.offset)
                .take(query.limit)
                .cloned()
                .collect()
        };
        let is_lookup = !query.hashes.is_empty() || !query.matches.is_empty() || !query.sessions.is_empty();
        if let (OwnerFilter::User(tenant, user), SessionOrder::Newest, false) = (&query.owner, query.order, is_lookup) {
            let ids = self.newest.get(&(tenant.clone(), user.clone())).into_iter().flatten().rev();
            return page(&mut ids.filter_map(|(_, id)| self.head_of(tenant, id)));
        }
        let mut candidates = self.candidates(query);
        match query.order {
            SessionOrder::Newest => candidates.sort_by_key(|h| Reverse((h.active_at, &h.info.session_id, &h.tenant))),
            SessionOrder::Oldest => candidates.sort_by_key(|h| (h.active_at, &h.info.session_id, &h.tenant)),
            SessionOrder::Due => candidates.sort_by_key(|h| (h.due_at, &h.tenant, &h.info.session_id)),
        }
        page(&mut candidates.into_iter())
    }

    /// Returns the newest matching heads, scanning at most `max_scan`.
    pub fn page(&self, query: &SessionQuery, max_scan: usize) -> HeadPage {
        let query = &SessionQuery { order: SessionOrder::Newest, ..query.clone() };
        let (tenant, positions) = match &query.owner {
            OwnerFilter::User(tenant, user) => (tenant, self.newest.get(&(tenant.clone(), user.clone()))),
            OwnerFilter::Tenant(tenant) => (tenant, self.newest_of_all.get(tenant)),
            OwnerFilter::AllTenants => return HeadPage { heads: self.heads(query), scan_stopped_at: None },
        };
        let is_indexed = !query.hashes.is_empty()
            || !query.matches.is_empty()
            || !query.sessions.is_empty()
            || query.parent.is_some();
        if is_indexed {
            return HeadPage { heads: self.heads(query), scan_stopped_at: None };
        }
        let none = BTreeSet::new();
        let none_active = BTreeSet::new();
        let labels = query.labels().into_iter().map(|label| self.labels.get(&(tenant.clone(), label)));
        let threads = query.thread.iter().map(|thread| self.threads.get(&(tenant.clone(), thread.clone())));
        let fewest = labels.chain(threads).map(|ids| ids.unwrap_or(&none)).min_by_key(|ids| ids.len());
        let after = |head: &&Head| match &query.cursor {
            Some(c) => (head.active_at, &head.info.session_id) < (c.active_at, &c.session),
            None => true,
        };
        if let Some(ids) = fewest.filter(|ids| ids.len() <= max_scan) {
            let mut matching: Vec<&Head> = ids.iter().filter_map(|id| self.head_of(tenant, id)).filter(after).collect();
            matching.retain(|head| query.matches(head));
            matching.sort_by_key(|h| Reverse((h.active_at, &h.info.session_id)));
            let heads = matching.into_iter().skip(query.offset).take(query.limit).cloned().collect();
            return HeadPage { heads, scan_stopped_at: None };
        }
        let upto = query.cursor.as_ref().map(|c| (c.active_at, c.session.clone()));
        let upto = upto.map_or(Bound::Unbounded, Bound::Excluded);
        let positions = positions.unwrap_or(&none_active).range((Bound::Unbounded, upto)).rev();
        let mut page = HeadPage::default();
        let mut matched = 0;
        for (scanned, head) in (1..).zip(positions.filter_map(|(_, id)| self.head_of(tenant, id))) {
            if page.heads.len() >= query.limit {
                return page;
            }
            if query.matches(head) {
                matched += 1;
                if matched > query.offset {
                    page.heads.push(head.clone());
                }
            }
            if scanned == max_scan && page.heads.len() < query.limit {
                page.scan_stopped_at = Some(SessionCursor::of(head));
                return page;
            }
        }
        page
    }

    /// Returns a superset of the matching heads: a small one if an index serves the query.
    fn candidates(&self, query: &SessionQuery) -> Vec<&Head> {
        let tenant = match &query.owner {
            OwnerFilter::User(tenant, _) | OwnerFilter::Tenant(tenant) => tenant,
            OwnerFilter::AllTenants => return self.heads.values().collect(),
        };
        for (wanted, index) in [(&query.hashes, &self.hashes), (&query.matches, &self.matches)] {
            if !wanted.is_empty() {
                let ids = wanted.iter().filter_map(|hash| index.get(&(tenant.clone(), *hash))).flatten();
                let ids: BTreeSet<_> = ids.collect();
                return ids.into_iter().filter_map(|id| self.head_of(tenant, id)).collect();
            }
        }
        if !query.sessions.is_empty() {
            let ids: BTreeSet<_> = query.sessions.iter().collect();
            return ids.into_iter().filter_map(|id| self.head_of(tenant, id)).collect();
        }
        if let Some(parent) = &query.parent {
            let parent = SessionKey { tenant: tenant.clone(), session: parent.clone() };
            let ids = self.children.get(&parent).into_iter().flatten();
            return ids.filter_map(|id| self.head_of(tenant, id)).collect();
        }
        // The smallest valid id: the first printable character that is not a space.
        let first = SessionKey { tenant: tenant.clone(), session: SessionId::new("!").expect("a valid id") };
        self.heads.range(first..).map(|(_, head)| head).take_while(|h| h.tenant == *tenant).collect()
    }

    fn head_of(&self, tenant: &Tenant, session: &SessionId) -> Option<&Head> {
        self.heads.get(&SessionKey { tenant: tenant.clone(), session: session.clone() })
    }

    /// Checks that a session, if it exists, still has this creation time and its log still ends at
    /// this record.
    pub fn check_at(&self, key: &SessionKey, expected: Option<(Timestamp, Seq)>) -> Result<()> {
        match (self.heads.get(key), expected) {
            (Some(head), Some((created_at, seq))) if (head.info.created_at, head.seq) != (created_at, seq) => {
                Err(Error::Conflict { session_id: key.session.clone(), expected: seq })
            }
            _ => Ok(()),
        }
    }

    /// Computes the fork inheritance for purging a session. The fork with the latest fork point
    /// inherits the records that the forks need and takes the session's place; the others are
    /// re-parented to it. If all fork points lie before the session's own first record, all forks
    /// are re-parented to its parent (D-001).
    pub fn fork_inheritance(&self, key: &SessionKey) -> ForkInheritance {
        let ids = self.children.get(key).into_iter().flatten();
        let mut forks: Vec<Head> = ids.filter_map(|id| self.head_of(&key.tenant, id)).cloned().collect();
        let fork_point = |h: &Head| h.parent.as_ref().map_or(0, |p| p.seq);
        forks.sort_by_key(fork_point);
        let (Some(purged), Some(last)) = (self.heads.get(key), forks.last()) else {
            return ForkInheritance { inheriting_fork: None, reparented: Vec::new() };
        };
        let upto = fork_point(last);
        let inheriting_fork = if upto + 1 >= purged.first { forks.pop() } else { None };
        let inheriting_fork =
            inheriting_fork.map(|h| (Head { first: purged.first, parent: purged.parent.clone(), ..h }, upto));
        let new_parent = match (&inheriting_fork, &purged.parent) {
            (Some((fork, _)), _) => Some(&fork.info.session_id),
            (None, Some(parent)) => Some(&parent.session),
            (None, None) => None,
        };
        for fork in &mut forks {
            if let (Some(parent), Some(session)) = (&mut fork.parent, new_parent) {
                parent.session = session.clone();
            }
        }
        ForkInheritance { inheriting_fork, reparented: forks }
    }

    /// Adds references of a session to blobs, from a record on.
    pub fn use_blobs(&mut self, key: &SessionKey, blobs: impl IntoIterator<Item = BlobId>, from: Seq) {
        for blob in blobs {
            let used = self.uses.entry(key.clone()).or_default();
            let first = used.entry(blob).or_insert_with(|| {
                *self.counts.entry((key.tenant.clone(), blob)).or_default() += 1;
                from
            });
            *first = from.min(*first);
        }
    }

    /// Copies the blob references that belong to records up to `upto` to the fork that inherits
    /// them.
    pub fn inherit_blobs(&mut self, from: &SessionKey, inheriting_fork: &SessionKey, upto: Seq) {
        for (blob, first) in self.uses.get(from).cloned().unwrap_or_default() {
            if first <= upto {
                self.use_blobs(inheriting_fork, [blob], first);
            }
        }
    }

    /// Returns whether any session of a tenant references a blob.
    pub fn uses_blob(&self, tenant: &Tenant, blob: BlobId) -> bool {
        self.counts.contains_key(&(tenant.clone(), blob))
    }

    /// Releases one reference to a blob. Returns whether it was the last one.
    fn release(&mut self, tenant: &Tenant, blob: BlobId) -> bool {
        let key = (tenant.clone(), blob);
        let remaining = self.counts.get(&key).map_or(0, |n| n - 1);
        match remaining {
            0 => self.counts.remove(&key),
            n => self.counts.insert(key, n),
        };
        remaining == 0
    }

    /// Checks that a namespace can be written: one of a session requires that the session exists.
    pub fn check_namespace(&self, namespace: &Namespace) -> Result<()> {
        match &namespace.owner {
            Owner::Session(id) if self.head_of(&namespace.tenant, id).is_none() => {
                Err(Error::NotFound { session_id: id.clone() })
            }
            _ => Ok(()),
        }
    }

    pub fn put(&mut self, namespace: &Namespace, item: Item) {
        self.namespaces.entry(namespace.clone()).or_default().put(item);
    }

    /// Returns the keys to evict before an item is put into a namespace of at most `max_items`: the
    /// least recently used, never the new one.
    pub fn keys_to_evict(&self, namespace: &Namespace, key: &str, max_items: Option<usize>) -> Vec<String> {
        let (Some(max_items), Some(space)) = (max_items, self.namespaces.get(namespace)) else { return Vec::new() };
        if space.items.len() < max_items {
            return Vec::new();
        }
        let mut old: Vec<_> = space.items.values().filter(|i| i.key != key).collect();
        let surplus = (old.len() + 1).saturating_sub(max_items.max(1));
        old.sort_by_key(|i| (i.used_at, &i.key));
        old.into_iter().take(surplus).map(|i| i.key.clone()).collect()
    }

    /// Returns an item. With `used_at`, records a use at that time.
    pub fn get(&mut self, namespace: &Namespace, key: &str, used_at: Option<Timestamp>) -> Option<Item> {
        let item = self.namespaces.get_mut(namespace)?.items.get_mut(key)?;
        if let Some(used_at) = used_at {
            Arc::make_mut(item).record_use(used_at);
        }
        Some(Item::clone(item))
    }

    /// Iterates over the items of a namespace in the order of their keys, after a key (exclusive).
    pub fn items(&self, namespace: &Namespace, after: Option<&str>) -> impl Iterator<Item = &Arc<Item>> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.namespaces
            .get(namespace)
            .into_iter()
            .flat_map(move |s| s.items.range::<str, _>((from, Bound::Unbounded)).map(|(_, i)| i))
    }

    pub fn item(&self, namespace: &Namespace, key: &str) -> Option<&Item> {
        Some(self.namespaces.get(namespace)?.items.get(key)?.as_ref())
    }

    pub fn remove_item(&mut self, namespace: &Namespace, key: &str) -> bool {
        let Some(space) = self.namespaces.get_mut(namespace) else { return false };
        let existed = space.remove(key);
        if space.items.is_empty() {
            self.namespaces.remove(namespace);
        }
        existed
    }

    /// Iterates over the items of all namespaces.
    pub fn all_items(&self) -> impl Iterator<Item = (&Namespace, &Arc<Item>)> {
        self.namespaces.iter().flat_map(|(namespace, space)| space.items.values().map(move |i| (namespace, i)))
    }

    /// Iterates over the heads of all sessions.
    pub fn all_heads(&self) -> impl Iterator<Item = &Head> {
        self.heads.values()
    }

    /// Returns expired items with their namespaces, at most `limit`.
    pub fn expired(&self, now: Timestamp, limit: usize) -> Vec<(Namespace, String)> {
        let expired = self.all_items().filter(|(_, i)| i.is_expired(now));
        expired.take(limit).map(|(namespace, i)| (namespace.clone(), i.key.clone())).collect()
    }

    /// Iterates over the namespaces of an owner.
    pub fn namespaces_of(
        &self,
        tenant: &Tenant,
        owner: &Owner,
    ) -> impl Iterator<Item = (&Namespace, &BTreeMap<String, Arc<Item>>)> {
        let first = Namespace { tenant: tenant.clone(), owner: owner.clone(), name: String::new() };
        let tenant = first.tenant.clone();
        let owner = first.owner.clone();
        let owned = self.namespaces.range(first..).take_while(move |(s, _)| s.tenant == tenant && s.owner == owner);
        owned.map(|(namespace, space)| (namespace, &space.items))
    }

    /// Removes all namespaces of an owner.
    pub fn remove_namespaces(&mut self, tenant: &Tenant, owner: &Owner) {
        let owned: Vec<_> = self.namespaces_of(tenant, owner).map(|(namespace, _)| namespace.clone()).collect();
        for namespace in owned {
            self.namespaces.remove(&namespace);
        }
    }
}

/// The message index.
impl MemIndex {
    /// Applies the update of the message index in a commit.
    pub fn index_messages(&mut self, commit: &Commit) {
        let key = commit.head.key();
        let forks = self.children.get(&key).into_iter().flatten();
        let fork_points = forks.filter_map(|session| {
            let fork = self.heads.get(&SessionKey { tenant: key.tenant.clone(), session: session.clone() })?;
            Some(fork.parent.as_ref()?.seq)
        });
        let inherited = fork_points.max().unwrap_or_default();
        self.messages.apply(commit, &commit.head.user, inherited);
    }

    /// Moves the messages up to a record to the fork that inherits them.
    pub fn inherit_messages(&mut self, from: &SessionKey, fork: &Head, last: Seq) {
        self.messages.inherit(from, fork, last);
    }

    /// Returns whether the message index was used.
    pub fn uses_message_index(&self) -> bool {
        self.messages.is_used()
    }

    /// Finds messages by their words.
    pub fn find_messages(&mut self, query: &MessageQuery) -> MessageMatches {
        self.messages.find(query)
    }

    /// Lists the messages of a session in the message index.
    pub fn indexed_messages(&self, key: &SessionKey) -> Vec<(Seq, usize)> {
        self.messages.indexed(key)
    }

    /// Returns the first session that is not in the message index.
    pub fn next_unindexed(&mut self, rules: WordRules) -> Option<SessionKey> {
        let heads = &self.heads;
        self.messages.next_unindexed(rules, |from| first_key(heads, from))
    }

    /// Replaces a part of a session in the message index.
    pub fn replace_messages(&mut self, part: &SessionIndexPart) -> Result<()> {
        let Some(head) = self.heads.get(&part.key) else { return Ok(()) };
        if head.end() != part.end {
            return Err(Error::Conflict { session_id: part.key.session.clone(), expected: part.end.seq });
        }
        let heads = &self.heads;
        self.messages.replace(part, &head.user, |from| first_key(heads, from));
        Ok(())
    }
}

/// Returns the first key in a range that is not bounded above.
fn first_key(heads: &BTreeMap<SessionKey, Head>, from: Bound<&SessionKey>) -> Option<SessionKey> {
    heads.range((from, Bound::Unbounded)).next().map(|(key, _)| key.clone())
}

/// The items of a namespace.
#[derive(Debug, Default)]
struct ItemSpace {
    items: BTreeMap<String, Arc<Item>>,
}

impl ItemSpace {
    fn put(&mut self, item: Item) {
        self.items.insert(item.key.clone(), Arc::new(item));
    }

    fn remove(&mut self, key: &str) -> bool {
        self.items.remove(key).is_some()
    }
}

fn parent_key(head: &Head) -> Option<SessionKey> {
    head.parent.as_ref().map(|p| SessionKey { tenant: head.tenant.clone(), session: p.session.clone() })
}

/// Removes a value from a map of sets, and the set when it becomes empty.
fn remove_value<K: std::hash::Hash + Eq, V: Ord>(map: &mut HashMap<K, BTreeSet<V>>, key: &K, value: &V) {
    if let Some(set) = map.get_mut(key) {
        set.remove(value);
        if set.is_empty() {
            map.remove(key);
        }
    }
}

#[cfg(test)]
mod tests;
