//! `tenure keys`: who may ask a server.

use super::client::{At, Needs};
use super::show::{age, clean, line, note, print, table};
use crate::auth::{Key, Right};
use anyhow::bail;
use clap::{Subcommand, ValueEnum};
use serde_json::{Value, json};
use tenure::HistoryMode;

/// What to do with keys.
#[derive(Debug, Subcommand)]
pub enum Keys {
    /// Make a key; it is shown once and kept nowhere
    Add {
        /// What it allows
        #[arg(long, value_delimiter = ',', default_value = "read,write")]
        rights: Vec<Right>,
        /// What it is for
        #[arg(long, value_name = "TEXT")]
        name: Option<String>,
        /// How the messages of its requests are read: auto, full or append
        #[arg(long, value_name = "MODE", value_parser = history)]
        history: Option<HistoryMode>,
    },
    /// List the keys
    List,
    /// Let requests without a key in again, on loopback; only when no keys are left
    AllowUnauthenticated,
    /// Remove keys; a server knows within two seconds
    Revoke {
        /// The keys, by their ids
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

impl Keys {
    /// Does it. `--tenant` and `--user` say whose data a new key opens, and which user it acts as.
    pub async fn run(self, at: &At, as_json: bool) -> anyhow::Result<()> {
        let needs = if matches!(self, Self::Add { .. }) { Needs::Store } else { Needs::Sessions };
        let app = at.house(needs).await?;
        match self {
            Self::Add { mut rights, name, history } => {
                rights.sort_unstable();
                rights.dedup();
                let tenant = at.tenant.clone().unwrap_or_default();
                let first = !app.keys.are_there().await?;
                let (key, secret) = app.keys.add(tenant, at.user.clone(), rights, name, history).await?;
                if as_json {
                    let mut shown = view(&key);
                    shown["key"] = json!(secret);
                    return Ok(line(shown.to_string())?);
                }
                line(&secret)?;
                note(format!("this is the key {}, shown this once; clients send `Authorization: Bearer KEY`", key.id));
                if first {
                    note("it is the first one: from now on the server answers nobody without a key");
                }
            }
            Self::List => {
                let keys = app.keys.list().await?;
                if as_json {
                    let data: Vec<Value> = keys.iter().map(view).collect();
                    return Ok(line(json!({"object": "list", "data": data}).to_string())?);
                }
                let now = crate::clock::now();
                let row = |k: &Key| {
                    let user = k.user.as_ref().map_or("any", |u| u.as_str());
                    let rights: Vec<String> = k.rights.iter().map(word).collect();
                    let name = k.name.as_deref().unwrap_or_default();
                    let age = age(&json!(k.created_at), now);
                    [k.id.clone(), clean(name), k.tenant.to_string(), user.to_owned(), rights.join(","), age]
                };
                print(table(["id", "name", "tenant", "user", "rights", "age"], keys.iter().map(row).collect()))?;
            }
            Self::AllowUnauthenticated => {
                app.keys.allow_unauthenticated().await?;
                note("a server on loopback answers without a key now, whoever asks");
            }
            Self::Revoke { ids } => {
                let (mut unknown, mut gone) = (Vec::new(), Vec::new());
                for id in ids {
                    match app.keys.revoke(&id).await? {
                        true if as_json => gone.push(id),
                        true => line(format!("{id} is revoked"))?,
                        false => unknown.push(id),
                    }
                }
                if as_json {
                    line(json!({"revoked": gone, "unknown": unknown}).to_string())?;
                }
                if !unknown.is_empty() {
                    bail!("there is no key {}; `tenure keys list` shows them", clean(&unknown.join(", ")));
                }
            }
        }
        Ok(())
    }
}

fn history(text: &str) -> Result<HistoryMode, String> {
    serde_json::from_value(json!(text)).map_err(|_| "it is auto, full or append".to_owned())
}

fn word(right: &Right) -> String {
    right.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
}

/// A key without its hash.
fn view(key: &Key) -> Value {
    let Key { id, name, tenant, user, rights, created_at, history, .. } = key;
    json!({
        "id": id, "name": name, "tenant": tenant, "user": user, "rights": rights, "created_at": created_at,
        "history": history,
    })
}
