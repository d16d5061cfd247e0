//! Purges of sessions with forks, and crashes during them.

use super::*;

/// Reads what a fork shows: the records of its ancestors up to the fork points, and its own.
pub(super) async fn full_log(store: &dyn Store, key: &SessionKey) -> Vec<Record> {
    let mut session = key.clone();
    let mut upto = u64::MAX;
    let mut log = Vec::new();
    loop {
        let head = store.head(&session).await.unwrap().expect("a fork's parent exists");
        let mut own = store.records(&session, &RecordRange { upto, ..RecordRange::after(0) }).await.unwrap();
        own.append(&mut log);
        log = own;
        let Some(parent) = head.parent else { return log };
        upto = upto.min(parent.seq);
        session.session = parent.session;
    }
}

async fn full_logs(store: &dyn Store, sessions: &[&str]) -> Vec<Vec<Record>> {
    let mut logs = Vec::new();
    for session in sessions {
        logs.push(full_log(store, &key(session)).await);
    }
    logs
}

/// Creates a root of five records in three commits, forks of it at 2, 4 (in the middle of a commit)
/// and 5, and a fork of a fork.
async fn create_fork_tree(store: &JsonlStore) {
    let mut first = begin(&key("root"), &[user("one")]);
    first.blobs.push(blob(b"early"));
    first.items.push(("cache".into(), item("secret", "of the root")));
    store.commit(&first).await.unwrap();
    let mut second = next(&first.head, &[user("three"), user("four"), user("five")]);
    second.blobs.push(blob(b"later"));
    store.commit(&second).await.unwrap();
    let mut third = next(&second.head, &[user("six, which nobody needs")]);
    third.blobs.push(blob(b"last"));
    store.commit(&third).await.unwrap();
    for (name, seq) in [("at2", 2), ("at4", 4), ("at3", 3)] {
        let mut step = fork(&key(name), &third.head, seq);
        step.head.due_at = Some(at(1000));
        store.commit(&step).await.unwrap();
        store.put(&session_namespace(name), &item("k", name), None).await.unwrap();
        store.commit(&next(&step.head, &[user("more")])).await.unwrap();
    }
    let at4 = store.head(&key("at4")).await.unwrap().unwrap();
    store.commit(&fork(&key("grandchild"), &at4, 3)).await.unwrap();
}

const FORKS: [&str; 4] = ["at2", "at3", "at4", "grandchild"];

#[tokio::test]
async fn a_purge_does_not_change_the_forks_of_the_session() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir).await;
    create_fork_tree(&store).await;
    let before = full_logs(&store, &FORKS).await;
    let stale = store.head(&key("at4")).await.unwrap().unwrap();
    store.purge(&key("root")).await.unwrap();
    store.purge(&key("root")).await.unwrap();

    let parent = |head: Head| head.parent.map(|p| (p.session.to_string(), p.seq));
    let copied = copy(&dir);
    for store in [&store, &open(&copied).await] {
        assert_eq!(full_logs(store, &FORKS).await, before);
        let heads = [store.head(&key("at4")).await.unwrap().unwrap(), store.head(&key("at3")).await.unwrap().unwrap()];
        assert_eq!((heads[0].first, heads[0].due_at, heads[0].seq), (1, Some(at(1000)), stale.seq));
        assert_eq!(heads.map(parent), [None, Some(("at4".to_owned(), 3))]);
        let has = async |b: &[u8]| store.blob(&Tenant::default(), &BlobId::of(b)).await.unwrap().is_some();
        assert_eq!((has(b"early").await, has(b"later").await, has(b"last").await), (true, true, false));
        assert_eq!(store.items(&session_namespace("at4"), None, 9).await.unwrap(), [item("k", "at4")]);
    }
    assert!(!any_file_contains(dir.path(), "nobody needs") && !any_file_contains(dir.path(), "secret"));

    // A writer that loaded the inheriting fork before the purge can continue, and does not restore
    // the old parent.
    store.commit(&next(&stale, &[user("and on")])).await.unwrap();
    let head = store.head(&key("at4")).await.unwrap().unwrap();
    assert_eq!((head.first, head.parent), (1, None));

    // Purge one after the other until none is left.
    for purged in ["at4", "at2", "grandchild", "at3"] {
        store.purge(&key(purged)).await.unwrap();
        let remaining = store.heads(&SessionQuery::new(OwnerFilter::AllTenants, 9)).await.unwrap();
        for head in &remaining {
            let name = head.info.session_id.as_str();
            let i = FORKS.iter().position(|f| *f == name).unwrap();
            assert_eq!(full_log(&store, &head.key()).await, before[i], "{name} after {purged}");
        }
    }
    assert_eq!(fs::read_dir(dir.path().join("default/blobs")).unwrap().count(), 0);
    let files = fs::read_dir(dir.path().join("default")).unwrap().filter(|f| f.as_ref().unwrap().path().is_file());
    assert_eq!(files.count(), 0);
}

#[tokio::test]
async fn a_purge_interrupted_by_a_crash_loses_nothing_and_can_be_repeated() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir).await;
    create_fork_tree(&store).await;
    let before = full_logs(&store, &FORKS).await;
    let old = copy(&dir);
    store.purge(&key("root")).await.unwrap();
    drop(store);
    // For each crash point of a purge, the files that have not been replaced yet.
    let restore =
        [&["root", "at2", "at3", "at4"][..], &["root", "at2", "at3"], &["root", "at3"], &["root", "at2"], &["root"]];
    for files in restore {
        let crashed = copy(&dir);
        for name in files {
            let file = format!("default/{name}.jsonl");
            fs::copy(old.path().join(&file), crashed.path().join(&file)).unwrap();
        }
        // Blobs are removed last.
        for blob in fs::read_dir(old.path().join("default/blobs")).unwrap() {
            let blob = blob.unwrap();
            fs::copy(blob.path(), crashed.path().join("default/blobs").join(blob.file_name())).unwrap();
        }
        // A new file that has not been renamed yet.
        fs::write(crashed.path().join("default/at4.jsonl.tmp"), "half").unwrap();
        let store = open(&crashed).await;
        assert_eq!(full_logs(&store, &FORKS).await, before, "{files:?}");
        assert!(store.head(&key("root")).await.unwrap().is_some());
        store.purge(&key("root")).await.unwrap();
        assert_eq!(store.head(&key("root")).await.unwrap(), None);
        assert_eq!(full_logs(&store, &FORKS).await, before, "{files:?}");
        assert!(!any_file_contains(crashed.path(), "nobody needs"));
        drop(store);
        let store = open(&crashed).await;
        assert_eq!(full_logs(&store, &FORKS).await, before, "{files:?}");
    }
}

#[tokio::test]
async fn nothing_is_destroyed_while_a_fork_inherits_from_it() {
    let dir = TempDir::new().unwrap();
    let store = open(&dir).await;
    create_fork_tree(&store).await;
    let before = full_logs(&store, &FORKS).await;
    for name in ["at4", "at2"] {
        // The inheriting fork's new file, or the other fork's new parent, cannot be written.
        let file = dir.path().join("default").join(if name == "at4" { "at4.jsonl.tmp" } else { "at2.jsonl" });
        let aside = dir.path().join("aside");
        let _ = fs::rename(&file, &aside);
        std::os::unix::fs::symlink("/dev/full", &file).unwrap();
        assert!(store.purge(&key("root")).await.is_err());
        let _ = fs::remove_file(&file);
        let _ = fs::rename(&aside, &file);
        assert_eq!(full_logs(&store, &FORKS).await, before);
        let copied = copy(&dir);
        let store = open(&copied).await;
        assert_eq!(full_logs(&store, &FORKS).await, before);
        assert!(store.head(&key("root")).await.unwrap().is_some());
        store.purge(&key("root")).await.unwrap();
        assert_eq!(full_logs(&store, &FORKS).await, before);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_fork_is_read_while_its_parent_is_purged() {
    let dir = TempDir::new().unwrap();
    let store = Arc::new(open(&dir).await);
    let entries: Vec<_> = (0..500).map(|i| user(&format!("message {i}"))).collect();
    let root = begin(&key("root"), &entries);
    store.commit(&root).await.unwrap();
    store.commit(&fork(&key("fork"), &root.head, 400)).await.unwrap();
    let own = store.records(&key("fork"), &RecordRange::after(400)).await.unwrap();
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (store, own) = (store.clone(), own.clone());
        readers.spawn(async move {
            for _ in 0..50 {
                assert_eq!(store.records(&key("fork"), &RecordRange::after(400)).await.unwrap(), own);
            }
        });
    }
    store.purge(&key("root")).await.unwrap();
    while let Some(result) = readers.join_next().await {
        result.unwrap();
    }
}

/// Copies the files of a store.
fn copy(dir: &TempDir) -> TempDir {
    fn copy_all(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            let path = entry.path();
            let to = to.join(entry.file_name());
            if path.is_dir() { copy_all(&path, &to) } else { assert!(fs::copy(&path, &to).is_ok()) }
        }
    }
    let to = TempDir::new().unwrap();
    copy_all(dir.path(), to.path());
    to
}
