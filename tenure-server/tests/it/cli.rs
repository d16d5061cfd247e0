//! The command line, as users and scripts use it: the real binary, on stores and against a running server.

mod check;
mod commands;

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// The outcome of a command.
struct CommandOutput {
    code: i32,
    out: String,
    err: String,
}

impl CommandOutput {
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(self.code, 0, "out: {}\nerr: {}", self.out, self.err);
        self.out
    }

    #[track_caller]
    fn json(self) -> Value {
        let out = self.ok();
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
    }

    /// Asserts that it failed with one line that contains this text.
    #[track_caller]
    fn fails(self, code: i32, message: &str) {
        assert_eq!(self.code, code, "out: {}\nerr: {}", self.out, self.err);
        let last = self.err.lines().rfind(|l| l.starts_with("error: ")).unwrap_or_else(|| panic!("{}", self.err));
        assert!(last.contains(message), "{last}");
    }
}

fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenure"));
    for name in ["TENURE_SERVER", "TENURE_KEY", "TENURE_STORE", "TENURE_CONFIG"] {
        command.env_remove(name);
    }
    command.args(args).current_dir(dir).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run_with_input(mut command: Command, input: &str) -> CommandOutput {
    let mut child = command.spawn().unwrap();
    // It may exit before it has read all input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    CommandOutput { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
}

fn tenure(dir: &Path, args: &[&str]) -> CommandOutput {
    run_with_input(command(dir, args), "")
}

fn chat(dir: &Path, args: &[&str], input: &str) -> CommandOutput {
    run_with_input(command(dir, &[&["chat"], args].concat()), input)
}

/// A running server.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(dir: &Path, store: &str) -> Self {
        let mut command = command(dir, &["--store", store, "serve", "--listen", "127.0.0.1:0"]);
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        let url = first.strip_prefix("listening on ").unwrap().to_owned();
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, url }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls until a condition holds, for at most a minute.
fn wait_until(description: &str, mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed() < std::time::Duration::from_secs(60), "timed out waiting until {description}");
        std::thread::sleep(std::time::Duration::from_millis(50)); // polling interval
    }
}

fn temp() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tenure/tests/fixtures/foreign").join(name)
}

#[test]
fn chat_over_a_pipe() {
    let dir = temp();
    let input = "Hello there\nCALL weather {\"city\":\"Paris\"}\nsunny\nmulti\\\nline\n/title The red ferry\n/checkpoint here\n\
        /checkpoints\n/fork 2\nin the fork\n/rewind turn:1\n//literal\n/new\nfresh\n/sessions\n/switch one\n/history 1\n/quit\nnever said\n";
    let output = chat(dir.path(), &["one"], input);
    assert!(output.err.contains("new session one\n"), "{}", output.err);
    let out = output.ok();
    for want in [
        "You said: Hello there I see 1 message.\n→ weather {\"city\":\"Paris\"}\nThe tool said: sunny I see 5 messages.\n",
        "You said: multi\nline I see 7 messages.\n",
        "checkpoint here after message 8\n",
        "turn-1                  2",
        "You said: in the fork I see 3 messages.\n",
        "is rewound to message 2; discarded: 2 messages, still in the log",
        "You said: /literal I see 3 messages.\n",
        "You said: fresh I see 1 message.\n",
        "[8] assistant\n    You said: multi\n    line I see 7 messages.\n",
    ] {
        assert!(out.contains(want), "{want:?} is not in:\n{out}");
    }
    assert!(!out.contains("never said"));
    // All messages are in the session, with their fields in the customary order.
    let lines = tenure(dir.path(), &["sessions", "export", "one", "--format", "jsonl"]).ok();
    assert!(lines.starts_with("{\"role\":\"user\",\"content\":\"Hello there\"}\n"), "{lines}");
    assert_eq!(lines.lines().count(), 8);
    // A script gets the error, and earlier messages stay stored.
    chat(dir.path(), &["one"], "again\n/nonsense\nnot reached\n").fails(1, "unknown command /nonsense");
    chat(dir.path(), &["one", "--model", "rehearsal"], "/rewind nowhere\n").fails(1, "nowhere");
    let one = tenure(dir.path(), &["sessions", "show", "one", "--json"]).json();
    assert_eq!((&one["message_count"], &one["title"]), (&10.into(), &"The red ferry".into()));
    // An open call at the end of the input stays open.
    assert!(chat(dir.path(), &["two"], "CALL f {}\n").err.contains("the tool call is left open"));
    chat(dir.path(), &["two"], "and now?\n").ok();
}

#[test]
fn commands_and_their_exit_codes() {
    let dir = temp();
    let dir = dir.path();
    tenure(dir, &["sessions", "list"]).fails(1, "the store sqlite:tenure.db does not exist");
    assert!(!dir.join("tenure.db").exists(), "a look must not make a store");
    chat(dir, &["one"], "Where is the Ferry?\nIn Dover\n/title \u{1b}[31mred\n").ok();
    let table = tenure(dir, &["sessions", "list"]).ok();
    assert!(table.starts_with("ID   AGE  TITLE") && !table.contains('\u{1b}'), "{table}");
    assert!(table.lines().nth(1).unwrap().starts_with("one ") && table.contains("  4  active"), "{table}");
    tenure(dir, &["sessions", "fork", "one", "--at", "turn:1", "--id", "two"]).ok();
    tenure(dir, &["sessions", "fork", "one", "--id", "two"]).fails(1, "already exists");
    let fork = tenure(dir, &["sessions", "fork", "one", "--json"]).json();
    let id = fork["id"].as_str().unwrap();
    // A generated id can be abbreviated.
    let shown = tenure(dir, &["sessions", "show", &id[24..]]).ok();
    assert!(shown.contains(id) && shown.contains("fork of    one, after message 4"), "{shown}");
    assert!(shown.contains("[1] user\n    Where is the Ferry?\n"), "{shown}");
    assert!(tenure(dir, &["sessions", "rewind", "two", "1"]).ok().contains("rewound to message 1"));
    tenure(dir, &["sessions", "rewind", "two", "9"]).fails(1, "not found");
    let page = tenure(dir, &["sessions", "list", "--json", "--limit", "2"]).json();
    assert_eq!(page["data"].as_array().unwrap().len(), 2);
    assert!(page["next_cursor"].is_string());
    let all = tenure(dir, &["sessions", "list", "--json", "--all", "--title", "RED"]).json();
    assert_eq!((all["data"].as_array().unwrap().len(), &all["next_cursor"]), (3, &Value::Null));
    // Search.
    let search = tenure(dir, &["sessions", "search", "dover"]);
    assert!(search.err.contains("4 found in 2 sessions"), "{}", search.err);
    let search = search.ok();
    assert!(
        search.contains("[3] user") && search.contains("\n    In Dover\n") && !search.contains('\u{1b}'),
        "{search}"
    );
    let search = tenure(dir, &["sessions", "search", "DOVER", "in", "--role", "user", "--json", "--limit", "1"]).json();
    assert_eq!(
        (&search["data"][0]["highlights"], search["data"].as_array().unwrap().len()),
        (&json!([[0, 2], [3, 8]]), 1)
    );
    assert!(search["next_cursor"].is_string());
    assert!(tenure(dir, &["sessions", "search", "ferry*", "--role", "tool"]).err.contains("0 found"));
    tenure(dir, &["sessions", "search", "!"]).fails(1, "no word");
    // Delete and restore.
    tenure(dir, &["sessions", "delete", "two"]).ok();
    tenure(dir, &["sessions", "show", "two"]).fails(1, "`tenure sessions restore` brings it back");
    assert!(tenure(dir, &["sessions", "list", "--status", "deleted"]).ok().contains("two"));
    assert_eq!(tenure(dir, &["sessions", "restore", "two"]).ok(), "two is active\n");
    tenure(dir, &["sessions", "delete", "two", "--purge"]).fails(1, "--yes");
    tenure(dir, &["sessions", "show", "two"]).ok();
    tenure(dir, &["sessions", "delete", "two", "--purge", "--yes"]).ok();
    tenure(dir, &["sessions", "restore", "two"]).fails(1, "was not found");
    // Invalid arguments.
    tenure(dir, &["sessions", "show", " a"]).fails(1, "session_id");
    tenure(dir, &["sessions", "list", "--created-after", "soon"]).fails(1, "created_after");
    for wrong in [
        &["sessions"][..],
        &["sessions", "list", "--status", "x"],
        &["fly"],
        &["--store", "a", "--server", "b", "sweep"],
    ] {
        assert_eq!(tenure(dir, wrong).code, 2, "{wrong:?}");
    }
    // Users and tenants are separate.
    chat(dir, &["hers", "--user", "ada", "--tenant", "acme"], "hello\n").ok();
    assert!(!tenure(dir, &["sessions", "list"]).ok().contains("hers"));
    assert!(tenure(dir, &["sessions", "list", "--tenant", "acme"]).ok().contains("ada"));
    tenure(dir, &["sessions", "show", "hers", "--tenant", "acme", "--user", "eve"]).fails(1, "was not found");
}

#[test]
fn a_reader_may_close_the_pipe_early() {
    let dir = temp();
    chat(dir.path(), &["long"], &("x".repeat(300_000) + "\n")).ok();
    let mut child = command(dir.path(), &["sessions", "show", "long"]).spawn().unwrap();
    let mut few = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut few).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}

#[test]
fn a_server_and_a_store_give_the_same_output() {
    let dir = temp();
    let dir = dir.path();
    let server = Server::start(dir, "sqlite:tenure.db");
    let at = ["--server", &server.url];
    assert!(
        chat(dir, &[&at[..], &["one"]].concat(), "hello\nagain\n").ok().contains("You said: again I see 3 messages.")
    );
    tenure(dir, &[&at[..], &["sessions", "fork", "one", "--id", "two", "--at", "turn:1"]].concat()).ok();
    for args in [
        &["show", "one", "--json"][..],
        &["list", "--all", "--json"],
        &["export", "two"],
        &["search", "again", "--json"],
    ] {
        let remote = tenure(dir, &[&at[..], &["sessions"], args].concat()).ok();
        // SQLite permits several processes at once.
        assert_eq!(remote, tenure(dir, &[&["sessions"], args].concat()).ok(), "{args:?}");
    }
    let mut by_env = command(dir, &["sessions", "list"]);
    by_env.env("TENURE_SERVER", &server.url);
    assert!(run_with_input(by_env, "").ok().contains("two"));
    tenure(dir, &[&at[..], &["keys", "allow-unauthenticated"]].concat()).fails(1, "--store");
    // From the first key on, keys are required.
    let key = tenure(dir, &["keys", "add", "--tenant", "acme", "--user", "ada", "--name", "ci"]).ok();
    assert!(key.starts_with("tnr_"));
    // A running server notices the first key within two seconds.
    wait_until("a key is required", || tenure(dir, &[&at[..], &["sessions", "list"]].concat()).code == 1);
    tenure(dir, &[&at[..], &["sessions", "list"]].concat()).fails(1, "--key");
    let with_key = [&at[..], &["--key", key.trim()]].concat();
    chat(dir, &[&with_key[..], &["hers"]].concat(), "hello\n").ok();
    assert_eq!(tenure(dir, &[&with_key[..], &["sessions", "list", "--long"]].concat()).ok().lines().count(), 2);
    assert!(tenure(dir, &["--tenant", "acme", "sessions", "show", "hers"]).ok().contains("user       ada"));
    let keys = tenure(dir, &["keys", "list", "--json"]).json();
    assert!(keys["data"][0]["hash"].is_null() && keys["data"][0]["name"] == "ci");
    let id = keys["data"][0]["id"].as_str().unwrap();
    tenure(dir, &["keys", "revoke", id]).ok();
    tenure(dir, &["keys", "revoke", id]).fails(1, "there is no key");
    drop(server);
    tenure(dir, &["--server", "http://127.0.0.1:1", "sessions", "list"]).fails(1, "tenure serve");
}

/// A server with one tool, which answers each call with `done`. Returns its address and the recorded calls.
fn tool() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/refund", listener.local_addr().unwrap());
    let calls = Arc::default();
    let received: Arc<Mutex<Vec<String>>> = Arc::clone(&calls);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = Vec::new();
            let mut part = [0; 4096];
            while !request.ends_with(b"}") {
                let n = stream.read(&mut part).unwrap();
                request.extend_from_slice(&part[..n]);
            }
            let request = String::from_utf8(request).unwrap();
            received.lock().unwrap().push(request.split("\r\n\r\n").nth(1).unwrap().to_owned());
            write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\ndone").unwrap();
        }
    });
    (url, calls)
}

/// A directory with an assistant whose calls need approval, and one session per name that waits for it.
fn waiting(sessions: &[&str]) -> (TempDir, Arc<Mutex<Vec<String>>>) {
    let (dir, (url, calls)) = (temp(), tool());
    let yaml = format!(
        "assistants:\n- name: agent\n  review: [{{tool: refund, queue: finance}}]\n  tools: [{{http: {{name: refund, description: R., url: '{url}'}}}}]\n"
    );
    std::fs::write(dir.path().join("tenure.yaml"), yaml).unwrap();
    for session in sessions {
        let out = chat(dir.path(), &[session, "--assistant", "agent"], "CALL refund {\"x\":5}\n").ok();
        assert!(out.contains("rev_"), "{out}");
    }
    (dir, calls)
}

/// The last run of a session, once it has ended.
fn ended(dir: &Path, at: &[&str], session: &str) -> Value {
    let mut run = Value::Null;
    wait_until("the run has ended", || {
        run = tenure(dir, &[at, &["runs", "show", session, "--json"]].concat()).json();
        !run["ended_at"].is_null()
    });
    run
}

#[test]
fn reviews_are_decided() {
    let (dir, calls) = waiting(&["one", "two", "three"]);
    let dir = dir.path();
    let table = tenure(dir, &["reviews", "list", "--queue", "finance"]).ok();
    assert!(table.starts_with("ID ") && table.lines().count() == 4 && table.contains(r#"{"x":5}"#), "{table}");
    assert_eq!(tenure(dir, &["reviews", "list", "--queue", "other"]).ok().lines().count(), 1);
    let list = tenure(dir, &["reviews", "list", "--json", "--limit", "5"]).json();
    let of = |session: &str| {
        let all = list["data"].as_array().unwrap();
        all.iter().find(|r| r["session_id"] == session).unwrap()["id"].as_str().unwrap().to_owned()
    };
    let one = of("one");
    let two = of("two");
    let three = of("three");
    let shown = tenure(dir, &["reviews", "show", &one]).ok();
    assert!(shown.contains("step        refund\narguments   {\"x\":5}\nqueue       finance\n"), "{shown}");
    // On a store the decision is stored, and nothing is executed.
    let output = tenure(dir, &["--user", "ada", "reviews", "reject", &one, "--notes", "too much"]);
    assert!(output.err.contains("a server on this store"), "{}", output.err);
    assert_eq!(output.ok(), format!("{one} is rejected\n"));
    let shown = tenure(dir, &["reviews", "show", &one, "--json"]).json();
    assert_eq!((&shown["reviewer"], &shown["notes"]), (&"ada".into(), &"too much".into()));
    let trail = tenure(dir, &["audit", "one", "--json"]).json();
    assert_eq!((&trail["verified"], &trail["decisions"][0]["reviewer"]), (&true.into(), &"ada".into()));
    let table = tenure(dir, &["audit", "one"]).ok();
    assert!(table.starts_with("RECORD ") && table.contains("rejected") && table.contains("too much"), "{table}");
    assert_eq!(tenure(dir, &["audit"]).json()["hash"], trail["decisions"][0]["hash"]);
    assert_eq!(tenure(dir, &["audit", "--format", "csv"]).ok().lines().count(), 2);
    assert_eq!(tenure(dir, &["audit", "--from", "2200-01-01T00:00:00Z"]).ok(), "");
    tenure(dir, &["audit", "--from", "soon"]).fails(1, "from");
    tenure(dir, &["reviews", "approve", &one]).fails(1, "decided");
    tenure(dir, &["reviews", "approve", "rev_99_nobody"]).fails(1, "rev_99_nobody");
    tenure(dir, &["reviews", "correct", &two, "5"]).fails(1, "JSON object");
    assert!(calls.lock().unwrap().is_empty());
    // A server resumes runs that were decided before, and those decided through it.
    let server = Server::start(dir, "sqlite:tenure.db");
    let at = ["--server", server.url.as_str()];
    assert_eq!(ended(dir, &at, "one")["status"], "completed");
    assert!(calls.lock().unwrap().is_empty(), "it was rejected");
    let output = tenure(dir, &[&at[..], &["reviews", "approve", &two]].concat());
    assert!(!output.err.contains("store"), "{}", output.err);
    output.ok();
    assert_eq!(ended(dir, &at, "two")["status"], "completed");
    let decided = tenure(dir, &[&at[..], &["reviews", "correct", &three, r#"{"x": 3}"#, "--json"]].concat()).json();
    assert_eq!(decided["decision"], "corrected");
    let answer = ended(dir, &at, "three")["answer"]["content"].as_str().unwrap().to_owned();
    assert!(answer.starts_with("The tool said: ") && answer.contains("done"), "{answer}");
    assert_eq!(*calls.lock().unwrap(), [r#"{"x":5}"#, r#"{"x":3}"#]);
    let decided = tenure(dir, &[&at[..], &["reviews", "list", "--status", "decided"]].concat()).ok();
    assert!(decided.lines().count() == 4 && decided.contains("corrected"), "{decided}");
}

#[test]
fn runs_are_shown_and_stopped() {
    let (dir, calls) = waiting(&["one"]);
    let dir = dir.path();
    let table = tenure(dir, &["runs", "list", "one"]).ok();
    assert!(table.starts_with("ID ") && table.contains("run_") && table.contains(" paused"), "{table}");
    let shown = tenure(dir, &["runs", "show", "one"]).ok();
    assert!(shown.contains("waits for  rev_") && shown.contains("→ refund {\"x\":5}"), "{shown}");
    let run = tenure(dir, &["runs", "list", "one", "--json"]).json()["data"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(tenure(dir, &["runs", "cancel", "one"]).ok(), format!("{run} is cancelled\n"));
    assert_eq!(tenure(dir, &["runs", "show", "one", &run, "--json"]).json()["code"], "cancelled");
    assert_eq!(tenure(dir, &["reviews", "list", "--json"]).json()["data"], Value::Array(Vec::new()));
    tenure(dir, &["runs", "show", "one", "run_nobody"]).fails(1, "run_nobody");
    tenure(dir, &["runs", "list", "nobody"]).fails(1, "nobody");
    tenure(dir, &["sessions", "fork", "one", "--at", "0", "--id", "empty"]).ok();
    tenure(dir, &["runs", "cancel", "empty"]).fails(1, "no runs");
    assert!(calls.lock().unwrap().is_empty());
}

#[test]
fn a_locked_store_names_the_process_that_holds_it() {
    let dir = temp();
    let server = Server::start(dir.path(), "jsonl:sessions");
    tenure(dir.path(), &["--store", "jsonl:sessions", "sessions", "list"]).fails(1, "--server http://127.0.0.1:8787");
    chat(dir.path(), &["--server", &server.url, "one"], "hello\n").ok();
    drop(server);
    assert!(tenure(dir.path(), &["--store", "jsonl:sessions", "sessions", "list"]).ok().contains("one"));
}

#[test]
fn export_and_import() {
    let dir = temp();
    let dir = dir.path();
    chat(dir, &["one"], "hello\nCALL f {}\n1\n/title One\n/checkpoint here\n/fork turn:1\nother\n").ok();
    assert!(tenure(dir, &["sessions", "export", "--all", "out"]).ok().starts_with("2 sessions"));
    let b = ["--store", "sqlite:b.db", "sessions"];
    assert!(
        tenure(dir, &[&b[..], &["import", "out"]].concat()).ok().contains("one: 6 messages from out/one.json (tenure)")
    );
    tenure(dir, &[&b[..], &["export", "--all", "again"]].concat()).ok();
    let read = |from: &str, name: &std::ffi::OsStr| -> Value {
        let mut value: Value = serde_json::from_slice(&std::fs::read(dir.join(from).join(name)).unwrap()).unwrap();
        let times = ["created_at", "updated_at"];
        times.iter().for_each(|t| drop(value.as_object_mut().unwrap().remove(*t)));
        // They differ only in how they were created: an import names its origin.
        value["log"].as_array_mut().unwrap().retain(|r| r["entry"].get("created").is_none());
        value
    };
    for file in std::fs::read_dir(dir.join("out")).unwrap() {
        let name = file.unwrap().file_name();
        assert_eq!(read("out", &name), read("again", &name));
    }
    let openai = tenure(dir, &["sessions", "export", "one", "--format", "openai"]);
    assert!(openai.err.contains("this format leaves out: info, timestamps, runs"), "{}", openai.err);
    let again = tenure(dir, &[&b[..], &["import", "out/one.json", "--id", "again", "--json"]].concat()).json();
    assert_eq!(again["duplicate_of"], serde_json::json!(["one"]));
    // A second import without an id changes nothing.
    let list = || tenure(dir, &[&b[..], &["list", "--json"]].concat()).ok();
    let before = list();
    let again = tenure(dir, &[&b[..], &["import", "out/one.json"]].concat()).ok();
    assert!(again.contains("out/one.json was imported before, as "), "{again}");
    assert_eq!(list(), before);
    // Another session under a taken id gets a new one.
    std::fs::write(dir.join("other.json"), r#"{"session_id": "one", "messages": [{"role": "user", "content": "x"}]}"#)
        .unwrap();
    assert!(tenure(dir, &[&b[..], &["import", "other.json"]].concat()).ok().contains("its own id one is taken"));
    assert!(tenure(dir, &[&b[..], &["import", "out/one.json", "--id", "mine"]].concat()).ok().starts_with("mine: 6"));
    tenure(dir, &[&b[..], &["import", "out/one.json", "--id", "mine"]].concat()).fails(1, "could not be imported");
    tenure(dir, &[&b[..], &["import", "out", "--id", "mine"]].concat()).fails(1, "--id applies to a single session");
}

/// `~` in a store's URL is the home directory.
#[test]
fn a_tilde_is_the_home_directory() {
    let (dir, home) = (temp(), temp());
    for (store, file) in [("sqlite:~/x.db", "x.db"), ("jsonl:~/files", "files/format")] {
        let mut command = command(dir.path(), &["--store", store, "chat", "one"]);
        command.env("HOME", home.path());
        run_with_input(command, "hello\n").ok();
        assert!(home.path().join(file).exists(), "{store}");
    }
    assert!(!dir.path().join("~").exists());
}

/// Commands take any session id, in this process and over HTTP, and print it so that it can be pasted.
#[test]
fn any_session_id_is_an_argument() {
    let dir = temp();
    let dir = dir.path();
    for id in ["user@example.com", "a/b c", "..", "It's 会話"] {
        chat(dir, &["--store", "jsonl:files", id], "hello\n").ok();
        let shown = tenure(dir, &["--store", "jsonl:files", "sessions", "show", id, "--json"]).json();
        assert_eq!(shown["id"], id, "{shown}");
    }
    let a = ["--store", "jsonl:files", "sessions"];
    assert!(tenure(dir, &[&a[..], &["export", "--all", "out"]].concat()).ok().starts_with("4 sessions"));
    let deleted = tenure(dir, &[&a[..], &["delete", "It's 会話"]].concat()).ok();
    assert!(deleted.contains(r"`tenure sessions restore 'It'\''s 会話'`"), "{deleted}");
    let server = Server::start(dir, "jsonl:files");
    let remote = |args: &[&str]| tenure(dir, &[&["sessions", "--server", &server.url], args].concat());
    assert_eq!(remote(&["show", "a/b c", "--json"]).json()["id"], "a/b c");
    remote(&["show", ".."]).fails(1, "a URL cannot name the session");
    assert!(remote(&["list"]).ok().contains("user@example.com"));
}

#[test]
fn sessions_of_other_programs_are_imported() {
    let dir = temp();
    let dir = dir.path();
    for name in ["30_claude_code.jsonl", "20_mistralrs_tagged.json", "13_openai_lines.jsonl"] {
        let path = fixture(name).display().to_string();
        let imported = tenure(dir, &["sessions", "import", "--json", &path]).json();
        assert!(!imported["sessions"].as_array().unwrap().is_empty(), "{name}: {imported}");
        assert_eq!(imported["failed"], Value::Array(Vec::new()), "{name}");
        for session in imported["sessions"].as_array().unwrap() {
            tenure(dir, &["sessions", "show", session["id"].as_str().unwrap()]).ok();
        }
    }
    // In this database, one session of three is corrupt.
    let agents = tenure(dir, &["sessions", "import", "--json", &fixture("40_agents_sdk.db").display().to_string()]);
    let imported: Value = serde_json::from_str(&agents.out).unwrap();
    assert_eq!(
        (imported["sessions"].as_array().unwrap().len(), imported["failed"].as_array().unwrap().len()),
        (2, 1),
        "{imported}"
    );
    agents.fails(1, "1 could not be imported");
    tenure(dir, &["sessions", "show", "trip-to-rome"]).ok();
    let claude = fixture("30_claude_code.jsonl").display().to_string();
    assert!(tenure(dir, &["sessions", "import", &claude]).ok().contains("\n  left out: "));
    // An invalid file does not stop the others, and is reported.
    std::fs::create_dir(dir.join("mixed")).unwrap();
    std::fs::write(dir.join("mixed/a.json"), "{\"messages\": [{\"role\": 7}]}").unwrap();
    std::fs::write(dir.join("mixed/b.json"), "[{\"role\":\"user\",\"content\":\"hi\"}]").unwrap();
    std::fs::write(dir.join("mixed/c.txt"), "not ours").unwrap();
    let output = tenure(dir, &["sessions", "import", "mixed"]);
    assert!(output.err.contains("not imported: mixed/a.json: messages[0]"), "{}", output.err);
    assert!(output.out.contains("1 message from mixed/b.json (openai)"), "{}", output.out);
    output.fails(1, "1 could not be imported");
    let piped = run_with_input(
        command(dir, &["sessions", "import", "-", "--id", "piped"]),
        "{\"role\":\"user\",\"content\":\"hello there\"}\n",
    );
    assert_eq!(piped.ok(), "piped: 1 message from - (openai)\n");
    assert_eq!(tenure(dir, &["sessions", "import", "x", "--format", "word"]).code, 2);
}

#[test]
fn maintenance_of_a_store() {
    let dir = temp();
    let dir = dir.path();
    assert_eq!(tenure(dir, &["migrate"]).ok(), format!("a new store, format {}\n", tenure::store::FORMAT));
    assert_eq!(tenure(dir, &["migrate", "--json"]).json()["from"], tenure::store::FORMAT);
    chat(dir, &["one"], "hello\n").ok();
    let mut sweep = command(dir, &["sweep"]);
    sweep.env("TENURE_SESSIONS__TTL", "300ms");
    let swept = run_with_input(sweep, "").ok();
    // The expiry time of a session was fixed when it was written.
    assert!(swept.contains("0 expired, 0 over the cap, 0 purged"), "{swept}");
    let mut soon = command(dir, &["chat", "two"]);
    soon.env("TENURE_SESSIONS__TTL", "300ms");
    run_with_input(soon, "hello\n").ok();
    wait_until("the session has expired", || {
        let mut sweep = command(dir, &["sweep", "--json"]);
        sweep.env("TENURE_SESSIONS__TTL", "300ms");
        let expired = run_with_input(sweep, "").json()["expired"].clone();
        assert!(expired == json!([]) || expired == json!(["default/two"]), "{expired}");
        expired != json!([])
    });
    assert!(tenure(dir, &["sessions", "list", "--status", "expired"]).ok().contains("two"));
}

#[test]
fn the_doctor_reports_damage() {
    let dir = temp();
    let dir = dir.path();
    let at = ["--store", "jsonl:store"];
    tenure(dir, &[&at[..], &["doctor"]].concat()).fails(1, "the store jsonl:store does not exist");
    chat(dir, &[&at[..], &["one"]].concat(), "hello\nagain\n").ok();
    assert_eq!(tenure(dir, &[&at[..], &["doctor"]].concat()).ok(), "1 sessions checked, no findings\n");
    // A commit in the middle is corrupt: damage, not a torn tail.
    let file = dir.join("store/default/one.jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replacen("hello", "hallo", 1)).unwrap();
    let output = tenure(dir, &[&at[..], &["doctor"]].concat());
    assert_eq!(output.code, 1, "{}", output.err);
    assert!(
        output.out.contains("WHERE") && output.out.contains("one.jsonl") && output.out.contains("backup"),
        "{}",
        output.out
    );
    let output = tenure(dir, &[&at[..], &["doctor", "--repair", "--json"]].concat());
    let report: Value = serde_json::from_str(&output.out).unwrap();
    assert_eq!((output.code, &report["findings"][0]["mendable"]), (1, &Value::Bool(false)), "{report}");
}

#[test]
fn configuration_and_completions() {
    let dir = temp();
    std::fs::write(dir.path().join("tenure.yaml"), "store: postgres://me:secret@db/x\nsessions: {ttl: 3h}\n").unwrap();
    let shown = tenure(dir.path(), &["config"]).ok();
    assert!(shown.contains("me:***@db") && shown.contains("3h") && !shown.contains("secret"), "{shown}");
    let example = tenure(dir.path(), &["config", "--example"]).ok();
    assert_eq!(example, include_str!("../../../tenure.example.yaml"));
    // A missing key of a model server does not affect commands that call no model.
    let model = "models: [{name: m, base_url: http://127.0.0.1:1/v1, api_key_env: NOT_SET_ANYWHERE}]\n";
    std::fs::write(dir.path().join("tenure.yaml"), model).unwrap();
    tenure(dir.path(), &["migrate"]).ok();
    tenure(dir.path(), &["sessions", "list"]).ok();
    chat(dir.path(), &["one"], "hello\n").fails(1, "NOT_SET_ANYWHERE");
    for shell in ["bash", "zsh", "fish"] {
        assert!(tenure(dir.path(), &["completions", shell]).ok().contains("sessions"));
    }
}

/// Compaction by command and in a chat, and its undo.
#[test]
fn summaries() {
    let dir = tempfile::tempdir().unwrap();
    chat(dir.path(), &["trip"], "Which ferry?\nWhat fare?\nFor two?\n").ok();
    let output = tenure(dir.path(), &["sessions", "compact", "trip", "--keep", "1"]).ok();
    let want = "models are shown a summary of the first 4 messages of trip:\nThe user said: Which ferry?; What fare?\n";
    assert_eq!(output, want);
    let shown = tenure(dir.path(), &["sessions", "show", "trip"]).ok();
    assert!(
        shown.contains("summary    of the first 4: The user said: Which ferry?")
            && shown.contains("Which ferry? I see 1"),
        "{shown}"
    );
    let none = tenure(dir.path(), &["sessions", "compact", "trip", "--keep", "1"]).ok();
    assert_eq!(none, "trip has no turns to summarize\n");
    let out = chat(dir.path(), &["trip"], "/compact 0\nAnd back?\n").ok();
    assert!(out.contains("What fare?; For two?") && out.contains("And back? I see 2 messages."), "{out}");
    tenure(dir.path(), &["sessions", "uncompact", "trip"]).ok();
    assert_eq!(tenure(dir.path(), &["sessions", "show", "trip", "--json"]).json()["summary"], Value::Null);
    tenure(dir.path(), &["sessions", "compact", "trip", "--model", "nobody"]).fails(1, "there is no model");
    chat(dir.path(), &["trip"], "/compact all\n").fails(1, "a number of turns");
}
