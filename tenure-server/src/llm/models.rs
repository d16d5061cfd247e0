//! Registry of the configured models.

use super::echo::EchoModel;
use super::upstream::Upstream;
use crate::config::{BUILT_IN_MODEL, ModelConfig};
use std::collections::BTreeMap;
use std::sync::Arc;
use tenure::Model;

/// Looks models up by name.
pub struct ModelRegistry {
    order: Vec<String>,
    by_name: BTreeMap<String, Arc<Upstream>>,
    /// The server that receives requests for unknown model names. `None` means that such names are rejected.
    pass_unknown: Option<Arc<Upstream>>,
}

/// Alias under which the built-in model can be requested if no model is configured.
const DEFAULT_MODEL: &str = "default";

impl ModelRegistry {
    /// Creates a registry of the configured model servers.
    pub fn new(configured: &[ModelConfig]) -> anyhow::Result<Self> {
        let mut by_name = BTreeMap::new();
        let mut pass_unknown = None;
        for model in configured {
            let upstream = Arc::new(Upstream::new(model)?);
            if model.pass_unknown {
                pass_unknown = Some(upstream.clone());
            }
            by_name.insert(model.name.clone(), upstream);
        }
        Ok(Self { order: configured.iter().map(|m| m.name.clone()).collect(), by_name, pass_unknown })
    }

    /// Returns the model names in the order of the configuration; the built-in model if none is configured.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let built_in = self.order.is_empty().then_some(BUILT_IN_MODEL);
        self.order.iter().map(String::as_str).chain(built_in)
    }

    /// Returns the name of the model that is used if a request names none.
    pub fn default_name(&self) -> &str {
        self.order.first().map_or(BUILT_IN_MODEL, String::as_str)
    }

    /// Returns a model by name, or `None` if the name is unknown and no server accepts unknown names.
    pub fn get(&self, name: &str) -> Option<Arc<dyn Model>> {
        if name == BUILT_IN_MODEL || (self.order.is_empty() && name == DEFAULT_MODEL) {
            return Some(Arc::new(EchoModel));
        }
        self.upstream(name).map(|u| u as Arc<dyn Model>)
    }

    /// Returns the name under which a model is counted: a configured one, or `other`, because clients can invent names.
    pub fn label<'a>(&'a self, name: &str) -> &'a str {
        if name == DEFAULT_MODEL && self.order.is_empty() {
            return BUILT_IN_MODEL;
        }
        self.names().find(|known| *known == name).unwrap_or("other")
    }

    /// Returns the model server for a model name, or `None` if no server serves it.
    pub fn upstream(&self, name: &str) -> Option<Arc<Upstream>> {
        self.by_name.get(name).or(self.pass_unknown.as_ref()).cloned()
    }
}
