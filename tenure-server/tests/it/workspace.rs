//! Workspaces in git: at the end, at checkpoints, and back again. Repositories are real, and so are those who would do harm.

use crate::kit::*;
use crate::running::serve;
use axum::Router;
use git2::{Oid, Repository};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tenure::{Clock, Ending, New, Principal, SessionId, Status, Tenure};
use tenure_server::config::Config;

/// The directory of workspaces, and a place outside of it.
struct Desk {
    dir: tempfile::TempDir,
}

impl Desk {
    fn new() -> Self {
        let desk = Self { dir: tempfile::tempdir().unwrap() };
        fs::create_dir_all(desk.path("")).unwrap();
        fs::create_dir(desk.outside()).unwrap();
        desk
    }

    fn root(&self) -> String {
        self.dir.path().join("root").display().to_string()
    }

    fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("root/default").join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path(name)).ok()
    }

    /// The commits of a session, newest first.
    fn commits(&self, workspace: &str, session: &str) -> Vec<Oid> {
        let Ok(git) = Repository::open(self.path(workspace)) else { return Vec::new() };
        let Ok(tip) = git.refname_to_id(&format!("refs/tenure/{session}")) else { return Vec::new() };
        let mut next = git.find_commit(tip).ok();
        let mut all = Vec::new();
        while let Some(commit) = next.filter(|c| c.author().name() == Ok("tenure")) {
            all.push(commit.id());
            next = commit.parent(0).ok();
        }
        all
    }

    fn message(&self, workspace: &str, commit: Oid) -> String {
        Repository::open(self.path(workspace)).unwrap().find_commit(commit).unwrap().message().unwrap().to_owned()
    }

    /// The files of a commit.
    fn files(&self, workspace: &str, commit: Oid) -> BTreeMap<String, String> {
        let git = Repository::open(self.path(workspace)).unwrap();
        let mut files = BTreeMap::new();
        let tree = git.find_commit(commit).unwrap().tree().unwrap();
        tree.walk(git2::TreeWalkMode::PreOrder, |dir, entry| {
            if let Ok(blob) = git.find_blob(entry.id()) {
                let content = String::from_utf8(blob.content().to_vec()).unwrap();
                files.insert(format!("{dir}{}", entry.name().unwrap()), content);
            }
            git2::TreeWalkResult::Ok
        })
        .unwrap();
        files
    }

    fn config(&self, more: &str) -> Config {
        Config::parse(&format!(
            "store: 'memory:'\nsessions: {{ttl: 1h}}\nworkspaces: {{root: '{}'{more}}}",
            self.root()
        ))
        .unwrap()
    }

    /// A server that keeps workspaces.
    async fn home(&self, checkpoints: bool) -> Home {
        let home = Home::with("memory", false, |c| {
            (c.workspaces.root, c.workspaces.checkpoints) = (self.root(), checkpoints);
        });
        home.await.unwrap()
    }
}

fn files(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect()
}

/// A house whose clock can be moved.
async fn house(config: &Config, clock: &Clock) -> Tenure {
    let options = tenure::Options { clock: clock.clone(), ..config.options() };
    let tenure = Tenure::open_with(&config.store, options).await.unwrap();
    tenure_server::hooks::install(&tenure, config).unwrap();
    tenure
}

fn start() -> Clock {
    Clock::manual("2026-01-01T00:00:00Z".parse::<Timestamp>().unwrap())
}

async fn begin(tenure: &Tenure, id: &str, workspace: impl Into<Value>) {
    let metadata = serde_json::Map::from_iter([("workspace".to_owned(), workspace.into())]);
    let new = New { id: Some(SessionId::new(id).unwrap()), metadata, ..New::default() };
    tenure.create(&Principal::default(), new).await.unwrap();
}

async fn send(home: &Home, method: &str, path: &str, body: Value) -> (u16, Value) {
    let method = method.parse().unwrap();
    let request = home.client.http.request(method, format!("{}{path}", home.client.base)).json(&body);
    let response = request.send().await.unwrap();
    (response.status().as_u16(), serde_json::from_str(&response.text().await.unwrap()).unwrap_or_default())
}

/// Whatever git would run leaves a trace.
fn set_traps(workspace: &Path, trace: &Path) {
    let hooks = workspace.join(".git/hooks");
    fs::create_dir_all(&hooks).unwrap();
    for name in
        ["pre-commit", "post-commit", "commit-msg", "reference-transaction", "post-checkout", "post-index-change"]
    {
        fs::write(hooks.join(name), format!("#!/bin/sh\ntouch '{}'\n", trace.display())).unwrap();
        fs::set_permissions(hooks.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let config = format!(
        "[filter \"trap\"]\n\tclean = touch '{0}'\n\tsmudge = touch '{0}'\n\trequired = true\n[core]\n\tautocrlf = true\n\tfsmonitor = touch '{0}'\n",
        trace.display()
    );
    let file = workspace.join(".git/config");
    fs::write(&file, fs::read_to_string(&file).unwrap() + &config).unwrap();
    fs::write(workspace.join(".gitattributes"), "* filter=trap\n*.txt text eol=crlf ident\n").unwrap();
}

#[tokio::test]
async fn the_end_is_committed_beside_the_users_own_work() {
    let (desk, clock) = (Desk::new(), start());
    desk.write("shop/a.txt", "one\r\ntwo\n$Id$\n");
    let git = Repository::init(desk.path("shop")).unwrap();
    let me = git2::Signature::now("me", "me@example.com").unwrap();
    let mut index = git.index().unwrap();
    index.add_path(Path::new("a.txt")).unwrap();
    index.write().unwrap();
    let tree = git.find_tree(index.write_tree().unwrap()).unwrap();
    let mine = git.commit(Some("HEAD"), &me, &me, "mine", &tree, &[]).unwrap();
    set_traps(&desk.path("shop"), &desk.outside().join("ran"));
    desk.write("shop/.gitignore", "*.log\nbuild/\n/sub/local\n");
    for (name, text) in [
        ("b.txt", "new"),
        ("x.log", "ignored"),
        ("build/out", "ignored"),
        ("sub/c", "deep"),
        ("sub/local", "ignored"),
        ("sub/.gitignore", "d\n"),
        ("sub/d", "ignored"),
    ] {
        desk.write(&format!("shop/{name}"), text);
    }
    fs::set_permissions(desk.path("shop/sub/c"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("/etc/passwd", desk.path("shop/link")).unwrap();
    fs::create_dir(desk.path("shop/empty")).unwrap();
    let before = fs::read(desk.path("shop/.git/index")).unwrap();

    let tenure = house(&desk.config(""), &clock).await;
    begin(&tenure, "s1", "shop").await;
    clock.advance(SignedDuration::from_hours(2));
    let report = tenure.sweep().await.unwrap();
    assert_eq!((report.expired.len(), report.failed.len()), (1, 0), "{report:?}");

    let commits = desk.commits("shop", "s1");
    assert_eq!(commits.len(), 1);
    let mut kept = desk.files("shop", commits[0]);
    kept.retain(|name, _| !name.starts_with(".git") && !name.ends_with(".gitignore"));
    let want = [("a.txt", "one\r\ntwo\n$Id$\n"), ("b.txt", "new"), ("link", "/etc/passwd"), ("sub/c", "deep")];
    assert_eq!(kept, files(&want), "byte for byte, without what is ignored, and links are links");
    let commit = git.find_commit(commits[0]).unwrap();
    assert_eq!(commit.parent_id(0).unwrap(), mine);
    assert_eq!(commit.tree().unwrap().get_path(Path::new("sub/c")).unwrap().filemode(), 0o100755);
    let message = commit.message().unwrap();
    assert_eq!(message, "the end of the session\n\nTenure-Session: s1 2026-01-01T00:00:00Z\nTenure-Seq: 1\n");
    assert_eq!(git.head().unwrap().target(), Some(mine), "HEAD is the user's");
    assert_eq!(fs::read(desk.path("shop/.git/index")).unwrap(), before, "so is the index");
    assert!(!desk.outside().join("ran").exists(), "nothing was run");

    // Ended once more without a change: no commit more.
    tenure.restore(&Principal::default(), &SessionId::new("s1").unwrap()).await.unwrap();
    clock.advance(SignedDuration::from_hours(2));
    assert_eq!(tenure.sweep().await.unwrap().expired.len(), 1);
    assert_eq!(desk.commits("shop", "s1"), commits);
}

#[tokio::test]
async fn who_is_sent_away_and_who_has_no_repository_are_kept_too() {
    let (desk, clock) = (Desk::new(), start());
    desk.write("old/a", "1");
    let mut config = desk.config("");
    config.sessions.max_sessions = 1;
    let tenure = house(&config, &clock).await;
    begin(&tenure, "a.b:c", "old").await;
    clock.advance(SignedDuration::from_secs(1));
    begin(&tenure, "other", Value::Null).await;
    assert_eq!(tenure.sweep().await.unwrap().evicted.len(), 1);
    let commits = desk.commits("old", "a%2Eb%3Ac");
    assert_eq!(commits.len(), 1);
    assert_eq!(desk.files("old", commits[0]), files(&[("a", "1")]));
    assert!(!desk.path("old/.git/hooks").join("pre-commit.sample").exists(), "no template of this machine is used");
}

/// What is wrong with one workspace is reported and tried again, and the others go.
#[tokio::test]
async fn a_workspace_that_fails_holds_up_nobody() {
    let (desk, clock) = (Desk::new(), start());
    let names = ["gone", "good", "big", "link", "file", "common", "objects", "alternates", "pipe", "ignore"];
    for name in names {
        desk.write(&format!("{name}/a"), "1");
    }
    let tenure = house(&desk.config(", max_files: 3, max_bytes: 1000"), &clock).await;
    for name in names {
        begin(&tenure, name, name).await;
    }
    // Those never were workspaces, and have nothing to keep.
    begin(&tenure, "number", 7).await;
    begin(&tenure, "absolute", "/etc").await;
    fs::rename(desk.path("gone"), desk.path("moved")).unwrap();
    (0..3).for_each(|n| desk.write(&format!("big/{n}"), "x"));
    // Repositories that lead elsewhere.
    let elsewhere = desk.outside().join("repository");
    Repository::init(&elsewhere).unwrap();
    symlink(elsewhere.join(".git"), desk.path("link/.git")).unwrap();
    desk.write("file/.git", &format!("gitdir: {}/.git\n", elsewhere.display()));
    for name in ["common", "objects", "alternates", "pipe"] {
        Repository::init(desk.path(name)).unwrap();
    }
    desk.write("common/.git/commondir", &format!("{}/.git\n", elsewhere.display()));
    fs::remove_dir_all(desk.path("objects/.git/objects")).unwrap();
    symlink(elsewhere.join(".git/objects"), desk.path("objects/.git/objects")).unwrap();
    desk.write("alternates/.git/objects/info/alternates", &format!("{}/.git/objects\n", elsewhere.display()));
    // Pipes that nobody writes to.
    fs::remove_file(desk.path("pipe/.git/config")).unwrap();
    for pipe in ["pipe/.git/config", "ignore/.gitignore"] {
        assert!(std::process::Command::new("mkfifo").arg(desk.path(pipe)).status().unwrap().success());
    }
    let outside = list(&desk.outside());

    clock.advance(SignedDuration::from_hours(2));
    let watch = std::time::Instant::now();
    let report = tenure.sweep().await.unwrap();
    let expired: Vec<&str> = report.expired.iter().map(|k| k.session.as_str()).collect();
    assert_eq!(expired, ["absolute", "good", "number"], "{report:?}");
    let why: BTreeMap<&str, &str> =
        report.failed.iter().map(|(key, why)| (key.session.as_str(), why.as_str())).collect();
    assert_eq!(why.len(), 9);
    assert!(why["ignore"].contains("ignore/.gitignore: it is not a plain file"), "{}", why["ignore"]);
    assert!(why["gone"].contains("no directory") && why["big"].contains("`max_files` of 3"), "{why:?}");
    for name in ["link", "file", "common", "objects", "alternates", "pipe"] {
        assert!(why[name].contains("leads out of the workspace"), "{}", why[name]);
    }
    assert_eq!(list(&desk.outside()), outside, "nothing was written elsewhere");

    assert!(watch.elapsed() < Duration::from_secs(5), "nobody waits for a pipe");

    // Put right, they go with the next try.
    fs::rename(desk.path("moved"), desk.path("gone")).unwrap();
    desk.write("big/.gitignore", "[0-9]\n");
    for name in ["link", "file"] {
        fs::remove_file(desk.path(name).join(".git")).unwrap();
    }
    clock.advance(SignedDuration::from_mins(2));
    assert_eq!(tenure.sweep().await.unwrap().expired.len(), 4);
    assert_eq!(desk.files("big", desk.commits("big", "big")[0]), files(&[(".gitignore", "[0-9]\n"), ("a", "1")]));
    // Too many bytes is another limit.
    desk.write("good/large", &"x".repeat(1001));
    let id = SessionId::new("good").unwrap();
    tenure.restore(&Principal::default(), &id).await.unwrap();
    clock.advance(SignedDuration::from_hours(2));
    let report = tenure.sweep().await.unwrap();
    assert!(
        report.failed.iter().any(|(key, why)| key.session == id && why.contains("`max_bytes` of 1000")),
        "{report:?}"
    );
}

/// Everything below a directory.
fn list(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.symlink_metadata().unwrap().is_dir() {
            all.extend(list(&path));
        }
        all.push(path);
    }
    all.sort();
    all
}

/// What the repository's configuration says about where its files are is not believed.
#[tokio::test]
async fn a_repository_can_not_say_that_its_files_are_elsewhere() {
    let (desk, clock) = (Desk::new(), start());
    desk.write("w/a", "mine");
    fs::write(desk.outside().join("secret"), "theirs").unwrap();
    let git = Repository::init(desk.path("w")).unwrap();
    git.config().unwrap().set_str("core.worktree", desk.outside().to_str().unwrap()).unwrap();
    let tenure = house(&desk.config(""), &clock).await;
    begin(&tenure, "s", "w").await;
    clock.advance(SignedDuration::from_hours(2));
    assert_eq!(tenure.sweep().await.unwrap().expired.len(), 1);
    fs::write(desk.path("w/.git/config"), "[core]\n\trepositoryformatversion = 0\n").unwrap();
    assert_eq!(desk.files("w", desk.commits("w", "s")[0]), files(&[("a", "mine")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_names_are_refused_wherever_metadata_is_set() {
    let desk = Desk::new();
    let home = desk.home(false).await;
    desk.write("good/a", "1");
    desk.write("a-file", "1");
    symlink(desk.outside(), desk.path("out")).unwrap();
    symlink(desk.path("good"), desk.path("alias")).unwrap();
    fs::create_dir_all(desk.dir.path().join("root/other/theirs")).unwrap();
    symlink(desk.dir.path().join("root/other/theirs"), desk.path("theirs")).unwrap();
    assert_eq!(
        send(&home, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "good", "x": 1}})).await.0,
        201
    );
    assert_eq!(send(&home, "POST", "/sessions", json!({"metadata": {"workspace": "alias"}})).await.0, 201);
    assert_eq!(send(&home, "POST", "/sessions", json!({"metadata": {"workspace": null}})).await.0, 201);
    let count = home.sessions().await;
    let outside = desk.outside().display().to_string();
    let long = "x/".repeat(200);
    for bad in [
        json!(""),
        json!("."),
        json!(".."),
        json!("../other/theirs"),
        json!("good/../good"),
        json!(outside),
        json!("/"),
        json!("out"),
        json!("theirs"),
        json!("missing"),
        json!("a-file"),
        json!("good/.git"),
        json!("good/.GIT/objects"),
        json!("a\u{0}b"),
        json!("a\nb"),
        json!(long),
        json!(7),
        json!(true),
        json!(["good"]),
        json!({"a": 1}),
    ] {
        let metadata = json!({"workspace": bad});
        let message = json!({"role": "user", "content": "hi"});
        for (method, path, body) in [
            ("POST", "/sessions", json!({"metadata": metadata})),
            ("PATCH", "/sessions/s", json!({"metadata": metadata, "title": "changed"})),
            ("POST", "/threads/t/session", json!({"metadata": metadata})),
            ("PUT", "/v1/sessions/put", json!({"tenure": 1, "messages": [message], "metadata": metadata})),
            ("POST", "/sessions/import", json!({"tenure": 1, "messages": [message], "metadata": metadata})),
        ] {
            let (status, answer) = send(&home, method, path, body).await;
            assert_eq!(
                (status, &answer["error"]["param"]),
                (400, &json!("metadata.workspace")),
                "{method} {path} {bad}: {answer}"
            );
        }
    }
    assert_eq!(home.sessions().await, count, "nothing was made");
    let session = home.session("s").await;
    assert_eq!((session.info.title.as_deref(), &session.info.metadata["workspace"]), (None, &json!("good")));
    assert_eq!(send(&home, "PATCH", "/sessions/s", json!({"metadata": {"x": 2}})).await.0, 200);
    assert_eq!(send(&home, "PATCH", "/sessions/s", json!({"metadata": {"workspace": null}})).await.0, 200);
    // Where no workspaces are kept, the word means nothing.
    let plain = Home::new("memory", false).await.unwrap();
    assert_eq!(send(&plain, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "/etc"}})).await.0, 201);
    let (status, answer) = send(&plain, "POST", "/sessions/s/rewind", json!({"position": 0, "workspace": true})).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("workspace")), "{answer}");
}

async fn say(home: &Home, text: &str) {
    let reply = home.chat(json!({"session_id": "s", "messages": [user(text)]})).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewind_brings_the_files_back() {
    let desk = Desk::new();
    let home = desk.home(true).await;
    desk.write("w/.gitignore", "*.tmp\ncache/\n");
    desk.write("w/a", "a1");
    desk.write("w/run.sh", "#!");
    fs::set_permissions(desk.path("w/run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    desk.write("w/dir/x", "x1");
    symlink("a", desk.path("w/link")).unwrap();
    assert_eq!(send(&home, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await.0, 201);
    say(&home, "one").await;
    let first = desk.commits("w", "s")[0];
    set_traps(&desk.path("w"), &desk.outside().join("ran"));
    fs::remove_file(desk.path("w/.gitattributes")).unwrap();
    say(&home, "nothing changed").await;
    assert_eq!(desk.commits("w", "s"), [first], "no commit without a change");
    let seq = home.session("s").await.checkpoints[0].seq;
    assert!(
        desk.message("w", first).starts_with("checkpoint turn-1\n\nTenure-Session: s "),
        "{}",
        desk.message("w", first)
    );
    assert!(desk.message("w", first).ends_with(&format!("Tenure-Seq: {seq}\n")));

    // Files change, go, come, and become something else.
    desk.write("w/a", "a2");
    fs::remove_file(desk.path("w/run.sh")).unwrap();
    fs::remove_dir_all(desk.path("w/dir")).unwrap();
    desk.write("w/dir", "a file now");
    fs::remove_file(desk.path("w/link")).unwrap();
    desk.write("w/link/deep", "a directory now");
    desk.write("w/new/n", "n");
    desk.write("w/keep.tmp", "ignored");
    desk.write("w/cache/c", "ignored");
    say(&home, "two").await;
    assert_eq!(desk.commits("w", "s").len(), 2);
    let (status, set) = send(&home, "POST", "/sessions/s/checkpoints", json!({"label": "by-hand"})).await;
    assert_eq!((status, desk.commits("w", "s").len()), (201, 2), "{set}");
    desk.write("w/a", "a3, which no checkpoint has");
    desk.write("w/new/too.tmp", "ignored, in a directory that goes");

    // A place that is not there: nothing changes.
    let (status, _) = send(&home, "POST", "/sessions/s/rewind", json!({"label": "nowhere", "workspace": true})).await;
    assert_eq!((status, desk.read("w/a").unwrap().as_str()), (404, "a3, which no checkpoint has"));
    let (status, answer) =
        send(&home, "POST", "/sessions/s/rewind", json!({"label": "turn-1", "workspace": true})).await;
    assert_eq!(
        (status, &answer["position"], &answer["workspace"]["commit"]),
        (200, &json!(2), &json!(first.to_string())),
        "{answer}"
    );
    assert_eq!(home.session("s").await.messages.len(), 2);
    let read = |name: &str| desk.read(&format!("w/{name}"));
    assert_eq!((read("a"), read("run.sh"), read("dir/x")), (Some("a1".into()), Some("#!".into()), Some("x1".into())));
    assert_eq!(fs::metadata(desk.path("w/run.sh")).unwrap().permissions().mode() & 0o111, 0o111);
    assert_eq!(fs::read_link(desk.path("w/link")).unwrap(), Path::new("a"));
    assert_eq!(
        (read("keep.tmp"), read("cache/c"), read("new/too.tmp")),
        (Some("ignored".into()), Some("ignored".into()), Some("ignored, in a directory that goes".into()))
    );
    assert_eq!(read("new/n"), None);
    let saved: Oid = answer["workspace"]["saved"].as_str().unwrap().parse().unwrap();
    let lost = desk.files("w", saved);
    assert_eq!(
        (lost["a"].as_str(), lost["link/deep"].as_str()),
        ("a3, which no checkpoint has", "a directory now"),
        "nothing is lost"
    );
    assert!(!desk.outside().join("ran").exists(), "nothing was run");

    // The way on from there: the files belong to the session's new end, and not to what was cut off.
    let commits = desk.commits("w", "s");
    assert_eq!((commits.len(), commits[1]), (4, saved));
    say(&home, "other two").await;
    assert_eq!(desk.commits("w", "s"), commits);
    desk.write("w/a", "a4");
    let (status, answer) =
        send(&home, "POST", "/sessions/s/rewind", json!({"label": "turn-2", "workspace": true})).await;
    assert_eq!((status, read("a")), (200, Some("a1".into())), "{answer}");
    // Again, to where it is already: nothing to save, and no commit.
    let commits = desk.commits("w", "s");
    let (status, answer) =
        send(&home, "POST", "/sessions/s/rewind", json!({"label": "turn-2", "workspace": true})).await;
    assert_eq!((status, &answer["workspace"]["saved"]), (200, &Value::Null), "{answer}");
    assert_eq!(desk.commits("w", "s"), commits);
    // Deleting it is an end as well.
    desk.write("w/a", "a5");
    assert_eq!(send(&home, "DELETE", "/sessions/s", json!({})).await.0, 200);
    let last = desk.commits("w", "s")[0];
    assert!(desk.message("w", last).starts_with("the session was deleted"));
    assert_eq!(desk.files("w", last)["a"], "a5");
}

/// Ignored now, but a file of the commit that is brought back: it is put by before it is written over.
#[tokio::test(flavor = "multi_thread")]
async fn what_would_be_written_over_is_put_by_also_if_it_is_ignored() {
    let desk = Desk::new();
    let home = desk.home(true).await;
    desk.write("w/conf/local", "then");
    desk.write("w/data", "then");
    send(&home, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await;
    say(&home, "one").await;
    desk.write("w/.gitignore", "conf/\ndata\n");
    say(&home, "two").await;
    assert_eq!(desk.files("w", desk.commits("w", "s")[0]), files(&[(".gitignore", "conf/\ndata\n")]));
    desk.write("w/conf/local", "now");
    desk.write("w/conf/stays", "now");
    let rewind = json!({"label": "turn-1", "workspace": true});
    let (status, answer) = send(&home, "POST", "/sessions/s/rewind", rewind.clone()).await;
    assert_eq!(status, 200, "{answer}");
    let read = |name: &str| desk.read(&format!("w/{name}"));
    assert_eq!(
        (read("conf/local"), read("conf/stays"), read(".gitignore")),
        (Some("then".into()), Some("now".into()), None)
    );
    let saved = desk.files("w", answer["workspace"]["saved"].as_str().unwrap().parse().unwrap());
    assert_eq!(saved, files(&[(".gitignore", "conf/\ndata\n"), ("conf/local", "now"), ("data", "then")]));
    // Something ignored is where a file must be: it is not removed, and what to do is told.
    desk.write("w/.gitignore", "data/\n");
    fs::remove_file(desk.path("w/data")).unwrap();
    desk.write("w/data/precious", "ignored");
    let (status, answer) = send(&home, "POST", "/sessions/s/rewind", rewind.clone()).await;
    assert_eq!(status, 503, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("w/data"), "{answer}");
    assert_eq!(read("data/precious").as_deref(), Some("ignored"));
    fs::rename(desk.path("w/data"), desk.path("aside")).unwrap();
    let (status, answer) = send(&home, "POST", "/sessions/s/rewind", rewind).await;
    assert_eq!((status, read("data").as_deref()), (200, Some("then")), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_commit_nothing_is_changed() {
    let desk = Desk::new();
    let home = desk.home(false).await;
    desk.write("w/a", "1");
    send(&home, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await;
    say(&home, "one").await;
    say(&home, "two").await;
    let seq = home.session("s").await.seq;
    let rewind = |more: Value| {
        let mut body = json!({"label": "turn-1", "workspace": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let (status, answer) = send(&home, "POST", "/sessions/s/rewind", rewind(json!({}))).await;
    assert_eq!((status, &answer["error"]["code"]), (409, &json!("workspace_not_kept")), "{answer}");
    assert_eq!(
        (home.session("s").await.seq, desk.path("w/.git").exists()),
        (seq, false),
        "neither session nor workspace"
    );
    // A session of the same name that was before this one does not count.
    assert_eq!(send(&home, "DELETE", "/sessions/s?purge=true", json!({})).await.0, 200);
    assert_eq!(desk.commits("w", "s").len(), 1);
    send(&home, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await;
    for text in ["one", "two", "three", "four"] {
        say(&home, text).await;
    }
    let (status, answer) = send(&home, "POST", "/sessions/s/rewind", rewind(json!({"label": "turn-4"}))).await;
    assert_eq!((status, &answer["error"]["code"]), (409, &json!("workspace_not_kept")), "{answer}");
    // Other ways to be wrong.
    for (body, want) in [
        (rewind(json!({"workspace": "yes"})), 400),
        (rewind(json!({"position": 1})), 400),
        (json!({"workspace": true}), 400),
    ] {
        assert_eq!(send(&home, "POST", "/sessions/s/rewind", body.clone()).await.0, want, "{body}");
    }
    send(&home, "PATCH", "/sessions/s", json!({"metadata": {"workspace": null}})).await;
    let (status, answer) = send(&home, "POST", "/sessions/s/rewind", rewind(json!({}))).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("workspace")), "{answer}");
}

/// Over a limit, a rewind is refused before anything is done.
#[tokio::test(flavor = "multi_thread")]
async fn a_rewind_that_could_not_put_by_what_is_there_is_refused() {
    let desk = Desk::new();
    let home = Home::with("memory", false, |c| {
        (c.workspaces.root, c.workspaces.checkpoints, c.workspaces.max_files) = (desk.root(), true, 2);
    });
    let home = home.await.unwrap();
    desk.write("w/a", "1");
    send(&home, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "w"}})).await;
    say(&home, "one").await;
    ["b", "c"].iter().for_each(|name| desk.write(&format!("w/{name}"), "2"));
    say(&home, "a checkpoint that can not be committed harms no turn").await;
    let seq = home.session("s").await.seq;
    let (status, answer) =
        send(&home, "POST", "/sessions/s/rewind", json!({"label": "turn-1", "workspace": true})).await;
    assert_eq!((status, &answer["error"]["param"]), (413, &json!("max_files")), "{answer}");
    assert_eq!((home.session("s").await.seq, desk.read("w/b").as_deref()), (seq, Some("2")));
}

/// In the middle of a run: each tool call has a checkpoint, and the files are kept as they were there.
#[tokio::test(flavor = "multi_thread")]
async fn every_step_of_a_run_can_be_gone_back_to() {
    let desk = Desk::new();
    desk.write("w/n", "0");
    let file = desk.path("w/n");
    let count = move || {
        let file = file.clone();
        async move {
            let n: usize = fs::read_to_string(&file).unwrap().parse::<usize>().unwrap() + 1;
            fs::write(&file, n.to_string()).unwrap();
            n.to_string()
        }
    };
    let url = serve(Router::new().route("/count", axum::routing::post(count))).await + "/count";
    let home = Home::with("memory", false, |c| {
        (c.workspaces.root, c.workspaces.checkpoints) = (desk.root(), true);
        let tool = json!({"http": {"name": "count", "description": "counts", "url": url}});
        c.assistants =
            vec![serde_json::from_value(json!({"name": "counter", "model": "default", "tools": [tool]})).unwrap()];
    });
    let home = home.await.unwrap();
    let body = json!({"id": "s", "assistant_id": "counter", "metadata": {"workspace": "w"}});
    assert_eq!(send(&home, "POST", "/sessions", body).await.0, 201);
    for id in ["c1", "c2", "c3"] {
        home.model.then(Act::Call(vec![(id, "count", "{}")]));
    }
    home.model.then(Act::Say("counted"));
    let (status, run) = send(&home, "POST", "/sessions/s/runs", json!({"input": "count to three"})).await;
    assert_eq!((status, &run["status"]), (200, &json!("completed")), "{run}");
    assert_eq!(desk.read("w/n").as_deref(), Some("3"));
    let checkpoints = home.session("s").await.checkpoints;
    assert_eq!(checkpoints.len(), 4, "{checkpoints:?}");
    for (checkpoint, want) in checkpoints.iter().zip(["1", "2", "3", "3"]).rev() {
        let body = json!({"label": checkpoint.label, "workspace": true});
        let (status, answer) = send(&home, "POST", "/sessions/s/rewind", body).await;
        assert_eq!((status, desk.read("w/n").as_deref()), (200, Some(want)), "{answer}");
    }
}

/// Two sessions, and two who hold the same workspace.
#[tokio::test(flavor = "multi_thread")]
async fn one_workspace_for_many() {
    let desk = Desk::new();
    let (config, clock) = (desk.config(", checkpoints: true"), start());
    desk.write("w/a", "1");
    let houses = [house(&config, &clock).await, house(&config, &clock).await];
    let mut tasks = Vec::new();
    for (i, tenure) in houses.iter().enumerate() {
        for n in 0..8 {
            let (tenure, file) = (tenure.clone(), desk.path(&format!("w/{i}-{n}")));
            tasks.push(tokio::spawn(async move {
                let id = format!("s{i}-{n}");
                begin(&tenure, &id, "w").await;
                for round in 0..5 {
                    fs::write(&file, round.to_string()).unwrap();
                    tenure.checkpoint(&Principal::default(), &SessionId::new(&id).unwrap(), None).await.unwrap();
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    for (i, n) in (0..2).flat_map(|i| (0..8).map(move |n| (i, n))) {
        let commits = desk.commits("w", &format!("s{i}-{n}"));
        assert_eq!(commits.len(), 5);
        for (round, commit) in commits.iter().rev().enumerate() {
            assert_eq!(desk.files("w", *commit)[&format!("{i}-{n}")], round.to_string());
        }
    }
    // Held by somebody else for a while, it is waited for; for too long, it is tried again later.
    let lock = list(&desk.dir.path().join("root/.locks")).pop().unwrap();
    let held = fs::OpenOptions::new().write(true).open(lock).unwrap();
    held.lock().unwrap();
    let (who, id) = (Principal::default(), SessionId::new("s0-0").unwrap());
    let release = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        held.unlock().unwrap();
        held
    });
    desk.write("w/a", "2");
    houses[0].checkpoint(&who, &id, None).await.unwrap();
    assert_eq!(desk.commits("w", "s0-0").len(), 6);
    let held = release.join().unwrap();
    held.lock().unwrap();
    begin(&houses[0], "free", Value::Null).await;
    clock.advance(SignedDuration::from_hours(2));
    let report = houses[0].sweep().await.unwrap();
    assert_eq!((report.expired.len(), report.failed.len()), (1, 8), "{report:?}");
    assert!(report.failed.iter().all(|(_, why)| why.contains("in use by another")), "{report:?}");
    held.unlock().unwrap();
    clock.advance(SignedDuration::from_mins(2));
    assert_eq!(houses[0].sweep().await.unwrap().expired.len(), 8);
    assert_eq!(houses[0].head(&who, &id).await.unwrap().status, Status::Expired);
}

/// The process dies after the commit, before the session is marked: the next one finds nothing to commit, and goes on.
#[tokio::test]
async fn an_end_that_was_committed_already_is_not_committed_twice() {
    let (desk, clock) = (Desk::new(), start());
    desk.write("w/a", "1");
    let tenure = house(&desk.config(""), &clock).await;
    tenure.on_expire(|_, why| {
        assert_eq!(why, Ending::Expired);
        async { Err("it dies here".to_owned()) }
    });
    begin(&tenure, "s", "w").await;
    clock.advance(SignedDuration::from_hours(2));
    assert_eq!(tenure.sweep().await.unwrap().failed.len(), 1);
    clock.advance(SignedDuration::from_mins(2));
    assert_eq!(tenure.sweep().await.unwrap().failed.len(), 1);
    assert_eq!(desk.commits("w", "s").len(), 1);
}

/// The command line on a store: the same hooks, and `--workspace`.
#[test]
fn the_command_line_brings_files_back() {
    let desk = Desk::new();
    let tenure = |args: &[&str], input: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tenure"));
        for name in ["TENURE_SERVER", "TENURE_KEY", "TENURE_STORE", "TENURE_CONFIG"] {
            command.env_remove(name);
        }
        command.args(args).current_dir(desk.dir.path()).stdin(std::process::Stdio::piped());
        let mut child =
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let done = child.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (done.status.success(), text(done.stdout), text(done.stderr))
    };
    fs::write(desk.dir.path().join("tenure.yaml"), "store: sqlite:t.db\nworkspaces: {root: root, checkpoints: true}\n")
        .unwrap();
    desk.write("w/a", "1");
    let session = json!({"tenure": 1, "session_id": "one", "messages": [], "metadata": {"workspace": "w"}});
    fs::write(desk.dir.path().join("one.json"), session.to_string()).unwrap();
    let ran = tenure(&["sessions", "import", "one.json"], "");
    assert!(ran.0, "{ran:?}");
    assert!(tenure(&["chat", "one"], "first\n").0);
    desk.write("w/a", "2");
    assert!(tenure(&["chat", "one"], "second\n").0);
    assert_eq!(desk.commits("w", "one").len(), 2);
    let ran = tenure(&["sessions", "rewind", "one", "turn-1", "--workspace"], "");
    let first = desk.commits("w", "one").pop().unwrap().to_string();
    assert!(ran.0 && ran.1.contains(&format!("its workspace is as in commit {}", &first[..12])), "{ran:?}");
    assert_eq!(desk.read("w/a").as_deref(), Some("1"));
    let ran = tenure(&["sessions", "rewind", "one", "0", "--workspace"], "");
    assert!(!ran.0 && ran.2.contains("was not committed at position 0"), "{ran:?}");
}
