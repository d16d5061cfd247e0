//! Assistants: what sessions can belong to, and how those are kept.
//!
//! Some are declared by whoever opens the house and stand for every tenant; the others are a tenant's own, and lie on its shelf.

use crate::store::item::{Owner, Shelf};
use crate::types::assistant::Assistant;
use crate::types::id::Tenant;
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, RwLock};

pub(crate) const ASSISTANTS: &str = "assistants";
/// What was read of a tenant's assistants is believed for so long: a change made by another process is seen after it.
pub(crate) const FRESH: SignedDuration = SignedDuration::from_secs(5);

/// The assistants that are known.
#[derive(Debug, Default)]
pub(crate) struct Assistants {
    pub declared: RwLock<BTreeMap<String, Arc<Assistant>>>,
    pub own: RwLock<HashMap<Tenant, Own>>,
    /// Held while one is made or changed, to know whether it is new. Across awaits, so not std's.
    pub changing: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
pub(crate) struct Own {
    pub read_at: Timestamp,
    pub by_name: BTreeMap<String, Arc<Assistant>>,
}

impl Assistants {
    pub fn find(&self, tenant: &Tenant, name: &str) -> Option<Arc<Assistant>> {
        let declared = self.declared.read().unwrap_or_else(|e| e.into_inner());
        if let Some(assistant) = declared.get(name) {
            return Some(assistant.clone());
        }
        let own = self.own.read().unwrap_or_else(|e| e.into_inner());
        own.get(tenant)?.by_name.get(name).cloned()
    }

    pub fn is_fresh(&self, tenant: &Tenant, now: Timestamp) -> bool {
        let own = self.own.read().unwrap_or_else(|e| e.into_inner());
        own.get(tenant).is_some_and(|o| now.duration_since(o.read_at).abs() < FRESH)
    }
}

pub(crate) fn shelf(tenant: &Tenant) -> Shelf {
    Shelf { tenant: tenant.clone(), owner: Owner::Tenant, name: ASSISTANTS.to_owned() }
}
