//! `tenure sessions search`: full-text search of messages through `GET /search`.

use super::client::{ApiClient, with_query};
use super::output::{self, age, brief, clean, field, line, note, print, short};
use clap::Args;
use serde_json::{Value, json};
use std::io::IsTerminal;

/// What to look for.
#[derive(Debug, Args)]
pub struct SearchArgs {
    /// Words that must all be there; "in quotes" they follow each other, with a star they may go on
    #[arg(required = true, value_name = "WORDS")]
    text: Vec<String>,
    /// At most so many messages
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Only what was said by user, assistant, tool, system or developer
    #[arg(long, value_name = "ROLE")]
    role: Option<String>,
    /// Also in sessions that expired or were deleted
    #[arg(long)]
    all: bool,
}

/// Runs the search, prints the matches, and reports how far it got.
pub async fn run(client: &ApiClient, what: &SearchArgs, json: bool) -> anyhow::Result<()> {
    let (mut found, mut damaged, mut looked_at) = (Vec::new(), Vec::new(), 0);
    let bar = super::transfer::bar(None, "looked at");
    let mut next: Option<String> = None;
    while found.len() < what.limit {
        let mut page = page(client, what, what.limit - found.len(), next.as_deref()).await?;
        looked_at += page["looked_at"].as_u64().unwrap_or(0) as usize;
        bar.set_position(looked_at as u64);
        for (list, name) in [(&mut found, "data"), (&mut damaged, "damaged")] {
            if let Value::Array(more) = page[name].take() {
                list.extend(more);
            }
        }
        next = page["next_cursor"].as_str().map(str::to_owned);
        if next.is_none() {
            break;
        }
    }
    bar.finish_and_clear();
    if json {
        let all =
            json!({"object": "list", "data": found, "next_cursor": next, "looked_at": looked_at, "damaged": damaged});
        return Ok(line(all.to_string())?);
    }
    let (now, bold) = (crate::clock::now(), std::io::stdout().is_terminal());
    for f in &found {
        let place = match f["position"].as_u64() {
            Some(_) => format!("[{}] {}", output::number(f), field(f, "role")),
            None => "title".to_owned(),
        };
        let (id, when) = (short(field(f, "session_id")), age(&f["active_at"], now));
        let head = format!("{id}  {when}  {}  {}", brief(&place, 32), brief(field(f, "title"), 48));
        print(format!("{}\n    {}\n", clean(head.trim_end()), marked(f, bold)))?;
    }
    let more = if next.is_some() { "; there may be more in older ones" } else { "" };
    note(format!("{} found in {}{more}", found.len(), output::count(&looked_at.into(), "session")));
    damaged.iter().filter_map(Value::as_str).for_each(|id| {
        note(format!("{} is damaged and was not looked at; `tenure doctor` says more", clean(id)));
    });
    Ok(())
}

async fn page(client: &ApiClient, what: &SearchArgs, limit: usize, cursor: Option<&str>) -> anyhow::Result<Value> {
    let mut query = vec![("q", what.text.join(" ")), ("limit", limit.min(100).to_string())];
    query.extend(cursor.map(|c| ("cursor", c.to_owned())));
    query.extend(what.role.clone().map(|r| ("role", r)));
    query.extend(what.all.then(|| ("status", "active,paused,expired,deleted".to_owned())));
    match client.get(&with_query("/search", &query)?).await {
        // The server's `max_page` is smaller than the requested limit.
        Err(e) if e.to_string().contains("max_page") => {
            query.retain(|(name, _)| *name != "limit");
            client.get(&with_query("/search", &query)?).await
        }
        page => page,
    }
}

/// Renders the snippet on one line; with `bold`, matches are highlighted.
fn marked(found: &Value, bold: bool) -> String {
    let chars: Vec<char> = field(found, "snippet").chars().collect();
    let plain = |from: usize, to: usize| {
        let piece: String = chars[from.min(chars.len())..to.min(chars.len())].iter().collect();
        clean(&piece).replace(['\n', '\t'], " ")
    };
    let place = |v: &Value| v.as_u64().map_or(0, |n| n as usize);
    let (mut text, mut done) = (String::new(), 0);
    for span in found["highlights"].as_array().into_iter().flatten() {
        let (from, to) = (place(&span[0]).max(done), place(&span[1]).max(done));
        text.push_str(&plain(done, from.max(done)));
        match bold {
            true => text.push_str(&format!("\x1b[1m{}\x1b[0m", plain(from, to.max(from)))),
            false => text.push_str(&plain(from, to.max(from))),
        }
        done = to.max(from);
    }
    text + &plain(done, chars.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_stands_out_and_commands_nothing() {
        let found = json!({"snippet": "the\nÄ ferry\u{1b}[2J to", "highlights": [[4, 5], [6, 11]]});
        assert_eq!(marked(&found, false), "the Ä ferry\u{fffd}[2J to");
        assert_eq!(marked(&found, true), "the \u{1b}[1mÄ\u{1b}[0m \u{1b}[1mferry\u{1b}[0m\u{fffd}[2J to");
        // Highlights that are out of range or malformed are ignored.
        let odd = json!({"snippet": "ab", "highlights": [[1, 99], [0, 1], ["x", null]]});
        assert_eq!(marked(&odd, false), "ab");
    }
}
