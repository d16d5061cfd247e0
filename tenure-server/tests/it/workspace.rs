//! Workspaces in git: commits at the end of a session and at checkpoints, and rewinds. Repositories are real, some
//! of them hostile.

mod rewind;

use crate::support::*;
use git2::{Oid, Repository};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tenure::{Clock, NewSession, Principal, SessionId, Tenure, maintenance::EndReason, session::Status};
use tenure_server::config::Config;

/// The directory of workspaces, and a directory outside of it.
struct WorkspaceFixture {
    dir: tempfile::TempDir,
}

impl WorkspaceFixture {
    fn new() -> Self {
        let fixture = Self { dir: tempfile::tempdir().unwrap() };
        fs::create_dir_all(fixture.path("")).unwrap();
        fs::create_dir(fixture.outside()).unwrap();
        fixture
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

    /// A server with workspaces enabled.
    async fn test(&self, checkpoints: bool) -> TestServer {
        let test = TestServer::with(StoreKind::Memory, false, |c| {
            (c.workspaces.root, c.workspaces.checkpoints) = (self.root(), checkpoints);
        });
        test.await.unwrap()
    }
}

fn files(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect()
}

/// A `Tenure` with a movable clock.
async fn open_tenure(config: &Config, clock: &Clock) -> Tenure {
    let options = tenure::Options { clock: clock.clone(), ..config.options() };
    let tenure = Tenure::open_with(&config.store, options).await.unwrap();
    if let Some(workspaces) = tenure_server::workspace::Workspaces::new(&config.workspaces).unwrap() {
        workspaces.install(&tenure);
    }
    tenure
}

fn start() -> Clock {
    Clock::manual("2026-01-01T00:00:00Z".parse::<Timestamp>().unwrap())
}

async fn begin(tenure: &Tenure, id: &str, workspace: impl Into<Value>) {
    let metadata = serde_json::Map::from_iter([("workspace".to_owned(), workspace.into())]);
    let new = NewSession { id: Some(SessionId::new(id).unwrap()), metadata, ..NewSession::default() };
    tenure.create(&Principal::default(), new).await.unwrap();
}

async fn send(test: &TestServer, method: &str, path: &str, body: Value) -> (u16, Value) {
    let method = method.parse().unwrap();
    let request = test.client.http.request(method, format!("{}{path}", test.client.base)).json(&body);
    let response = request.send().await.unwrap();
    (response.status().as_u16(), serde_json::from_str(&response.text().await.unwrap()).unwrap_or_default())
}

/// Installs hooks and filters that leave a trace if git runs them.
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
    let fixture = WorkspaceFixture::new();
    let clock = start();
    fixture.write("shop/a.txt", "one\r\ntwo\n$Id$\n");
    let git = Repository::init(fixture.path("shop")).unwrap();
    let author = git2::Signature::now("me", "me@example.com").unwrap();
    let mut index = git.index().unwrap();
    index.add_path(Path::new("a.txt")).unwrap();
    index.write().unwrap();
    let tree = git.find_tree(index.write_tree().unwrap()).unwrap();
    let user_commit = git.commit(Some("HEAD"), &author, &author, "mine", &tree, &[]).unwrap();
    set_traps(&fixture.path("shop"), &fixture.outside().join("ran"));
    fixture.write("shop/.gitignore", "*.log\nbuild/\n/sub/local\n");
    for (name, text) in [
        ("b.txt", "new"),
        ("x.log", "ignored"),
        ("build/out", "ignored"),
        ("sub/c", "deep"),
        ("sub/local", "ignored"),
        ("sub/.gitignore", "d\n"),
        ("sub/d", "ignored"),
    ] {
        fixture.write(&format!("shop/{name}"), text);
    }
    fs::set_permissions(fixture.path("shop/sub/c"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("/etc/passwd", fixture.path("shop/link")).unwrap();
    fs::create_dir(fixture.path("shop/empty")).unwrap();
    let before = fs::read(fixture.path("shop/.git/index")).unwrap();

    let tenure = open_tenure(&fixture.config(""), &clock).await;
    begin(&tenure, "s1", "shop").await;
    clock.advance(SignedDuration::from_hours(2));
    let report = tenure.sweep().await.unwrap();
    assert_eq!((report.expired.len(), report.failed.len()), (1, 0), "{report:?}");

    let commits = fixture.commits("shop", "s1");
    assert_eq!(commits.len(), 1);
    let mut committed = fixture.files("shop", commits[0]);
    committed.retain(|name, _| !name.starts_with(".git") && !name.ends_with(".gitignore"));
    let want = [("a.txt", "one\r\ntwo\n$Id$\n"), ("b.txt", "new"), ("link", "/etc/passwd"), ("sub/c", "deep")];
    assert_eq!(committed, files(&want), "byte for byte, without what is ignored, and links are links");
    let commit = git.find_commit(commits[0]).unwrap();
    assert_eq!(commit.parent_id(0).unwrap(), user_commit);
    assert_eq!(commit.tree().unwrap().get_path(Path::new("sub/c")).unwrap().filemode(), 0o100755);
    let message = commit.message().unwrap();
    assert_eq!(message, "end of the session\n\nTenure-Session: s1 2026-01-01T00:00:00Z\nTenure-Seq: 1\n");
    assert_eq!(git.head().unwrap().target(), Some(user_commit), "HEAD is the user's");
    assert_eq!(fs::read(fixture.path("shop/.git/index")).unwrap(), before, "so is the index");
    assert!(!fixture.outside().join("ran").exists(), "nothing was run");

    // Ended again without a change: no further commit.
    tenure.restore(&Principal::default(), &SessionId::new("s1").unwrap(), None).await.unwrap();
    clock.advance(SignedDuration::from_hours(2));
    assert_eq!(tenure.sweep().await.unwrap().expired.len(), 1);
    assert_eq!(fixture.commits("shop", "s1"), commits);
}

#[tokio::test]
async fn evicted_sessions_and_directories_without_repository_are_committed() {
    let fixture = WorkspaceFixture::new();
    let clock = start();
    fixture.write("old/a", "1");
    let mut config = fixture.config("");
    config.sessions.max_sessions = 1;
    let tenure = open_tenure(&config, &clock).await;
    begin(&tenure, "a.b:c", "old").await;
    clock.advance(SignedDuration::from_secs(1));
    begin(&tenure, "other", Value::Null).await;
    let commits = fixture.commits("old", "a%2Eb%3Ac");
    assert_eq!(commits.len(), 1);
    assert_eq!(fixture.files("old", commits[0]), files(&[("a", "1")]));
    assert!(!fixture.path("old/.git/hooks").join("pre-commit.sample").exists(), "no template of this machine is used");
}

/// A failing workspace is reported and retried, without delaying the others.
#[tokio::test]
async fn a_failing_workspace_does_not_block_others() {
    let fixture = WorkspaceFixture::new();
    let clock = start();
    let names = ["gone", "good", "big", "link", "file", "common", "objects", "alternates", "pipe", "ignore"];
    for name in names {
        fixture.write(&format!("{name}/a"), "1");
    }
    let tenure = open_tenure(&fixture.config(", max_files: 3, max_bytes: 1000"), &clock).await;
    for name in names {
        begin(&tenure, name, name).await;
    }
    // These were never workspaces, and have nothing to commit.
    begin(&tenure, "number", 7).await;
    begin(&tenure, "absolute", "/etc").await;
    fs::rename(fixture.path("gone"), fixture.path("moved")).unwrap();
    (0..3).for_each(|n| fixture.write(&format!("big/{n}"), "x"));
    // Repositories that redirect elsewhere.
    let outside_repository = fixture.outside().join("repository");
    Repository::init(&outside_repository).unwrap();
    symlink(outside_repository.join(".git"), fixture.path("link/.git")).unwrap();
    fixture.write("file/.git", &format!("gitdir: {}/.git\n", outside_repository.display()));
    for name in ["common", "objects", "alternates", "pipe"] {
        Repository::init(fixture.path(name)).unwrap();
    }
    fixture.write("common/.git/commondir", &format!("{}/.git\n", outside_repository.display()));
    fs::remove_dir_all(fixture.path("objects/.git/objects")).unwrap();
    symlink(outside_repository.join(".git/objects"), fixture.path("objects/.git/objects")).unwrap();
    fixture
        .write("alternates/.git/objects/info/alternates", &format!("{}/.git/objects\n", outside_repository.display()));
    // Named pipes without a writer.
    fs::remove_file(fixture.path("pipe/.git/config")).unwrap();
    for pipe in ["pipe/.git/config", "ignore/.gitignore"] {
        assert!(std::process::Command::new("mkfifo").arg(fixture.path(pipe)).status().unwrap().success());
    }
    let outside = list(&fixture.outside());

    clock.advance(SignedDuration::from_hours(2));
    let watch = std::time::Instant::now();
    let report = tenure.sweep().await.unwrap();
    let expired: Vec<&str> = report.expired.iter().map(|k| k.session.as_str()).collect();
    assert_eq!(expired, ["absolute", "good", "number"], "{report:?}");
    let reasons: BTreeMap<&str, &str> =
        report.failed.iter().map(|(key, reasons)| (key.session.as_str(), reasons.as_str())).collect();
    assert_eq!(reasons.len(), 9);
    assert!(reasons["ignore"].contains("ignore/.gitignore: not a regular file"), "{}", reasons["ignore"]);
    assert!(
        reasons["gone"].contains("no workspace directory") && reasons["big"].contains("`max_files` of 3"),
        "{reasons:?}"
    );
    for name in ["link", "file", "common", "objects", "alternates", "pipe"] {
        assert!(reasons[name].contains("outside the workspace"), "{}", reasons[name]);
    }
    assert_eq!(list(&fixture.outside()), outside, "nothing was written elsewhere");

    assert!(watch.elapsed() < Duration::from_secs(55), "nobody waits for a pipe until its time is over");

    // Once repaired, they are committed with the next retry.
    fs::rename(fixture.path("moved"), fixture.path("gone")).unwrap();
    fixture.write("big/.gitignore", "[0-9]\n");
    for name in ["link", "file"] {
        fs::remove_file(fixture.path(name).join(".git")).unwrap();
    }
    clock.advance(SignedDuration::from_mins(2));
    assert_eq!(tenure.sweep().await.unwrap().expired.len(), 4);
    assert_eq!(fixture.files("big", fixture.commits("big", "big")[0]), files(&[(".gitignore", "[0-9]\n"), ("a", "1")]));
    // The limit on bytes is separate.
    fixture.write("good/large", &"x".repeat(1001));
    let id = SessionId::new("good").unwrap();
    tenure.restore(&Principal::default(), &id, None).await.unwrap();
    clock.advance(SignedDuration::from_hours(2));
    let report = tenure.sweep().await.unwrap();
    assert!(
        report.failed.iter().any(|(key, reasons)| key.session == id && reasons.contains("`max_bytes` of 1000")),
        "{report:?}"
    );
}

/// All paths below a directory.
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

/// The repository's own configuration of its work tree is not trusted.
#[tokio::test]
async fn a_repository_can_not_point_outside_its_directory() {
    let fixture = WorkspaceFixture::new();
    let clock = start();
    fixture.write("w/a", "mine");
    fs::write(fixture.outside().join("secret"), "theirs").unwrap();
    let git = Repository::init(fixture.path("w")).unwrap();
    git.config().unwrap().set_str("core.worktree", fixture.outside().to_str().unwrap()).unwrap();
    let tenure = open_tenure(&fixture.config(""), &clock).await;
    begin(&tenure, "s", "w").await;
    clock.advance(SignedDuration::from_hours(2));
    assert_eq!(tenure.sweep().await.unwrap().expired.len(), 1);
    fs::write(fixture.path("w/.git/config"), "[core]\n\trepositoryformatversion = 0\n").unwrap();
    assert_eq!(fixture.files("w", fixture.commits("w", "s")[0]), files(&[("a", "mine")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_names_are_refused_wherever_metadata_is_set() {
    let fixture = WorkspaceFixture::new();
    let test = fixture.test(false).await;
    fixture.write("good/a", "1");
    fixture.write("a-file", "1");
    symlink(fixture.outside(), fixture.path("out")).unwrap();
    symlink(fixture.path("good"), fixture.path("alias")).unwrap();
    fs::create_dir_all(fixture.dir.path().join("root/other/theirs")).unwrap();
    symlink(fixture.dir.path().join("root/other/theirs"), fixture.path("theirs")).unwrap();
    assert_eq!(
        send(&test, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "good", "x": 1}})).await.0,
        201
    );
    assert_eq!(send(&test, "POST", "/sessions", json!({"metadata": {"workspace": "alias"}})).await.0, 201);
    assert_eq!(send(&test, "POST", "/sessions", json!({"metadata": {"workspace": null}})).await.0, 201);
    let count = test.sessions().await;
    let outside = fixture.outside().display().to_string();
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
            let (status, answer) = send(&test, method, path, body).await;
            assert_eq!(
                (status, &answer["error"]["param"]),
                (400, &json!("metadata.workspace")),
                "{method} {path} {bad}: {answer}"
            );
            assert!(!answer.to_string().contains(&fixture.root()), "where the root is is nobody's business: {answer}");
        }
    }
    assert_eq!(test.sessions().await, count, "nothing was made");
    let session = test.session("s").await;
    assert_eq!(
        (session.head().info.title.as_deref(), &session.head().info.metadata["workspace"]),
        (None, &json!("good"))
    );
    assert_eq!(send(&test, "PATCH", "/sessions/s", json!({"metadata": {"x": 2}})).await.0, 200);
    assert_eq!(send(&test, "PATCH", "/sessions/s", json!({"metadata": {"workspace": null}})).await.0, 200);
    // Where workspaces are not configured, `metadata.workspace` has no effect.
    let plain = TestServer::new(StoreKind::Memory, false).await.unwrap();
    assert_eq!(send(&plain, "POST", "/sessions", json!({"id": "s", "metadata": {"workspace": "/etc"}})).await.0, 201);
    let (status, answer) = send(&plain, "POST", "/sessions/s/rewind", json!({"position": 0, "workspace": true})).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("workspace")), "{answer}");
}

/// Two sessions, and two concurrent holders of the same workspace.
#[tokio::test(flavor = "multi_thread")]
async fn one_workspace_for_many() {
    let fixture = WorkspaceFixture::new();
    let config = fixture.config(", checkpoints: true");
    let clock = start();
    fixture.write("w/a", "1");
    let nodes = [open_tenure(&config, &clock).await, open_tenure(&config, &clock).await];
    let mut tasks = Vec::new();
    for (i, tenure) in nodes.iter().enumerate() {
        for n in 0..8 {
            let tenure = tenure.clone();
            let file = fixture.path(&format!("w/{i}-{n}"));
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
        let commits = fixture.commits("w", &format!("s{i}-{n}"));
        assert_eq!(commits.len(), 5);
        for (round, commit) in commits.iter().rev().enumerate() {
            assert_eq!(fixture.files("w", *commit)[&format!("{i}-{n}")], round.to_string());
        }
    }
    // A lock held for a short time is waited for; held for too long, the commit is retried later.
    let lock = list(&fixture.dir.path().join("root/.locks")).pop().unwrap();
    let held = fs::OpenOptions::new().write(true).open(lock).unwrap();
    held.lock().unwrap();
    let principal = Principal::default();
    let id = SessionId::new("s0-0").unwrap();
    let release = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300)); // pacing: the lock is held this long
        held.unlock().unwrap();
        held
    });
    fixture.write("w/a", "2");
    nodes[0].checkpoint(&principal, &id, None).await.unwrap();
    assert_eq!(fixture.commits("w", "s0-0").len(), 6);
    let held = release.join().unwrap();
    held.lock().unwrap();
    begin(&nodes[0], "free", Value::Null).await;
    clock.advance(SignedDuration::from_hours(2));
    let report = nodes[0].sweep().await.unwrap();
    assert_eq!((report.expired.len(), report.failed.len()), (1, 8), "{report:?}");
    assert!(report.failed.iter().all(|(_, reason)| reason.contains("in use by another")), "{report:?}");
    held.unlock().unwrap();
    clock.advance(SignedDuration::from_mins(2));
    assert_eq!(nodes[0].sweep().await.unwrap().expired.len(), 8);
    assert_eq!(nodes[0].head(&principal, &id).await.unwrap().status, Status::Expired);
}

/// A step after the commit fails, as if the process had died there: the retry finds nothing to commit, and
/// continues.
#[tokio::test]
async fn a_committed_end_is_not_committed_twice() {
    let fixture = WorkspaceFixture::new();
    let clock = start();
    fixture.write("w/a", "1");
    let tenure = open_tenure(&fixture.config(""), &clock).await;
    tenure.on_expire(|_, reason| {
        assert_eq!(reason, EndReason::Expired);
        async { Err("it dies here".into()) }
    });
    begin(&tenure, "s", "w").await;
    clock.advance(SignedDuration::from_hours(2));
    assert_eq!(tenure.sweep().await.unwrap().failed.len(), 1);
    clock.advance(SignedDuration::from_mins(2));
    assert_eq!(tenure.sweep().await.unwrap().failed.len(), 1);
    assert_eq!(fixture.commits("w", "s").len(), 1);
}
