//! Retraction of memories: when messages are discarded, or a session or user is purged, memories
//! that have no other source are removed (D-073).

use crate::engine::write::Committed;
use crate::memory::memories::{
    BACK_REFERENCES, BackReference, MEMORY, contains_message, decode_memory, encode_memory, namespace_of, parse_owner,
    registry, registry_key,
};
use crate::rules::session::StoredMessage;
use crate::store::item::{Item, Namespace, Owner};
use crate::tenure::{SessionObserver, Tenure};
use crate::types::error::{Error, Result};
use crate::types::id::{Principal, Seq, SessionId, SessionKey, Tenant, User};
use async_trait::async_trait;
use std::collections::BTreeSet;

/// Observer that retracts memories of messages discarded by a rewind.
#[derive(Debug)]
pub(crate) struct RetractMemories;

#[async_trait]
impl SessionObserver for RetractMemories {
    /// Runs after the rewind is durable. A failure is logged, and the next rewind of the session
    /// retries the retraction.
    async fn committed(&self, tenure: &Tenure, event: &Committed) {
        if !event.rewound {
            return;
        }
        let principal = event.head.owner();
        let id = &event.head.info.session_id;
        if let Err(error) = tenure.retract_rewound(&principal, id).await {
            tracing::warn!(session_id = %id, %error, "could not retract memories of discarded messages; the next rewind retries");
        }
    }
}

impl Tenure {
    /// Retracts the memories whose only source is a session's discarded messages. `remaining` is
    /// the messages that remain. `None` means that the whole session is purged.
    pub(crate) async fn retract(&self, key: &SessionKey, remaining: Option<&[StoredMessage]>) -> Result<()> {
        let references = namespace_of(&key.tenant, Owner::Session(key.session.clone()), BACK_REFERENCES);
        self.retract_from(&references, |messages| match remaining {
            None => false,
            Some(remaining) => messages.is_empty() || messages.iter().any(|seq| contains_message(remaining, *seq)),
        })
        .await
    }

    /// Retracts memories after a committed rewind, based on the messages that remain.
    pub(crate) async fn retract_rewound(&self, principal: &Principal, id: &SessionId) -> Result<()> {
        let key = principal.key(id);
        let references = namespace_of(&key.tenant, Owner::Session(key.session.clone()), BACK_REFERENCES);
        if self.store().items(&references, None, 1).await?.is_empty() {
            return Ok(());
        }
        let session = self.engine.shared_session(principal, id).await?;
        self.retract(&key, Some(&session.session.messages)).await
    }

    /// Follows the back references in a namespace and removes the sources that are no longer valid.
    /// Then scrubs the affected owners from the store.
    async fn retract_from(&self, references: &Namespace, is_valid: impl Fn(&[Seq]) -> bool) -> Result<()> {
        let mut after = None::<String>;
        let mut affected_owners = BTreeSet::new();
        loop {
            let page = self.store().items(references, after.as_deref(), 256).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for item in page {
                let reference: BackReference = serde_json::from_str(&item.value).map_err(|e| {
                    Error::corrupt(format!("memory back reference {} of {}", item.key, references.owner), e)
                })?;
                if self.remove_source(&references.tenant, &reference, &is_valid).await? {
                    self.store().remove(references, &item.key).await?;
                    affected_owners.insert(reference.owner);
                }
            }
        }
        for owner in affected_owners.iter().filter_map(|o| parse_owner(o)) {
            self.store().scrub(&references.tenant, &owner).await?;
        }
        Ok(())
    }

    /// Removes a source from a memory, and the memory itself with its last source. Returns true if
    /// the back reference is no longer needed.
    async fn remove_source(
        &self,
        tenant: &Tenant,
        reference: &BackReference,
        is_valid: impl Fn(&[Seq]) -> bool,
    ) -> Result<bool> {
        let Some(owner) = parse_owner(&reference.owner) else { return Ok(true) };
        let memories = namespace_of(tenant, owner, MEMORY);
        let _memory_guard = self.shared.memories.lock_memory(&reference.id).await;
        let Some(item) = self.store().get(&memories, &reference.id, None).await? else { return Ok(true) };
        let mut record = decode_memory(&item)?;
        match record.sources.get(&reference.source) {
            None => return Ok(true),
            Some(messages) if is_valid(messages) => return Ok(false),
            Some(_) => record.sources.remove(&reference.source),
        };
        if record.sources.is_empty() {
            self.remove_memory(&memories, &reference.id).await?;
        } else {
            self.store().put(&memories, &Item { value: encode_memory(&record), ..item }, None).await?;
            self.memory_changed(&memories, &reference.id).await?;
        }
        Ok(true)
    }

    /// Retracts a user's contributions to group memories, and removes the user from the dream
    /// reports and from the registry of namespaces.
    pub(crate) async fn retract_user(&self, tenant: &Tenant, user: &User) -> Result<()> {
        let owner = Owner::User(user.clone());
        self.retract_from(&namespace_of(tenant, owner.clone(), BACK_REFERENCES), |_| false).await?;
        self.remove_user_from_dreams(tenant, user).await?;
        let user_memories = namespace_of(tenant, owner, MEMORY);
        self.shared.memories.evict(&user_memories);
        self.store().remove(&registry(), &registry_key(&user_memories)).await.map(drop)
    }
}
