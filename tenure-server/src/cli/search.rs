//! `tenure sessions search`: full-text search of messages through `GET /search`.

use super::client::{ApiClient, with_query};
use super::output::{self, age, brief, clean, field, line, note, print, short};
use clap::Args;
use serde_json::{Value, json};
use std::io::IsTerminal;

/// The query and its filters.
#[derive(Debug, Args)]
pub struct SearchArgs {
    /// Words that must all occur; "in quotes" as a phrase, with a trailing * as a prefix
    #[arg(required = true, value_name = "WORDS")]
    text: Vec<String>,
    /// Maximum number of messages
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Only messages with this role: user, assistant, tool, system or developer
    #[arg(long, value_name = "ROLE")]
    role: Option<String>,
    /// The order of the matches: time (newest first) or relevance (best first, of the newest 1,000)
    #[arg(long, value_name = "ORDER", default_value = "time", value_parser = ["time", "relevance"])]
    sort: String,
    /// Also in sessions that expired or were deleted
    #[arg(long)]
    all: bool,
}

/// Runs the search, prints the matches, and reports how far it got.
pub async fn run(client: &ApiClient, args: &SearchArgs, json: bool) -> anyhow::Result<()> {
    let mut hits = Vec::new();
    let mut damaged = Vec::new();
    let mut scanned = 0;
    let bar = super::transfer::bar(None, "sessions searched");
    let mut next: Option<String> = None;
    while hits.len() < args.limit {
        let mut page = page(client, args, args.limit - hits.len(), next.as_deref()).await?;
        scanned += page["looked_at"].as_u64().unwrap_or(0) as usize;
        bar.set_position(scanned as u64);
        for (list, name) in [(&mut hits, "data"), (&mut damaged, "damaged")] {
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
            json!({"object": "list", "data": hits, "next_cursor": next, "looked_at": scanned, "damaged": damaged});
        return Ok(line(all.to_string())?);
    }
    let now = crate::clock::now();
    let bold = std::io::stdout().is_terminal();
    for f in &hits {
        let location = match f["position"].as_u64() {
            Some(_) => format!("[{}] {}", output::number(f), field(f, "role")),
            None => "title".to_owned(),
        };
        let id = short(field(f, "session_id"));
        let activity_age = age(&f["active_at"], now);
        let header = format!("{id}  {activity_age}  {}  {}", brief(&location, 32), brief(field(f, "title"), 48));
        print(format!("{}\n    {}\n", clean(header.trim_end()), highlight(f, bold)))?;
    }
    let more = if next.is_some() { "; there may be more in older ones" } else { "" };
    note(format!("{} found in {}{more}", hits.len(), output::count(&scanned.into(), "session")));
    damaged.iter().filter_map(Value::as_str).for_each(|id| {
        note(format!("{} is damaged and was not searched; run `tenure doctor` for details", clean(id)));
    });
    Ok(())
}

async fn page(client: &ApiClient, args: &SearchArgs, limit: usize, cursor: Option<&str>) -> anyhow::Result<Value> {
    let mut query = vec![("q", args.text.join(" ")), ("limit", limit.min(100).to_string())];
    query.extend(cursor.map(|c| ("cursor", c.to_owned())));
    query.extend(args.role.clone().map(|r| ("role", r)));
    query.extend((args.sort != "time").then(|| ("sort", args.sort.clone())));
    query.extend(args.all.then(|| ("status", "active,paused,expired,deleted".to_owned())));
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
fn highlight(hit: &Value, bold: bool) -> String {
    let chars: Vec<char> = field(hit, "snippet").chars().collect();
    let plain = |from: usize, to: usize| {
        let piece: String = chars[from.min(chars.len())..to.min(chars.len())].iter().collect();
        clean(&piece).replace(['\n', '\t'], " ")
    };
    let index = |v: &Value| v.as_u64().map_or(0, |n| n as usize);
    let mut text = String::new();
    let mut end = 0;
    for span in hit["highlights"].as_array().into_iter().flatten() {
        let from = index(&span[0]).max(end);
        let to = index(&span[1]).max(end);
        text.push_str(&plain(end, from.max(end)));
        if bold {
            text.push_str(&format!("\x1b[1m{}\x1b[0m", plain(from, to.max(from))));
        } else {
            text.push_str(&plain(from, to.max(from)));
        }
        end = to.max(from);
    }
    text + &plain(end, chars.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn highlights_are_bold_and_control_characters_are_replaced() {
        let hit = json!({"snippet": "the\nÄ ferry\u{1b}[2J to", "highlights": [[4, 5], [6, 11]]});
        assert_eq!(highlight(&hit, false), "the Ä ferry\u{fffd}[2J to");
        assert_eq!(highlight(&hit, true), "the \u{1b}[1mÄ\u{1b}[0m \u{1b}[1mferry\u{1b}[0m\u{fffd}[2J to");
        // Highlights that are out of range or malformed are ignored.
        let invalid = json!({"snippet": "ab", "highlights": [[1, 99], [0, 1], ["x", null]]});
        assert_eq!(highlight(&invalid, false), "ab");
    }
}
