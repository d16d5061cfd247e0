//! Key-value items.

use super::*;
use crate::store::item::{Item, Namespace, Owner};

fn namespace(owner: Owner) -> Namespace {
    Namespace { tenant: tenant(), owner, name: "notes".to_owned() }
}

fn item(key: &str, text: &str, second: i64) -> Item {
    let key = key.to_owned();
    let value = serde_json::json!({"a": "\0", "text": text}).to_string();
    Item { key, value, created_at: at(second), used_at: at(second), uses: 0, expires_at: None }
}

async fn keys(store: &PostgresStore, namespace: &Namespace) -> Vec<String> {
    store.items(namespace, None, 1000).await.unwrap().into_iter().map(|i| i.key).collect()
}

#[tokio::test]
async fn items_are_stored_used_and_bounded() {
    for options in ["pool=2", "pool=2&prepare=off"] {
        let Some(db) = Db::new(options).await else { return };
        let store = &db.store;
        let namespace = &namespace(Owner::Group("g/1".to_owned()));
        for n in 0..4 {
            store.put(namespace, &item(&format!("k{n}"), "x", n), Some(3)).await.unwrap();
        }
        assert_eq!(keys(store, namespace).await, ["k1", "k2", "k3"], "the least recently used one is evicted");
        let used = store.get(namespace, "k1", Some(at(9))).await.unwrap().unwrap();
        assert_eq!(used, Item { used_at: at(9), uses: 1, ..item("k1", "x", 1) });
        assert_eq!(store.get(namespace, "k1", None).await.unwrap(), Some(used));
        store.put(namespace, &item("k0", "x", 0), Some(2)).await.unwrap();
        assert_eq!(keys(store, namespace).await, ["k0", "k1"], "never the new one");
        store.put(namespace, &item("k0", "y", 20), Some(0)).await.unwrap();
        assert_eq!(store.items(namespace, None, 9).await.unwrap(), [item("k0", "y", 20)]);
        store.put(namespace, &item("k1", "x", 1), None).await.unwrap();
        store.put(namespace, &item("k2", "x", 1), None).await.unwrap();
        let page_keys = |after, limit| async move {
            store.items(namespace, after, limit).await.unwrap().into_iter().map(|i| i.key).collect::<Vec<_>>()
        };
        assert_eq!(page_keys(Some("k0"), 1).await, ["k1"]);
        assert_eq!(page_keys(Some("k\0"), 1).await, ["k0"]);
        assert!(store.remove(namespace, "k1").await.unwrap());
        assert!(!store.remove(namespace, "k1").await.unwrap());
        assert_eq!(store.get(namespace, "k1", Some(at(1))).await.unwrap(), None);
    }
}

#[tokio::test]
async fn an_invalid_key_is_rejected() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let namespace = &namespace(Owner::Tenant);
    assert_eq!(store.put(namespace, &item("a\0", "x", 0), None).await.unwrap_err().code(), "invalid");
    assert_eq!(store.put(namespace, &item(&"k".repeat(3000), "x", 0), None).await.unwrap_err().code(), "too_large");
    // A key of nearly the maximum length that hardly compresses.
    let mut rng = Rng::new(5);
    let long: String = (0..2000).map(|_| char::from(b'!' + rng.below(90) as u8)).collect();
    store.put(namespace, &item(&long, "x", 0), None).await.unwrap();
    assert_eq!(keys(store, namespace).await, [long]);
    assert_eq!(store.get(namespace, "a\0", Some(at(1))).await.unwrap(), None);
    assert!(!store.remove(namespace, "a\0").await.unwrap());
    let with_nul = Item { value: "a\0b".to_owned(), ..item("n", "x", 0) };
    assert_eq!(store.put(namespace, &with_nul, None).await.unwrap_err().code(), "invalid");
}

#[tokio::test]
async fn a_commit_stores_its_items() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let mut w = Writer::create(store, "a").await.unwrap();
    let stale = w.clone();
    let mut commit = w.next_commit([user_message("x")]);
    commit.items =
        [("k", "one"), ("l", "two"), ("k", "three")].map(|(k, t)| ("notes".to_owned(), item(k, t, 1))).into();
    w.commit(store, commit.clone()).await.unwrap();
    let namespace = &namespace(Owner::Session(key("a").session));
    let want = [item("k", "three", 1), item("l", "two", 1)];
    assert_eq!(store.items(namespace, None, 9).await.unwrap(), want, "of two with one key the last counts");

    commit.items[0].1 = item("late", "late", 1);
    let error = { stale }.commit(store, commit).await.unwrap_err();
    assert_eq!((error.code(), store.items(namespace, None, 9).await.unwrap()), ("conflict", want.into()));
}

#[tokio::test]
async fn expired_and_deleted_items_are_removed() {
    let Some(db) = Db::new("pool=2").await else { return };
    let store = &db.store;
    let user = Owner::User(crate::types::id::User::new("ann").unwrap());
    let user_namespace = &namespace(user.clone());
    let tenant_namespace = &namespace(Owner::Tenant);
    for n in 0..5 {
        store
            .put(tenant_namespace, &Item { expires_at: Some(at(n)), ..item(&format!("k{n}"), "x", 0) }, None)
            .await
            .unwrap();
    }
    store.put(user_namespace, &item("k", "x", 0), None).await.unwrap();
    assert_eq!(store.expire(at(3), 3).await.unwrap(), 3);
    assert_eq!(store.expire(at(3), 3).await.unwrap(), 1);
    assert_eq!(keys(store, tenant_namespace).await, ["k4"]);
    assert_eq!(keys(store, user_namespace).await, ["k"]);
    store.delete_owner(&tenant(), &user).await.unwrap();
    assert_eq!((keys(store, user_namespace).await.len(), keys(store, tenant_namespace).await.len()), (0, 1));
}
