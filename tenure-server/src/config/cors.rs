//! The section `cors`: web origins whose pages may call this server.

use super::url::http_url;
use anyhow::bail;
use serde::{Deserialize, Serialize};

/// Other web sites whose pages may call this server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cors {
    /// Their origins, such as `https://app.example.com`. Empty means same-origin only.
    pub origins: Vec<String>,
}

impl Cors {
    /// Validates that each entry is an origin in its canonical form.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        for (i, origin) in self.origins.iter().enumerate() {
            let url = http_url(&format!("cors.origins[{i}]"), origin)?;
            if url.origin().ascii_serialization() != *origin {
                let expected = url.origin().ascii_serialization();
                bail!("cors.origins[{i}]: {origin:?} is not an origin; write it as {expected:?}");
            }
        }
        Ok(())
    }
}
