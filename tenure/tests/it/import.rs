//! Imports of foreign formats, by example: each fixture is a file written by another program, and
//! `NAME.want` describes the expected result. A new case is a new file; `TENURE_WRITE_WANT=1` writes its `.want`, which is
//! read before it is committed.

use crate::support::{ada, id, raw};
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use tenure::import::{
    ImportFormat, ImportedSession, SkippedPart, read, read_database, read_postgres, to_mistralrs, to_mistralrs_tagged,
};
use tenure::testing::PostgresSchema;
use tenure::{policy::*, rules::*, session::*, *};

fn fixtures() -> Vec<PathBuf> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/foreign");
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().path()).collect();
    // Dumps of PostgreSQL databases have a test of their own.
    files.retain(|f| f.extension().is_some_and(|e| e != "want" && e != "sql"));
    files.sort();
    assert!(files.len() > 20, "the fixtures are there");
    files
}

fn texts() -> Vec<String> {
    let files = fixtures().into_iter().filter(|f| f.extension().is_some_and(|e| e != "db"));
    files.map(|f| std::fs::read_to_string(f).unwrap()).collect()
}

fn describe_error(e: &Error) -> String {
    match e {
        Error::Invalid { param, message } => format!("error at `{param}`: {message}\n"),
        other => format!("error: {other}\n"),
    }
}

/// A textual description of an imported session.
fn describe_session(foreign: &ImportedSession) -> String {
    let mut text = format!("{}\n", foreign.format);
    let info = serde_json::to_value(Export { messages: Vec::new(), ..foreign.export.clone() }).unwrap();
    for (name, value) in info.as_object().unwrap() {
        if name != "messages" && (name != "tenure" || value != 0) {
            writeln!(text, "  {name}: {value}").unwrap();
        }
    }
    foreign.export.messages.iter().for_each(|m| writeln!(text, "  {}", m.as_str()).unwrap());
    foreign
        .skipped
        .iter()
        .for_each(|SkippedPart { location, reason, .. }| writeln!(text, "  left out: {location}: {reason}").unwrap());
    text
}

#[test]
fn fixtures_have_the_expected_result() {
    for file in fixtures() {
        let parsed = if file.extension().is_some_and(|e| e == "db") {
            read_database(&file)
        } else {
            read(&std::fs::read_to_string(&file).unwrap(), None)
        };
        check_result(&file, &parsed);
    }
}

/// Compares what a fixture became with its `.want`.
fn check_result(file: &Path, parsed: &Result<Vec<Result<ImportedSession>>>) {
    let got = match parsed {
        Err(e) => describe_error(e),
        Ok(sessions) => {
            let each = |(i, s): (usize, &Result<ImportedSession>)| {
                format!("session {}: {}", i + 1, s.as_ref().map_or_else(describe_error, describe_session))
            };
            sessions.iter().enumerate().map(each).collect()
        }
    };
    let want = std::fs::read_to_string(file.with_extension("want")).unwrap_or_default();
    if std::env::var_os("TENURE_WRITE_WANT").is_some() {
        return std::fs::write(file.with_extension("want"), &got).unwrap();
    }
    assert!(got == want, "{} became\n{got}", file.display());
}

/// Parsed sessions can be imported and shown to a model.
#[tokio::test]
async fn parsed_sessions_can_be_imported() {
    let tenure = Tenure::open("memory:").await.unwrap();
    let files = texts().into_iter().filter_map(|t| read(&t, None).ok()).flatten();
    for (i, foreign) in files.flatten().enumerate() {
        let x = id(&format!("s{i}"));
        tenure.import(&ada(), &x, foreign.export.clone(), None).await.unwrap();
        let session = tenure.load(&ada(), &x).await.unwrap();
        assert_eq!(crate::support::texts(&session), raw(&foreign.export.messages));
        assert!(is_valid(&history(&session, &Window::default())));
    }
}

#[test]
fn a_hint_selects_the_format() {
    let text = r#"{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]}"#;
    let read = |hint| read(text, hint).unwrap().remove(0).unwrap();
    assert_eq!(read(None).format, ImportFormat::OpenAi);
    assert_eq!(read(None).skipped, []);
    assert_eq!(read(Some(ImportFormat::MistralRs)).skipped[0].location, "messages[0].content[0]");
    assert_eq!("claude-code".parse::<ImportFormat>().unwrap(), ImportFormat::ClaudeCode);
    assert!("word".parse::<ImportFormat>().unwrap_err().to_string().contains("tenure, openai, mistralrs"));
}

/// Reads a file that is not a database, and a database in use, whose newest rows are in its
/// write-ahead log.
#[test]
fn databases_of_the_agents_sdk() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("text"), "hello ".repeat(1000)).unwrap();
    rusqlite::Connection::open(path("other.db")).unwrap().execute_batch("CREATE TABLE t (x)").unwrap();
    for (name, code) in [("text", "invalid"), ("other.db", "invalid"), ("none.db", "unavailable")] {
        assert_eq!(read_database(path(name)).unwrap_err().code(), code, "{name}");
    }
    let special_path = path("a%20b?c#d.db");
    let db = fixtures().into_iter().find(|f| f.ends_with("40_agents_sdk.db")).unwrap();
    std::fs::copy(&db, &special_path).unwrap();
    let writer = rusqlite::Connection::open(&special_path).unwrap();
    writer.execute_batch("PRAGMA foreign_keys = OFF").unwrap();
    let item = r#"{"role": "user", "content": "newest"}"#;
    let sql = "INSERT INTO agent_messages (session_id, message_data) VALUES ('trip-to-rome', ?1), ('no row', ?1)";
    writer.execute(sql, [item]).unwrap();
    let sessions = read_database(&special_path).unwrap();
    let last = |i: usize| sessions[i].as_ref().unwrap().export.messages.last().unwrap().text();
    assert_eq!((sessions.len(), last(0), last(3)), (4, "newest".to_owned(), "newest".to_owned()));
    let sql = "CREATE TABLE message_structure (message_id, branch_id);
               INSERT INTO message_structure SELECT max(id), 'b2' FROM agent_messages WHERE session_id = 'trip-to-rome'";
    writer.execute_batch(sql).unwrap();
    let branched = read_database(&special_path).unwrap().remove(0).unwrap();
    assert_eq!(branched.export.messages.last().unwrap().text(), "The Colosseum.");
    assert_eq!(branched.skipped.last().unwrap().location, "message_structure");
}

/// Databases in which any byte of a value was changed never cause a panic, and other sessions are still read.
#[test]
fn damaged_databases_never_panic() {
    let dir = tempfile::tempdir().unwrap();
    for (name, table, column) in [
        ("43_langgraph.db", "checkpoints", "checkpoint"),
        ("44_adk.db", "events", "event_data"),
        ("40_agents_sdk.db", "agent_messages", "message_data"),
    ] {
        let original = fixtures().into_iter().find(|f| f.ends_with(name)).unwrap();
        let copy = dir.path().join(name);
        std::fs::copy(&original, &copy).unwrap();
        let db = rusqlite::Connection::open(&copy).unwrap();
        let sql = format!("SELECT rowid, CAST({column} AS BLOB) FROM {table} ORDER BY rowid DESC LIMIT 1");
        let (row, bytes): (i64, Vec<u8>) = db.query_row(&sql, [], |r| Ok((r.get(0)?, r.get(1)?))).unwrap();
        for i in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[i] = damaged[i].wrapping_mul(31).wrapping_add(i as u8 | 1);
            db.execute(&format!("UPDATE {table} SET {column} = ?1 WHERE rowid = ?2"), (damaged, row)).unwrap();
            let read = read_database(&copy).unwrap();
            assert!(read.iter().any(Result::is_ok), "{name}: byte {i}");
        }
    }
}

/// The dump of a database of `langgraph-checkpoint-postgres` 3.2.0, in a schema of its own.
async fn langgraph_schema() -> Option<PostgresSchema> {
    let schema = PostgresSchema::new()?;
    let dump = include_str!("../fixtures/foreign/47_langgraph_postgres.sql");
    schema.execute(&format!("CREATE SCHEMA {}; {dump}", schema.name())).await;
    Some(schema)
}

async fn read_threads(schema: &PostgresSchema) -> Result<Vec<Result<ImportedSession>>> {
    let mut import = read_postgres(&schema.url()).await?;
    let mut sessions = Vec::new();
    while let Some(session) = import.next_session().await? {
        sessions.push(session);
    }
    assert_eq!(import.total(), sessions.len() as u64);
    assert!(import.next_session().await?.is_none(), "it stays at the end");
    Ok(sessions)
}

fn session_of<'a>(sessions: &'a [Result<ImportedSession>], id: &str) -> &'a ImportedSession {
    let has_id = |s: &&ImportedSession| s.export.session_id.as_ref().is_some_and(|own| own.as_str() == id);
    sessions.iter().flatten().find(has_id).unwrap()
}

#[tokio::test]
async fn langgraph_checkpoints_in_postgresql() {
    let Some(schema) = langgraph_schema().await else { return };
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/foreign/47_langgraph_postgres.sql");
    let sessions = read_threads(&schema).await.unwrap();
    check_result(&file, &Ok(sessions));
}

/// Threads and checkpoints are read in pages; the newest checkpoint has the messages, and messages keep their times.
#[tokio::test]
async fn langgraph_databases_of_several_pages() {
    let Some(schema) = langgraph_schema().await else { return };
    let sql = "INSERT INTO checkpoints
            SELECT 'copy-' || n, checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata
            FROM checkpoints, generate_series(1, 230) n WHERE thread_id = 'trip';
        INSERT INTO checkpoint_blobs SELECT 'copy-' || n, checkpoint_ns, channel, version, type, blob
            FROM checkpoint_blobs, generate_series(1, 230) n WHERE thread_id = 'trip';
        INSERT INTO checkpoints SELECT thread_id, '', 'x-' || to_char(n, '000'), checkpoint_id, type,
                jsonb_set(checkpoint, '{ts}', '\"2026-11-19T00:00:00Z\"'), metadata
            FROM checkpoints, generate_series(1, 50) n
            WHERE thread_id = 'trip' AND checkpoint_id = (SELECT max(checkpoint_id) FROM checkpoints
                WHERE thread_id = 'trip');";
    schema.execute(sql).await;
    let sessions = read_threads(&schema).await.unwrap();
    assert_eq!((sessions.len(), sessions.iter().filter(|s| s.is_ok()).count()), (233, 232));
    assert_eq!(session_of(&sessions, "copy-230").export.messages, session_of(&sessions, "trip").export.messages);
    assert_eq!(
        session_of(&sessions, "copy-230").export.message_times,
        session_of(&sessions, "trip").export.message_times
    );
    assert!(session_of(&sessions, "trip").skipped.iter().any(|s| s.reason.starts_with("57 earlier checkpoints")));

    // The newest checkpoint, on the last page, refers to an earlier version.
    let sql = "UPDATE checkpoints c SET checkpoint = jsonb_set(checkpoint, '{channel_versions,messages}', to_jsonb(
            (SELECT min(version) FROM checkpoint_blobs b WHERE b.thread_id = 'trip' AND b.channel = 'messages')))
        WHERE thread_id = 'trip' AND checkpoint_id = 'x- 050'";
    schema.execute(sql).await;
    let sessions = read_threads(&schema).await.unwrap();
    assert_eq!(session_of(&sessions, "trip").export.messages.len(), 2);
    assert_eq!(session_of(&sessions, "copy-1").export.messages.len(), 7);
}

/// A value that cannot be decoded is an error of its thread only, and a database of another form one of the database.
#[tokio::test]
async fn invalid_langgraph_databases_in_postgresql() {
    let Some(schema) = langgraph_schema().await else { return };
    for (damage, reason) in [
        ("UPDATE checkpoint_blobs SET blob = '\\xc1' WHERE thread_id = 'trip'", "the byte 0xc1 is not used"),
        ("UPDATE checkpoint_blobs SET type = 'pickle' WHERE thread_id = 'trip'", "the encoding \"pickle\" is not"),
        ("UPDATE checkpoint_blobs SET type = 'json', blob = '7' WHERE thread_id = 'trip'", "not a list"),
        ("DELETE FROM checkpoint_blobs WHERE thread_id = 'trip'", "DeltaChannel"),
    ] {
        schema.execute(damage).await;
        let sessions = read_threads(&schema).await.unwrap();
        let Err(Error::Invalid { param, message }) = &sessions[0] else { panic!("{damage}: {:?}", sessions[0]) };
        assert_eq!(param, "thread trip, checkpoint 8", "{damage}");
        assert!(message.contains(reason), "{damage}: {message}");
        assert!(sessions[1].is_ok(), "{damage}");
    }
    // A checkpoint of an unknown form does not end the transaction.
    schema.execute("UPDATE checkpoints SET checkpoint = '{\"channel_values\": 7, \"channel_versions\": []}'").await;
    assert!(read_threads(&schema).await.unwrap().iter().all(|s| s.as_ref().unwrap().export.messages.is_empty()));
    // As the tables of `ShallowPostgresSaver` are.
    schema.execute("ALTER TABLE checkpoint_blobs DROP COLUMN version").await;
    let e = read_threads(&schema).await.unwrap_err();
    assert!(e.code() == "invalid" && e.to_string().contains("is not a checkpoint database of LangGraph"), "{e}");
    for (url, code) in [
        ("postgres://me:sesame@127.0.0.1:1/db?sslmode=disable", "unavailable"),
        ("postgres://me:sesame@127.0.0.1/db?sslmode=sesame", "invalid"),
    ] {
        let e = read_postgres(url).await.unwrap_err();
        assert_eq!(e.code(), code, "{e}");
        assert!(!format!("{e} {e:?}").contains("sesame"), "{e:?}");
    }
}

mod properties {
    use super::*;
    use proptest::prelude::*;

    const HINTS: [Option<ImportFormat>; 7] = [
        None,
        Some(ImportFormat::Tenure),
        Some(ImportFormat::OpenAi),
        Some(ImportFormat::MistralRs),
        Some(ImportFormat::ClaudeCode),
        Some(ImportFormat::Responses),
        Some(ImportFormat::ChatGpt),
    ];

    fn read_with_every_hint(text: &str) {
        for hint in HINTS {
            for foreign in read(text, hint).into_iter().flatten().flatten() {
                to_mistralrs(&foreign.export).unwrap();
            }
        }
    }

    fn any_data() -> impl Strategy<Value = String> {
        use base64::Engine;
        let bytes = prop_oneof![prop::collection::vec(any::<u8>(), 0..12), prop::collection::vec(0u8..3, 900..1200)];
        bytes.prop_map(|b| base64::engine::general_purpose::STANDARD.encode(b))
    }

    fn any_part() -> impl Strategy<Value = serde_json::Value> {
        let url = |kind: &'static str| any_data().prop_map(move |d| format!("data:{kind};base64,{d}"));
        prop_oneof![
            ".{0,12}".prop_map(|t| json!({"type": "text", "text": t})),
            url("image/png").prop_map(|u| json!({"type": "image_url", "image_url": {"url": u}})),
            url("image/webp").prop_map(|u| json!({"type": "image_url", "image_url": u})),
            url("video/mp4").prop_map(|u| json!({"type": "video_url", "video_url": {"url": u}})),
            any_data().prop_map(|d| json!({"type": "input_audio", "input_audio": {"data": d, "format": "wav"}})),
            any_data().prop_map(|d| json!({"type": "file", "file": {"filename": "a", "file_data": d}})),
            Just(json!({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})),
        ]
    }

    /// Content parts that only our own exports preserve.
    fn any_own_part() -> impl Strategy<Value = serde_json::Value> {
        let parts = [json!({"type": "image"}), json!({"type": "video"}), json!({"type": "own", "Left": {"Right": []}})];
        prop::sample::select(parts.to_vec())
    }

    fn any_message(with_own_parts: bool) -> impl Strategy<Value = Message> {
        let part =
            if with_own_parts { prop_oneof![3 => any_part(), 1 => any_own_part()].boxed() } else { any_part().boxed() };
        let parts_message =
            (prop::sample::select(vec!["user", "assistant", "system"]), prop::collection::vec(part, 0..4));
        let message = |v| Message::from_value(&v).unwrap();
        prop_oneof![
            ".{0,20}".prop_map(|t| Message::user(&t)),
            parts_message.prop_map(move |(role, parts)| message(json!({"role": role, "content": parts}))),
            ("[a-c]", ".{0,9}").prop_map(move |(id, args)| {
                let call = json!({"id": id, "type": "function", "function": {"name": "f", "arguments": args}});
                message(json!({"role": "assistant", "content": null, "tool_calls": [call]}))
            }),
            ("[a-c]", ".{0,9}").prop_map(|(id, text)| Message::tool(&id, &text)),
            Just(
                Message::parse(
                    r#"{ "n":1.10, "role" : "user","content":"\u00e9\u0000","big":12345678901234567890123,"z":null }"#
                )
                .unwrap()
            ),
        ]
    }

    fn any_export(with_own_parts: bool) -> impl Strategy<Value = Export> {
        let words = (prop::option::of("[a-z]{1,9}"), prop::option::of(".{1,9}"), prop::collection::vec(".{0,5}", 0..3));
        let lists = (prop::collection::vec(any_message(with_own_parts), 0..9), prop::collection::vec(0usize..9, 0..3));
        (words, lists, 0u32..=EXPORT_FORMAT).prop_map(|((id, title, tags), (messages, positions), tenure)| {
            let clamped = |p: &usize| (*p).min(messages.len());
            let checkpoint = |p| ExportedCheckpoint {
                label: CheckpointLabel::new(format!("at {}", clamped(p))).unwrap(),
                position: clamped(p),
                auto: clamped(p) % 2 == 0,
                created_at: "2026-01-01T00:00:00.000001Z".parse().ok(),
                state: json!({"n": clamped(p)}).as_object().unwrap().clone(),
            };
            Export {
                tenure,
                session_id: id.map(|i| SessionId::new(i).unwrap()),
                created_at: "2026-01-01T00:00:00Z".parse().ok(),
                model: title.clone(),
                title,
                metadata: tags.iter().map(|t| (t.clone(), json!([t]))).collect(),
                tags,
                instruction_positions: positions.clone(),
                checkpoints: positions.iter().map(checkpoint).collect(),
                messages,
                ..Export::default()
            }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// An export for mistral.rs round-trips byte for byte.
        #[test]
        fn exports_round_trip(export in any_export(true)) {
            let json = to_mistralrs(&export).unwrap();
            let value: serde_json::Value = serde_json::from_str(json.get()).unwrap();
            for list in ["messages", "images", "videos", "files"] {
                prop_assert!(value[list].is_array());
            }
            let plain = serde_json::to_string(&export).unwrap();
            for text in [json.get(), &plain] {
                let mut read = read(text, None).unwrap();
                prop_assert_eq!(read.len(), 1);
                let foreign = read.remove(0).unwrap();
                prop_assert_eq!(&foreign.skipped, &[]);
                prop_assert_eq!(&foreign.export, &export);
            }
        }

        /// An export in the tagged form of mistral.rs is read back with the same roles, texts, calls and results.
        #[test]
        fn tagged_exports_round_trip(export in any_export(false)) {
            let (text, _) = to_mistralrs_tagged(&export).unwrap();
            let foreign = read(&text, None).unwrap().remove(0).unwrap();
            prop_assert_eq!(foreign.format, ImportFormat::MistralRs);
            prop_assert_eq!(&foreign.skipped, &[]);
            let describe = |m: &Message| (m.role(), m.text(), m.tool_call_id(), m.tool_calls().into_iter().map(|c| (c.id, c.name)).collect::<Vec<_>>());
            let all = |list: &[Message]| list.iter().map(describe).collect::<Vec<_>>();
            prop_assert_eq!(all(&foreign.export.messages), all(&export.messages));
        }

        /// Media that are listed and also part of a message are not duplicated.
        #[test]
        fn media_are_not_duplicated(export in any_export(false)) {
            let text = to_mistralrs(&export).unwrap();
            let text = text.get().replacen(&format!(r#"{{"tenure":{},"#, export.tenure), "{", 1);
            let foreign = read(&text, None).unwrap().remove(0).unwrap();
            prop_assert_eq!(foreign.format, ImportFormat::MistralRs);
            prop_assert_eq!(&foreign.skipped, &[]);
            prop_assert_eq!(&foreign.export.messages, &export.messages);
        }

        #[test]
        fn arbitrary_text_never_panics(text in any::<String>(), json in r#"[\[\]{}",:\\ \n0-9a-z]{0,80}"#) {
            read_with_every_hint(&text);
            read_with_every_hint(&json);
        }

        /// Fixtures with a part removed, duplicated or replaced never cause a panic.
        #[test]
        fn damaged_fixtures_never_panic(
            fixture in any::<prop::sample::Index>(),
            edits in prop::collection::vec((any::<prop::sample::Index>(), 0usize..40, any::<prop::sample::Index>()), 1..4),
        ) {
            let replacements = ["", "null", "{}", "[]", "\"x\"", "-1e999", "{\"Left\":1}", "\\ud800", "}", ",", "\n", "[[", "\u{feff}", "messages", "type"];
            let all = texts();
            let mut text: Vec<char> = fixture.get(&all).chars().collect();
            for (from, len, replacement) in edits {
                let from = from.index(text.len() + 1);
                let to = (from + len).min(text.len());
                text.splice(from..to, replacement.get(&replacements).chars());
            }
            read_with_every_hint(&text.iter().collect::<String>());
        }
    }
}
