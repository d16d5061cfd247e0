//! The models by name.

use super::echo::EchoModel;
use super::upstream::Upstream;
use crate::config::{BUILT_IN_MODEL, ModelConfig};
use std::collections::BTreeMap;
use std::sync::Arc;
use tenure::Model;

/// The models that can be asked.
pub struct ModelRegistry {
    order: Vec<String>,
    by_name: BTreeMap<String, Arc<Upstream>>,
    /// The server that gets requests for any other name.
    pass_unknown: Option<Arc<Upstream>>,
}

/// The name under which the first model can always be asked for: the built-in one, if none is configured.
const DEFAULT_MODEL: &str = "default";

impl ModelRegistry {
    /// Of the configured servers.
    pub fn new(configured: &[ModelConfig]) -> anyhow::Result<Self> {
        let (mut by_name, mut pass_unknown) = (BTreeMap::new(), None);
        for model in configured {
            let upstream = Arc::new(Upstream::new(model)?);
            if model.pass_unknown {
                pass_unknown = Some(upstream.clone());
            }
            by_name.insert(model.name.clone(), upstream);
        }
        Ok(Self { order: configured.iter().map(|m| m.name.clone()).collect(), by_name, pass_unknown })
    }

    /// The names, in the order of the configuration; the built-in model last.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.order.iter().map(String::as_str).chain([BUILT_IN_MODEL])
    }

    /// The model that is meant if none is named.
    pub fn default_name(&self) -> &str {
        self.order.first().map_or(BUILT_IN_MODEL, String::as_str)
    }

    /// A model by name.
    pub fn get(&self, name: &str) -> Option<Arc<dyn Model>> {
        if name == BUILT_IN_MODEL || (self.order.is_empty() && name == DEFAULT_MODEL) {
            return Some(Arc::new(EchoModel));
        }
        self.upstream(name).map(|u| u as Arc<dyn Model>)
    }

    /// A model server by the name of its model.
    pub fn upstream(&self, name: &str) -> Option<Arc<Upstream>> {
        self.by_name.get(name).or(self.pass_unknown.as_ref()).cloned()
    }
}
