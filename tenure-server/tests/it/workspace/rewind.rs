//! Rewinds of workspaces: a rewind restores the files of a session.

use super::*;
use crate::support::serve;
use axum::Router;
use std::io::Write;
use tenure::Tools;

async fn append_user_message(test: &TestServer, text: &str) {
    let reply = test.chat(json!({"session_id": "s", "messages": [user(text)]})).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewind_restores_the_files() {
    let fixture = WorkspaceFixture::new();
    let test = fixture.test(true).await;
    fixture.write("w/.gitignore", "*.tmp\ncache/\n");
    fixture.write("w/a", "a1");
    fixture.write("w/run.sh", "#!");
    fs::set_permissions(fixture.path("w/run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    fixture.write("w/dir/x", "x1");
    symlink("a", fixture.path("w/link")).unwrap();
    assert_eq!(send(&test, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await.0, 201);
    append_user_message(&test, "one").await;
    let first = fixture.commits("w", "s")[0];
    set_traps(&fixture.path("w"), &fixture.outside().join("ran"));
    fs::remove_file(fixture.path("w/.gitattributes")).unwrap();
    append_user_message(&test, "nothing changed").await;
    assert_eq!(fixture.commits("w", "s"), [first], "no commit without a change");
    let seq = test.session("s").await.checkpoints[0].seq;
    assert!(
        fixture.message("w", first).starts_with("checkpoint turn-1\n\nTenure-Session: s "),
        "{}",
        fixture.message("w", first)
    );
    assert!(fixture.message("w", first).ends_with(&format!("Tenure-Seq: {seq}\n")));

    // Files are changed, removed, added, and replaced by other kinds.
    fixture.write("w/a", "a2");
    fs::remove_file(fixture.path("w/run.sh")).unwrap();
    fs::remove_dir_all(fixture.path("w/dir")).unwrap();
    fixture.write("w/dir", "a file now");
    fs::remove_file(fixture.path("w/link")).unwrap();
    fixture.write("w/link/deep", "a directory now");
    fixture.write("w/new/n", "n");
    fixture.write("w/keep.tmp", "ignored");
    fixture.write("w/cache/c", "ignored");
    append_user_message(&test, "two").await;
    assert_eq!(fixture.commits("w", "s").len(), 2);
    let (status, set) = send(&test, "POST", "/sessions/s/checkpoints", json!({"label": "by-hand"})).await;
    assert_eq!((status, fixture.commits("w", "s").len()), (201, 2), "{set}");
    fixture.write("w/a", "a3, which no checkpoint has");
    fixture.write("w/new/too.tmp", "ignored, in a directory that goes");

    // An unknown position: nothing changes.
    let (status, _) = send(&test, "POST", "/sessions/s/rewind", json!({"label": "nowhere", "workspace": true})).await;
    assert_eq!((status, fixture.read("w/a").unwrap().as_str()), (404, "a3, which no checkpoint has"));
    let (status, answer) =
        send(&test, "POST", "/sessions/s/rewind", json!({"label": "turn-1", "workspace": true})).await;
    assert_eq!(
        (status, &answer["position"], &answer["workspace"]["commit"]),
        (200, &json!(2), &json!(first.to_string())),
        "{answer}"
    );
    assert_eq!(test.session("s").await.messages.len(), 2);
    let read = |name: &str| fixture.read(&format!("w/{name}"));
    assert_eq!((read("a"), read("run.sh"), read("dir/x")), (Some("a1".into()), Some("#!".into()), Some("x1".into())));
    assert_eq!(fs::metadata(fixture.path("w/run.sh")).unwrap().permissions().mode() & 0o111, 0o111);
    assert_eq!(fs::read_link(fixture.path("w/link")).unwrap(), Path::new("a"));
    assert_eq!(
        (read("keep.tmp"), read("cache/c"), read("new/too.tmp")),
        (Some("ignored".into()), Some("ignored".into()), Some("ignored, in a directory that goes".into()))
    );
    assert_eq!(read("new/n"), None);
    let saved: Oid = answer["workspace"]["saved"].as_str().unwrap().parse().unwrap();
    let lost = fixture.files("w", saved);
    assert_eq!(
        (lost["a"].as_str(), lost["link/deep"].as_str()),
        ("a3, which no checkpoint has", "a directory now"),
        "nothing is lost"
    );
    assert!(!fixture.outside().join("ran").exists(), "nothing was run");

    // After the rewind: the files belong to the session's new end, and not to the discarded messages.
    let commits = fixture.commits("w", "s");
    assert_eq!((commits.len(), commits[1]), (4, saved));
    append_user_message(&test, "other two").await;
    assert_eq!(fixture.commits("w", "s"), commits);
    fixture.write("w/a", "a4");
    let (status, answer) =
        send(&test, "POST", "/sessions/s/rewind", json!({"label": "turn-2", "workspace": true})).await;
    assert_eq!((status, read("a")), (200, Some("a1".into())), "{answer}");
    // A rewind to the current state: nothing to save, and no commit.
    let commits = fixture.commits("w", "s");
    let (status, answer) =
        send(&test, "POST", "/sessions/s/rewind", json!({"label": "turn-2", "workspace": true})).await;
    assert_eq!((status, &answer["workspace"]["saved"]), (200, &Value::Null), "{answer}");
    assert_eq!(fixture.commits("w", "s"), commits);
    // Deleting the session commits its workspace as well.
    fixture.write("w/a", "a5");
    assert_eq!(send(&test, "DELETE", "/sessions/s", json!({})).await.0, 200);
    let last = fixture.commits("w", "s")[0];
    assert!(fixture.message("w", last).starts_with("the session was deleted"));
    assert_eq!(fixture.files("w", last)["a"], "a5");
}

/// Erasing a user ends their sessions as deleting each of them does: workspaces are committed, and tools end.
#[tokio::test(flavor = "multi_thread")]
async fn erasing_a_user_commits_the_workspaces_and_ends_the_tools() {
    let fixture = WorkspaceFixture::new();
    let test = TestServer::with(StoreKind::Memory, false, |c| {
        c.workspaces.root = fixture.root();
        c.assistants = vec![serde_json::from_value(json!({"name": "a", "tools": ["python"]})).unwrap()];
        c.python.helper = env!("CARGO_BIN_EXE_tenure").into();
    });
    let test = test.await.unwrap();
    fixture.write("w/a", "a1");
    assert_eq!(send(&test, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await.0, 201);
    assert_eq!(send(&test, "POST", "/sessions", json!({"id": "gone", "metadata": {"workspace": "w"}})).await.0, 201);
    assert_eq!(send(&test, "DELETE", "/sessions/gone", json!({})).await.0, 200);
    let run = async |code: &str| {
        let mut call = crate::tools::call("s", "python", json!({"code": code}));
        call.session.tenant = tenure::Tenant::default();
        test.app.tools.call(&crate::tools::context(&test.app.config.assistants[0]), &call).await.unwrap().content
    };
    run("x = 1").await;
    assert_eq!(run("x").await, "1");
    fixture.write("w/a", "a2");
    let (status, receipt) = send(&test, "DELETE", "/users/default", json!({})).await;
    assert_eq!((status, &receipt["sessions"]), (200, &json!(2)), "{receipt}");
    assert_eq!(fixture.commits("w", "gone").len(), 1, "a session that was deleted before is not committed again");
    let commits = fixture.commits("w", "s");
    assert_eq!(commits.len(), 1);
    assert!(fixture.message("w", commits[0]).starts_with("the session was deleted"));
    assert_eq!(fixture.files("w", commits[0])["a"], "a2");
    assert!(run("'x' in globals()").await.ends_with("False"), "its interpreter has ended");
    test.app.tools.close().await;
}

/// A file that is ignored now, but part of the restored commit, is committed before it is overwritten.
#[tokio::test(flavor = "multi_thread")]
async fn overwritten_files_are_saved_even_if_ignored() {
    let fixture = WorkspaceFixture::new();
    let test = fixture.test(true).await;
    fixture.write("w/conf/local", "then");
    fixture.write("w/data", "then");
    send(&test, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await;
    append_user_message(&test, "one").await;
    fixture.write("w/.gitignore", "conf/\ndata\n");
    append_user_message(&test, "two").await;
    assert_eq!(fixture.files("w", fixture.commits("w", "s")[0]), files(&[(".gitignore", "conf/\ndata\n")]));
    fixture.write("w/conf/local", "now");
    fixture.write("w/conf/stays", "now");
    let rewind = json!({"label": "turn-1", "workspace": true});
    let (status, answer) = send(&test, "POST", "/sessions/s/rewind", rewind.clone()).await;
    assert_eq!(status, 200, "{answer}");
    let read = |name: &str| fixture.read(&format!("w/{name}"));
    assert_eq!(
        (read("conf/local"), read("conf/stays"), read(".gitignore")),
        (Some("then".into()), Some("now".into()), None)
    );
    let saved = fixture.files("w", answer["workspace"]["saved"].as_str().unwrap().parse().unwrap());
    assert_eq!(saved, files(&[(".gitignore", "conf/\ndata\n"), ("conf/local", "now"), ("data", "then")]));
    // An ignored path is where a file must be: it is not removed, and the error says what to do.
    fixture.write("w/.gitignore", "data/\n");
    fs::remove_file(fixture.path("w/data")).unwrap();
    fixture.write("w/data/precious", "ignored");
    let (status, answer) = send(&test, "POST", "/sessions/s/rewind", rewind.clone()).await;
    assert_eq!(status, 503, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("default/w/data") && !message.contains(&fixture.root()), "{message}");
    assert_eq!(read("data/precious").as_deref(), Some("ignored"));
    fs::rename(fixture.path("w/data"), fixture.path("aside")).unwrap();
    let (status, answer) = send(&test, "POST", "/sessions/s/rewind", rewind).await;
    assert_eq!((status, read("data").as_deref()), (200, Some("then")), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_commit_nothing_is_changed() {
    let fixture = WorkspaceFixture::new();
    let test = fixture.test(false).await;
    fixture.write("w/a", "1");
    send(&test, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await;
    append_user_message(&test, "one").await;
    append_user_message(&test, "two").await;
    let seq = test.session("s").await.head().seq;
    let rewind = |more: Value| {
        let mut body = json!({"label": "turn-1", "workspace": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let (status, answer) = send(&test, "POST", "/sessions/s/rewind", rewind(json!({}))).await;
    assert_eq!((status, &answer["error"]["code"]), (409, &json!("workspace_not_kept")), "{answer}");
    assert_eq!(
        (test.session("s").await.head().seq, fixture.path("w/.git").exists()),
        (seq, false),
        "neither session nor workspace"
    );
    // Commits of an earlier session with the same id do not count.
    assert_eq!(send(&test, "DELETE", "/sessions/s?purge=true", json!({})).await.0, 200);
    assert_eq!(fixture.commits("w", "s").len(), 1);
    send(&test, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await;
    for text in ["one", "two", "three", "four"] {
        append_user_message(&test, text).await;
    }
    let (status, answer) = send(&test, "POST", "/sessions/s/rewind", rewind(json!({"label": "turn-4"}))).await;
    assert_eq!((status, &answer["error"]["code"]), (409, &json!("workspace_not_kept")), "{answer}");
    // Other invalid requests.
    for (body, want) in [
        (rewind(json!({"workspace": "yes"})), 400),
        (rewind(json!({"position": 1})), 400),
        (json!({"workspace": true}), 400),
    ] {
        assert_eq!(send(&test, "POST", "/sessions/s/rewind", body.clone()).await.0, want, "{body}");
    }
    send(&test, "PATCH", "/sessions/s", json!({"metadata": {"workspace": null}})).await;
    let (status, answer) = send(&test, "POST", "/sessions/s/rewind", rewind(json!({}))).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("workspace")), "{answer}");
}

/// Over a limit, a rewind is refused before anything is changed.
#[tokio::test(flavor = "multi_thread")]
async fn a_rewind_that_can_not_save_current_files_is_refused() {
    let fixture = WorkspaceFixture::new();
    let test = TestServer::with(StoreKind::Memory, false, |c| {
        (c.workspaces.root, c.workspaces.checkpoints, c.workspaces.max_files) = (fixture.root(), true, 2);
    });
    let test = test.await.unwrap();
    fixture.write("w/a", "1");
    send(&test, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await;
    append_user_message(&test, "one").await;
    ["b", "c"].iter().for_each(|name| fixture.write(&format!("w/{name}"), "2"));
    append_user_message(&test, "a checkpoint that can not be committed harms no turn").await;
    let seq = test.session("s").await.head().seq;
    let (status, answer) =
        send(&test, "POST", "/sessions/s/rewind", json!({"label": "turn-1", "workspace": true})).await;
    assert_eq!((status, &answer["error"]["param"]), (413, &json!("max_files")), "{answer}");
    assert_eq!((test.session("s").await.head().seq, fixture.read("w/b").as_deref()), (seq, Some("2")));
}

/// During a run: each tool call has a checkpoint, with the files as they were then.
#[tokio::test(flavor = "multi_thread")]
async fn every_step_of_a_run_can_be_restored() {
    let fixture = WorkspaceFixture::new();
    fixture.write("w/n", "0");
    let file = fixture.path("w/n");
    let count = move || {
        let file = file.clone();
        async move {
            let n: usize = fs::read_to_string(&file).unwrap().parse::<usize>().unwrap() + 1;
            fs::write(&file, n.to_string()).unwrap();
            n.to_string()
        }
    };
    let url = serve(Router::new().route("/count", axum::routing::post(count))).await + "/count";
    let test = TestServer::with(StoreKind::Memory, false, |c| {
        (c.workspaces.root, c.workspaces.checkpoints) = (fixture.root(), true);
        let tool = json!({"http": {"name": "count", "description": "counts", "url": url}});
        c.assistants =
            vec![serde_json::from_value(json!({"name": "counter", "model": "default", "tools": [tool]})).unwrap()];
    });
    let test = test.await.unwrap();
    let body = json!({"id": "s", "assistant_id": "counter", "metadata": {"workspace": "w"}});
    assert_eq!(send(&test, "POST", "/sessions", body).await.0, 201);
    for id in ["c1", "c2", "c3"] {
        test.model.then(ModelResponse::ToolCalls(vec![(id, "count", "{}")]));
    }
    test.model.then(ModelResponse::Text("counted"));
    let (status, run) = send(&test, "POST", "/sessions/s/runs", json!({"input": "count to three"})).await;
    assert_eq!((status, &run["status"]), (200, &json!("completed")), "{run}");
    assert_eq!(fixture.read("w/n").as_deref(), Some("3"));
    let checkpoints = test.session("s").await.checkpoints;
    assert_eq!(checkpoints.len(), 4, "{checkpoints:?}");
    for (checkpoint, want) in checkpoints.iter().zip(["1", "2", "3", "3"]).rev() {
        let body = json!({"label": checkpoint.label, "workspace": true});
        let (status, answer) = send(&test, "POST", "/sessions/s/rewind", body).await;
        assert_eq!((status, fixture.read("w/n").as_deref()), (200, Some(want)), "{answer}");
    }
}

/// The command line on a store: the same hooks, and `--workspace`.
#[test]
fn the_command_line_restores_files() {
    let fixture = WorkspaceFixture::new();
    let tenure = |args: &[&str], input: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tenure"));
        for name in ["TENURE_SERVER", "TENURE_KEY", "TENURE_STORE", "TENURE_CONFIG"] {
            command.env_remove(name);
        }
        command.args(args).current_dir(fixture.dir.path()).stdin(std::process::Stdio::piped());
        let mut child =
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.success(), text(output.stdout), text(output.stderr))
    };
    fs::write(
        fixture.dir.path().join("tenure.yaml"),
        "store: sqlite:t.db\nworkspaces: {root: root, checkpoints: true}\n",
    )
    .unwrap();
    fixture.write("w/a", "1");
    let session = json!({"tenure": 1, "session_id": "one", "messages": [], "metadata": {"workspace": "w"}});
    fs::write(fixture.dir.path().join("one.json"), session.to_string()).unwrap();
    let imported = tenure(&["sessions", "import", "one.json"], "");
    assert!(imported.0, "{imported:?}");
    assert!(tenure(&["chat", "one"], "first\n").0);
    fixture.write("w/a", "2");
    assert!(tenure(&["chat", "one"], "second\n").0);
    assert_eq!(fixture.commits("w", "one").len(), 2);
    let imported = tenure(&["sessions", "rewind", "one", "turn-1", "--workspace"], "");
    let first = fixture.commits("w", "one").pop().unwrap().to_string();
    assert!(
        imported.0 && imported.1.contains(&format!("its workspace is restored to commit {}", &first[..12])),
        "{imported:?}"
    );
    assert_eq!(fixture.read("w/a").as_deref(), Some("1"));
    let imported = tenure(&["sessions", "rewind", "one", "0", "--workspace"], "");
    assert!(!imported.0 && imported.2.contains("was not committed at position 0"), "{imported:?}");
}
