//! Commands that change one session, and those for assistants, schedules and users: on a store, and on a server.

use super::*;

/// How a command reaches the sessions: the arguments that precede it.
type Target = Vec<String>;

fn run(dir: &Path, target: &Target, args: &[&str]) -> CommandOutput {
    let target: Vec<&str> = target.iter().map(String::as_str).collect();
    tenure(dir, &[&target[..], args].concat())
}

/// Calls a test with the store of a directory, and with a server on it.
fn on_store_and_server(yaml: &str, test: impl Fn(&Path, &Target)) {
    let dir = temp();
    std::fs::write(dir.path().join("tenure.yaml"), yaml).unwrap();
    tenure(dir.path(), &["migrate"]).ok();
    test(dir.path(), &Vec::new());
    let dir = temp();
    std::fs::write(dir.path().join("tenure.yaml"), yaml).unwrap();
    let server = Server::start(dir.path(), "sqlite:tenure.db");
    // The scheme is optional.
    let address = server.url.strip_prefix("http://").unwrap().to_owned();
    test(dir.path(), &vec!["--server".to_owned(), address]);
}

#[test]
fn sessions_are_changed() {
    on_store_and_server("", |dir, at| {
        let import = |id: &str| {
            let lines = "{\"role\":\"system\",\"content\":\"Be kind.\"}\n{\"role\":\"user\",\"content\":\"Where is the\\nferry?\"}\n{\"role\":\"assistant\",\"content\":\"In Dover.\"}\n{\"role\":\"user\",\"content\":\"And the fare?\"}\n{\"role\":\"assistant\",\"content\":\"Ten.\"}\n";
            let args: Vec<&str> =
                at.iter().map(String::as_str).chain(["sessions", "import", "-", "--id", id]).collect();
            run_with_input(command(dir, &args), lines).ok();
        };
        import("one");
        // Without a title of its own, a session is shown with the first words of the first question.
        let list = run(dir, at, &["sessions", "list"]).ok();
        assert!(list.contains("Where is the ferry?"), "{list}");
        assert!(run(dir, at, &["sessions", "show", "one"]).ok().contains("title      Where is the ferry?\n"));
        let shown = run(dir, at, &["sessions", "show", "one", "--json"]).json();
        assert_eq!((&shown["title"], &shown["display_title"]), (&Value::Null, &"Where is the ferry?".into()));
        // It is not a title: it is not found as one.
        assert_eq!(run(dir, at, &["sessions", "list", "--title", "ferry"]).ok().lines().count(), 1);
        assert_eq!(run(dir, at, &["sessions", "title", "one"]).ok(), "\n");
        let set = run(dir, at, &["sessions", "title", "one", "The", "red ferry"]).ok();
        assert_eq!(set, "the title of one is now \"The red ferry\"\n");
        assert_eq!(run(dir, at, &["sessions", "title", "one"]).ok(), "The red ferry\n");
        assert!(run(dir, at, &["sessions", "list", "--title", "red"]).ok().contains("The red ferry"));
        let cleared = run(dir, at, &["sessions", "title", "one", "--clear", "--json"]).json();
        assert_eq!(cleared, json!({"id": "one", "title": null}));

        assert_eq!(run(dir, at, &["sessions", "tag", "one"]).ok(), "");
        assert_eq!(run(dir, at, &["sessions", "tag", "one", "b", "a", "b"]).ok(), "b\na\n");
        let tagged = run(dir, at, &["sessions", "tag", "one", "c", "--remove", "b", "--json"]).json();
        assert_eq!(tagged, json!({"id": "one", "tags": ["a", "c"]}));
        assert!(run(dir, at, &["sessions", "list", "--tag", "c"]).ok().contains("one"));

        assert_eq!(run(dir, at, &["sessions", "pause", "one"]).ok(), "one is paused\n");
        assert!(run(dir, at, &["sessions", "list", "--status", "paused"]).ok().contains("one"));
        let resumed = run(dir, at, &["sessions", "resume", "one", "--json"]).json();
        assert_eq!(resumed["data"][0]["status"], "active");

        let undone = run(dir, at, &["sessions", "undo", "one"]).ok();
        assert_eq!(undone, "one is rewound to message 3; discarded: 2 messages, still in the log\n");
        run(dir, at, &["sessions", "undo", "one", "2"]).fails(1, "one has only 1 turn");
        // What precedes the first question stays.
        assert_eq!(run(dir, at, &["sessions", "undo", "one", "1", "--json"]).json()["position"], 1);
        run(dir, at, &["sessions", "undo", "one"]).fails(1, "one has only 0 turns");
        assert_eq!(run(dir, at, &["sessions", "undo", "one", "0"]).code, 2);

        let trail = run(dir, at, &["sessions", "audit", "one", "--json"]).json();
        assert_eq!((&trail["verified"], &trail["decisions"]), (&true.into(), &json!([])));
        assert!(run(dir, at, &["sessions", "audit", "one"]).ok().starts_with("RECORD "));
        for unknown in [&["undo"][..], &["title"], &["tag"], &["pause"], &["resume"], &["audit"]] {
            run(dir, at, &[&["sessions"], unknown, &["nobody"]].concat()).fails(1, "nobody");
        }
    });
}

#[test]
fn chat_undoes_turns() {
    let dir = temp();
    let out = chat(dir.path(), &["--session", "one"], "first\nsecond\nthird\n/undo 2\nagain\n/undo x\n");
    assert!(out.out.contains("one is rewound to message 2; discarded: 4 messages"), "{}", out.out);
    assert!(out.out.contains("You said: again I see 3 messages."), "{}", out.out);
    out.fails(1, "/undo takes a number of turns");
    assert_eq!(chat(dir.path(), &["one", "--session", "two"], "").code, 2);
}

const DECLARED: &str = "\
models: [{name: big, base_url: 'http://127.0.0.1:1/v1'}]
assistants: [{name: agent, model: big, instructions: You are kind.}]
schedules: [{name: morning, cron: 0 9 * * mon-fri, timezone: Europe/Berlin, assistant: agent, input: Hello}]
";

#[test]
fn assistants_and_schedules_are_shown() {
    on_store_and_server(DECLARED, |dir, at| {
        let list = run(dir, at, &["assistants", "list"]).ok();
        assert_eq!(list.lines().count(), 2, "{list}");
        for part in ["NAME", "agent", "big", "configuration", "You are kind."] {
            assert!(list.contains(part), "{list}");
        }
        assert_eq!(run(dir, at, &["assistants", "list", "--json"]).json()["data"][0]["id"], "agent");
        let shown = run(dir, at, &["assistants", "show", "agent"]).ok();
        assert!(shown.contains("model        big\n") && shown.contains("instructions You are kind.\n"), "{shown}");
        assert_eq!(run(dir, at, &["assistants", "show", "agent", "--json"]).json()["model"], "big");
        run(dir, at, &["assistants", "show", "no/body"]).fails(1, "no/body");

        let list = run(dir, at, &["schedules", "list"]).ok();
        assert_eq!(list.lines().count(), 2, "{list}");
        for part in ["morning", "0 9 * * mon-fri", "Europe/Berlin", "agent", "never"] {
            assert!(list.contains(part), "{list}");
        }
        let next = run(dir, at, &["schedules", "list", "--next", "3", "--json"]).json();
        let times = next["data"][0]["next_times"].as_array().unwrap();
        assert_eq!((times.len(), &times[0]), (3, &next["data"][0]["next_at"]));
        assert!(times.windows(2).all(|pair| pair[0].as_str() < pair[1].as_str()), "{times:?}");
        assert_eq!(run(dir, at, &["schedules", "list", "--next", "3"]).ok().lines().count(), 5);
        assert_eq!(run(dir, at, &["schedules", "list", "--next", "0"]).code, 2);
    });
}

#[test]
fn a_user_is_erased_after_confirmation() {
    on_store_and_server("", |dir, at| {
        let line = "{\"role\":\"user\",\"content\":\"hello\"}\n";
        for (user, id) in [("a/da", "hers"), ("a/da", "hers-too"), ("eve", "other")] {
            let args = ["--user", user, "sessions", "import", "-", "--id", id];
            let args: Vec<&str> = at.iter().map(String::as_str).chain(args).collect();
            run_with_input(command(dir, &args), line).ok();
        }
        run(dir, at, &["users", "erase", "a/da"]).fails(1, "--yes");
        run(dir, at, &["--user", "a/da", "users", "erase", "eve", "--yes"]).fails(1, "without --user");
        assert_eq!(run(dir, at, &["sessions", "list"]).ok().lines().count(), 4);
        let receipt = run(dir, at, &["users", "erase", "a/da", "--yes"]).ok();
        assert!(receipt.starts_with("all data of a/da is erased: 2 sessions, at 20"), "{receipt}");
        let left = run(dir, at, &["sessions", "list", "--json"]).json();
        assert_eq!((left["data"].as_array().unwrap().len(), &left["data"][0]["id"]), (1, &"other".into()));
        let receipt = run(dir, at, &["users", "erase", "nobody", "--yes", "--json"]).json();
        assert_eq!((&receipt["user"], &receipt["sessions"]), (&"nobody".into(), &0.into()));
    });
}

#[test]
fn help_groups_the_global_options() {
    let dir = temp();
    for args in [&["--help"][..], &["sessions", "list", "--help"], &["chat", "-h"]] {
        let help = tenure(dir.path(), args).ok();
        let (own, global) = help.split_once("\nGlobal options:\n").unwrap_or_else(|| panic!("{help}"));
        assert!(global.contains("--server") && !own.contains("--server"), "{help}");
        assert!(own.contains("--help") && !global.contains("--help"), "{help}");
    }
    let script = tenure(dir.path(), &["completions", "bash"]).ok();
    for word in ["undo", "assistants", "schedules", "users"] {
        assert!(script.contains(word), "{word}");
    }
}

/// The threads of a LangGraph database on PostgreSQL become sessions. The password of its URL is never printed.
#[tokio::test]
async fn a_postgresql_database_of_langgraph_is_imported() {
    let Some(schema) = crate::support::PostgresSchema::new() else { return };
    let dump = std::fs::read_to_string(fixture("47_langgraph_postgres.sql")).unwrap();
    schema.execute(&format!("CREATE SCHEMA {}; {dump}", schema.name())).await;
    let url = schema.url();
    let (user, address) = url.strip_prefix("postgres://").and_then(|rest| rest.split_once('@')).unwrap();
    let user = user.split(':').next().unwrap();
    let (url, shown) = (format!("postgres://{user}:sesame@{address}"), format!("postgres://{user}:***@{address}"));
    let dir = temp();
    let dir = dir.path();
    let import = |args: &[&str]| {
        let output = tenure(dir, &[&["sessions", "import"], args].concat());
        assert!(!output.out.contains("sesame") && !output.err.contains("sesame"), "{}{}", output.out, output.err);
        output
    };
    let output = import(&[&url]);
    assert!(output.out.contains(&format!("trip: 7 messages from {shown} (langgraph)\n")), "{}", output.out);
    assert!(output.out.contains("  left out: thread user@example.com: the checkpoints of 1 subgraphs\n"));
    assert!(output.err.contains(&format!("not imported: {shown}: thread deltas, checkpoint 3: ")), "{}", output.err);
    output.fails(1, "1 could not be imported");
    let trip = tenure(dir, &["sessions", "show", "trip", "--json"]).json();
    assert_eq!(trip["messages"][6]["created_at"], "2026-11-18T16:10:06.401962Z", "{trip}");

    let again = import(&[&url, "--json"]);
    let report: Value = serde_json::from_str(&again.out).unwrap();
    assert_eq!((&report["sessions"], &report["duplicate_of"]), (&json!([]), &json!(["trip", "user@example.com"])));
    import(&[&url, "--id", "mine"]).fails(1, "--id applies to a single session");
    import(&["postgres://me:sesame@127.0.0.1:1/db?sslmode=disable"]).fails(1, "could not be imported");
}
