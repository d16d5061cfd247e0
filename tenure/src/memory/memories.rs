//! Memories: short texts that outlive the messages they came from. The assistant's policy
//! determines whether a session, a user or a group shares them.
//!
//! A memory is one item in one namespace, together with its sources and its vector, so removing the
//! item (by retention, the cap, or erasing its owner) leaves nothing behind (D-071). The sessions
//! it came from store a back reference: when they are rewound or purged explicitly, a memory whose
//! only source is there is retracted (D-072, D-073).

use crate::rules::session::StoredMessage;
use crate::store::item::{Item, Namespace, Owner};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::head::Head;
use crate::types::id::{Principal, Seq, SessionId, Tenant, User};
use crate::types::memory::{Memory, MemoryKind, MemoryRecord, MemorySource};
use crate::types::policy::{MemoryPolicy, MemoryScope};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Namespace of the memories.
pub(crate) const MEMORY: &str = "memory";
/// Namespace of the back references.
pub(crate) const BACK_REFERENCES: &str = "memory-back-references";
/// Registry of the namespaces that contain memories, used to recompute their vectors.
pub(crate) const NAMESPACES: &str = "memory-namespaces";
/// The reserved tenant for data that belongs to no tenant.
pub(crate) const SYSTEM: &str = "tenure:system";

/// The target of a memory operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
    /// When it is injected into prompts. `None` means that an existing memory keeps its kind, and that a new one
    /// is a fact.
    pub kind: Option<MemoryKind>,
    /// Positions of the session's messages that it was derived from.
    pub messages: Vec<Seq>,
    /// Arbitrary metadata.
    pub metadata: Map<String, Value>,
    /// When it was said or became true. `None` means now.
    pub timestamp: Option<Timestamp>,
    /// The ids of older memories that it supersedes. Those that it updates by its words are found without it.
    pub supersedes: Vec<String>,
}

impl From<&str> for NewMemory {
    fn from(text: &str) -> Self {
        Self { text: text.to_owned(), ..Self::default() }
    }
}

impl From<String> for NewMemory {
    fn from(text: String) -> Self {
        Self { text, ..Self::default() }
    }
}

/// A back reference from a source to a memory, used to retract the memory with its source.
#[derive(Serialize, Deserialize)]
pub(crate) struct BackReference {
    /// The id of the memory.
    pub id: String,
    /// The owner of the namespace that contains the memory, in textual form.
    pub owner: String,
    /// The key of the source in the memory: a session id, or [`user_source`].
    pub source: String,
}

/// A resolved memory target: the namespace and the policy that applies to it.
#[derive(Clone, Debug)]
pub(crate) struct MemoryLocation {
    pub namespace: Namespace,
    pub policy: MemoryPolicy,
    pub assistant: Option<String>,
    /// The head of the session, if the target is one.
    pub session: Option<Head>,
}

/// The id of a memory, derived from its text by BLAKE3, so that equal texts are one memory.
pub(crate) fn memory_id(text: &str) -> String {
    format!("mem_{}", &blake3::hash(text.as_bytes()).to_hex()[..32])
}

pub(crate) fn namespace_of(tenant: &Tenant, owner: Owner, name: &str) -> Namespace {
    Namespace { tenant: tenant.clone(), owner, name: name.to_owned() }
}

/// The beginning of the key of a source that is a user. No session id begins with a space.
const USER_SOURCE: char = ' ';

/// The key of a source that is a user and not a session.
fn user_source(user: &User) -> String {
    format!("{USER_SOURCE}{user}")
}

/// Parses an owner from its textual form in a namespace.
pub(crate) fn parse_owner(text: &str) -> Option<Owner> {
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
pub(crate) fn decode_memory(item: &Item) -> Result<MemoryRecord> {
    serde_json::from_str(&item.value).map_err(|e| Error::corrupt_from(format!("memory {}", item.key), e))
}

/// Serializes a memory for storage.
pub(crate) fn encode_memory(record: &MemoryRecord) -> String {
    serde_json::to_string(record).expect("plain data")
}

/// Converts an item of a namespace into a [`Memory`].
pub(crate) fn memory_from_item(namespace: &Namespace, item: Item) -> Result<Memory> {
    let record = decode_memory(&item)?;
    let (scope, session_id, user, group) = match &namespace.owner {
        Owner::Session(id) => (MemoryScope::Session, Some(id.clone()), None, None),
        Owner::User(name) => (MemoryScope::User, None, Some(name.clone()), None),
        Owner::Group(name) => (MemoryScope::Group, None, None, Some(name.clone())),
        Owner::Tenant => (MemoryScope::None, None, None, None),
    };
    let source = |(name, messages): (String, Vec<Seq>)| match name.strip_prefix(USER_SOURCE) {
        Some(user) => MemorySource { session_id: None, messages, user: User::new(user).ok() },
        None => MemorySource { session_id: SessionId::new(&name).ok(), messages, user: None },
    };
    Ok(Memory {
        id: item.key,
        text: record.text,
        kind: record.kind,
        scope,
        session_id,
        user,
        group,
        assistant: record.assistant,
        sources: record.sources.into_iter().map(source).collect(),
        metadata: record.metadata,
        created_at: item.created_at,
        used_at: item.used_at,
        uses: item.uses,
        expires_at: item.expires_at,
        superseded_by: record.superseded_by,
        dream: record.dream,
    })
}

/// Adds the source, its messages and the metadata of a new memory to the stored form.
fn merge_memory(record: &mut MemoryRecord, source: String, new_memory: &NewMemory) {
    let mut messages = record.sources.remove(&source).unwrap_or_default();
    messages.extend(&new_memory.messages);
    messages.sort_unstable();
    messages.dedup();
    record.sources.insert(source, messages);
    record.metadata.extend(new_memory.metadata.clone());
    record.kind = new_memory.kind.unwrap_or(record.kind);
}

/// When a memory that is stored now expires.
fn expiry(policy: &MemoryPolicy, now: Timestamp) -> Option<Timestamp> {
    let retention = SignedDuration::try_from(policy.retention?).ok()?;
    now.checked_add(retention).ok()
}

/// Returns true if the message with this position is among `messages`, which are ordered by
/// position.
pub(crate) fn contains_message(messages: &[StoredMessage], seq: Seq) -> bool {
    messages.binary_search_by_key(&seq, |m| m.seq).is_ok()
}

/// Sampled eviction: enforcing the cap scans the namespace, so for large caps only about one write
/// in `max / 1000` (at most 256) does it. Returns the cap if it is to be enforced by this write.
/// The namespace may briefly exceed it.
pub(crate) fn sampled_eviction_cap(max: usize, id: &str) -> Option<usize> {
    let one_in = (max / 1000).clamp(1, 256);
    (usize::from(blake3::hash(id.as_bytes()).as_bytes()[1]) % one_in == 0).then_some(max)
}

/// The namespace that lists all namespaces with memories.
pub(crate) fn registry() -> Namespace {
    namespace_of(&Tenant::new(SYSTEM).unwrap_or_default(), Owner::Tenant, NAMESPACES)
}

/// The key of a namespace in the registry.
pub(crate) fn registry_key(namespace: &Namespace) -> String {
    format!("{} {}", namespace.tenant, namespace.owner)
}

impl Tenure {
    /// Resolves a memory target to its namespace and policy. The error explains why the target has
    /// no memories.
    pub(crate) async fn resolve_memory_target(
        &self,
        principal: &Principal,
        target: &MemoryTarget,
    ) -> Result<MemoryLocation> {
        self.engine.ensure_assistants_loaded(&principal.tenant).await?;
        let none = |param: &str, subject: String| {
            let message = format!(
                "{subject} has no memory: `memory.scope` is `none`; set it to `session`, `user` or `group` on the assistant"
            );
            Error::invalid(param, message)
        };
        let (owner, policy, assistant, session) = match target {
            MemoryTarget::Own => {
                (Owner::User(principal.user.clone()), self.engine.default_policy().memory.clone(), None, None)
            }
            MemoryTarget::Assistant(name) => {
                let Some(assistant) = self.engine.assistant(principal, name).await? else {
                    return Err(Error::invalid(
                        "assistant_id",
                        format!("assistant {name} does not exist", name = excerpt(name)),
                    ));
                };
                let policy = self.policy(&principal.tenant, Some(name)).memory;
                let owner = match policy.scope {
                    MemoryScope::None => return Err(none("assistant_id", format!("assistant {name:?}"))),
                    MemoryScope::Session => {
                        let message = "the assistant's memories have session scope; pass `session_id`";
                        return Err(Error::invalid("session_id", message));
                    }
                    MemoryScope::User => Owner::User(principal.user.clone()),
                    MemoryScope::Group => Owner::Group(policy.group.clone().unwrap_or_else(|| name.clone())),
                };
                (owner, policy, Some(assistant.name.clone()), None)
            }
            MemoryTarget::Session(id) => {
                let head = self.get_live_head(principal, id).await?;
                let policy = self.policy(&principal.tenant, head.assistant.as_deref()).memory;
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
        Ok(MemoryLocation { namespace: namespace_of(&principal.tenant, owner, MEMORY), policy, assistant, session })
    }

    /// Stores a memory. Idempotent by text: an equal text updates the existing memory, with a new
    /// timestamp and an additional source. Older memories that it updates are superseded by it.
    pub async fn remember(
        &self,
        principal: &Principal,
        target: &MemoryTarget,
        new_memory: NewMemory,
    ) -> Result<Memory> {
        let location = self.resolve_memory_target(principal, target).await?;
        let text = self.memory_text(&new_memory.text)?;
        self.check_messages(principal, &location, &new_memory.messages).await?;
        if location.policy.max_entries == 0 {
            return Err(Error::invalid("text", "memories cannot be stored: `memory.max_entries` is 0"));
        }
        let source = match &location.session {
            Some(head) => head.info.session_id.to_string(),
            None => user_source(&principal.user),
        };
        let id = memory_id(&text);
        if new_memory.kind == Some(MemoryKind::Preference) {
            self.check_preference_limit(&location.namespace, &id).await?;
        }
        self.check_superseded(&location.namespace, &new_memory.supersedes).await?;
        let vector = self.vector_of(&text).await;
        // Write the back references first: a dangling reference is harmless, a memory without one
        // could not be retracted.
        self.store_back_references(&location, &id, &source, &principal.user).await?;
        let item = self.store_memory(&location, id, text, source, &new_memory, vector.as_deref()).await?;
        self.link_superseded(&location.namespace, &item, new_memory.supersedes, vector).await?;
        memory_from_item(&location.namespace, item)
    }

    /// Writes a memory, merged with the stored one of the same text.
    async fn store_memory(
        &self,
        location: &MemoryLocation,
        id: String,
        text: String,
        source: String,
        new_memory: &NewMemory,
        vector: Option<&[f32]>,
    ) -> Result<Item> {
        let _memory_guard = self.shared.memories.lock_memory(&id).await;
        let now = self.now();
        let namespace = &location.namespace;
        let existing = self.store().get(namespace, &id, None).await?.filter(|i| is_fresh(i, now));
        let mut record = existing.as_ref().map_or_else(|| Ok(MemoryRecord::default()), decode_memory)?;
        record.text = text;
        merge_memory(&mut record, source, new_memory);
        record.assistant = record.assistant.or(location.assistant.clone());
        record.vector = self.quantized(vector).or(record.vector);
        record.stored_at = new_memory.timestamp.map(|_| now);
        // Said again, it is current again.
        record.superseded_by = None;
        let item = Item {
            created_at: new_memory.timestamp.unwrap_or(now),
            uses: existing.map_or(0, |i| i.uses),
            expires_at: expiry(&location.policy, now),
            ..Item::new(id, self.encode_within_limit(&record)?, now)
        };
        self.store().put(namespace, &item, sampled_eviction_cap(location.policy.max_entries, &item.key)).await?;
        match record.kind {
            MemoryKind::Preference => self.index_preference(namespace, &item).await?,
            MemoryKind::Fact => self.unindex_preference(namespace, &item.key).await?,
        }
        self.memory_changed(namespace, &item.key).await?;
        Ok(item)
    }

    pub(crate) fn encode_within_limit(&self, record: &MemoryRecord) -> Result<String> {
        let value = encode_memory(record);
        let max = self.limits().max_item_bytes;
        if value.len() > max {
            let subject = "a memory's metadata".into();
            return Err(Error::TooLarge { subject, limit: "max_item_bytes", max: max as u64 });
        }
        Ok(value)
    }

    /// Trims, redacts and validates a text for storage as a memory.
    pub fn memory_text(&self, text: &str) -> Result<String> {
        let (text, _) = self.redact(text.trim());
        let text = &*text;
        let max = self.limits().max_memory_bytes;
        match text {
            "" => Err(Error::invalid("text", "the text of a memory must not be empty")),
            _ if text.contains('\0') => Err(Error::invalid("text", "a memory must not contain NUL characters")),
            _ if text.len() > max => {
                let subject = format!("a memory of {} bytes", text.len());
                Err(Error::TooLarge { subject, limit: "max_memory_bytes", max: max as u64 })
            }
            _ => Ok(text.to_owned()),
        }
    }

    /// Verifies that the messages that a memory was derived from exist.
    async fn check_messages(&self, principal: &Principal, location: &MemoryLocation, messages: &[Seq]) -> Result<()> {
        let Some(head) = location.session.as_ref().filter(|_| !messages.is_empty()) else {
            return if messages.is_empty() {
                Ok(())
            } else {
                Err(Error::invalid("messages", "`messages` refers to messages of a session; pass `session_id`"))
            };
        };
        let id = &head.info.session_id;
        self.engine
            .read_session(principal, id, |session| {
                match messages.iter().find(|seq| !contains_message(&session.messages, **seq)) {
                    None => Ok(()),
                    Some(seq) => Err(Error::NoSuchPoint {
                        session_id: id.clone(),
                        point: format!("a message with record {seq}"),
                    }),
                }
            })
            .await
    }

    /// Stores the back references of a memory: with its source session, and for a group memory also
    /// with the contributing user. Registers the namespace.
    pub(crate) async fn store_back_references(
        &self,
        location: &MemoryLocation,
        id: &str,
        source: &str,
        user: &User,
    ) -> Result<()> {
        let tenant = &location.namespace.tenant;
        let owner = location.namespace.owner.to_string();
        let key = format!("{id} {source} {owner}");
        let key = blake3::hash(key.as_bytes()).to_hex().to_string();
        let reference = BackReference { id: id.to_owned(), owner, source: source.to_owned() };
        let item = self.permanent_item(key, serde_json::to_string(&reference).expect("plain data"));
        if let Some(head) = &location.session {
            let references = namespace_of(tenant, Owner::Session(head.info.session_id.clone()), BACK_REFERENCES);
            self.store().put(&references, &item, None).await?;
        }
        // A group outlives its members: erasing a user must retract what they contributed.
        if matches!(location.namespace.owner, Owner::Group(_)) {
            let contributor = location.session.as_ref().map_or(user, |head| &head.user);
            self.store()
                .put(&namespace_of(tenant, Owner::User(contributor.clone()), BACK_REFERENCES), &item, None)
                .await?;
        }
        self.register_memory_namespace(&location.namespace).await
    }

    /// Creates an item without expiry.
    pub(crate) fn permanent_item(&self, key: String, value: String) -> Item {
        let now = self.now();
        Item::new(key, value, now)
    }

    /// Registers a namespace as containing memories. Session namespaces are not registered; they
    /// are deleted with their session.
    pub async fn register_memory_namespace(&self, namespace: &Namespace) -> Result<()> {
        if matches!(namespace.owner, Owner::Session(_)) || !self.shared.memories.register_namespace(namespace) {
            return Ok(());
        }
        self.store().put(&registry(), &self.permanent_item(registry_key(namespace), "null".to_owned()), None).await
    }

    /// Lists the registered namespaces. Some may be empty by now.
    pub(crate) async fn memory_namespaces(&self) -> Result<Vec<Namespace>> {
        let mut namespaces = Vec::new();
        let mut after = None::<String>;
        loop {
            let page = self.store().items(&registry(), after.as_deref(), 1000).await?;
            let Some(last) = page.last() else { return Ok(namespaces) };
            after = Some(last.key.clone());
            namespaces.extend(page.iter().filter_map(|item| {
                let (tenant, owner) = item.key.split_once(' ')?;
                Some(namespace_of(&Tenant::new(tenant).ok()?, parse_owner(owner)?, MEMORY))
            }));
        }
    }

    /// Returns a memory by its id. `None` if it does not exist or has expired.
    pub async fn memory(&self, principal: &Principal, target: &MemoryTarget, id: &str) -> Result<Option<Memory>> {
        let location = self.resolve_memory_target(principal, target).await?;
        let item = self.store().get(&location.namespace, id, None).await?;
        item.filter(|i| is_fresh(i, self.now())).map(|item| memory_from_item(&location.namespace, item)).transpose()
    }

    /// Lists at most `limit` memories, of one kind or of all, in order of their ids, after the id `after`.
    pub async fn memory_list(
        &self,
        principal: &Principal,
        target: &MemoryTarget,
        kind: Option<MemoryKind>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<Memory>> {
        let location = self.resolve_memory_target(principal, target).await?;
        if kind == Some(MemoryKind::Preference) {
            let mut preferences = self.preferences(&location.namespace, None).await?;
            preferences.retain(|p| after.is_none_or(|after| p.id.as_str() > after));
            preferences.truncate(limit);
            return Ok(preferences);
        }
        let now = self.now();
        let mut after = after.map(str::to_owned);
        let mut memories = Vec::new();
        while memories.len() < limit {
            let page = self.store().items(&location.namespace, after.as_deref(), limit - memories.len()).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for item in page.into_iter().filter(|i| is_fresh(i, now)) {
                let memory = memory_from_item(&location.namespace, item)?;
                memories.extend(kind.is_none_or(|kind| memory.kind == kind).then_some(memory));
            }
        }
        Ok(memories)
    }

    /// Removes a memory and what refers to it in its namespace. Returns whether it existed. The caller holds the
    /// memory's lock.
    pub(crate) async fn remove_memory(&self, namespace: &Namespace, id: &str) -> Result<bool> {
        let existed = self.store().remove(namespace, id).await?;
        self.unindex_preference(namespace, id).await?;
        self.memory_changed(namespace, id).await?;
        Ok(existed)
    }

    /// Deletes a memory and scrubs its text from the store. Returns whether it existed.
    pub async fn forget_memory(&self, principal: &Principal, target: &MemoryTarget, id: &str) -> Result<bool> {
        let location = self.resolve_memory_target(principal, target).await?;
        let _memory_guard = self.shared.memories.lock_memory(id).await;
        let existed = self.remove_memory(&location.namespace, id).await?;
        if existed {
            self.store().scrub(&location.namespace.tenant, &location.namespace.owner).await?;
        }
        Ok(existed)
    }
}
