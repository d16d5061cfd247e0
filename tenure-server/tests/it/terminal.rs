//! `tenure chat` at a terminal: the real binary on a pseudo-terminal, with scripted keystrokes.

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A pseudo-terminal that runs a command.
struct Terminal {
    keys: File,
    shown: Arc<Mutex<String>>,
    /// How much of the output was matched already.
    seen: usize,
    child: Child,
}

fn pair() -> rustix::io::Result<(File, File)> {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    grantpt(&controller)?;
    unlockpt(&controller)?;
    tcsetwinsize(&controller, Winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 })?;
    let name = ptsname(&controller, Vec::new())?;
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
    let terminal = rustix::fs::open(&name, flags, rustix::fs::Mode::empty())?;
    Ok((controller.into(), terminal.into()))
}

impl Terminal {
    /// Returns `None` where there are no pseudo-terminals; CI has them.
    fn start(mut command: Command) -> Option<Self> {
        let (controller, terminal) = match pair() {
            Ok(pair) => pair,
            Err(e) if std::env::var_os("CI").is_none() => {
                eprintln!("skipped: there are no pseudo-terminals here ({e})");
                return None;
            }
            Err(e) => panic!("no pseudo-terminal: {e}"),
        };
        let end = || terminal.try_clone().unwrap();
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let shown = Arc::new(Mutex::new(String::new()));
        let mut screen = controller.try_clone().unwrap();
        let mut keys = controller.try_clone().unwrap();
        let text = Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            // Reading fails when the command has exited.
            while let Ok(n @ 1..) = screen.read(&mut part) {
                let new = String::from_utf8_lossy(&part[..n]).into_owned();
                // A terminal answers queries for the cursor position.
                for _ in new.matches("\x1b[6n") {
                    let _ = keys.write_all(b"\x1b[1;1R");
                }
                text.lock().unwrap().push_str(&new);
            }
        });
        Some(Self { keys: controller, shown, seen: 0, child })
    }

    fn type_keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this text is shown, after the text that was waited for before.
    #[track_caller]
    fn wait_for_output(&mut self, want: &str) {
        let watch = Instant::now();
        loop {
            {
                let shown = self.shown.lock().unwrap();
                if let Some(at) = shown[self.seen..].find(want) {
                    self.seen += at + want.len();
                    return;
                }
                let late = watch.elapsed() > Duration::from_secs(30);
                assert!(!late, "{want:?} is not shown: {:?}", &shown[self.seen..]);
            }
            std::thread::sleep(Duration::from_millis(10)); // polling interval
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tenure(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenure"));
    for name in ["TENURE_SERVER", "TENURE_KEY", "TENURE_STORE", "TENURE_CONFIG"] {
        command.env_remove(name);
    }
    command.args(args).current_dir(dir).env("TERM", "xterm");
    command
}

/// At a terminal, a mistyped id does not create a session unless the user confirms it.
#[test]
fn an_unknown_session_is_created_after_a_question() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut terminal) = Terminal::start(tenure(dir.path(), &["chat", "--session", "trip", "--new"])) else {
        return;
    };
    terminal.wait_for_output("new session trip");
    terminal.wait_for_output("> ");
    terminal.type_keys("hello\r");
    terminal.wait_for_output("You said: hello");
    terminal.wait_for_output("> ");
    terminal.type_keys("/quit\r");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
    let mut terminal = Terminal::start(tenure(dir.path(), &["chat", "trpi"])).unwrap();
    terminal.wait_for_output("there is no session trpi; did you mean trip?");
    terminal.wait_for_output("create a new session trpi? [y/N]");
    terminal.type_keys("n\r");
    terminal.wait_for_output("no session was created");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(1));
    let listed = tenure(dir.path(), &["sessions", "list", "--json"]).output().unwrap();
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!((listed["data"].as_array().unwrap().len(), &listed["data"][0]["id"]), (1, &"trip".into()));
}

#[test]
fn a_chat_at_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let chat = |id: &str| tenure(dir.path(), &["chat", id]);
    let Some(mut terminal) = Terminal::start(chat("one")) else { return };
    terminal.wait_for_output("there is no session one");
    terminal.wait_for_output("create a new session one? [y/N]");
    terminal.type_keys("y\r");
    terminal.wait_for_output("new session one");
    terminal.wait_for_output("> ");
    terminal.type_keys("Hello there\r");
    terminal.wait_for_output("You said: Hello there I see 1 message.");
    terminal.wait_for_output("> ");
    terminal.type_keys("/checkpoints\r");
    terminal.wait_for_output("CHECKPOINT");
    terminal.wait_for_output("turn-1");
    terminal.wait_for_output("> ");
    // An invalid command does not end the chat.
    terminal.type_keys("/nonsense\r");
    terminal.wait_for_output("error: unknown command /nonsense");
    terminal.wait_for_output("> ");
    terminal.type_keys("/fork\r");
    terminal.wait_for_output("session ");
    terminal.wait_for_output("> ");
    terminal.type_keys("in the fork\r");
    terminal.wait_for_output("You said: in the fork I see 3 messages.");
    terminal.wait_for_output("> ");
    terminal.type_keys("/quit\r");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
    // The chat is resumed; earlier input is in the history, and Ctrl-D quits.
    let mut terminal = Terminal::start(chat("one")).unwrap();
    terminal.wait_for_output("You said: Hello there I see 1 message.");
    terminal.wait_for_output("> ");
    terminal.type_keys("\x1b[A\r");
    terminal.wait_for_output("You said: Hello there I see 3 messages.");
    terminal.wait_for_output("> ");
    terminal.type_keys("\x04");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
}

/// A model server that sends one word and then hangs. Returns its address.
fn one_word() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map(Result::unwrap) {
            std::thread::spawn(move || {
                let mut request = [0; 65536];
                let _ = stream.read(&mut request);
                let chunk = r#"{"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":"Half"}}]}"#;
                let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
                let event = format!("data: {chunk}\n\n");
                let _ = write!(stream, "{head}{:x}\r\n{event}\r\n", event.len());
                // Blocks until the connection is closed.
                let _ = stream.read(&mut request);
            });
        }
    });
    format!("http://{address}/v1")
}

/// Ctrl-C stops an answer: its run is cancelled, and the partial answer is stored.
#[test]
fn ctrl_c_cancels_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("models: [{{name: default, base_url: \"{}\"}}]\n", one_word());
    std::fs::write(dir.path().join("tenure.yaml"), config).unwrap();
    let Some(mut terminal) = Terminal::start(tenure(dir.path(), &["chat", "one", "--new"])) else { return };
    terminal.wait_for_output("> ");
    terminal.type_keys("Hello there\r");
    terminal.wait_for_output("Half");
    let interrupt = Command::new("kill").args(["-INT", &terminal.child.id().to_string()]).status().unwrap();
    assert!(interrupt.success());
    terminal.wait_for_output("stopped; the partial answer is stored");
    terminal.wait_for_output("> ");
    terminal.type_keys("/quit\r");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
    let shown = tenure(dir.path(), &["sessions", "show", "one", "--json"]).output().unwrap();
    let session: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(session["messages"][1]["message"]["content"], "Half", "{session}");
    assert_eq!(session["messages"][1]["partial"], true);
    assert_eq!(session["runs"][0]["status"], "cancelled");
}
