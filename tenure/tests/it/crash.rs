//! Crash recovery, invariants 1, 2 and 3: writers are killed with `kill -9`, files are truncated at
//! every byte, disks are full, and the database becomes unavailable.

use crate::support::*;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use tenure::{session::*, *};

const WRITERS: usize = 16;

fn writer_url() -> Option<String> {
    std::env::var("TENURE_CRASH_URL").ok()
}

/// Not a test of its own: the writer process that [`killed_writers`] starts.
#[tokio::test(flavor = "multi_thread")]
async fn victim() {
    let Some(url) = writer_url() else { return };
    let tenure = Tenure::open(&url).await.unwrap();
    let mut tasks = Vec::new();
    for w in 0..WRITERS {
        let tenure = tenure.clone();
        tasks.push(tokio::spawn(async move {
            let x = id(&format!("w{w}"));
            if let Err(Error::NotFound { .. }) = tenure.head(&ada(), &x).await {
                tenure.create(&ada(), new_session(x.as_str())).await.unwrap();
            }
            let mut n = tenure.head(&ada(), &x).await.unwrap().digest.turns;
            loop {
                let appended = tenure.append(&ada(), &x, turn_messages(n)).await.unwrap();
                let mut out = std::io::stdout().lock();
                writeln!(out, "ACK {x} {n} {}", appended.messages).unwrap();
                out.flush().unwrap();
                n += 1;
            }
        }));
    }
    // Runs until the process is killed or a writer fails.
    tasks.pop().unwrap().await.unwrap();
}

/// Starts the writer process and kills it with writes in flight, after `after` acknowledgements.
/// Returns the number of acknowledged turns per session.
fn run_and_kill(url: &str, after: usize) -> BTreeMap<String, usize> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["crash::victim", "--exact", "--nocapture", "--test-threads=1"])
        .env("TENURE_CRASH_URL", url)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut acknowledged = BTreeMap::new();
    let mut count = 0;
    while let Some(Ok(line)) = lines.next() {
        let Some(words) = line.find("ACK ").map(|i| line[i..].split(' ').collect::<Vec<_>>()) else { continue };
        let [_, session, n, messages] = words[..] else { continue };
        let turns: usize = n.parse::<usize>().unwrap() + 1;
        assert_eq!(messages.parse::<usize>().unwrap(), turns * 4);
        acknowledged.insert(session.to_owned(), turns);
        count += 1;
        if count == after {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(count >= after, "the victim ended by itself after {count} turns");
    acknowledged
}

/// Reopens a store, retrying while it is locked: a child process that another test is spawning
/// inherits our file descriptors and locks until it executes its program.
async fn reopen(url: &str) -> Tenure {
    loop {
        match Tenure::open(url).await {
            // Polling interval.
            Err(Error::Locked { .. }) => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
            opened => return opened.unwrap(),
        }
    }
}

async fn killed_writers(kind: &str) {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("{kind}:{}", dir.path().join("store").display());
    let mut acknowledged: BTreeMap<String, usize> = BTreeMap::new();
    for round in 0..8 {
        acknowledged.extend(run_and_kill(&url, 10 + 10 * round));
        let tenure = reopen(&url).await;
        for (session, turns) in &acknowledged {
            let s = tenure.load(&ada(), &id(session)).await.unwrap();
            let stored_turns = s.messages.len() / 4;
            assert!(
                stored_turns >= *turns,
                "{session}: {turns} turns were acknowledged, {stored_turns} are there (round {round})"
            );
            let want: Vec<String> = (0..stored_turns).flat_map(|n| raw(&turn_messages(n))).collect();
            assert_eq!(texts(&s), want, "{session}: what is there is what was sent, whole turns only");
            assert_eq!(s.head().seq as usize, 1 + stored_turns * 5, "no holes");
        }
        assert_eq!(tenure.examine(|_| ()).await.unwrap(), [], "the message index agrees with the log");
    }
}

/// Invariants 1 and 3: after `kill -9` no acknowledged write is missing, and every commit is
/// atomic.
mod acknowledged_means_durable {
    #[tokio::test(flavor = "multi_thread")]
    async fn sqlite() {
        super::killed_writers("sqlite").await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn jsonl() {
        super::killed_writers("jsonl").await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn postgres() {
        super::restarted_database().await;
    }
}

/// A separate PostgreSQL server that the test may kill.
struct Cluster;

impl Cluster {
    fn call(verb: &str) -> Option<String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/postgres.sh");
        let out = Command::new("bash").arg(script).arg(verb).env("TENURE_TEST_PG_NAME", "crash").output().unwrap();
        if out.status.success() {
            return Some(String::from_utf8(out.stdout).unwrap().trim().to_owned());
        }
        eprintln!("{}", String::from_utf8_lossy(&out.stderr));
        None
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        Cluster::call("stop");
    }
}

/// Waits until every writer has written a few more turns, without a timeout.
async fn progress(written: &[AtomicUsize]) {
    let count = |n: &AtomicUsize| n.load(std::sync::atomic::Ordering::SeqCst);
    let before: Vec<usize> = written.iter().map(count).collect();
    wait_until("every writer gets on", async || {
        written.iter().zip(&before).all(|(now, before)| count(now) >= before + 3)
    })
    .await;
}

async fn restarted_database() {
    if postgres_server().is_none() {
        return;
    }
    // Stop a server left over from a killed test.
    Cluster::call("stop");
    let url = Cluster::call("start").expect("PostgreSQL starts");
    let cluster = Cluster;
    let tenure = Tenure::open(&url).await.unwrap();
    let stopped = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let written: Arc<Vec<AtomicUsize>> = Arc::new((0..WRITERS).map(|_| AtomicUsize::new(0)).collect());
    let mut tasks = Vec::new();
    for w in 0..WRITERS {
        let tenure = tenure.clone();
        let stopped = stopped.clone();
        let written = written.clone();
        tasks.push(tokio::spawn(async move {
            let x = id(&format!("w{w}"));
            tenure.create(&ada(), new_session(x.as_str())).await.unwrap();
            let mut n = 0;
            while !stopped.load(std::sync::atomic::Ordering::SeqCst) {
                // An append with an unknown outcome is retried with the same idempotency key, so it
                // is executed once.
                let append = Append { idempotency_key: Some(format!("k{n}")), ..turn_messages(n).into() };
                match tenure.append(&ada(), &x, append).await {
                    Ok(_) => {
                        n += 1;
                        written[w].store(n, std::sync::atomic::Ordering::SeqCst);
                    }
                    Err(Error::Unavailable { .. }) => {}
                    Err(e) => panic!("{e}"),
                }
            }
            (x, n)
        }));
    }
    for verb in ["restart", "kill", "start", "restart"] {
        // While the server is down, no writer makes progress.
        if verb != "start" {
            progress(&written).await;
        }
        tokio::task::spawn_blocking(move || Cluster::call(verb).expect(verb)).await.unwrap();
    }
    progress(&written).await;
    stopped.store(true, std::sync::atomic::Ordering::SeqCst);
    let fresh = Tenure::open(&url).await.unwrap();
    for task in tasks {
        let (x, n) = task.await.unwrap();
        let s = fresh.load(&ada(), &x).await.unwrap();
        let want: Vec<String> = (0..n).flat_map(|n| raw(&turn_messages(n))).collect();
        let stored = texts(&s);
        // The last turn may have been committed without being acknowledged.
        assert_eq!(stored[..want.len()], want, "{x}");
        assert!(stored.len() <= want.len() + 4, "{x}: nothing is doubled");
    }
    drop(cluster);
}

/// Invariant 2: the state after a crash is a prefix of what was sent; a torn tail is truncated and
/// reported, never shown as empty.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_truncated_at_every_byte_is_a_prefix() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let file = store.join("acme/x.jsonl");
    let url = format!("jsonl:{}", store.display());
    let mut states: Vec<(usize, Option<Vec<String>>)> = vec![(0, None)];
    let tenure = Tenure::open(&url).await.unwrap();
    let note = async |states: &mut Vec<(usize, Option<Vec<String>>)>| {
        let s = tenure.load(&ada(), &id("x")).await.unwrap();
        states.push((std::fs::metadata(&file).unwrap().len() as usize, Some(texts(&s))));
    };
    tenure.create(&ada(), NewSession { title: Some("é".into()), ..new_session("x") }).await.unwrap();
    note(&mut states).await;
    for n in 0..2 {
        tenure.append(&ada(), &id("x"), turn_messages(n)).await.unwrap();
        note(&mut states).await;
    }
    tenure.rewind(&ada(), &id("x"), "turn-1").await.unwrap();
    note(&mut states).await;
    tenure
        .append(&ada(), &id("x"), Append { idempotency_key: Some("k".into()), ..turn_messages(2).into() })
        .await
        .unwrap();
    note(&mut states).await;
    drop(tenure);
    let bytes = std::fs::read(&file).unwrap();
    for length in 0..=bytes.len() {
        std::fs::write(&file, &bytes[..length]).unwrap();
        let (end, want) = states.iter().rev().find(|(end, _)| *end <= length).unwrap();
        let tenure = reopen(&url).await;
        assert_eq!(
            tenure.repairs().len(),
            usize::from(*end != length || length == 0),
            "cut at {length}: {:?}",
            tenure.repairs()
        );
        let loaded = tenure.load(&ada(), &id("x")).await;
        match want {
            None => {
                assert_eq!(loaded.unwrap_err().code(), "not_found", "cut at {length}");
                tenure.create(&ada(), new_session("x")).await.unwrap();
            }
            Some(want) => assert_eq!(&texts(&loaded.unwrap()), want, "cut at {length}"),
        }
        tenure.append(&ada(), &id("x"), turn_messages(9)).await.unwrap();
        drop(tenure);
        let again = reopen(&url).await;
        assert!(again.repairs().is_empty());
        let s = again.load(&ada(), &id("x")).await.unwrap();
        assert_eq!(texts(&s), [want.clone().unwrap_or_default(), raw(&turn_messages(9))].concat(), "cut at {length}");
    }
}

/// A small file system. Needs root; otherwise the test reports that it was skipped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new() -> Option<Self> {
        Self::of("3m")
    }

    fn of(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(dir.path())
            .output();
        if mounted.is_ok_and(|m| m.status.success()) {
            return Some(Self(dir));
        }
        assert!(std::env::var("CI").is_err(), "in CI nothing is skipped: run as root");
        eprintln!("skipped: a small disk can only be mounted as root");
        None
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(self.0.path()).status().ok();
    }
}

/// A full disk is reported with a clear error and loses nothing, and the store recovers when space
/// is available again.
async fn full_disk(kind: &str) {
    let Some(disk) = SmallDisk::new() else { return };
    let url = format!("{kind}:{}", disk.0.path().join("store").display());
    let ballast = disk.0.path().join("ballast");
    std::fs::write(&ballast, vec![7u8; 1 << 20]).unwrap();
    let tenure = Tenure::open(&url).await.unwrap();
    tenure.create(&ada(), new_session("x")).await.unwrap();
    let message = Message::user(&"a full kilobyte ".repeat(640));
    let mut acknowledged = 0;
    let error = loop {
        match tenure.append(&ada(), &id("x"), vec![message.clone()]).await {
            Ok(appended) => acknowledged = appended.messages,
            Err(e) => break e,
        }
        assert!(acknowledged < 1000, "the disk is never full");
    };
    assert_eq!(error.code(), "storage_full", "{error}");
    assert!(acknowledged > 20);
    assert_eq!(tenure.load(&ada(), &id("x")).await.unwrap().messages.len(), acknowledged, "still open");
    std::fs::remove_file(&ballast).unwrap();
    let appended = tenure.append(&ada(), &id("x"), vec![message.clone()]).await.unwrap();
    assert_eq!(appended.messages, acknowledged + 1, "there is room again");
    drop(tenure);
    let again = Tenure::open(&url).await.unwrap();
    assert_eq!(again.load(&ada(), &id("x")).await.unwrap().messages.len(), acknowledged + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_a_clear_error_on_sqlite() {
    full_disk("sqlite").await;
}

/// On a full disk, sessions can still be purged one after the other, which frees space for new ones
/// (D-034).
#[tokio::test(flavor = "multi_thread")]
async fn sessions_can_be_purged_on_a_full_disk() {
    let Some(disk) = SmallDisk::of("24m") else { return };
    let url = format!("sqlite:{}", disk.0.path().join("store").display());
    let tenure = Tenure::open(&url).await.unwrap();
    let message = Message::user(&"a full kilobyte ".repeat(640));
    for n in 0..8 {
        let name = format!("old{n}");
        tenure.create(&ada(), NewSession { tags: vec!["old".into()], ..new_session(&name) }).await.unwrap();
        tenure.append(&ada(), &id(&name), vec![message.clone(); 20]).await.unwrap();
    }
    tenure.create(&ada(), new_session("x")).await.unwrap();
    let mut stored = 0;
    while let Ok(appended) = tenure.append(&ada(), &id("x"), vec![message.clone()]).await {
        stored = appended.messages;
        assert!(stored < 5000, "the disk is never full");
    }
    // Other files take the remaining space.
    let mut ballast = std::fs::File::create(disk.0.path().join("ballast")).unwrap();
    let mut fill = || while std::io::Write::write(&mut ballast, &[7; 512]).is_ok_and(|n| n > 0) {};
    fill();
    let full = tenure.append(&ada(), &id("x"), vec![message.clone()]).await.unwrap_err();
    assert_eq!(full.code(), "storage_full", "{full}");
    for n in 0..8 {
        assert!(tenure.purge(&ada(), &id(&format!("old{n}")), None).await.unwrap(), "old{n}");
        // Wait until the reserve is written again, then take all remaining space.
        let reserve = disk.0.path().join("store-reserve");
        while std::fs::metadata(&reserve).map_or(0, |m| m.len()) < 8 << 20 {
            tokio::task::yield_now().await;
        }
        fill();
    }
    assert_eq!(tenure.load(&ada(), &id("x")).await.unwrap().messages.len(), stored, "nothing else is lost");
    let tagged = SessionQuery { tags: vec!["old".into()], ..SessionQuery::new(OwnerFilter::AllTenants, 10) };
    assert!(tenure.list(&ada(), tagged).await.unwrap().heads.is_empty());
    drop((tenure, ballast));
    std::fs::remove_file(disk.0.path().join("ballast")).unwrap();
    let again = Tenure::open(&url).await.unwrap();
    again.append(&ada(), &id("x"), vec![message]).await.unwrap();
    assert_eq!(again.store().check(&[]).await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_a_clear_error_on_jsonl() {
    full_disk("jsonl").await;
}

/// Damage is reported as an error that names its location; other sessions are unaffected.
async fn damaged(kind: StoreKind, damage: impl AsyncFn(&TestTenure)) {
    let Some(mut test) = TestTenure::new(kind).await else { return };
    for name in ["x", "y"] {
        test.tenure.create(&ada(), new_session(name)).await.unwrap();
        for n in 0..3 {
            test.tenure.append(&ada(), &id(name), turn_messages(n)).await.unwrap();
        }
    }
    if kind != StoreKind::Postgres {
        test.tenure = Tenure::open("memory:").await.unwrap(); // closes the files
    }
    damage(&test).await;
    test.reopen().await;
    let error = test.tenure.load(&ada(), &id("x")).await.unwrap_err();
    assert_eq!(error.code(), "corrupt", "{error}");
    let text = error.to_string();
    assert!(text.contains("acme/x"), "it names the session: {text}");
    assert!(text.contains("record 8") || text.contains("x.jsonl:7"), "and the place: {text}");
    assert_eq!(test.tenure.load(&ada(), &id("y")).await.unwrap().messages.len(), 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrupted_row_is_located_on_sqlite() {
    damaged(StoreKind::Sqlite, async |test| {
        let db = rusqlite::Connection::open(test.url().strip_prefix("sqlite:").unwrap()).unwrap();
        let sql = "UPDATE record SET entry = replace(entry, 'search', 'SEARCH') \
                   WHERE record_key & 0xffffffff = 8 AND record_key >> 32 = (SELECT id FROM head WHERE session = 'x')";
        assert_eq!(db.execute(sql, []).unwrap(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrupted_row_is_located_on_postgres() {
    damaged(StoreKind::Postgres, async |test| {
        let sql = "UPDATE tenure_record SET entry = replace(entry, 'search', 'SEARCH') WHERE session = 'x' AND seq = 8";
        test.store.schema().unwrap().execute(sql).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrupted_line_is_located_on_jsonl() {
    damaged(StoreKind::Jsonl, async |test| {
        let file = test.directory().unwrap().join("sessions/acme/x.jsonl");
        let text = std::fs::read_to_string(&file).unwrap();
        let broken = text.replacen("question 1", "question #", 1);
        assert_ne!(broken, text);
        std::fs::write(&file, broken).unwrap();
    })
    .await;
}
