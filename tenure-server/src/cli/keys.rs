//! `tenure keys`: API keys, in the store or through a running server.

use super::client::ApiClient;
use super::output::{age, clean, line, note, print, table};
use super::target::{Needs, TargetArgs};
use crate::auth::Right;
use crate::config::KeyLimits;
use anyhow::bail;
use axum::http::Method;
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use tenure::policy::{HistoryMode, HumanDuration};

/// Commands for API keys.
#[derive(Debug, Subcommand)]
pub enum KeysCommand {
    /// Create a key; its secret is shown once and stored nowhere
    Add(AddKey),
    /// List the keys
    List,
    /// Replace a key by a new one with the same settings
    Rotate {
        /// The key, by its id
        id: String,
        /// How long the old key stays valid
        #[arg(long, value_name = "TIME", default_value = "1h")]
        grace: HumanDuration,
    },
    /// Accept requests without a key again, on loopback; only when no keys are left
    AllowUnauthenticated,
    /// Revoke keys; a running server stops accepting them within two seconds
    Revoke {
        /// The keys, by their ids
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

/// A key to be created.
#[derive(Debug, Args)]
pub struct AddKey {
    /// The rights it grants
    #[arg(long, value_delimiter = ',', default_value = "read,write")]
    rights: Vec<Right>,
    /// A description of its purpose
    #[arg(long, value_name = "TEXT")]
    name: Option<String>,
    /// How the messages of its requests are merged: auto, full or append
    #[arg(long, value_name = "MODE", value_parser = history)]
    history: Option<HistoryMode>,
    /// Lifetime of the key, such as 90d (default: until it is revoked)
    #[arg(long, value_name = "TIME")]
    expires_in: Option<HumanDuration>,
    /// Requests per minute, on each node; 0: unlimited
    #[arg(long, value_name = "N")]
    requests_per_minute: Option<u64>,
    /// Tokens of models per minute, on each node; 0: unlimited
    #[arg(long, value_name = "N")]
    tokens_per_minute: Option<u64>,
    /// Live sessions of its user, else of its tenant; 0: unlimited
    #[arg(long, value_name = "N")]
    max_sessions: Option<u64>,
    /// Bytes stored by its user, else by its tenant; 0: unlimited
    #[arg(long, value_name = "N")]
    max_stored_bytes: Option<u64>,
}

impl KeysCommand {
    /// Executes the command. For a new key, `--tenant` and `--user` are the tenant it grants access to and the user
    /// it is bound to.
    pub async fn run(self, target: &TargetArgs, as_json: bool) -> anyhow::Result<()> {
        if let Self::AllowUnauthenticated = self {
            target.open_store(Needs::Sessions).await?.keys.allow_unauthenticated().await?;
            note("servers on loopback now accept unauthenticated requests");
            return Ok(());
        }
        let needs = if matches!(self, Self::Add(_)) { Needs::Store } else { Needs::Sessions };
        // `--user` is the user a new key is bound to, not the user of this request.
        let client = TargetArgs { user: None, ..target.clone() }.client(needs).await?;
        match self {
            Self::Add(add) => add.run(&client, target, as_json).await,
            Self::List => list(&client, target, as_json).await,
            Self::Rotate { id, grace } => {
                if !is_id(&id) {
                    bail!("there is no key {}; `tenure keys list` shows them", clean(&id));
                }
                let path = format!("/keys/{id}/rotate");
                let key: Value = client.post(&path, &json!({"grace": grace})).await?.json().await?;
                print_key(&key, as_json)
            }
            Self::Revoke { ids } => revoke(&client, ids, as_json).await,
            Self::AllowUnauthenticated => Ok(()),
        }
    }
}

impl AddKey {
    async fn run(self, client: &ApiClient, target: &TargetArgs, as_json: bool) -> anyhow::Result<()> {
        let expires_at = match self.expires_in {
            None => None,
            Some(time) => time.duration().map(|time| crate::clock::now().checked_add(time)).transpose()?,
        };
        let limits = KeyLimits {
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            max_sessions: self.max_sessions,
            max_stored_bytes: self.max_stored_bytes,
        };
        let body = json!({
            "name": self.name, "user": target.user, "rights": self.rights, "history": self.history,
            "expires_at": expires_at, "limits": limits,
        });
        let key: Value = client.post("/keys", &body).await?.json().await?;
        print_key(&key, as_json)?;
        if !as_json && client.is_store() {
            note("servers on this store now require a key for every request");
        }
        Ok(())
    }
}

/// Prints a key that was just created, with its secret.
fn print_key(key: &Value, as_json: bool) -> anyhow::Result<()> {
    let text = |name: &str| key[name].as_str().unwrap_or_default();
    if as_json {
        return Ok(line(key.to_string())?);
    }
    line(text("key"))?;
    note(format!(
        "key {} was created; its secret is shown only once; clients send `Authorization: Bearer KEY`",
        text("id")
    ));
    Ok(())
}

async fn list(client: &ApiClient, target: &TargetArgs, as_json: bool) -> anyhow::Result<()> {
    let all = client.is_store() && target.tenant.is_none();
    let list: Value = client.get(if all { "/keys?tenant=*" } else { "/keys" }).await?;
    if as_json {
        return Ok(line(list.to_string())?);
    }
    let now = crate::clock::now();
    let row = |key: &Value| {
        let text = |name: &str| key[name].as_str().unwrap_or_default();
        let rights: Vec<&str> = key["rights"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let user = key["user"].as_str().unwrap_or("any");
        let used = if key["last_used_at"].is_null() { "never".to_owned() } else { age(&key["last_used_at"], now) };
        let expires = text("expires_at").split('T').next().unwrap_or_default().to_owned();
        let id = text("id").to_owned();
        let name = clean(text("name"));
        let tenant = text("tenant").to_owned();
        [id, name, tenant, user.to_owned(), rights.join(","), age(&key["created_at"], now), used, expires]
    };
    let rows = list["data"].as_array().into_iter().flatten().map(row).collect();
    Ok(print(table(["id", "name", "tenant", "user", "rights", "age", "last used", "expires"], rows))?)
}

async fn revoke(client: &ApiClient, ids: Vec<String>, as_json: bool) -> anyhow::Result<()> {
    let mut unknown = Vec::new();
    let mut revoked = Vec::new();
    for id in ids {
        if !is_id(&id) {
            unknown.push(id);
            continue;
        }
        match client.send(Method::DELETE, &format!("/keys/{id}"), None).await {
            Ok(_) if as_json => revoked.push(id),
            Ok(_) => line(format!("{id} is revoked"))?,
            Err(e) if super::client::ApiRefusal::from_error(&e).is_some_and(|refusal| refusal.status == 404) => {
                unknown.push(id)
            }
            Err(e) => return Err(e),
        }
    }
    if as_json {
        line(json!({"revoked": revoked, "unknown": unknown}).to_string())?;
    }
    if !unknown.is_empty() {
        bail!("there is no key {}; `tenure keys list` shows them", clean(&unknown.join(", ")));
    }
    Ok(())
}

/// Returns true if the text can be the id of a key.
fn is_id(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit())
}

fn history(text: &str) -> Result<HistoryMode, String> {
    serde_json::from_value(json!(text)).map_err(|_| "it is auto, full or append".to_owned())
}
