//! Recovery after a crash, and detection of damage.

use super::*;
use std::os::unix::fs::symlink;
use std::process::Command;

/// Creates a session of four commits. Returns the session's file, and the state of the store after
/// each commit with the file's length.
async fn four_commits(dir: &TempDir) -> (Vec<u8>, Vec<(usize, (Option<Head>, Vec<Record>, Vec<Item>))>) {
    let (store, key, path) = (open(dir).await, key("s"), dir.path().join("default/s.jsonl"));
    let mut states = vec![(0, (None, vec![], vec![]))];
    let mut first = begin(&key, &[user("one")]);
    first.head.due_at = Some(at(77));
    let second = next(&first.head, &[user("two"), user("three"), user("four")]);
    let mut third = next(&second.head, &[user("five")]);
    third.items.push(("cache".into(), item("k", "v")));
    let mut fourth = next(&third.head, &[]);
    fourth.head.status = Status::Paused;
    for commit in [&first, &second, &third, &fourth] {
        store.commit(commit).await.unwrap();
        states.push((fs::metadata(&path).unwrap().len() as usize, read_session(&store, &key).await));
    }
    (fs::read(path).unwrap(), states)
}

#[tokio::test]
async fn a_crash_at_any_byte_leaves_the_last_complete_commit() {
    let dir = TempDir::new().unwrap();
    let (bytes, states) = four_commits(&dir).await;
    let (key, path) = (key("s"), dir.path().join("default/s.jsonl"));
    for end in 0..=bytes.len() {
        fs::write(&path, &bytes[..end]).unwrap();
        let (store, repairs) = open_repaired(dir.path()).await;
        let (len, want) = states.iter().rev().find(|(len, _)| *len <= end).unwrap();
        assert_eq!(&read_session(&store, &key).await, want, "truncated at {end}");
        let expected = match (*len, end - len) {
            (0, _) => vec![format!("removed the file ({end} bytes): its first commit was incomplete")],
            (_, 0) => vec![],
            (_, n) => {
                let line = bytes[..*len].iter().filter(|b| **b == b'\n').count() + 1;
                vec![format!("truncated {n} bytes from line {line} on: an incomplete commit")]
            }
        };
        assert_eq!(repairs.iter().map(|r| r.description.clone()).collect::<Vec<_>>(), expected, "truncated at {end}");

        // The session can continue from there, and no further repair is needed.
        let continuation = match &want.0 {
            Some(head) => next(head, &[user("after")]),
            None => begin(&key, &[user("after")]),
        };
        store.commit(&continuation).await.unwrap();
        let after = read_session(&store, &key).await;
        drop(store);
        assert_eq!(read_session(&open(&dir).await, &key).await, after, "truncated at {end}");
    }
}

#[tokio::test]
async fn invalid_bytes_at_the_end_are_truncated() {
    let dir = TempDir::new().unwrap();
    let (bytes, states) = four_commits(&dir).await;
    let (key, path) = (key("s"), dir.path().join("default/s.jsonl"));
    // Possible remains of an interrupted write: zeros, or its end without its beginning.
    let zeros = vec![0; 5000];
    let (third, fourth) = (&bytes[states[2].0..states[3].0], &bytes[states[3].0..]);
    let without_start = [&[0; 30], &third[30..]].concat();
    for tail in [&zeros[..], b"\n\n\n", &[0xff, b'\n', 0xc3], b"{}\n", &fourth[1..], &without_start] {
        let intact = &bytes[..states[2].0];
        fs::write(&path, [intact, tail].concat()).unwrap();
        let (store, repairs) = open_repaired(dir.path()).await;
        assert_eq!(repairs.len(), 1);
        assert!(repairs[0].location.ends_with("default/s.jsonl"));
        assert!(
            repairs[0].description.starts_with(&format!("truncated {} bytes from line 6 on", tail.len())),
            "{repairs:?}"
        );
        assert_eq!(read_session(&store, &key).await, states[2].1);
        assert_eq!(fs::read(&path).unwrap(), intact);
    }
}

#[tokio::test]
async fn damage_before_the_end_is_never_truncated() {
    let dir = TempDir::new().unwrap();
    let (bytes, states) = four_commits(&dir).await;
    let path = dir.path().join("default/s.jsonl");
    // Except the line break between the last two commits: without it they look like one unfinished
    // commit.
    for position in 0..states[3].0 - 1 {
        let mut damaged = bytes.clone();
        damaged[position] ^= 1;
        fs::write(&path, &damaged).unwrap();
        let (store, repairs) = open_repaired(dir.path()).await;
        let line =
            bytes[..states.iter().rev().find(|(len, _)| *len <= position).unwrap().0].split(|b| *b == b'\n').count();
        assert_eq!(repairs.len(), 1, "byte {position}");
        assert!(repairs[0].description.starts_with("NOT repaired"), "byte {position}: {repairs:?}");
        let error = store.head(&key("s")).await.unwrap_err().to_string();
        assert!(error.contains(&format!("default/s.jsonl:{line}")), "byte {position}: {error}");
        assert_eq!(fs::read(&path).unwrap(), damaged);
    }
}

#[tokio::test]
async fn a_damaged_session_does_not_stop_the_others() {
    let dir = TempDir::new().unwrap();
    let (bytes, states) = four_commits(&dir).await;
    let path = dir.path().join("default/s.jsonl");
    // A whole commit is missing.
    fs::write(&path, [&bytes[..states[1].0], &bytes[states[2].0..]].concat()).unwrap();
    let (store, repairs) = open_repaired(dir.path()).await;
    assert_eq!(repairs[0].location, format!("{}:4", path.display()));
    assert_eq!(
        repairs[0].description,
        "NOT repaired: expected record 3, found record 6; restore the file from a backup"
    );

    let (other, key, namespace) = (key("other"), key("s"), session_namespace("s"));
    store.commit(&begin(&other, &[])).await.unwrap();
    let step = next(states[4].1.0.as_ref().unwrap(), &[]);
    let codes = [
        store.head(&key).await.unwrap_err().code(),
        store.records(&key, &RecordRange::after(0)).await.unwrap_err().code(),
        store.commit(&step).await.unwrap_err().code(),
        store.commit(&begin(&key, &[])).await.unwrap_err().code(),
        store.put(&namespace, &item("a", "b"), None).await.unwrap_err().code(),
        store.get(&namespace, "a", None).await.unwrap_err().code(),
        store.items(&namespace, None, 1).await.unwrap_err().code(),
        store.remove(&namespace, "a").await.unwrap_err().code(),
    ];
    assert_eq!(codes, ["corrupt"; 8]);
    let listed = store
        .heads(&SessionQuery { order: SessionOrder::Newest, ..SessionQuery::new(OwnerFilter::AllTenants, 9) })
        .await
        .unwrap();
    assert_eq!(listed.len(), 2, "it is listed, so that it can be found and purged");
    store.purge(&key).await.unwrap();
    assert_eq!(store.head(&key).await.unwrap(), None);
    store.commit(&begin(&key, &[])).await.unwrap();
    drop(store);
    open(&dir).await;
}

#[tokio::test]
async fn damaged_namespaces_affect_only_their_owner() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir).await;
    let ada = namespace_of(Owner::User("ada".try_into().unwrap()));
    let bob = namespace_of(Owner::User("bob".try_into().unwrap()));
    for namespace in [&ada, &bob] {
        store.put(namespace, &item("a", "tea"), None).await.unwrap();
        store.put(namespace, &item("b", "tea"), None).await.unwrap();
    }
    drop(store);
    let path = dir.path().join("default/namespaces/user%2Fada.jsonl");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, String::from_utf8(bytes.clone()).unwrap().replacen("tea", "tee", 1)).unwrap();
    let (store, repairs) = open_repaired(dir.path()).await;
    assert_eq!(repairs.len(), 1);
    assert_eq!(store.items(&ada, None, 9).await.unwrap_err().code(), "corrupt");
    assert_eq!(store.items(&bob, None, 9).await.unwrap().len(), 2);
    drop(store);
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let (store, repairs) = open_repaired(dir.path()).await;
    assert_eq!(repairs.len(), 1);
    assert_eq!(store.items(&ada, None, 9).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_record_damaged_while_the_store_is_open_names_its_line() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir).await;
    store.commit(&begin(&key("s"), &[user("one"), user("two")])).await.unwrap();
    let path = dir.path().join("default/s.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    for (from, to) in [
        ("{\"seq\":2", "{\"seq\":9"),
        ("{\"seq\":2", "[\"seq\":2"),
        ("\"entry\":{\"message\"", "\"entry\":{\"massage\""),
    ] {
        fs::write(&path, text.replacen(from, to, 1)).unwrap();
        let error = store.records(&key("s"), &RecordRange::after(0)).await.unwrap_err();
        assert_eq!(error.code(), "corrupt");
        assert!(error.to_string().contains("default/s.jsonl:2"), "{error}");
        assert!(!error.to_string().contains("one"), "{error}");
    }
}

#[tokio::test]
async fn a_partial_commit_is_never_followed_by_another() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir).await;
    let first = begin(&key("s"), &[user("one")]);
    store.commit(&first).await.unwrap();
    let (path, aside) = (dir.path().join("default/s.jsonl"), dir.path().join("aside"));
    fs::rename(&path, &aside).unwrap();
    // A file that is always full, and cannot be truncated.
    symlink("/dev/full", &path).unwrap();
    let step = next(&first.head, &[user("two")]);
    assert_eq!(store.commit(&step).await.unwrap_err().code(), "unavailable");
    fs::rename(&aside, &path).unwrap();
    let error = store.commit(&step).await.unwrap_err();
    assert_eq!(error.code(), "unavailable");
    assert!(error.to_string().contains("reopen the store"), "{error}");
    assert_eq!(store.put(&session_namespace("s"), &item("k", "v"), None).await.unwrap_err().code(), "unavailable");
    assert_eq!(store.records(&key("s"), &RecordRange::after(0)).await.unwrap(), first.records);
    store.commit(&begin(&key("other"), &[])).await.unwrap();
    drop(store);
    let store = open(&dir).await;
    store.commit(&step).await.unwrap();
}

/// A small file system, mounted for the test.
struct Mount<'a>(&'a Path);

impl<'a> Mount<'a> {
    fn new(dir: &'a Path) -> Option<Self> {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"]).arg(dir).output();
        mounted.is_ok_and(|o| o.status.success()).then_some(Self(dir))
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("--lazy").arg(self.0).status());
    }
}

/// Requires the right to mount; is skipped without it.
#[tokio::test]
async fn a_full_disk_loses_no_acknowledged_commit() {
    let dir = TempDir::new().unwrap();
    let Some(_mount) = Mount::new(dir.path()) else { return eprintln!("SKIPPED: no right to mount a small disk") };
    let store = open(&dir).await;
    let mut head = begin(&key("s"), &[]).head;
    store.commit(&begin(&key("s"), &[])).await.unwrap();
    let error = loop {
        let step = next(&head, &[user(&"x".repeat(10_000))]);
        match store.commit(&step).await {
            Ok(()) => head = step.head,
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), "storage_full");
    assert!(head.seq > 5);
    let mut media = begin(&key("t"), &[]);
    media.blobs.push(blob([7; 100_000]));
    assert_eq!(store.commit(&media).await.unwrap_err().code(), "storage_full");
    let step = next(&head, &[user("small")]);
    store.commit(&step).await.unwrap();
    let before = read_session(&store, &key("s")).await;
    assert_eq!(before.0, Some(step.head));
    drop(store);
    assert_eq!(read_session(&open(&dir).await, &key("s")).await, before);
}
