//! Backups: a store is restored completely into a store of any kind, and damage is detected before
//! anything is written.

use crate::support::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tenure::maintenance::{BackupSummary, Finding, verify_backup};
use tenure::store::{Item, Namespace, Owner, RecordRange, Store};
use tenure::{session::*, *};
use tokio::sync::mpsc;

/// Writes a backup to a file in the directory.
async fn back_up(tenure: &Tenure, dir: &Path) -> Result<(PathBuf, BackupSummary)> {
    let (sender, mut chunks) = mpsc::channel(1);
    let writing = tenure.backup(sender);
    let reading = async {
        let mut all = Vec::new();
        while let Some(chunk) = chunks.recv().await {
            all.extend(chunk);
        }
        all
    };
    let (summary, bytes) = tokio::join!(writing, reading);
    let file = dir.join("backup.jsonl");
    fs::write(&file, bytes).unwrap();
    Ok((file, summary?))
}

/// Everything that a store holds, as text.
async fn contents(store: &dyn Store) -> Vec<String> {
    let snapshot = store.snapshots().unwrap().snapshot().await.unwrap();
    let mut all = Vec::new();
    for head in snapshot.heads(None, 1000).await.unwrap() {
        let mut last = 0;
        while last < head.seq {
            for record in snapshot.records(&head.key(), &RecordRange::after(last)).await.unwrap() {
                all.push(format!("{} {} {} {}", head.key(), record.seq, record.at, record.entry.encode()));
                last = record.seq;
            }
        }
        all.push(serde_json::to_string(&head).unwrap());
    }
    let items = snapshot.items(None, 1000).await.unwrap();
    all.extend(items.iter().map(|(namespace, item)| format!("{namespace:?} {item:?}")));
    all.sort();
    all
}

/// Sessions of two tenants with media, forks of forks, an inherited log, a rewind, a deleted
/// session, and items of every kind of owner.
async fn fill(test: &TestTenure) {
    let (tenure, ada) = (&test.tenure, ada());
    let other = Principal::new("other", "ada").unwrap();
    for (principal, name) in [(&ada, "x"), (&ada, "y"), (&other, "x"), (&ada, "gone"), (&ada, "a-parent")] {
        tenure.create(principal, new_session(name)).await.unwrap();
        for n in 0..3 {
            tenure.append(principal, &id(name), turn_messages(n)).await.unwrap();
            test.advance(jiff::SignedDuration::from_secs(1));
        }
    }
    for (principal, name, fill) in [(&ada, "x", "a"), (&ada, "y", "a"), (&ada, "y", "b"), (&other, "x", "a")] {
        let messages = vec![image_message("look", fill), Message::assistant("nice")];
        tenure.append(principal, &id(name), messages).await.unwrap();
    }
    // In the order of their keys, each fork comes before its parent.
    tenure.fork(&ada, &id("x"), Fork::at(Point::Turn(4)).id(Some(id("g")))).await.unwrap();
    tenure.fork(&ada, &id("g"), Fork::at(Point::Turn(3)).id(Some(id("f")))).await.unwrap();
    tenure.append(&ada, &id("g"), vec![image_message("again", "a"), Message::assistant("yes")]).await.unwrap();
    tenure.fork(&ada, &id("a-parent"), Fork::at(Point::Turn(2)).id(Some(id("heir")))).await.unwrap();
    tenure.fork(&ada, &id("a-parent"), Fork::at(Point::Turn(1)).id(Some(id("early")))).await.unwrap();
    tenure.append(&ada, &id("heir"), turn_messages(9)).await.unwrap();
    tenure.purge(&ada, &id("a-parent"), None).await.unwrap();
    tenure.rewind(&ada, &id("y"), "turn-1").await.unwrap();
    tenure.delete(&ada, &id("gone"), None).await.unwrap();
    let at = test.now();
    let item = Item { uses: 7, expires_at: Some(at), ..Item::new("k", "{\"a\":1}", at) };
    let session = Owner::Session(id("x"));
    for owner in [session, Owner::User(ada.user.clone()), Owner::Group("g".into()), Owner::Tenant] {
        let namespace = Namespace { tenant: ada.tenant.clone(), owner, name: "cache".into() };
        tenure.store().put(&namespace, &item, None).await.unwrap();
    }
}

/// Backs up a store of one kind and restores it into every other.
async fn restored_everywhere(kind: StoreKind) {
    let Some(test) = TestTenure::new(kind).await else { return };
    fill(&test).await;
    let dir = tempfile::tempdir().unwrap();
    let (file, summary) = back_up(&test.tenure, dir.path()).await.unwrap();
    assert_eq!((summary.sessions, summary.items, summary.blobs), (8, 4, 3), "{summary:?}");
    assert_eq!(verify_backup(&file, |_| ()).unwrap(), summary);
    let want = contents(&**test.tenure.store()).await;
    for kind in [StoreKind::Jsonl, StoreKind::Sqlite, StoreKind::Postgres] {
        let Some(mut copy) = TestTenure::new(kind).await else { continue };
        assert_eq!(copy.tenure.restore_backup(&file, |_| ()).await.unwrap(), summary);
        assert_eq!(contents(&**copy.tenure.store()).await, want, "{kind:?}");
        let findings: Vec<String> = copy.tenure.examine(|_| ()).await.unwrap().iter().map(Finding::to_string).collect();
        assert_eq!(findings, Vec::<String>::new(), "{kind:?}");
        copy.reopen().await;
        assert_eq!(contents(&**copy.tenure.store()).await, want, "{kind:?}, reopened");
        let session = copy.tenure.load(&ada(), &id("g")).await.unwrap();
        assert_eq!(texts(&session), texts(&test.tenure.load(&ada(), &id("g")).await.unwrap()));
        copy.tenure.append(&ada(), &id("heir"), turn_messages(10)).await.unwrap();
        let error = copy.tenure.restore_backup(&file, |_| ()).await.unwrap_err().to_string();
        assert!(error.contains("the store is not empty"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jsonl_store_is_restored_into_every_store() {
    restored_everywhere(StoreKind::Jsonl).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sqlite_store_is_restored_into_every_store() {
    restored_everywhere(StoreKind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_store_is_restored_into_every_store() {
    restored_everywhere(StoreKind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_in_memory_is_refused() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let error = back_up(&test.tenure, dir.path()).await.unwrap_err().to_string();
    assert!(error.contains("cannot be backed up"), "{error}");
}

/// A session of more records than one commit restores, with media in the middle.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_session_is_restored_in_parts() {
    let test = TestTenure::new(StoreKind::Sqlite).await.unwrap();
    test.tenure.create(&ada(), new_session("x")).await.unwrap();
    for n in 0..3 {
        let many: Vec<Message> = (0..600).flat_map(|_| turn_messages(n)).collect();
        test.tenure.append(&ada(), &id("x"), many).await.unwrap();
        test.tenure.append(&ada(), &id("x"), vec![image_message("look", "a"), Message::assistant("ok")]).await.unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let (file, summary) = back_up(&test.tenure, dir.path()).await.unwrap();
    assert!(summary.records > 3000, "{summary:?}");
    for kind in [StoreKind::Jsonl, StoreKind::Sqlite, StoreKind::Postgres] {
        let Some(copy) = TestTenure::new(kind).await else { continue };
        copy.tenure.restore_backup(&file, |_| ()).await.unwrap();
        assert_eq!(contents(&**copy.tenure.store()).await, contents(&**test.tenure.store()).await);
        assert_eq!(copy.tenure.examine(|_| ()).await.unwrap(), []);
        copy.tenure.purge(&ada(), &id("x"), None).await.unwrap();
        assert_eq!(copy.tenure.examine(|_| ()).await.unwrap(), [], "no blob is left behind");
    }
}

/// Any change of a byte, any missing line and any truncation is detected, and restoring a damaged
/// backup fails.
#[tokio::test(flavor = "multi_thread")]
async fn damage_is_detected() {
    let test = TestTenure::new(StoreKind::Sqlite).await.unwrap();
    fill(&test).await;
    let dir = tempfile::tempdir().unwrap();
    let (file, _) = back_up(&test.tenure, dir.path()).await.unwrap();
    let intact = fs::read(&file).unwrap();
    let damaged = dir.path().join("damaged");
    let check = |bytes: &[u8], damage: &str| {
        fs::write(&damaged, bytes).unwrap();
        assert!(verify_backup(&damaged, |_| ()).is_err(), "{damage} is not detected");
    };
    for position in (0..intact.len()).step_by(intact.len() / 300) {
        let mut bytes = intact.clone();
        bytes[position] ^= 1;
        check(&bytes, &format!("a changed byte {position}"));
        check(&intact[..position], &format!("the end at byte {position}"));
    }
    let lines: Vec<&[u8]> = intact.split_inclusive(|b| *b == b'\n').collect();
    for missing in 0..lines.len() {
        let rest: Vec<u8> =
            lines.iter().enumerate().filter(|(n, _)| *n != missing).flat_map(|(_, l)| l.to_vec()).collect();
        check(&rest, &format!("the missing line {missing}"));
    }
    check(&[&intact[..], b"\n"].concat(), "a line after the end");
    check(b"{\"tenure_backup\":2,\"format\":1,\"created_at\":\"2026-01-01T00:00:00Z\"}\n", "a newer format");
    let error = verify_backup(&dir.path().join("none"), |_| ()).unwrap_err().to_string();
    assert!(error.contains("none"), "{error}");
    fs::write(&damaged, &intact[..intact.len() / 2]).unwrap();
    let copy = TestTenure::new(StoreKind::Sqlite).await.unwrap();
    let error = copy.tenure.restore_backup(&damaged, |_| ()).await.unwrap_err().to_string();
    assert!(error.contains("incomplete"), "{error}");
}

/// Backups that are made while sessions are written and purged are complete: each contains what was
/// acknowledged before it began, and can be restored.
async fn made_during_writes(kind: StoreKind) {
    let Some(test) = TestTenure::new(kind).await else { return };
    test.tenure.create(&ada(), new_session("x")).await.unwrap();
    let writer = {
        let tenure = test.tenure.clone();
        async move {
            for n in 0.. {
                tenure.append(&ada(), &id("x"), turn_messages(n)).await.unwrap();
                let name = format!("s{n}");
                tenure.create(&ada(), new_session(&name)).await.unwrap();
                tenure
                    .append(&ada(), &id(&name), vec![image_message("look", &name), Message::assistant("ok")])
                    .await
                    .unwrap();
                tenure.fork(&ada(), &id(&name), Fork::at(Point::Turn(1)).id(Some(id(&format!("f{n}"))))).await.unwrap();
                if n > 2 {
                    tenure.purge(&ada(), &id(&format!("s{}", n - 2)), None).await.unwrap();
                }
                tokio::task::yield_now().await;
            }
        }
    };
    let backups = async {
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_millis(20)).await; // pacing: writes between two backups
            let before = test.tenure.load(&ada(), &id("x")).await.unwrap();
            let (file, summary) = back_up(&test.tenure, dir.path()).await.unwrap();
            assert_eq!(verify_backup(&file, |_| ()).unwrap(), summary);
            let copy = TestTenure::new(StoreKind::Sqlite).await.unwrap();
            copy.tenure.restore_backup(&file, |_| ()).await.unwrap();
            assert_eq!(copy.tenure.examine(|_| ()).await.unwrap(), []);
            let after = copy.tenure.load(&ada(), &id("x")).await.unwrap();
            assert!(after.messages.len() >= before.messages.len(), "an acknowledged message is missing");
        }
    };
    tokio::select! {
        () = writer => {}
        () = backups => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jsonl_store_is_backed_up_while_it_is_used() {
    made_during_writes(StoreKind::Jsonl).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sqlite_store_is_backed_up_while_it_is_used() {
    made_during_writes(StoreKind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_store_is_backed_up_while_it_is_used() {
    made_during_writes(StoreKind::Postgres).await;
}
