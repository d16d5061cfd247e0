//! Erases a user: all sessions, memories and index entries of the user are destroyed.

use crate::store::item::Owner;
use crate::store::query::{OwnerFilter, SessionQuery};
use crate::tenure::Tenure;
use crate::types::error::{Error, Result};
use crate::types::id::{AccessScope, Principal, User};
use jiff::Timestamp;

/// The receipt of an erasure.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ErasureReceipt {
    /// The user who was erased.
    pub user: User,
    /// The number of sessions that were purged.
    pub sessions: usize,
    /// The time at which the erasure was completed.
    pub at: Timestamp,
}

impl Tenure {
    /// Erases a user: every session, memory and index entry. Forks that belong to other users keep
    /// the records that they share. Only the user or an administrator of the tenant may do it.
    pub async fn erase(&self, principal: &Principal, user: &User) -> Result<ErasureReceipt> {
        if principal.scope != AccessScope::Tenant && principal.user != *user {
            return Err(Error::invalid("user", "only the user or an administrator of the tenant can erase a user"));
        }
        let mut sessions = 0;
        loop {
            let page = self
                .store()
                .heads(&SessionQuery::new(OwnerFilter::User(principal.tenant.clone(), user.clone()), 256))
                .await?;
            if page.is_empty() {
                break;
            }
            for head in page {
                self.retract(&head.key(), None).await?;
                self.engine.purge_key(&head.key()).await?;
                self.end_tools(&head.key()).await;
                sessions += 1;
            }
        }
        self.retract_user(&principal.tenant, user).await?;
        self.store().delete_owner(&principal.tenant, &Owner::User(user.clone())).await?;
        Ok(ErasureReceipt { user: user.clone(), sessions, at: self.now() })
    }
}
