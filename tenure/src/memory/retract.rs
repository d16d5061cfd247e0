//! Retraction of memories: when messages are discarded, or a session or user is purged, memories
//! that have no other source are removed (D-073).

use crate::engine::write::Committed;
use crate::memory::memories::{
    BackReference, MEMORY, TRACES, entry, is_there, kept, owner_of, registry, shelf, written,
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
        let (who, id) = (event.head.owner(), &event.head.info.session_id);
        if let Err(error) = tenure.retract_rewound(&who, id).await {
            tracing::warn!(session_id = %id, %error, "memories of messages that were cut off could not be retracted");
        }
    }
}

impl Tenure {
    /// Retracts the memories whose only source is a session's discarded messages. `left` is the
    /// messages that remain. `None` means that the whole session is purged.
    pub(crate) async fn retract(&self, key: &SessionKey, left: Option<&[StoredMessage]>) -> Result<()> {
        let at = shelf(&key.tenant, Owner::Session(key.session.clone()), TRACES);
        self.retract_from(&at, |messages| match left {
            None => false,
            Some(left) => messages.is_empty() || messages.iter().any(|seq| is_there(left, *seq)),
        })
        .await
    }

    /// Retracts memories after a committed rewind, based on the messages that remain.
    pub(crate) async fn retract_rewound(&self, who: &Principal, id: &SessionId) -> Result<()> {
        let key = who.key(id);
        let at = shelf(&key.tenant, Owner::Session(key.session.clone()), TRACES);
        if self.store().items(&at, None, 1).await?.is_empty() {
            return Ok(());
        }
        let session = self.engine.shared(who, id).await?;
        self.retract(&key, Some(&session.messages)).await
    }

    /// Follows the back references in a namespace and removes the sources that no longer stand.
    /// Then scrubs the affected owners from the store.
    async fn retract_from(&self, at: &Namespace, stands: impl Fn(&[Seq]) -> bool) -> Result<()> {
        let (mut after, mut emptied) = (None::<String>, BTreeSet::new());
        loop {
            let page = self.store().items(at, after.as_deref(), 256).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for item in page {
                let trace: BackReference = serde_json::from_str(&item.value)
                    .map_err(|e| Error::corrupt(format!("trace {} of {}", item.key, at.owner), e))?;
                if self.take_back(&at.tenant, &trace, &stands).await? {
                    self.store().remove(at, &item.key).await?;
                    emptied.insert(trace.owner);
                }
            }
        }
        for owner in emptied.iter().filter_map(|o| owner_of(o)) {
            self.store().wipe(&at.tenant, &owner).await?;
        }
        Ok(())
    }

    /// Removes a source from a memory, and the memory itself with its last source. Returns true if
    /// the back reference is no longer needed.
    async fn take_back(&self, tenant: &Tenant, trace: &BackReference, stands: impl Fn(&[Seq]) -> bool) -> Result<bool> {
        let Some(owner) = owner_of(&trace.owner) else { return Ok(true) };
        let place = shelf(tenant, owner, MEMORY);
        let _changing = self.shared.memories.changing(&trace.id).await;
        let Some(item) = self.store().get(&place, &trace.id, None).await? else { return Ok(true) };
        let mut all = kept(&item)?;
        match all.sources.get(&trace.source) {
            None => return Ok(true),
            Some(messages) if stands(messages) => return Ok(false),
            Some(_) => all.sources.remove(&trace.source),
        };
        match all.sources.is_empty() {
            true => drop(self.store().remove(&place, &trace.id).await?),
            false => self.store().put(&place, &Item { value: written(&all), ..item }, None).await?,
        }
        self.memory_changed(&place, &trace.id).await?;
        Ok(true)
    }

    /// Retracts a user's contributions to group memories, and removes the user from the dream
    /// reports and from the registry of namespaces.
    pub(crate) async fn retract_user(&self, tenant: &Tenant, user: &User) -> Result<()> {
        let owner = Owner::User(user.clone());
        self.retract_from(&shelf(tenant, owner.clone(), TRACES), |_| false).await?;
        self.undream(tenant, user).await?;
        let own = shelf(tenant, owner, MEMORY);
        self.shared.memories.forget(&own);
        self.store().remove(&registry(), &entry(&own)).await.map(drop)
    }
}
