//! Assistants: declared by the application for every tenant, or stored by a tenant.

use crate::engine::registry::shelf;
use crate::store::item::Item;
use crate::tenure::Tenure;
use crate::types::assistant::{Assistant, MemorySize};
use crate::types::error::{Error, Result};
use crate::types::id::{Principal, Reach, check_text};
use std::sync::Arc;

impl Tenure {
    /// Declares an assistant that stands for every tenant of this house, for as long as it is open.
    pub fn declare(&self, assistant: Assistant) {
        let mut declared = self.engine.assistants_known().declared.write().unwrap_or_else(|e| e.into_inner());
        declared.insert(assistant.name.clone(), Arc::new(assistant));
    }

    /// Whether an assistant was declared, and so can not be changed by a tenant.
    pub fn is_declared(&self, name: &str) -> bool {
        self.engine.assistants_known().declared.read().unwrap_or_else(|e| e.into_inner()).contains_key(name)
    }

    /// An assistant by its name.
    pub async fn assistant(&self, who: &Principal, name: &str) -> Result<Option<Arc<Assistant>>> {
        self.engine.assistant(who, name).await
    }

    /// All assistants by name: the declared ones and the tenant's own.
    pub async fn assistants(&self, who: &Principal) -> Result<Vec<Arc<Assistant>>> {
        self.engine.assistants(who).await
    }

    /// Makes an assistant of the tenant's own, or changes it; whether it is new. Its sessions follow it from then on.
    pub async fn put_assistant(&self, who: &Principal, assistant: Assistant) -> Result<bool> {
        let item = self.assistant_item(who, &assistant)?;
        let _changing = self.engine.assistants_known().changing.lock().await;
        let new = self.store().get(&shelf(&who.tenant), &item.key, None).await?.is_none();
        self.store().put(&shelf(&who.tenant), &item, None).await?;
        self.engine.read_assistants(&who.tenant).await?;
        Ok(new)
    }

    /// Makes an assistant of the tenant's own, unless there is one of that name; whether it was made. Of several at once one makes it, if
    /// they ask the same process; between processes the last one wins.
    pub async fn create_assistant(&self, who: &Principal, assistant: Assistant) -> Result<bool> {
        let item = self.assistant_item(who, &assistant)?;
        let _changing = self.engine.assistants_known().changing.lock().await;
        let free = self.store().get(&shelf(&who.tenant), &item.key, None).await?.is_none();
        if free {
            self.store().put(&shelf(&who.tenant), &item, None).await?;
        }
        self.engine.read_assistants(&who.tenant).await?;
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
        let _changing = self.engine.assistants_known().changing.lock().await;
        let removed = self.store().remove(&shelf(&who.tenant), name).await?;
        self.engine.read_assistants(&who.tenant).await?;
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
}
