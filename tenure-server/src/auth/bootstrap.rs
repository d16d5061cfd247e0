//! The bootstrap key: the first API key of a deployment, read from a file. It serves containers, where no operator
//! can run `tenure keys add`.

use super::keys::{KeyStore, NewKey, Right, hash_secret, system_item, system_namespace};
use anyhow::{Context, bail};
use std::path::Path;

/// Minimum length of a bootstrap secret in bytes. Shorter secrets could be guessed.
const MIN_LENGTH: usize = 32;

/// Adds the key in a file as an administrator key of the tenant `default`. This happens once per secret: a secret
/// that was added before and has since been revoked stays revoked, also after a restart (D-103). Returns the key's
/// id if it was added by this call, and `None` if it had been added before.
pub async fn add_bootstrap_key(keys: &KeyStore, file: &Path) -> anyhow::Result<Option<String>> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read bootstrap_key_file {}", file.display()))?;
    let secret = text.trim();
    if secret.len() < MIN_LENGTH || secret.chars().any(|c| c.is_whitespace() || c.is_control()) {
        bail!(
            "bootstrap_key_file {} must hold one key of at least {MIN_LENGTH} characters without spaces; \
             for example: openssl rand -hex 32",
            file.display()
        );
    }
    let (_, id) = hash_secret(secret);
    let store = keys.tenure().store();
    let namespace = system_namespace("auth");
    let item_key = format!("bootstrap-{id}");
    if store.get(&namespace, &item_key, None).await?.is_some() {
        return Ok(None);
    }
    let rights = vec![Right::Read, Right::Write, Right::Review, Right::Admin, Right::Backup];
    keys.add_secret(NewKey { rights, name: Some("bootstrap".to_owned()), ..NewKey::default() }, secret).await?;
    store.put(&namespace, &system_item(item_key, "true".to_owned(), keys.tenure().now()), None).await?;
    Ok(Some(id))
}
