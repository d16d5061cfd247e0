//! `tenure sessions search`: by title through the list, by what was said through the newest sessions.

use super::client::{Client, Pages, Refused};
use super::show::{self, age, brief, field, line, note, print, short};
use clap::Args;
use serde_json::{Value, json};
use std::collections::HashSet;

/// How much of a text is shown around a match.
const AROUND: usize = 32;

/// What to look for.
#[derive(Debug, Args)]
pub struct Search {
    /// The text, whatever its case
    text: String,
    /// At most so many sessions that match
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Look at what was said in so many of the newest sessions
    #[arg(long, value_name = "N", default_value_t = 1000)]
    limit_sessions: usize,
}

/// Looks, and says how far.
pub async fn run(client: &Client, what: &Search, json: bool) -> anyhow::Result<()> {
    let mut found = Vec::new();
    let mut pages = Pages::new(client, "/sessions", &[("title", &what.text)], what.limit);
    while let Some(session) = pages.next().await? {
        let snippet = snippet(field(&session, "title"), &what.text).unwrap_or_default();
        found.push(hit(&session, Value::Null, "title", snippet));
    }
    let seen: HashSet<String> = found.iter().map(|f| field(f, "id").to_owned()).collect();
    let bar = super::transfer::bar(None, "looked at");
    let mut pages = Pages::new(client, "/sessions", &[], what.limit_sessions);
    let mut looked_at = 0;
    while found.len() < what.limit
        && let Some(session) = pages.next().await?
    {
        (looked_at, _) = (looked_at + 1, bar.inc(1));
        if !seen.contains(field(&session, "id")) {
            found.extend(said(client, &session, &what.text).await?);
        }
    }
    bar.finish_and_clear();
    if json {
        return Ok(line(json!({"object": "list", "data": found, "looked_at": looked_at}).to_string())?);
    }
    let now = crate::clock::now();
    let place = |f: &Value| match f["position"].as_u64() {
        Some(_) => format!("[{}] {}", show::number(f), field(f, "where")),
        None => field(f, "where").to_owned(),
    };
    let row = |f: &Value| {
        let id = short(field(f, "id")).to_owned();
        [
            id,
            age(&f["active_at"], now),
            brief(field(f, "title"), 32),
            place(f),
            brief(field(f, "snippet"), 2 * AROUND + 24),
        ]
    };
    if !found.is_empty() {
        print(show::table(["id", "age", "title", "where", "text"], found.iter().map(row).collect()))?;
    }
    note(format!("{} found; titles of all sessions, and what was said in the {looked_at} newest", found.len()));
    Ok(())
}

/// The first message of a session with the text in it.
async fn said(client: &Client, session: &Value, text: &str) -> anyhow::Result<Option<Value>> {
    let id = field(session, "id");
    let mut pages = Pages::new(client, &format!("/sessions/{id}/messages"), &[], usize::MAX);
    loop {
        let said = match pages.next().await {
            // It went while we were looking.
            Err(e) if Refused::of(&e).is_some_and(|r| [404, 410].contains(&r.status)) => return Ok(None),
            said => said?,
        };
        let Some(said) = said else { return Ok(None) };
        let mut all = show::text(&said["message"]);
        for call in said["message"]["tool_calls"].as_array().into_iter().flatten() {
            all.push('\n');
            all.push_str(&show::call(call));
        }
        if let Some(snippet) = snippet(&all, text) {
            return Ok(Some(hit(session, said["position"].clone(), field(&said["message"], "role"), snippet)));
        }
    }
}

fn hit(session: &Value, position: Value, place: &str, snippet: String) -> Value {
    let (id, title, active_at) = (&session["id"], &session["title"], &session["active_at"]);
    json!({"id": id, "title": title, "active_at": active_at, "position": position, "where": place, "snippet": snippet})
}

/// The text around the first match, whatever the case.
fn snippet(text: &str, wanted: &str) -> Option<String> {
    let (chars, wanted): (Vec<char>, Vec<char>) = (text.chars().collect(), fold(wanted.chars()));
    let folded: Vec<char> = chars.iter().map(|c| c.to_lowercase().next().unwrap_or(*c)).collect();
    let at = match wanted.is_empty() {
        true => return None,
        false => folded.windows(wanted.len()).position(|w| w == wanted)?,
    };
    let (from, to) = (at.saturating_sub(AROUND), (at + wanted.len() + AROUND).min(chars.len()));
    let (before, after) = (if from > 0 { "…" } else { "" }, if to < chars.len() { "…" } else { "" });
    Some(format!("{before}{}{after}", chars[from..to].iter().collect::<String>()))
}

fn fold(text: impl Iterator<Item = char>) -> Vec<char> {
    text.map(|c| c.to_lowercase().next().unwrap_or(c)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snippet_has_the_match_in_it() {
        let long = format!("{} the İstanbul FERRY leaves {}", "x ".repeat(50), "y ".repeat(50));
        let snippet = snippet(&long, "ferry").unwrap();
        assert!(snippet.contains("FERRY") && snippet.starts_with('…') && snippet.ends_with('…'), "{snippet}");
        assert!(snippet.chars().count() <= 5 + 2 * AROUND + 2);
        assert_eq!(super::snippet("Größe", "GRÖ").as_deref(), Some("Größe"));
        assert!(super::snippet("abc", "").is_none() && super::snippet("abc", "abcd").is_none());
    }
}
