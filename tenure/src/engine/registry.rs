//! Assistants: what sessions can belong to, and how those are kept.
//!
//! Some are declared by whoever opens the house and stand for every tenant; the others are a tenant's own, and lie on its shelf.

use crate::error::{Error, Result};
use crate::store::item::{Item, Owner, Shelf};
use crate::tenure::Tenure;
use crate::types::assistant::{Assistant, MemorySize};
use crate::types::id::{Principal, Reach, Tenant, check_text};
use crate::types::policy::Policy;
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, RwLock};
use std::time::Duration;

const ASSISTANTS: &str = "assistants";
/// What was read of a tenant's assistants is believed for so long: a change made by another process is seen after it.
const FRESH: SignedDuration = SignedDuration::from_secs(5);

/// The assistants that are known.
#[derive(Debug, Default)]
pub(crate) struct Assistants {
    declared: RwLock<BTreeMap<String, Arc<Assistant>>>,
    own: RwLock<HashMap<Tenant, Own>>,
    /// Held while one is made or changed, to know whether it is new. Across awaits, so not std's.
    changing: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Own {
    read_at: Timestamp,
    by_name: BTreeMap<String, Arc<Assistant>>,
}

impl Assistants {
    fn find(&self, tenant: &Tenant, name: &str) -> Option<Arc<Assistant>> {
        let declared = self.declared.read().unwrap_or_else(|e| e.into_inner());
        if let Some(assistant) = declared.get(name) {
            return Some(assistant.clone());
        }
        let own = self.own.read().unwrap_or_else(|e| e.into_inner());
        own.get(tenant)?.by_name.get(name).cloned()
    }

    fn is_fresh(&self, tenant: &Tenant, now: Timestamp) -> bool {
        let own = self.own.read().unwrap_or_else(|e| e.into_inner());
        own.get(tenant).is_some_and(|o| now.duration_since(o.read_at).abs() < FRESH)
    }
}

impl Tenure {
    /// Declares an assistant that stands for every tenant of this house, for as long as it is open.
    pub fn declare(&self, assistant: Assistant) {
        let mut declared = self.assistants_known().declared.write().unwrap_or_else(|e| e.into_inner());
        declared.insert(assistant.name.clone(), Arc::new(assistant));
    }

    /// Whether an assistant was declared, and so can not be changed by a tenant.
    pub fn is_declared(&self, name: &str) -> bool {
        self.assistants_known().declared.read().unwrap_or_else(|e| e.into_inner()).contains_key(name)
    }

    /// An assistant by its name.
    pub async fn assistant(&self, who: &Principal, name: &str) -> Result<Option<Arc<Assistant>>> {
        self.know(&who.tenant).await?;
        Ok(self.assistants_known().find(&who.tenant, name))
    }

    /// All assistants by name: the declared ones and the tenant's own.
    pub async fn assistants(&self, who: &Principal) -> Result<Vec<Arc<Assistant>>> {
        self.read_assistants(&who.tenant).await?;
        let known = self.assistants_known();
        let own = known.own.read().unwrap_or_else(|e| e.into_inner());
        let mut all = own.get(&who.tenant).map(|o| o.by_name.clone()).unwrap_or_default();
        all.extend(known.declared.read().unwrap_or_else(|e| e.into_inner()).clone());
        Ok(all.into_values().collect())
    }

    /// Makes an assistant of the tenant's own, or changes it; whether it is new. Its sessions follow it from then on.
    pub async fn put_assistant(&self, who: &Principal, assistant: Assistant) -> Result<bool> {
        let item = self.assistant_item(who, &assistant)?;
        let _changing = self.assistants_known().changing.lock().await;
        let new = self.store().get(&shelf(&who.tenant), &item.key, None).await?.is_none();
        self.store().put(&shelf(&who.tenant), &item, None).await?;
        self.read_assistants(&who.tenant).await?;
        Ok(new)
    }

    /// Makes an assistant of the tenant's own, unless there is one of that name; whether it was made. Of several at once one makes it, if
    /// they ask the same process; between processes the last one wins.
    pub async fn create_assistant(&self, who: &Principal, assistant: Assistant) -> Result<bool> {
        let item = self.assistant_item(who, &assistant)?;
        let _changing = self.assistants_known().changing.lock().await;
        let free = self.store().get(&shelf(&who.tenant), &item.key, None).await?.is_none();
        if free {
            self.store().put(&shelf(&who.tenant), &item, None).await?;
        }
        self.read_assistants(&who.tenant).await?;
        Ok(free)
    }

    fn assistant_item(&self, who: &Principal, assistant: &Assistant) -> Result<Item> {
        self.may_change(who, &assistant.name)?;
        check_text(&assistant.name).map_err(|why| Error::invalid("name", format!("not a valid name: {why}")))?;
        assistant.memory.as_ref().map_or(Ok(()), MemorySize::check)?;
        if !assistant.tools.is_empty() {
            return Err(Error::invalid("tools", "tools can only be declared in the server's configuration"));
        }
        let value = serde_json::to_string(assistant).expect("plain data");
        let max = self.limits().max_info_bytes;
        if value.len() > max {
            return Err(Error::TooLarge { what: "an assistant".into(), limit: "max_info_bytes", max: max as u64 });
        }
        let (now, key) = (self.now(), assistant.name.clone());
        Ok(Item { key, value, text: None, created_at: now, used_at: now, uses: 0, expires_at: None })
    }

    /// Removes an assistant of the tenant's own; whether there was one. Its sessions stay, and are kept as those of no assistant.
    pub async fn remove_assistant(&self, who: &Principal, name: &str) -> Result<bool> {
        self.may_change(who, name)?;
        let _changing = self.assistants_known().changing.lock().await;
        let removed = self.store().remove(&shelf(&who.tenant), name).await?;
        self.read_assistants(&who.tenant).await?;
        Ok(removed)
    }

    fn may_change(&self, who: &Principal, name: &str) -> Result<()> {
        if who.reach != Reach::Tenant {
            return Err(Error::invalid("name", "only an administrator of the tenant can change assistants"));
        }
        match self.is_declared(name) {
            true => Err(Error::invalid(
                "name",
                format!("assistant {name:?} is declared in the configuration; change it there"),
            )),
            false => Ok(()),
        }
    }

    /// The policy for the sessions of an assistant, or of none. A tenant's own assistants count once they were read.
    pub fn policy(&self, tenant: &Tenant, assistant: Option<&str>) -> Policy {
        let house = self.house_policy();
        let assistant = assistant.and_then(|name| self.assistants_known().find(tenant, name));
        assistant.map_or_else(|| house.clone(), |a| a.policy(house))
    }

    /// The shortest time to live of any session here, as far as assistants are known: how often sweeping makes sense.
    pub fn shortest_ttl(&self) -> Option<Duration> {
        let known = self.assistants_known();
        let declared = known.declared.read().unwrap_or_else(|e| e.into_inner());
        let own = known.own.read().unwrap_or_else(|e| e.into_inner());
        let all = declared.values().chain(own.values().flat_map(|o| o.by_name.values()));
        let ttls = all.filter_map(|a| a.sessions.ttl?.duration());
        ttls.chain(self.house_policy().ttl).min()
    }

    /// Sees to it that a tenant's assistants are known: every verb whose answer depends on a policy begins with it.
    pub(crate) async fn know(&self, tenant: &Tenant) -> Result<()> {
        match self.assistants_known().is_fresh(tenant, self.now()) {
            true => Ok(()),
            false => self.read_assistants(tenant).await,
        }
    }

    async fn read_assistants(&self, tenant: &Tenant) -> Result<()> {
        let (shelf, read_at) = (shelf(tenant), self.now());
        let (mut by_name, mut after) = (BTreeMap::new(), None::<String>);
        loop {
            let page = self.store().items(&shelf, after.as_deref(), 1000).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            for item in &page {
                let place = || format!("assistant {:?} of tenant {tenant}", item.key);
                let assistant = serde_json::from_str(&item.value).map_err(|e| Error::corrupt(place(), e))?;
                by_name.insert(item.key.clone(), Arc::new(assistant));
            }
        }
        let mut own = self.assistants_known().own.write().unwrap_or_else(|e| e.into_inner());
        own.insert(tenant.clone(), Own { read_at, by_name });
        Ok(())
    }
}

fn shelf(tenant: &Tenant) -> Shelf {
    Shelf { tenant: tenant.clone(), owner: Owner::Tenant, name: ASSISTANTS.to_owned() }
}
