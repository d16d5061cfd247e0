//! Management of assistants: those declared by the application apply to every tenant, the others
//! are stored by one tenant.

use crate::engine::registry::assistants_namespace;
use crate::store::item::Item;
use crate::tenure::Tenure;
use crate::types::assistant::Assistant;
use crate::types::error::{Error, Result};
use crate::types::id::{AccessScope, Principal, check_text};
use std::sync::Arc;

impl Tenure {
    /// Loads an assistant by its name, if one is given.
    pub(crate) async fn assistant_of(
        &self,
        principal: &Principal,
        name: Option<String>,
    ) -> Result<Option<Arc<Assistant>>> {
        match name {
            Some(name) => self.assistant(principal, &name).await,
            None => Ok(None),
        }
    }

    /// Declares an assistant that applies to every tenant for as long as the store is open.
    pub fn declare(&self, assistant: Assistant) {
        let mut declared = self.engine.assistant_registry().declared.write().unwrap_or_else(|e| e.into_inner());
        declared.insert(assistant.name.clone(), Arc::new(assistant));
    }

    /// Returns true if an assistant was declared by the application. A tenant cannot change it.
    pub fn is_declared(&self, name: &str) -> bool {
        self.engine.assistant_registry().declared.read().unwrap_or_else(|e| e.into_inner()).contains_key(name)
    }

    /// Finds an assistant by its name.
    pub async fn assistant(&self, principal: &Principal, name: &str) -> Result<Option<Arc<Assistant>>> {
        self.engine.assistant(principal, name).await
    }

    /// Lists all assistants by name: the declared ones and the tenant's own.
    pub async fn assistants(&self, principal: &Principal) -> Result<Vec<Arc<Assistant>>> {
        self.engine.assistants(principal).await
    }

    /// Creates or replaces a tenant's own assistant. Returns true if it is new. Its policy applies
    /// to its existing sessions too.
    pub async fn put_assistant(&self, principal: &Principal, assistant: Assistant) -> Result<bool> {
        let item = self.assistant_item(principal, &assistant)?;
        let _changing = self.engine.assistant_registry().changing.lock().await;
        let new = self.store().get(&assistants_namespace(&principal.tenant), &item.key, None).await?.is_none();
        self.store().put(&assistants_namespace(&principal.tenant), &item, None).await?;
        self.engine.read_assistants(&principal.tenant).await?;
        Ok(new)
    }

    /// Creates a tenant's own assistant unless one of that name exists. Returns true if it was
    /// created. Concurrent calls in one process create it only once; between processes the last
    /// write wins (D-057).
    pub async fn create_assistant(&self, principal: &Principal, assistant: Assistant) -> Result<bool> {
        let item = self.assistant_item(principal, &assistant)?;
        let _changing = self.engine.assistant_registry().changing.lock().await;
        let free = self.store().get(&assistants_namespace(&principal.tenant), &item.key, None).await?.is_none();
        if free {
            self.store().put(&assistants_namespace(&principal.tenant), &item, None).await?;
        }
        self.engine.read_assistants(&principal.tenant).await?;
        Ok(free)
    }

    fn assistant_item(&self, principal: &Principal, assistant: &Assistant) -> Result<Item> {
        self.may_change(principal, &assistant.name)?;
        check_text(&assistant.name).map_err(|reason| Error::invalid("name", format!("not a valid name: {reason}")))?;
        assistant.check()?;
        if !assistant.tools.is_empty() {
            return Err(Error::invalid("tools", "tools can only be declared in the server's configuration"));
        }
        let value = serde_json::to_string(assistant).expect("an assistant always serializes to JSON");
        let max = self.limits().max_info_bytes;
        if value.len() > max {
            return Err(Error::TooLarge { subject: "an assistant".into(), limit: "max_info_bytes", max: max as u64 });
        }
        let now = self.now();
        Ok(Item::new(assistant.name.clone(), value, now))
    }

    /// Removes a tenant's own assistant. Returns true if there was one. Its sessions remain, and
    /// get the default policy.
    pub async fn remove_assistant(&self, principal: &Principal, name: &str) -> Result<bool> {
        self.may_change(principal, name)?;
        let _changing = self.engine.assistant_registry().changing.lock().await;
        let removed = self.store().remove(&assistants_namespace(&principal.tenant), name).await?;
        self.engine.read_assistants(&principal.tenant).await?;
        Ok(removed)
    }

    fn may_change(&self, principal: &Principal, name: &str) -> Result<()> {
        if principal.scope != AccessScope::Tenant {
            return Err(Error::invalid("name", "only an administrator of the tenant can change assistants"));
        }
        if self.is_declared(name) {
            return Err(Error::invalid(
                "name",
                format!("assistant {name:?} is declared in the configuration; change it there"),
            ));
        }
        Ok(())
    }
}
