//! The tool `python`: real interpreters in their sandbox.

use crate::support::{ServerProcess, send, wait_until};
use crate::tools::{call, key, python, toolbox};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tenure::{Assistant, ToolError, ToolOutput, Tools};
use tenure_server::config::Config;
use tenure_server::tools::Toolbox;

/// Returns true if the number of processes can be capped for this user: for root only since Linux 6.14.
fn has_cap_on_processes() -> bool {
    use std::os::unix::fs::MetadataExt;
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|n| n.trim().parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    let has = !root || version >= (6, 14);
    if !has {
        eprintln!("partly skipped: this system has no cap on processes for root");
    }
    has
}

/// Runs code in a session.
async fn run(tools: &Toolbox, assistant: &Assistant, session: &str, code: &str) -> ToolOutput {
    tools.call(&crate::tools::context(assistant), &call(session, "python", json!({"code": code}))).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn python_keeps_definitions_between_calls() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({}));
    let list = tools.list(&crate::tools::context(&assistant)).await.unwrap();
    assert_eq!(
        (list.len(), list[0].name.as_str(), list[0].is_repeatable(), list[0].cache),
        (1, "python", false, false)
    );
    let ask = async |code: &str| run(&tools, &assistant, "s", code).await;
    let plain = |content: &str| ToolOutput { content: content.into(), failed: false };
    assert_eq!(ask("def twice(x):\n    return 2 * x\nname = 'Grüezi'").await, plain(""));
    assert_eq!(ask("print(name)\ntwice(21)").await, plain("Grüezi\n42"));
    assert_eq!(ask("_ + 1").await, plain("43"));
    assert_eq!(ask("None").await, plain(""));
    assert_eq!(ask("import sys; print('out'); print('err', file=sys.stderr)").await, plain("out\nerr\n"));
    assert_eq!(ask("import subprocess; subprocess.run(['echo', 'child']).returncode").await, plain("child\n0"));
    let error = ask("x = 1\ntwice()").await;
    assert!(error.failed && error.content.starts_with("Traceback") && error.content.contains("line 2"), "{error:?}");
    assert!(error.content.contains("    twice()") && error.content.contains("TypeError"), "{error:?}");
    assert!(ask("def").await.content.contains("SyntaxError"));
    assert!(ask("raise SystemExit(3)").await.content.ends_with("SystemExit: 3"));
    assert_eq!(ask("x").await, plain("1"));
    // Printed output is never parsed as a response, and too much of it is truncated.
    let line = r#"{"id": 99, "text": "no", "failed": false}"#;
    assert_eq!(ask(&format!("print('{line}')")).await, plain(&format!("{line}\n")));
    let long = ask("print('a' * 10**6 + 'z')").await;
    assert!(long.content.len() < 66_000 && long.content.contains("bytes omitted") && long.content.ends_with("z\n"));
    assert_eq!(ask("'\\ud800'").await, plain("'\\ud800'"));
    let missing =
        tools.call(&crate::tools::context(&assistant), &call("s", "python", json!({"cod": "1"}))).await.unwrap();
    assert!(missing.failed && missing.content.contains("`code`"));
    // Sessions are isolated from each other.
    assert!(run(&tools, &assistant, "other", "name").await.content.contains("NameError"));
    tools.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn python_is_interrupted_then_killed() {
    let (tools, assistant) =
        toolbox(json!([{"python": {"timeout": "600ms", "memory": "300MB"}}]), json!({"grace": "500ms"}));
    let ask = async |code: &str| run(&tools, &assistant, "s", code).await;
    ask("x = 7").await;
    for slow in
        ["import time\ntime.sleep(60)", "while True: pass", "import subprocess\nsubprocess.run(['sleep', '60'])"]
    {
        let late = ask(slow).await;
        assert!(late.failed && late.content.contains("KeyboardInterrupt"), "{late:?}");
        assert!(late.content.contains("600ms") && late.content.contains("earlier definitions are kept"), "{late:?}");
        assert_eq!(ask("x").await.content, "7", "after {slow}");
    }
    assert!(ask("b = bytearray(1 << 30)").await.content.contains("MemoryError"));
    let ignores_interrupt =
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)";
    let killed = ask(ignores_interrupt).await;
    assert!(killed.failed && killed.content.contains("all definitions are lost"), "{killed:?}");
    assert!(ask("x").await.content.contains("NameError"));
    for end in
        ["import os\nos._exit(4)", "import os\nos.abort()", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"]
    {
        let ended = ask(end).await;
        assert!(ended.failed && ended.content.contains("the interpreter exited"), "{ended:?}");
        assert_eq!(ask("1 + 1").await.content, "2");
    }
    // A call whose caller is gone is interrupted as well.
    ask("x = 8").await;
    let call = call("s", "python", json!({"code": "import time\ntime.sleep(60)"}));
    assert!(
        tokio::time::timeout(Duration::from_millis(200), tools.call(&crate::tools::context(&assistant), &call))
            .await
            .is_err()
    );
    assert_eq!(ask("x").await.content, "8");
    tools.close().await;
}

/// The number of processes on this machine whose command contains this text.
pub fn processes(text: &str) -> usize {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let command = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
    all.map(command).filter(|c| String::from_utf8_lossy(c).replace('\0', " ").contains(text)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn python_leaves_no_processes_or_files() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({"processes": 300}));
    // Each in its own process session, so that no signal to a group reaches them.
    let many =
        "import subprocess\nall = [subprocess.Popen(['sleep', '98765.4'], start_new_session=True) for _ in range(100)]";
    let started = run(&tools, &assistant, "s", many).await;
    assert!(!started.failed, "{started:?}");
    wait_until("they run", async || processes("sleep 98765.4") == 100).await;
    tools.end(&key("s")).await;
    assert_eq!(processes("sleep 98765.4"), 0);
    // Processes also end when the toolbox is dropped without a shutdown.
    run(&tools, &assistant, "s", &many.replace("98765.4", "98765.5")).await;
    wait_until("they run", async || processes("sleep 98765.5") == 100).await;
    drop(tools);
    wait_until("they are gone", async || processes("sleep 98765.5") == 0).await;
    // A fork bomb.
    if !has_cap_on_processes() {
        return;
    }
    let (tools, assistant) = toolbox(json!([{"python": {"timeout": "30s"}}]), json!({}));
    let bomb =
        "import os, time\nfor i in range(2000):\n    if os.fork() == 0:\n        time.sleep(1000)\n        os._exit(0)";
    let stopped = run(&tools, &assistant, "s", bomb).await;
    assert!(stopped.failed && stopped.content.contains("BlockingIOError"), "{stopped:?}");
    tools.end(&key("s")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn python_is_isolated() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({"file": "1MB"}));
    let ask = async |code: &str| run(&tools, &assistant, "s", code).await;
    let environment = ask("import os\nsorted(os.environ)").await;
    assert_eq!(environment.content, "['HOME', 'LANG', 'TMPDIR']");
    assert_eq!(ask("os.listdir() == [] and os.getcwd() == os.environ['HOME']").await.content, "True");
    assert!(!ask("open('own', 'w').write('x')\nopen('own').read()").await.failed);
    assert!(ask("open('big', 'wb').write(b'x' * (2 << 20))").await.content.contains("File too large"));
    // The driver's own descriptors are not inherited by programs that it starts.
    let descriptors = "def inheritable(fd):\n    try:\n        return os.get_inheritable(fd)\n    except OSError:\n        return False\n[fd for fd in range(3, 256) if inheritable(fd)]";
    assert_eq!(ask(descriptors).await.content, "[]");
    let secret = tempfile::NamedTempFile::new().unwrap();
    for code in [format!("open({:?}).read()", secret.path()), format!("open({:?}, 'w')", secret.path())] {
        let refused = ask(&code).await;
        assert!(refused.content.contains("FileNotFoundError"), "{refused:?}");
    }
    assert!(ask("open('/usr/new', 'w')").await.content.contains("Error"));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let tcp = ask(&format!("import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)")).await;
    assert!(tcp.failed && tcp.content.contains("Error"), "{tcp:?}");
    let udp = ask("s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', 9))").await;
    assert!(udp.content.contains("unreachable"), "{udp:?}");
    // Sockets to the host of a virtual machine do not belong to a network namespace.
    assert!(ask("socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)").await.failed);
    let other = std::process::id();
    assert!(ask(&format!("os.kill({other}, 0)")).await.failed, "it can not reach our processes");
    tools.close().await;
    // Declared directories can be read, and not written.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("data"), "42").unwrap();
    let (tools, assistant) = toolbox(json!(["python"]), json!({"read": [dir.path()]}));
    let data = dir.path().join("data");
    assert_eq!(run(&tools, &assistant, "s", &format!("open({data:?}).read()")).await.content, "'42'");
    assert!(run(&tools, &assistant, "s", &format!("open({data:?}, 'w')")).await.failed);
    assert!(
        run(&tools, &assistant, "s", &format!("import os\nos.utime({data:?})")).await.content.contains("Read-only")
    );
    tools.close().await;
}

/// Features that programs and libraries rely on.
#[tokio::test(flavor = "multi_thread")]
async fn python_programs_work_in_the_sandbox() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({}));
    for (code, want) in [
        ("import tempfile\nwith tempfile.TemporaryDirectory() as d: print(d.startswith('/session/'))", "True\n"),
        (
            "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, -2]))",
            "[1, 2]\n",
        ),
        (
            "from multiprocessing.shared_memory import SharedMemory\ns = SharedMemory(create=True, size=9)\ns.unlink()",
            "",
        ),
        ("import threading\nt = threading.Thread(target=print, args=('x',))\nt.start()\nt.join()", "x\n"),
        ("import asyncio\nasyncio.run(asyncio.sleep(0, 'done'))", "'done'"),
        (
            "import subprocess\nsubprocess.run('id -u; ls', shell=True, capture_output=True, text=True).stdout",
            "'1000\\n'",
        ),
        ("import os, random, secrets, sqlite3, zoneinfo\nzoneinfo.ZoneInfo('Europe/Berlin').key", "'Europe/Berlin'"),
        (
            "import shutil\nopen('a', 'w').write('x')\nshutil.copy2('a', 'b')\nos.chmod('b', 0o600)\nsorted(os.listdir())",
            "['a', 'b']",
        ),
        ("os.mkfifo('pipe')\nos.path.exists('pipe') and os.cpu_count() > 0", "True"),
        ("open('/dev/null', 'w').write('x')\nlen(open('/dev/urandom', 'rb').read(3))", "3"),
    ] {
        let output = run(&tools, &assistant, "s", code).await;
        assert_eq!((output.content.as_str(), output.failed), (want, false), "{code}");
    }
    tools.close().await;
}

/// A replacement for the server's executable that runs it on a system without the named feature.
fn system_without(dir: &Path, feature: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let script = match feature {
        "user namespaces" => {
            "#!/bin/sh\nexec unshare --user --map-root-user sh -c 'echo 0 > /proc/sys/user/max_user_namespaces; exec TENURE \"$@\"' sh \"$@\"\n"
        }
        // A seccomp filter of four instructions: landlock_create_ruleset (444) fails with ENOSYS.
        "Landlock" => {
            "#!PYTHON\nimport ctypes, os, struct, sys\nfilter = struct.pack('HBBIHBBIHBBIHBBI', 0x20, 0, 0, 0, 0x15, 0, 1, 444, 6, 0, 0, 0x50026, 6, 0, 0, 0x7fff0000)\ntext = ctypes.create_string_buffer(filter)\nprogram = ctypes.create_string_buffer(struct.pack('HxxxxxxP', 4, ctypes.addressof(text)))\nprctl = ctypes.CDLL(None).prctl\nassert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0\nos.execv('TENURE', sys.argv)\n"
        }
        other => panic!("{other}"),
    };
    let path = dir.join("helper");
    let text = script.replace("TENURE", env!("CARGO_BIN_EXE_tenure")).replace("PYTHON", python().to_str().unwrap());
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Nothing is run with less isolation than the configuration requires, and the error names what is missing.
#[tokio::test(flavor = "multi_thread")]
async fn python_is_refused_where_it_can_not_be_isolated() {
    for (feature, require, runs) in [
        ("user namespaces", "full", false),
        ("user namespaces", "landlock", true),
        ("user namespaces", "none", true),
        ("Landlock", "full", false),
        ("Landlock", "landlock", false),
        ("Landlock", "none", true),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let text =
            json!({"assistants": [{"name": "a", "tools": ["python"]}], "python": {"require": require}}).to_string();
        let mut config = Config::parse(&text).unwrap();
        config.python.helper = system_without(dir.path(), feature);
        let tools = Toolbox::new(&config).unwrap();
        let outcome = tools
            .call(&crate::tools::context(&config.assistants[0]), &call("s", "python", json!({"code": "1 + 1"})))
            .await;
        match outcome {
            Ok(output) => assert!(runs && output.content == "2", "{feature} {require}: {output:?}"),
            Err(ToolError::NotCalled(reason)) => {
                let names_the_requirement =
                    reason.contains(feature) && reason.contains(require) && reason.contains("docs/tools.md");
                assert!(!runs && names_the_requirement, "{feature} {require}: {reason}");
            }
            Err(other) => panic!("{feature} {require}: {other:?}"),
        }
        tools.close().await;
    }
}

/// Without namespaces the session's files are on the host: limited after each call, and removed at the end.
#[tokio::test(flavor = "multi_thread")]
async fn python_files_on_the_host_are_limited_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let python = json!({"require": "landlock", "disk": "1MB", "max_files": 50, "max_depth": 4});
    let text = json!({"assistants": [{"name": "a", "tools": ["python"]}], "python": python}).to_string();
    let mut config = Config::parse(&text).unwrap();
    config.python.helper = system_without(dir.path(), "user namespaces");
    let tools = Toolbox::new(&config).unwrap();
    let assistant = config.assistants[0].clone();
    for (code, limit) in [
        ("for i in range(60): open(str(i), 'w')", "python.max_files"),
        ("open('big', 'wb').write(b'x' * (2 << 20))", "1MB (python.disk)"),
        ("for i in range(5): os.mkdir('d'); os.chdir('d')", "python.max_depth"),
        ("os.mkdir('hidden', 0)", "a directory is not readable"),
    ] {
        let directory = run(&tools, &assistant, "s", "import os\nos.getcwd()").await.content;
        let directory = PathBuf::from(directory.trim_matches('\''));
        assert!(directory.exists());
        let exceeded = run(&tools, &assistant, "s", code).await;
        assert!(exceeded.failed && exceeded.content.contains(limit), "{code}: {exceeded:?}");
        assert!(!directory.parent().unwrap().exists(), "{code}");
    }
    let secret = tempfile::NamedTempFile::new().unwrap();
    for code in ["os.chmod({}, 0)", "os.utime({})", "os.setxattr({}, 'user.x', b'')"] {
        let refused = run(
            &tools,
            &assistant,
            "s",
            &format!("import os\n{}", code.replace("{}", &format!("{:?}", secret.path()))),
        )
        .await;
        assert!(refused.failed, "{code}");
    }
    tools.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn python_processes_are_limited() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({"max_processes": 2, "timeout": "20s"}));
    for session in ["a", "b"] {
        run(&tools, &assistant, session, "x = 1").await;
    }
    run(&tools, &assistant, "a", "x").await;
    run(&tools, &assistant, "c", "x = 1").await;
    assert_eq!(run(&tools, &assistant, "a", "x").await.content, "1", "the longest idle went");
    let fresh = run(&tools, &assistant, "b", "'x' in globals()").await.content;
    assert!(fresh.starts_with("[this is a new interpreter") && fresh.ends_with("False"), "{fresh}");
    // With all interpreters busy, a call is refused.
    let mut busy = Vec::new();
    for session in ["a", "b"] {
        let tools = tools.clone();
        let assistant = assistant.clone();
        let program = format!("sleep 98766.{}", busy.len());
        let code = format!("import subprocess\nsubprocess.run({program:?}.split())");
        busy.push(tokio::spawn(async move { run(&tools, &assistant, session, &code).await }));
        wait_until("it is busy", async || processes(&program) == 1).await;
    }
    let refused = tools.call(&crate::tools::context(&assistant), &call("d", "python", json!({"code": "1"}))).await;
    assert!(matches!(&refused, Err(ToolError::NotCalled(reason)) if reason.contains("max_processes")), "{refused:?}");
    // Ending a session ends its call.
    tools.end(&key("a")).await;
    tools.end(&key("b")).await;
    for call in busy {
        let timed_out = call.await.unwrap();
        assert!(timed_out.failed && timed_out.content.contains("has ended"), "{timed_out:?}");
    }
    tools.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_interpreters_end() {
    let (tools, assistant) = toolbox(json!(["python"]), json!({"idle": "300ms"}));
    run(&tools, &assistant, "s", "import subprocess\np = subprocess.Popen(['sleep', '98766.5'])").await;
    wait_until("it runs", async || processes("sleep 98766.5") == 1).await;
    let reaper = {
        let tools = tools.clone();
        tokio::spawn(async move { tools.reap_until(std::future::pending()).await })
    };
    wait_until("it is gone", async || processes("sleep 98766.5") == 0).await;
    assert!(run(&tools, &assistant, "s", "1").await.content.contains("idle for too long"));
    reaper.abort();
    tools.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_is_no_interpreter() {
    for program in ["/no/such/python", "true"] {
        let (tools, assistant) = toolbox(json!(["python"]), json!({"program": program}));
        let outcome = tools.call(&crate::tools::context(&assistant), &call("s", "python", json!({"code": "1"}))).await;
        assert!(matches!(&outcome, Err(ToolError::NotCalled(reason)) if reason.contains(program)), "{outcome:?}");
    }
}

/// After a restart of the server, in a fork, and after an import on another server, the result says that definitions are lost: once, and only if it
/// has used the interpreter before.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_server_is_reported_to_the_model() {
    const NOTICE: &str = "[this is a new interpreter: the one of the earlier calls has ended]\n";
    let dir = tempfile::tempdir().unwrap();
    let yaml = "store: sqlite:a.db\nassistants: [{name: helper, tools: [python]}]\n";
    let ask = async |server: &ServerProcess, session: &str, code: &str| {
        let text = format!("CALL python {}", json!({"code": code}));
        let body = json!({"session_id": session, "model": "helper", "messages": [{"role": "user", "content": text}]});
        let (status, answer) = send(server.request("POST", "/v1/chat/completions").json(&body)).await;
        assert_eq!(status, 200, "{answer}");
        answer["agentic_tool_calls"][0]["result_content"].as_str().unwrap().to_owned()
    };
    let server = ServerProcess::start(dir.path(), yaml);
    assert_eq!(ask(&server, "py", "x = 6 * 7\nx").await, "42");
    assert_eq!(ask(&server, "py", "x + 1").await, "43");
    server.stop();
    let server = ServerProcess::start(dir.path(), yaml);
    assert_eq!(ask(&server, "new", "'x' in globals()").await, "False");
    assert_eq!(ask(&server, "py", "'x' in globals()").await, format!("{NOTICE}False"));
    assert_eq!(ask(&server, "py", "1").await, "1");
    let (status, _) = send(server.request("POST", "/sessions/py/fork").json(&json!({"id": "fork"}))).await;
    assert_eq!(status, 201);
    assert_eq!(ask(&server, "fork", "2").await, format!("{NOTICE}2"));
    // The interpreter is not part of an export: an import elsewhere has its messages, and a new interpreter.
    assert_eq!(ask(&server, "py", "y = 1\ny").await, "1");
    let (status, export) = send(server.request("GET", "/v1/sessions/py")).await;
    assert_eq!(status, 200);
    let elsewhere = tempfile::tempdir().unwrap();
    let other = ServerProcess::start(elsewhere.path(), yaml);
    let (status, body) = send(other.request("PUT", "/v1/sessions/py").json(&export)).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(ask(&other, "py", "'y' in globals()").await, format!("{NOTICE}False"));
    assert_eq!(send(other.request("GET", "/v1/sessions/py")).await.1["messages"][0], export["messages"][0]);
}

/// Progress events of the tool have the type that mistral.rs gives its own.
#[tokio::test(flavor = "multi_thread")]
async fn the_tool_type_of_python_is_code_execution() {
    let dir = tempfile::tempdir().unwrap();
    let yaml = "store: 'memory:'\nassistants: [{name: helper, tools: [python]}]\n";
    let server = ServerProcess::start(dir.path(), yaml);
    let text = format!("CALL python {}", json!({"code": "1 + 1"}));
    let body = json!({"model": "helper", "stream": true, "messages": [{"role": "user", "content": text}]});
    let stream = server.request("POST", "/v1/chat/completions").json(&body).send().await.unwrap().text().await.unwrap();
    let events = stream.split("event: agentic_tool_call_progress\ndata: ").skip(1);
    let data =
        |event: &str| serde_json::from_str::<serde_json::Value>(event.lines().next().unwrap()).unwrap()["data"].clone();
    let events: Vec<_> = events.map(data).collect();
    assert_eq!(events.len(), 2, "{stream}");
    for event in &events {
        assert_eq!((&event["tool_type"], &event["code"]), (&json!("code_execution"), &json!("1 + 1")), "{event}");
    }
    assert_eq!(events[1]["content"], "2");
}
