//! Terminal output: tables, ages, messages. Stored text never reaches the terminal with control characters.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use jiff::Timestamp;
use serde_json::Value;
use std::borrow::Cow;
use std::io::{self, Write};

/// Writes text to standard output and flushes it. A closed pipe is returned as an error, which `main` handles.
pub fn print(text: impl AsRef<str>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_ref().as_bytes())?;
    out.flush()
}

/// Writes text and a line end to standard output.
pub fn line(text: impl AsRef<str>) -> io::Result<()> {
    print(format!("{}\n", text.as_ref()))
}

/// Writes a diagnostic line to standard error.
pub fn note(text: impl AsRef<str>) {
    // A failure to write to standard error cannot be reported anywhere.
    let _ = writeln!(io::stderr(), "{}", text.as_ref());
}

/// Renders a table without borders. Columns are as wide as their content; columns of numbers are right-aligned.
pub fn table<const N: usize>(header: [&str; N], rows: Vec<[String; N]>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.map(str::to_uppercase));
    let is_numeric = |i: usize| !rows.is_empty() && rows.iter().all(|r| r[i].parse::<u64>().is_ok());
    let right_aligned: Vec<usize> = (0..N).filter(|i| is_numeric(*i)).collect();
    table.add_rows(rows);
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right_aligned.contains(&i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.to_string().lines().map(|l| format!("{}\n", l.trim_end())).collect()
}

/// Renders the time elapsed since a timestamp: `12s`, `5m`, `3h`, `8d`.
pub fn age(at: &Value, now: Timestamp) -> String {
    let Some(at) = at.as_str().and_then(|t| t.parse::<Timestamp>().ok()) else { return "-".to_owned() };
    let seconds = now.duration_since(at).as_secs().max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Abbreviates an id for tables: a generated one to its last twelve digits, which are random.
pub fn short(id: &str) -> &str {
    if uuid::Uuid::parse_str(id).is_ok() && id.len() == 36 { &id[24..] } else { id }
}

/// Quotes a word for a POSIX shell, if that is necessary, so that a printed command can be pasted.
pub fn shell_word(word: &str) -> Cow<'_, str> {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"._:/@%+-".contains(&b);
    if word.bytes().all(is_plain) { word.into() } else { format!("'{}'", word.replace('\'', "'\\''")).into() }
}

/// Renders a text as one line of at most `max` characters.
pub fn brief(text: &str, max: usize) -> String {
    let text = clean(text).split_whitespace().collect::<Vec<_>>().join(" ");
    if text.chars().count() > max { text.chars().take(max.saturating_sub(1)).chain(['…']).collect() } else { text }
}

/// Replaces control characters that a terminal would interpret with U+FFFD; line feeds and tabs stay.
pub fn clean(text: &str) -> String {
    let is_control = |c: char| c.is_control() && c != '\n' && c != '\t';
    // Bidirectional overrides can make a text look like another one.
    let is_bidi = |c: char| matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if is_control(c) || is_bidi(c) { '\u{fffd}' } else { c }).collect()
}

/// Returns a string field of a JSON object, or the empty string if it is absent.
pub fn field<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

/// Renders a count with its noun: `1 message`, `2 messages`.
pub fn count(quantity: &Value, noun: &str) -> String {
    format!("{quantity} {noun}{}", if *quantity == 1 { "" } else { "s" })
}

/// Returns the text of a message's content, with a placeholder for each media part.
pub fn text(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().map(part).collect::<Vec<_>>().join("\n"),
        _ => field(message, "refusal").to_owned(),
    }
}

fn part(part: &Value) -> String {
    match part["text"].as_str() {
        Some(text) => text.to_owned(),
        None => format!("[{}]", part["type"].as_str().unwrap_or("part")),
    }
}

/// Renders a tool call as `name arguments`.
pub fn call(tool_call: &Value) -> String {
    let function = &tool_call["function"];
    let custom = &tool_call["custom"];
    let (name, arguments) = if function.is_object() {
        (&function["name"], &function["arguments"])
    } else {
        (&custom["name"], &custom["input"])
    };
    format!("{} {}", name.as_str().unwrap_or("?"), arguments.as_str().unwrap_or_default())
}

/// The one-based number of a message, as used in positions on the command line.
pub fn number(entry: &Value) -> u64 {
    entry["position"].as_u64().map_or(0, |p| p + 1)
}

/// Renders a message of a session.
pub fn format_message(entry: &Value) -> String {
    let message = &entry["message"];
    let mut header = format!("[{}] {}", number(entry), field(message, "role"));
    if let Some(id) = message["tool_call_id"].as_str() {
        header.push_str(&format!(" ({id})"));
    }
    let mut lines = vec![clean(&header)];
    let body = clean(&text(message));
    lines.extend(body.lines().map(|l| format!("    {l}")));
    for tool_call in message["tool_calls"].as_array().into_iter().flatten() {
        lines.push(clean(&format!("    → {} ({})", call(tool_call), field(tool_call, "id"))));
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn stored_text_cannot_control_the_terminal() {
        assert_eq!(clean("a\x1b[2Jb\u{9b}c\rd\u{202e}e\tf\n"), "a\u{fffd}[2Jb\u{fffd}c\u{fffd}d\u{fffd}e\tf\n");
        assert_eq!(brief("one\n\n two\tthree", 9), "one two …");
        let evil =
            json!({"position": 1, "message": {"role": "tool", "tool_call_id": "\x1b]0;x\x07", "content": "\x1b[31m"}});
        assert!(!format_message(&evil).contains('\x1b'));
    }

    #[test]
    fn ages_and_short_ids() {
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        let ages = [
            "2026-01-02T00:00:05Z",
            "2026-01-01T23:59:00Z",
            "2026-01-01T23:00:00Z",
            "2026-01-01T12:00:00Z",
            "2025-12-01T00:00:00Z",
        ];
        assert_eq!(ages.map(|t| age(&json!(t), now)), ["0s", "60s", "60m", "12h", "32d"]);
        assert_eq!(age(&Value::Null, now), "-");
        assert_eq!(short("019a8c3e-0000-7000-8000-3c6ec5dab1f0"), "3c6ec5dab1f0");
        assert_eq!(short("my-own-name"), "my-own-name");
    }

    #[test]
    fn printed_commands_can_be_pasted() {
        for (word, want) in
            [("trip:1", "trip:1"), ("a b", "'a b'"), ("it's", r"'it'\''s'"), ("会話", "'会話'"), ("$(x)", "'$(x)'")]
        {
            assert_eq!(shell_word(word), want);
        }
    }

    #[test]
    fn tables_are_plain() {
        let table = table(["id", "messages"], vec![["a".into(), "7".into()], ["bcd".into(), "12".into()]]);
        assert_eq!(table, "ID   MESSAGES\na           7\nbcd        12\n");
    }
}
