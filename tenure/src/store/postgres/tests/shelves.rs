//! Key-value items.

use super::*;
use crate::store::item::{Item, Namespace, Owner};

fn shelf(owner: Owner) -> Namespace {
    Namespace { tenant: tenant(), owner, name: "notes".to_owned() }
}

fn item(key: &str, text: &str, second: i64) -> Item {
    let (key, value, text) = (key.to_owned(), r#"{"a":"\u0000"}"#.to_owned(), Some(text.to_owned()));
    Item { key, value, text, created_at: at(second), used_at: at(second), uses: 0, expires_at: None }
}

async fn keys(store: &PostgresStore, shelf: &Namespace) -> Vec<String> {
    store.items(shelf, None, 1000).await.unwrap().into_iter().map(|i| i.key).collect()
}

#[tokio::test]
async fn items_are_kept_used_and_bounded() {
    for options in ["pool=2", "pool=2&prepare=off"] {
        let Some(db) = Db::new(options).await else { return };
        let (store, shelf) = (&db.store, &shelf(Owner::Group("g/1".to_owned())));
        for n in 0..4 {
            store.put(shelf, &item(&format!("k{n}"), "x", n), Some(3)).await.unwrap();
        }
        assert_eq!(keys(store, shelf).await, ["k1", "k2", "k3"], "the least recently used went");
        let used = store.get(shelf, "k1", Some(at(9))).await.unwrap().unwrap();
        assert_eq!(used, Item { used_at: at(9), uses: 1, ..item("k1", "x", 1) });
        assert_eq!(store.get(shelf, "k1", None).await.unwrap(), Some(used));
        store.put(shelf, &item("k0", "x", 0), Some(2)).await.unwrap();
        assert_eq!(keys(store, shelf).await, ["k0", "k1"], "never the new one");
        store.put(shelf, &item("k0", "y", 20), Some(0)).await.unwrap();
        assert_eq!(store.items(shelf, None, 9).await.unwrap(), [item("k0", "y", 20)]);
        store.put(shelf, &item("k1", "x", 1), None).await.unwrap();
        store.put(shelf, &item("k2", "x", 1), None).await.unwrap();
        let some = |after, limit| async move {
            store.items(shelf, after, limit).await.unwrap().into_iter().map(|i| i.key).collect::<Vec<_>>()
        };
        assert_eq!(some(Some("k0"), 1).await, ["k1"]);
        assert_eq!(some(Some("k\0"), 1).await, ["k0"]);
        assert!(store.remove(shelf, "k1").await.unwrap());
        assert!(!store.remove(shelf, "k1").await.unwrap());
        assert_eq!(store.get(shelf, "k1", Some(at(1))).await.unwrap(), None);
        db.end().await;
    }
}

#[tokio::test]
async fn what_can_not_be_a_key_is_refused() {
    let Some(db) = Db::new("pool=2").await else { return };
    let (store, shelf) = (&db.store, &shelf(Owner::Tenant));
    assert_eq!(store.put(shelf, &item("a\0", "x", 0), None).await.unwrap_err().code(), "invalid");
    assert_eq!(store.put(shelf, &item(&"k".repeat(3000), "x", 0), None).await.unwrap_err().code(), "too_large");
    // A key of nearly the maximum length that hardly compresses.
    let mut dice = Dice(5);
    let long: String = (0..2000).map(|_| char::from(b'!' + dice.roll(90) as u8)).collect();
    store.put(shelf, &item(&long, "x", 0), None).await.unwrap();
    assert_eq!(keys(store, shelf).await, [long]);
    assert_eq!(store.get(shelf, "a\0", Some(at(1))).await.unwrap(), None);
    assert!(!store.remove(shelf, "a\0").await.unwrap());
    assert_eq!(store.put(shelf, &item("n", "a\0b", 0), None).await.unwrap_err().code(), "invalid");
    db.end().await;
}

#[tokio::test]
async fn a_commit_brings_items() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let mut w = Writer::create(store, "a").await.unwrap();
    let stale = w.clone();
    let mut step = w.step([say("x")]);
    step.items = [("k", "one"), ("l", "two"), ("k", "three")].map(|(k, t)| ("notes".to_owned(), item(k, t, 1))).into();
    w.commit(store, step.clone()).await.unwrap();
    let shelf = &shelf(Owner::Session(key("a").session));
    let want = [item("k", "three", 1), item("l", "two", 1)];
    assert_eq!(store.items(shelf, None, 9).await.unwrap(), want, "of two with one key the last counts");
    assert_eq!(store.search(shelf, "three", 9).await.unwrap().len(), 1);

    step.items[0].1 = item("late", "late", 1);
    let error = { stale }.commit(store, step).await.unwrap_err();
    assert_eq!((error.code(), store.items(shelf, None, 9).await.unwrap()), ("conflict", want.into()));
    db.end().await;
}

#[tokio::test]
async fn search_finds_any_word_best_first() {
    let Some(db) = Db::new("pool=2").await else { return };
    let (store, shelf) = (&db.store, &shelf(Owner::User(crate::types::id::User::new("ann").unwrap())));
    let texts = ["The quick brown fox", "quick: a FOX, quick!", "ÉTÉ à Paris", "nothing", "fox' | <-> \\ !"];
    for (n, text) in texts.iter().enumerate() {
        store.put(shelf, &item(&format!("k{n}"), text, 0), None).await.unwrap();
    }
    let other = Namespace { name: "other".to_owned(), ..shelf.clone() };
    store.put(&other, &item("o", "fox", 0), None).await.unwrap();
    let found = |text: &'static str| async move {
        let hits = store.search(shelf, text, 9).await.unwrap();
        assert!(hits.windows(2).all(|h| h[0].score >= h[1].score));
        hits.into_iter().map(|h| h.item.key).collect::<Vec<_>>()
    };
    assert_eq!(found("Brown Fox").await[0], "k0");
    assert_eq!(found("FOX").await.len(), 3);
    assert_eq!(found("été").await, ["k2"]);
    for nothing in ["", "'", "y' | 'z\\", "& ! ( ) <->", "zebra", "fo", "\0"] {
        assert_eq!(found(nothing).await, [""; 0], "{nothing:?}");
    }
    assert_eq!(store.search(shelf, "fox", 1).await.unwrap().len(), 1);
    db.end().await;
}

#[tokio::test]
async fn what_is_over_goes_and_what_is_cleared_is_gone() {
    let Some(db) = Db::new("pool=2").await else { return };
    let (store, user) = (&db.store, Owner::User(crate::types::id::User::new("ann").unwrap()));
    let (hers, all) = (&shelf(user.clone()), &shelf(Owner::Tenant));
    for n in 0..5 {
        store.put(all, &Item { expires_at: Some(at(n)), ..item(&format!("k{n}"), "x", 0) }, None).await.unwrap();
    }
    store.put(hers, &item("k", "x", 0), None).await.unwrap();
    assert_eq!(store.expire(at(3), 3).await.unwrap(), 3);
    assert_eq!(store.expire(at(3), 3).await.unwrap(), 1);
    assert_eq!(keys(store, all).await, ["k4"]);
    assert_eq!(keys(store, hers).await, ["k"]);
    store.clear(&tenant(), &user).await.unwrap();
    assert_eq!((keys(store, hers).await.len(), keys(store, all).await.len()), (0, 1));
    db.end().await;
}
