//! Changes to one session or a few: `tenure sessions undo`, `title`, `tag`, `pause` and `resume`.

use super::client::{ApiClient, session_path};
use super::output::{self, clean, field, line};
use anyhow::bail;
use axum::http::Method;
use serde_json::{Value, json};

/// Rewinds a session to before its last turns. Refused if the session changes meanwhile.
pub async fn undo(client: &ApiClient, id_part: &str, turns: u64, as_json: bool) -> anyhow::Result<()> {
    let id = client.resolve(id_part).await?;
    let rewound = undo_turns(client, id.as_str(), turns).await?;
    line(if as_json { rewound.to_string() } else { rewound_text(id.as_str(), &rewound) })?;
    Ok(())
}

/// Rewinds a session to before its last turns, and returns the response.
pub async fn undo_turns(client: &ApiClient, id: &str, turns: u64) -> anyhow::Result<Value> {
    let session: Value = client.get(&session_path(&id, "")).await?;
    let count = session["turn_count"].as_u64().unwrap_or_default();
    let Some(turn) = count.checked_sub(turns) else {
        bail!("{id} has only {}", output::count(&json!(count), "turn"));
    };
    let body = json!({"turn": turn}).to_string();
    let path = session_path(&id, "/rewind");
    client.send_if(Method::POST, &path, Some(body), session["seq"].as_u64()).await?.json().await
}

/// Describes the outcome of a rewind.
pub fn rewound_text(id: &str, rewound: &Value) -> String {
    let discarded = output::count(&rewound["discarded"], "message");
    let commit = rewound["workspace"]["commit"].as_str();
    let files = commit.map_or_else(String::new, |c| format!("; its workspace is restored to commit {:.12}", c));
    format!("{id} is rewound to message {}; discarded: {discarded}, still in the log{files}", rewound["position"])
}

/// A change of a session's title.
#[derive(Debug)]
pub enum TitleChange {
    /// The title is printed, and not changed.
    Show,
    /// The title is replaced.
    Set(String),
    /// The title is removed.
    Clear,
}

impl TitleChange {
    /// Creates the change from the words of a command line.
    pub fn from_words(words: &[String]) -> Self {
        if words.is_empty() { Self::Show } else { Self::Set(words.join(" ")) }
    }
}

/// Shows, sets or removes the title of a session.
pub async fn title(client: &ApiClient, id_part: &str, change: TitleChange, as_json: bool) -> anyhow::Result<()> {
    let id = client.resolve(id_part).await?;
    let path = session_path(&id, "");
    let (session, text): (Value, String) = match change {
        TitleChange::Show => {
            let session: Value = client.get(&path).await?;
            let title = clean(field(&session, "title"));
            (session, title)
        }
        TitleChange::Set(title) => {
            let body = json!({"title": title}).to_string();
            let session = client.send(Method::PATCH, &path, Some(body)).await?.json().await?;
            (session, format!("the title of {id} is now {:?}", clean(&title)))
        }
        TitleChange::Clear => {
            let body = json!({"title": null}).to_string();
            let session = client.send(Method::PATCH, &path, Some(body)).await?.json().await?;
            (session, format!("{id} has no title"))
        }
    };
    if as_json {
        line(json!({"id": id, "title": session["title"]}).to_string())?;
    } else {
        line(text)?;
    }
    Ok(())
}

/// Adds and removes tags of a session, or prints them if none are given. Refused if the session changes meanwhile.
pub async fn tag(
    client: &ApiClient,
    id_part: &str,
    added: &[String],
    removed: &[String],
    as_json: bool,
) -> anyhow::Result<()> {
    let id = client.resolve(id_part).await?;
    let path = session_path(&id, "");
    let mut session: Value = client.get(&path).await?;
    let before = tags(&session);
    let mut after: Vec<String> = before.iter().filter(|t| !removed.contains(t)).cloned().collect();
    for tag in added {
        if !after.contains(tag) {
            after.push(tag.clone());
        }
    }
    if after != before {
        let body = json!({"tags": after}).to_string();
        let seq = session["seq"].as_u64();
        session = client.send_if(Method::PATCH, &path, Some(body), seq).await?.json().await?;
    }
    if as_json {
        line(json!({"id": id, "tags": session["tags"]}).to_string())?;
    } else {
        tags(&session).iter().try_for_each(|tag| line(clean(tag)))?;
    }
    Ok(())
}

fn tags(session: &Value) -> Vec<String> {
    session["tags"].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Pauses or resumes sessions.
pub async fn set_status(client: &ApiClient, id_parts: &[String], status: &str, as_json: bool) -> anyhow::Result<()> {
    let mut results = Vec::new();
    for id_part in id_parts {
        let id = client.resolve(id_part).await?;
        let body = json!({"status": status}).to_string();
        let session: Value = client.send(Method::PATCH, &session_path(&id, ""), Some(body)).await?.json().await?;
        if as_json {
            results.push(session);
        } else {
            line(format!("{id} is {}", field(&session, "status")))?;
        }
    }
    if as_json {
        line(json!({"object": "list", "data": results}).to_string())?;
    }
    Ok(())
}
