//! The cached registry of assistants. Some are declared by the application and apply to every
//! tenant; the others belong to one tenant and are stored as items in its namespace (D-056).

use crate::store::item::{Namespace, Owner};
use crate::types::assistant::Assistant;
use crate::types::id::Tenant;
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, RwLock};

/// The name of the namespace of a tenant's own assistants.
pub(crate) const ASSISTANTS: &str = "assistants";
/// The time for which the cached assistants of a tenant are used. A change made by another process
/// is seen after it at the latest.
pub(crate) const CACHE_TTL: SignedDuration = SignedDuration::from_secs(5);

/// The cached assistants.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    /// The declared assistants by name.
    pub declared: RwLock<BTreeMap<String, Arc<Assistant>>>,
    /// The tenants' own assistants.
    pub own: RwLock<HashMap<Tenant, TenantAssistants>>,
    /// Held while an assistant is created or changed, to determine whether it is new (D-057). It is
    /// held across awaits, so it is not a `std` mutex.
    pub changing: tokio::sync::Mutex<()>,
}

/// The cached assistants of one tenant.
#[derive(Debug)]
pub(crate) struct TenantAssistants {
    /// The time at which they were read from the store.
    pub read_at: Timestamp,
    /// The assistants by name.
    pub by_name: BTreeMap<String, Arc<Assistant>>,
}

impl Registry {
    /// Finds an assistant by name. Declared assistants take precedence.
    pub fn find(&self, tenant: &Tenant, name: &str) -> Option<Arc<Assistant>> {
        let declared = self.declared.read().unwrap_or_else(|e| e.into_inner());
        if let Some(assistant) = declared.get(name) {
            return Some(assistant.clone());
        }
        let own = self.own.read().unwrap_or_else(|e| e.into_inner());
        own.get(tenant)?.by_name.get(name).cloned()
    }

    /// Returns all assistants of a tenant by name, as far as they are cached. Declared assistants take
    /// precedence.
    pub fn all(&self, tenant: &Tenant) -> BTreeMap<String, Arc<Assistant>> {
        let own = self.own.read().unwrap_or_else(|e| e.into_inner());
        let mut all = own.get(tenant).map(|o| o.by_name.clone()).unwrap_or_default();
        all.extend(self.declared.read().unwrap_or_else(|e| e.into_inner()).clone());
        all
    }

    /// Returns true if the assistants of a tenant were read within [`CACHE_TTL`].
    pub fn is_fresh(&self, tenant: &Tenant, now: Timestamp) -> bool {
        let own = self.own.read().unwrap_or_else(|e| e.into_inner());
        own.get(tenant).is_some_and(|o| now.duration_since(o.read_at).abs() < CACHE_TTL)
    }
}

/// The namespace of a tenant's own assistants.
pub(crate) fn assistants_namespace(tenant: &Tenant) -> Namespace {
    Namespace { tenant: tenant.clone(), owner: Owner::Tenant, name: ASSISTANTS.to_owned() }
}
