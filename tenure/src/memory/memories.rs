//! Memories: short texts that outlive the messages they came from. The assistant's policy
//! determines whether a session, a user or a group shares them.
//!
//! A memory is one item in one namespace, together with its sources and its vector, so removing the
//! item (by retention, the cap, or erasing its owner) leaves nothing behind (D-071). The sessions
//! it came from store a back reference: when they are rewound or purged explicitly, a memory whose
//! only source is there is retracted (D-072, D-073).

use crate::engine::draft::Depth;
use crate::rules::session::StoredMessage;
use crate::store::item::{Item, Namespace, Owner};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId, Tenant, User};
use crate::types::memory::{Memory, MemoryRecord, MemorySource};
use crate::types::policy::{MemoryPolicy, MemoryScope};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Namespace of the memories.
pub(crate) const MEMORY: &str = "memory";
/// Namespace of the back references.
pub(crate) const TRACES: &str = "memory-traces";
/// Registry of the namespaces that contain memories, used to recompute their vectors.
pub(crate) const SHELVES: &str = "memory-shelves";
/// The reserved tenant for data that belongs to no tenant.
pub(crate) const SYSTEM: &str = "tenure:system";

/// The target of a memory operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryTarget {
    /// The memories available to a session: its own, its user's or its group's, depending on its
    /// assistant's policy.
    Session(SessionId),
    /// The memories of an assistant: those of the calling user, or of the assistant's group.
    Assistant(String),
    /// The memories of the calling user.
    Own,
}

/// A new memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewMemory {
    /// The text.
    pub text: String,
    /// Positions of the session's messages that it was derived from.
    pub messages: Vec<Seq>,
    /// Arbitrary metadata.
    pub metadata: Map<String, Value>,
}

/// Returns the text to index for word search. Character bigrams are appended for Chinese, Japanese,
/// Korean, Thai and Lao, where words are often not separated by spaces.
pub(crate) fn findable(text: &str) -> String {
    let apart = |c: char| {
        !matches!(c, '\u{2e80}'..='\u{9fff}' | '\u{ac00}'..='\u{d7af}' | '\u{f900}'..='\u{faff}' | '\u{e00}'..='\u{eff}' | '\u{20000}'..='\u{3ffff}')
            || !c.is_alphanumeric()
    };
    let mut all = text.to_owned();
    for run in text.split(apart).filter(|run| !run.is_empty()) {
        let letters: Vec<char> = run.chars().collect();
        for pair in letters.windows(2.min(letters.len())) {
            all.push(' ');
            all.extend(pair);
        }
    }
    all
}

/// A back reference from a source to a memory, used to retract the memory with its source.
#[derive(Serialize, Deserialize)]
pub(crate) struct BackReference {
    /// The id of the memory.
    pub id: String,
    /// The owner of the namespace that contains the memory, in textual form.
    pub owner: String,
    /// The key of the source in the memory: a session id, or `@` and a user.
    pub source: String,
}

/// A resolved memory target: the namespace and the policy that applies to it.
#[derive(Clone, Debug)]
pub(crate) struct MemoryLocation {
    pub shelf: Namespace,
    pub policy: MemoryPolicy,
    pub assistant: Option<String>,
    /// The head of the session, if the target is one.
    pub session: Option<Head>,
}

/// The id of a memory, derived from its text by BLAKE3, so that equal texts are one memory.
pub(crate) fn memory_id(text: &str) -> String {
    format!("mem_{}", &blake3::hash(text.as_bytes()).to_hex()[..32])
}

pub(crate) fn shelf(tenant: &Tenant, owner: Owner, name: &str) -> Namespace {
    Namespace { tenant: tenant.clone(), owner, name: name.to_owned() }
}

/// Parses an owner from its textual form in a namespace.
pub(crate) fn owner_of(text: &str) -> Option<Owner> {
    match text.split_once('/')? {
        ("session", id) => SessionId::new(id).ok().map(Owner::Session),
        ("user", user) => User::new(user).ok().map(Owner::User),
        ("group", group) => Some(Owner::Group(group.to_owned())),
        _ => None,
    }
}

/// Returns true if the item has not expired.
pub(crate) fn is_fresh(item: &Item, now: Timestamp) -> bool {
    !item.is_expired(now)
}

/// Deserializes the stored form of a memory.
pub(crate) fn kept(item: &Item) -> Result<MemoryRecord> {
    serde_json::from_str(&item.value).map_err(|e| Error::corrupt(format!("memory {}", item.key), e))
}

/// Serializes a memory for storage.
pub(crate) fn written(kept: &MemoryRecord) -> String {
    serde_json::to_string(kept).expect("plain data")
}

/// Converts an item of a namespace into a [`Memory`].
pub(crate) fn memory(shelf: &Namespace, item: Item) -> Result<Memory> {
    let kept = kept(&item)?;
    let (mut session_id, mut user, mut group) = (None, None, None);
    let scope = match &shelf.owner {
        Owner::Session(id) => (session_id = Some(id.clone()), MemoryScope::Session).1,
        Owner::User(name) => (user = Some(name.clone()), MemoryScope::User).1,
        Owner::Group(name) => (group = Some(name.clone()), MemoryScope::Group).1,
        Owner::Tenant => MemoryScope::None,
    };
    let source = |(name, messages): (String, Vec<Seq>)| match name.strip_prefix('@') {
        Some(user) => MemorySource { session_id: None, messages, user: User::new(user).ok() },
        None => MemorySource { session_id: SessionId::new(&name).ok(), messages, user: None },
    };
    Ok(Memory {
        id: item.key,
        text: kept.text.or(item.text).unwrap_or_default(),
        scope,
        session_id,
        user,
        group,
        assistant: kept.assistant,
        sources: kept.sources.into_iter().map(source).collect(),
        metadata: kept.metadata,
        created_at: item.created_at,
        used_at: item.used_at,
        uses: item.uses,
        expires_at: item.expires_at,
        dream: kept.dream,
    })
}

/// Returns true if the message with this position is among `messages`, which are ordered by
/// position.
pub(crate) fn is_there(messages: &[StoredMessage], seq: Seq) -> bool {
    messages.binary_search_by_key(&seq, |m| m.seq).is_ok()
}

/// Sampled eviction: enforcing the cap scans the namespace, so for large caps only about one write
/// in `max / 1000` (at most 256) does it. Returns the cap if it is to be enforced by this write.
/// The namespace may briefly exceed it.
pub(crate) fn bound(max: usize, id: &str) -> Option<usize> {
    let one_in = (max / 1000).clamp(1, 256);
    (usize::from(blake3::hash(id.as_bytes()).as_bytes()[1]) % one_in == 0).then_some(max)
}

/// The namespace that lists all namespaces with memories.
pub(crate) fn registry() -> Namespace {
    shelf(&Tenant::new(SYSTEM).unwrap_or_default(), Owner::Tenant, SHELVES)
}

/// The key of a namespace in the registry.
pub(crate) fn entry(at: &Namespace) -> String {
    format!("{} {}", at.tenant, at.owner)
}

impl Tenure {
    /// Resolves a memory target to its namespace and policy. The error explains why the target has
    /// no memories.
    pub(crate) async fn mind(&self, who: &Principal, mind: &MemoryTarget) -> Result<MemoryLocation> {
        self.engine.know(&who.tenant).await?;
        let none = |param: &str, whose: String| {
            let why = format!("{whose} remembers nothing: its `memory.scope` is none; set one on the assistant");
            Error::invalid(param, why)
        };
        let (owner, policy, assistant, session) = match mind {
            MemoryTarget::Own => {
                (Owner::User(who.user.clone()), self.engine.default_policy().memory.clone(), None, None)
            }
            MemoryTarget::Assistant(name) => {
                let Some(assistant) = self.engine.assistant(who, name).await? else {
                    return Err(Error::invalid(
                        "assistant_id",
                        format!("there is no assistant {name}", name = excerpt(name)),
                    ));
                };
                let policy = self.policy(&who.tenant, Some(name)).memory;
                let owner = match policy.scope {
                    MemoryScope::None => return Err(none("assistant_id", format!("assistant {name:?}"))),
                    MemoryScope::Session => {
                        let why = "the memories of this assistant belong to its sessions; name one with `session_id`";
                        return Err(Error::invalid("session_id", why));
                    }
                    MemoryScope::User => Owner::User(who.user.clone()),
                    MemoryScope::Group => Owner::Group(policy.group.clone().unwrap_or_else(|| name.clone())),
                };
                (owner, policy, Some(assistant.name.clone()), None)
            }
            MemoryTarget::Session(id) => {
                let head = self.live(who, id).await?;
                let policy = self.policy(&who.tenant, head.assistant.as_deref()).memory;
                let owner = match policy.scope {
                    MemoryScope::None => return Err(none("session_id", format!("session {id}"))),
                    MemoryScope::Session => Owner::Session(id.clone()),
                    MemoryScope::User => Owner::User(head.user.clone()),
                    MemoryScope::Group => {
                        Owner::Group(policy.group.clone().or(head.assistant.clone()).unwrap_or_default())
                    }
                };
                (owner, policy, head.assistant.clone(), Some(head))
            }
        };
        Ok(MemoryLocation { shelf: shelf(&who.tenant, owner, MEMORY), policy, assistant, session })
    }

    /// Stores a memory. Idempotent by text: an equal text updates the existing memory, with a new
    /// timestamp and an additional source.
    pub async fn remember(&self, who: &Principal, mind: &MemoryTarget, what: NewMemory) -> Result<Memory> {
        let place = self.mind(who, mind).await?;
        let text = self.memory_text(&what.text)?;
        let source = match &place.session {
            Some(head) => head.info.session_id.to_string(),
            None => format!("@{}", who.user),
        };
        self.check_messages(who, &place, &what.messages).await?;
        if place.policy.max_entries == 0 {
            return Err(Error::invalid("text", "nothing can be remembered here: `memory.max_entries` is 0"));
        }
        let vector = self.vector_of(&text).await;
        let id = memory_id(&text);
        // Write the back references first: a dangling reference is harmless, a memory without one
        // could not be retracted.
        self.leave_traces(&place, &id, &source, &who.user).await?;
        let _changing = self.shared.memories.changing(&id).await;
        let (now, shelf) = (self.now(), &place.shelf);
        let before = self.store().get(shelf, &id, None).await?.filter(|i| is_fresh(i, now));
        let mut all = before.as_ref().map_or_else(|| Ok(MemoryRecord::default()), kept)?;
        let mut messages = all.sources.remove(&source).unwrap_or_default();
        messages.extend(what.messages);
        messages.sort_unstable();
        messages.dedup();
        all.sources.insert(source, messages);
        all.assistant = all.assistant.or(place.assistant.clone());
        all.metadata.extend(what.metadata);
        all.vector = vector.or(all.vector);
        let words = findable(&text);
        all.text = (words != text).then_some(text);
        let value = written(&all);
        let max = self.limits().max_item_bytes;
        if value.len() > max {
            return Err(Error::TooLarge {
                what: "a memory's metadata".into(),
                limit: "max_item_bytes",
                max: max as u64,
            });
        }
        let age = place.policy.retention.and_then(|d| SignedDuration::try_from(d).ok());
        let expires_at = age.and_then(|age| now.checked_add(age).ok());
        let uses = before.map_or(0, |i| i.uses);
        let item = Item { text: Some(words), uses, expires_at, ..Item::new(id, value, now) };
        self.store().put(shelf, &item, bound(place.policy.max_entries, &item.key)).await?;
        self.memory_changed(shelf, &item.key).await?;
        memory(shelf, item)
    }

    /// Trims, redacts and validates a text for storage as a memory.
    pub fn memory_text(&self, text: &str) -> Result<String> {
        let (text, _) = self.redact(text.trim());
        let text = &*text;
        let max = self.limits().max_memory_bytes;
        match text {
            "" => Err(Error::invalid("text", "there is nothing to remember; say something")),
            _ if text.contains('\0') => Err(Error::invalid("text", "a memory must be free of NUL characters")),
            _ if text.len() > max => {
                let what = format!("a memory of {} bytes", text.len());
                Err(Error::TooLarge { what, limit: "max_memory_bytes", max: max as u64 })
            }
            _ => Ok(text.to_owned()),
        }
    }

    /// Verifies that the messages that a memory was derived from exist.
    async fn check_messages(&self, who: &Principal, place: &MemoryLocation, messages: &[Seq]) -> Result<()> {
        let Some(head) = place.session.as_ref().filter(|_| !messages.is_empty()) else {
            return match messages.is_empty() {
                true => Ok(()),
                false => Err(Error::invalid("messages", "messages belong to a session; name it with `session_id`")),
            };
        };
        let id = &head.info.session_id;
        self.engine
            .read(who, id, Depth::Session, |state| {
                let session = self.engine.whole_ref(state, id)?;
                match messages.iter().find(|seq| !is_there(&session.messages, **seq)) {
                    None => Ok(()),
                    Some(seq) => {
                        Err(Error::NoSuchPoint { session_id: id.clone(), what: format!("a message with record {seq}") })
                    }
                }
            })
            .await
    }

    /// Stores the back references of a memory: with its source session, and for a group memory also
    /// with the contributing user. Registers the namespace.
    pub(crate) async fn leave_traces(&self, place: &MemoryLocation, id: &str, source: &str, user: &User) -> Result<()> {
        let (tenant, owner) = (&place.shelf.tenant, place.shelf.owner.to_string());
        let key = format!("{id} {source} {owner}");
        let key = blake3::hash(key.as_bytes()).to_hex().to_string();
        let trace = BackReference { id: id.to_owned(), owner, source: source.to_owned() };
        let item = self.lasting(key, serde_json::to_string(&trace).expect("plain data"));
        if let Some(head) = &place.session {
            let at = shelf(tenant, Owner::Session(head.info.session_id.clone()), TRACES);
            self.store().put(&at, &item, None).await?;
        }
        // A group outlives its members: erasing a user must retract what they contributed.
        if matches!(place.shelf.owner, Owner::Group(_)) {
            let whose = place.session.as_ref().map_or(user, |head| &head.user);
            self.store().put(&shelf(tenant, Owner::User(whose.clone()), TRACES), &item, None).await?;
        }
        self.register(&place.shelf).await
    }

    /// Creates an item without expiry.
    pub(crate) fn lasting(&self, key: String, value: String) -> Item {
        let now = self.now();
        Item::new(key, value, now)
    }

    /// Registers a namespace as containing memories. Session namespaces are not registered; they
    /// are deleted with their session.
    pub async fn register(&self, at: &Namespace) -> Result<()> {
        if matches!(at.owner, Owner::Session(_)) || !self.shared.memories.is_new(at) {
            return Ok(());
        }
        self.store().put(&registry(), &self.lasting(entry(at), "null".to_owned()), None).await
    }

    /// Lists the registered namespaces. Some may be empty by now.
    pub(crate) async fn memory_shelves(&self) -> Result<Vec<Namespace>> {
        let mut all = Vec::new();
        let mut after = None::<String>;
        loop {
            let page = self.store().items(&registry(), after.as_deref(), 1000).await?;
            let Some(last) = page.last() else { return Ok(all) };
            after = Some(last.key.clone());
            all.extend(page.iter().filter_map(|item| {
                let (tenant, owner) = item.key.split_once(' ')?;
                Some(shelf(&Tenant::new(tenant).ok()?, owner_of(owner)?, MEMORY))
            }));
        }
    }

    /// Returns a memory by its id. `None` if it does not exist or has expired.
    pub async fn memory(&self, who: &Principal, mind: &MemoryTarget, id: &str) -> Result<Option<Memory>> {
        let place = self.mind(who, mind).await?;
        let item = self.store().get(&place.shelf, id, None).await?;
        item.filter(|i| is_fresh(i, self.now())).map(|item| memory(&place.shelf, item)).transpose()
    }

    /// Lists at most `limit` memories in order of their ids, after the id `after`.
    pub async fn memory_list(
        &self,
        who: &Principal,
        mind: &MemoryTarget,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<Memory>> {
        let place = self.mind(who, mind).await?;
        let (now, mut after, mut found) = (self.now(), after.map(str::to_owned), Vec::new());
        while found.len() < limit {
            let page = self.store().items(&place.shelf, after.as_deref(), limit - found.len()).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for item in page.into_iter().filter(|i| is_fresh(i, now)) {
                found.push(memory(&place.shelf, item)?);
            }
        }
        Ok(found)
    }

    /// Deletes a memory and scrubs its text from the store. Returns whether it existed.
    pub async fn forget_memory(&self, who: &Principal, mind: &MemoryTarget, id: &str) -> Result<bool> {
        let place = self.mind(who, mind).await?;
        let _changing = self.shared.memories.changing(id).await;
        let gone = self.store().remove(&place.shelf, id).await?;
        self.memory_changed(&place.shelf, id).await?;
        if gone {
            self.store().wipe(&place.shelf.tenant, &place.shelf.owner).await?;
        }
        Ok(gone)
    }
}
