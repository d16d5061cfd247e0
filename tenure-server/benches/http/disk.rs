//! Disk usage of chat turns.

use crate::client::Client;
use crate::servers::{Server, upstream_with};
use crate::*;
use std::path::Path;
use tenure::testing::PostgresSchema;

const TURNS: usize = 400;
const TEXT_BYTES: usize = 1000;

fn size(path: &Path) -> u64 {
    match std::fs::metadata(path) {
        Ok(m) if m.is_dir() => std::fs::read_dir(path).unwrap().map(|e| size(&e.unwrap().path())).sum(),
        Ok(m) => m.len(),
        Err(_) => 0,
    }
}

/// Runs the turns, each with a question and an answer of 1 KB, and stops the server.
async fn chat(store: &str, upstream: &str) {
    let server = Server::start(store, Some(upstream), &[]);
    let mut client = Client::connect(&server.address).await;
    for n in 0..TURNS {
        let body = format!(
            r#"{{"model":"m","session_id":"s","history":"append","messages":[{{"role":"user","content":"{}"}}]}}"#,
            words(TEXT_BYTES, n)
        );
        client.send(&Client::request("POST", "/v1/chat/completions", &body)).await;
    }
    drop(client);
    server.stop();
}

/// 400 chat turns with a question and an answer of 1 KB each, compared with the text of the messages; then the same
/// messages as rows of the database, and what a turn adds to a store that has its tables already.
pub async fn chat_turns(report: &mut Report) {
    let upstream = upstream_with(words(TEXT_BYTES, 7));
    let dir = tempfile::tempdir().unwrap();
    let text = (2 * TURNS * TEXT_BYTES) as u64;
    let kb = |bytes: u64| format!("{} KB", bytes / 1024);
    let mut row = |label: String, bytes: u64, promise| {
        report.row(label, kb(bytes), kb(text), bytes as f64 / text as f64, promise);
    };
    let raw_path = dir.path().join("raw.db");
    let db = raw::open(&raw_path);
    for n in 0..TURNS {
        let messages = [Message::user(&words(TEXT_BYTES, n)), Message::assistant(&words(TEXT_BYTES, 7))];
        raw::commit(&db, 1, n * 2, &messages);
    }
    drop(db);
    row("disk of 400 turns as raw SQLite rows, beside their text".to_owned(), size(&raw_path), Promise::None);
    for kind in ["sqlite", "jsonl"] {
        let path = dir.path().join(kind);
        let store = format!("{kind}:{}", path.display());
        drop(Tenure::open(&store).await.unwrap());
        let empty = size(&path);
        chat(&store, &upstream).await;
        let full = size(&path);
        row(format!("disk of 400 chat turns, {kind}, beside their text"), full, Promise::AtMost(1.35));
        row(format!("of that what the turns added, {kind}"), full - empty, Promise::None);
    }
    let shares = entry_shares(&dir.path().join("sqlite"));
    println!("(bytes of a turn by kind of entry: {shares})");
    let Some(schema) = PostgresSchema::new() else { return };
    drop(Tenure::open(&schema.url()).await.unwrap());
    let size = || {
        let sql = format!(
            "select sum(pg_total_relation_size(c.oid)) from pg_class c join pg_namespace n on n.oid = c.relnamespace \
             where n.nspname = '{}' and c.relkind = 'r'",
            schema.name()
        );
        run("psql", schema.server(), &["-Atqc", &sql]).trim().parse::<u64>().unwrap()
    };
    let empty = size();
    chat(&schema.url(), &upstream).await;
    let full = size();
    row("disk of 400 chat turns, postgres, beside their text".to_owned(), full, Promise::None);
    row("of that what the turns added, postgres".to_owned(), full - empty, Promise::None);
}

/// The bytes of each kind of entry per turn, largest first.
fn entry_shares(path: &Path) -> String {
    let db = rusqlite::Connection::open(path).unwrap();
    let sql = "select substr(entry, 3, instr(substr(entry, 3), '\"') - 1) as kind, sum(length(entry)) as bytes \
               from record group by kind order by bytes desc";
    let mut statement = db.prepare(sql).unwrap();
    let shares = statement.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, i64>(1)?))).unwrap();
    let shares = shares.map(|share| {
        let (kind, bytes) = share.unwrap();
        format!("{kind} {}", bytes / TURNS as i64)
    });
    shares.collect::<Vec<_>>().join(", ")
}
