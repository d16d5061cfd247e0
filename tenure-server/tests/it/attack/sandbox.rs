//! Hostile code in the sandbox of the `python` tool.

use super::{amount, report};
use crate::python::processes;
use crate::support::{ModelResponse, ScriptedModelServer, assistant, call, wait_until};
use crate::support::{ServerProcess, send};
use serde_json::{Value, json};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// A server whose assistant `agent` has the `python` tool, and a model that calls it with the code of a test.
struct Attack {
    server: Option<ServerProcess>,
    model: ScriptedModelServer,
    base_url: String,
    python: Value,
    starter: Option<PathBuf>,
    dir: tempfile::TempDir,
}

impl Attack {
    async fn start(python: Value) -> Self {
        Self::start_through(python, None).await
    }

    /// Starts a server on a system without user namespaces, where the files of a session are on the host.
    async fn start_without_namespaces(python: Value) -> Self {
        let script = "#!/bin/sh\nexec unshare --user --map-root-user sh -c 'echo 0 > /proc/sys/user/max_user_namespaces; exec \"$@\"' sh \"$@\"\n";
        Self::start_through(python, Some(script)).await
    }

    async fn start_through(python: Value, starter: Option<&str>) -> Self {
        // In memory, if `/dev/shm` exists: thousands of directories are created and removed.
        let memory = Some(Path::new("/dev/shm")).filter(|path| path.is_dir());
        let dir = memory.map_or_else(tempfile::tempdir, tempfile::tempdir_in).unwrap();
        std::fs::create_dir(dir.path().join("tmp")).unwrap();
        let starter = starter.map(|script| {
            let path = dir.path().join("starter");
            std::fs::write(&path, script).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path
        });
        let model = ScriptedModelServer::default();
        let base_url = model.start().await;
        let mut attack = Self { server: None, model, base_url, python, starter, dir };
        attack.restart();
        attack
    }

    fn restart(&mut self) {
        let yaml = format!(
            "store: sqlite:tenure.db\nmodels: [{{name: default, base_url: '{}', retries: 0}}]\nassistants: [{{name: agent, model: default, tools: [python]}}]\npython: {}\n",
            self.base_url, self.python
        );
        let scratch = self.scratch().to_str().unwrap().to_owned();
        let env = [("TMPDIR", scratch.as_str())];
        self.server = Some(ServerProcess::start_through(self.starter.as_deref(), self.dir.path(), &yaml, &env));
    }

    fn server(&self) -> &ServerProcess {
        self.server.as_ref().unwrap()
    }

    /// The server's directory for temporary files.
    fn scratch(&self) -> PathBuf {
        self.dir.path().join("tmp")
    }

    /// The number of files that sandboxes have left there.
    fn remaining(&self) -> usize {
        std::fs::read_dir(self.scratch()).unwrap().count()
    }

    /// Starts a run in a session in which the model calls the tool once with this code.
    async fn begin(&self, session: &str, code: &str, mode: &str) -> (u16, Value) {
        let post = |path: String, body: Value| self.server().request("POST", &path).json(&body);
        let created = send(post("/sessions".into(), json!({"id": session, "assistant_id": "agent"}))).await;
        assert!([201, 409].contains(&created.0), "{created:?}");
        let arguments = json!({ "code": code }).to_string();
        self.model
            .then(ModelResponse::Message(call("c", "python", &arguments)))
            .then(ModelResponse::Message(assistant("Done.")));
        send(post(format!("/sessions/{session}/runs"), json!({"input": "Go", "mode": mode}))).await
    }

    /// Runs code and returns the output that the model sees. The server must still answer afterwards.
    async fn run(&self, session: &str, code: &str) -> String {
        let outcome = self.begin(session, code, "wait").await;
        assert!(outcome.0 == 200 || outcome.0 == 201, "{outcome:?}");
        assert_eq!(self.server().get("/healthz").await.0, 200);
        let shown = self.model.last_messages();
        let result = shown.iter().rev().find(|message| message["role"] == "tool").expect("a result");
        result["content"].as_str().unwrap().to_owned()
    }
}

/// Creates more than 13,000 nested directories, assembled from pieces because Landlock checks every parent of a
/// path.
const NESTED: &str = "import os
piece = '/'.join(['d'] * 100)
os.mkdir('top')
for i in range(130):
    os.makedirs('next/' + piece)
    os.rename('top', 'next/' + piece + '/top')
    os.rename('next', 'top')
";

#[tokio::test(flavor = "multi_thread")]
async fn nested_directories_do_not_end_the_server() {
    let mut attack = Attack::start(json!({"max_files": 20_000})).await;
    let rounds = amount(1, 20);
    for _ in 0..rounds {
        let ended = attack.run("s", NESTED).await;
        assert!(ended.contains("python.max_depth") && ended.contains("all definitions are lost"), "{ended}");
        assert_eq!(attack.run("s", "1 + 1").await, "2");
    }
    // All directories exist, and nothing was checked before the session ends.
    attack
        .begin("t", &format!("{NESTED}\nimport subprocess\nsubprocess.run(['sleep', '98770.1'])"), "background")
        .await;
    wait_until("they are made", async || processes("sleep 98770.1") == 1).await;
    let deleted = send(attack.server().request("DELETE", "/sessions/t")).await;
    assert_eq!(deleted.0, 200, "{deleted:?}");
    wait_until("it is ended", async || processes("sleep 98770.1") == 0).await;
    assert_eq!(attack.server().get("/healthz").await.0, 200);
    assert_eq!(attack.remaining(), 0, "nothing of a session is on the host");
    // Nothing is left after the server was killed either.
    let code = format!("{NESTED}\nimport subprocess\nsubprocess.run(['sleep', '98770.3'])");
    attack.model.clear();
    attack.begin("u", &code, "background").await;
    wait_until("they are made", async || processes("sleep 98770.3") == 1).await;
    attack.server.take().unwrap().kill();
    wait_until("the interpreter is gone", async || processes("sleep 98770.3") == 0).await;
    assert_eq!(attack.remaining(), 0, "nothing of a session is on the host");
    report("sandbox::nested_directories", "directories", 13_130 * (rounds + 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn files_on_the_host_are_removed_outside_the_server() {
    let mut attack = Attack::start_without_namespaces(json!({"require": "landlock", "max_files": 20_000})).await;
    let ended = attack.run("s", NESTED).await;
    assert!(ended.contains("python.max_depth"), "{ended}");
    wait_until("they are removed", async || attack.remaining() == 0).await;
    // Unreadable directories, nested directories, and a server that is killed.
    let code = format!(
        "{NESTED}\nos.mkdir('hidden', 0)\nos.mkdir('top/hidden', 0)\nimport subprocess\nsubprocess.run(['sleep', '98770.2'])"
    );
    attack.begin("t", &code, "background").await;
    wait_until("they are made", async || processes("sleep 98770.2") == 1).await;
    attack.server.take().unwrap().kill();
    wait_until("the interpreter is gone", async || processes("sleep 98770.2") == 0).await;
    assert_eq!(attack.remaining(), 1, "the directory of the killed server");
    attack.restart();
    wait_until("what was left behind is removed", async || attack.remaining() == 0).await;
    assert_eq!(attack.server().get("/healthz").await.0, 200);
}

/// Attempts to access paths of the host, each printed as `name: outcome`.
const REACH: &str = r#"
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def watch(path):
    fd = libc.inotify_init()
    if fd < 0 or libc.inotify_add_watch(fd, path.encode(), 0xfff) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def connect(path):
    socket.socket(socket.AF_UNIX).connect(path)
for path in PATHS:
    for name, act in [
        ("stat", os.stat), ("open", open), ("listdir", os.listdir), ("chmod", lambda p: os.chmod(p, 0o666)), ("utime", os.utime),
        ("setxattr", lambda p: os.setxattr(p, "user.x", b"1")), ("chown", lambda p: os.chown(p, -1, os.getgid())), ("inotify", watch),
        ("connect", connect), ("link", lambda p: os.link(p, "link")), ("unlink", os.unlink), ("rename", lambda p: os.rename(p, "moved")),
    ]:
        try:
            act(path)
            print("REACHED", name, path)
        except (OSError, TypeError) as error:
            print("refused", name)
"#;

fn state(path: &Path) -> (u32, i64, i64, u64) {
    let metadata = std::fs::symlink_metadata(path).unwrap();
    (metadata.mode(), metadata.mtime(), metadata.ctime(), metadata.ino())
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_the_server_can_not_be_reached() {
    let attack = Attack::start(json!({})).await;
    let secret = attack.dir.path().join("secret");
    let socket = attack.dir.path().join("socket");
    std::fs::write(&secret, "hush").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    let paths = [attack.dir.path().to_owned(), attack.dir.path().join("tenure.yaml"), secret, socket];
    let before = paths.each_ref().map(|path| state(path));
    let outcome = attack.run("s", &REACH.replace("PATHS", &format!("{paths:?}"))).await;
    assert!(!outcome.contains("REACHED"), "{outcome}");
    assert_eq!(outcome.matches("refused").count(), 4 * 12, "{outcome}");
    let directory = state(attack.dir.path());
    assert_eq!((directory.0, directory.3), (before[0].0, before[0].3), "the server itself writes to its directory");
    assert_eq!(paths[1..].iter().map(|path| state(path)).collect::<Vec<_>>(), before[1..]);
    // Visible paths are safe as well: the system's programs are read-only.
    let outcome = attack.run("s", &REACH.replace("PATHS", "['/usr', '/dev/null']")).await;
    let reached: Vec<&str> = outcome.lines().filter(|line| line.starts_with("REACHED")).collect();
    assert_eq!(
        reached,
        ["REACHED stat /usr", "REACHED listdir /usr", "REACHED stat /dev/null", "REACHED open /dev/null"]
    );
    report("sandbox::files_of_the_server", "refused attempts", 4 * 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_files_and_depth_are_limited() {
    let attack = Attack::start(json!({"disk": "2MB", "max_files": 200, "max_depth": 5})).await;
    let disk = attack.run("s", "f = open('big', 'wb', buffering=0)\nwhile True: f.write(b'x' * 65536)").await;
    assert!(disk.contains("No space left") && disk.contains("2MB (python.disk)"), "{disk}");
    assert_eq!(attack.run("s", "import os\nos.remove('big')\nf.close()\nopen('small', 'w').write('x')").await, "1");
    let files = attack.run("s", "for i in range(1000): open(f'{i}', 'w').close()").await;
    assert!(files.contains("No space left") && files.contains("200 files (python.max_files)"), "{files}");
    assert_eq!(attack.run("s", "len(os.listdir())").await, "200");
    // An unreadable directory does not hide what is nested in it.
    let hidden = "os.chdir(os.environ['HOME'])\n[os.remove(f) for f in os.listdir()]\nfor i in range(6):\n    os.mkdir('d')\n    os.chdir('d')\nfor i in range(6):\n    os.chdir('..')\n    os.chmod('d', 0)";
    let depth = attack.run("s", hidden).await;
    assert!(depth.contains("more than 5 deep (python.max_depth)"), "{depth}");
    assert_eq!(attack.run("s", "import os\nos.listdir()").await, "[]", "a new interpreter");
    // Memory that is not backed by a file.
    let memory =
        "import ctypes\nlibc = ctypes.CDLL(None)\n(libc.memfd_create(b'x', 0), libc.shmget(0, 1 << 20, 0o1600))";
    assert_eq!(attack.run("s", memory).await, "(-1, -1)");
    assert_eq!(attack.remaining(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_memory_and_network_are_limited() {
    let attack = Attack::start(json!({"memory": "300MB", "processes": 40})).await;
    let bomb =
        "import os, time\nfor i in range(2000):\n    if os.fork() == 0:\n        time.sleep(1000)\n        os._exit(0)";
    let bomb = attack.run("s", bomb).await;
    assert!(bomb.contains("BlockingIOError") || bomb.contains("Resource temporarily unavailable"), "{bomb}");
    assert!(attack.run("t", "b = bytearray(1 << 30)").await.contains("MemoryError"));
    let address = attack.server().address;
    let connect =
        format!("import socket\nsocket.create_connection(({:?}, {}), 2)", address.ip().to_string(), address.port());
    let refused = attack.run("t", &connect).await;
    assert!(refused.contains("Error") && !refused.contains("socket.socket fd"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_system_that_can_not_isolate_refuses() {
    let mut attack = Attack::start_without_namespaces(json!({})).await;
    let refused = attack.run("s", "open('/etc/passwd').read()").await;
    assert!(refused.contains("user namespaces") && refused.contains("python.require"), "{refused}");
    assert_eq!(attack.remaining(), 0);
    let log = attack.server.take().unwrap().stop();
    assert!(log.contains("the Python tool is not available") && log.contains("user namespaces"), "{log}");
}
