//! Policy lookup: a session has the policy of its assistant, or the default policy.

use crate::engine::core::Engine;
use crate::engine::registry::{TenantAssistants, assistants_namespace};
use crate::store::query::ExpiryCutoffs;
use crate::types::assistant::Assistant;
use crate::types::error::{Error, Result};
use crate::types::id::{Principal, Tenant};
use crate::types::policy::Policy;
use jiff::SignedDuration;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

impl Engine {
    /// Finds an assistant by its name. Declared assistants take precedence over the tenant's own.
    pub async fn assistant(&self, principal: &Principal, name: &str) -> Result<Option<Arc<Assistant>>> {
        self.ensure_assistants_loaded(&principal.tenant).await?;
        Ok(self.assistant_registry().find(&principal.tenant, name))
    }

    /// Lists all assistants by name: the declared ones and the tenant's own, read from the store.
    pub async fn assistants(&self, principal: &Principal) -> Result<Vec<Arc<Assistant>>> {
        self.read_assistants(&principal.tenant).await?;
        Ok(self.assistant_registry().all(&principal.tenant).into_values().collect())
    }

    /// The policy for the sessions of an assistant, or of no assistant. A tenant's own assistants
    /// are only considered once they have been read from the store.
    pub fn policy(&self, tenant: &Tenant, assistant: Option<&str>) -> Policy {
        let default = self.default_policy();
        let assistant = assistant.and_then(|name| self.assistant_registry().find(tenant, name));
        assistant.map_or_else(|| default.clone(), |a| a.policy(default)).with_scope_applied()
    }

    /// The times of last activity before which the active sessions of a tenant have expired.
    pub(crate) fn expiry_cutoffs(&self, tenant: &Tenant) -> ExpiryCutoffs {
        let now = self.now();
        let cutoff = |ttl: Option<Duration>| now.checked_sub(SignedDuration::try_from(ttl?).ok()?).ok();
        let by_assistant = self.assistant_registry().all(tenant).into_iter().filter_map(|(name, assistant)| {
            let ttl = assistant.sessions.ttl?;
            Some((name, cutoff(ttl.duration())))
        });
        ExpiryCutoffs { default: cutoff(self.default_policy().ttl), by_assistant: by_assistant.collect() }
    }

    /// The shortest time to live of any session, as far as assistants are cached. It determines how
    /// often a sweep is useful.
    pub fn shortest_ttl(&self) -> Option<Duration> {
        let registry = self.assistant_registry();
        let declared = registry.declared.read().unwrap_or_else(|e| e.into_inner());
        let own = registry.own.read().unwrap_or_else(|e| e.into_inner());
        let all = declared.values().chain(own.values().flat_map(|o| o.by_name.values()));
        let ttls = all.filter_map(|a| a.sessions.ttl?.duration());
        ttls.chain(self.default_policy().ttl).min()
    }

    /// Ensures that the cached assistants of a tenant are fresh. Every operation whose result
    /// depends on a policy calls it first (D-056).
    pub(crate) async fn ensure_assistants_loaded(&self, tenant: &Tenant) -> Result<()> {
        if self.assistant_registry().is_fresh(tenant, self.now()) {
            return Ok(());
        }
        // Boxed: every read contains it, and few of them wait for it.
        Box::pin(self.read_assistants(tenant)).await
    }

    /// Reads the assistants of a tenant from the store into the cache.
    pub async fn read_assistants(&self, tenant: &Tenant) -> Result<()> {
        let namespace = assistants_namespace(tenant);
        let read_at = self.now();
        let mut by_name = BTreeMap::new();
        let mut after = None::<String>;
        loop {
            let page = self.store().items(&namespace, after.as_deref(), 1000).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for item in &page {
                let location = || format!("assistant {:?} of tenant {tenant}", item.key);
                let assistant = serde_json::from_str(&item.value).map_err(|e| Error::corrupt_from(location(), e))?;
                by_name.insert(item.key.clone(), Arc::new(assistant));
            }
        }
        let mut own = self.assistant_registry().own.write().unwrap_or_else(|e| e.into_inner());
        own.insert(tenant.clone(), TenantAssistants { read_at, by_name });
        Ok(())
    }
}
