//! Namespaces of key-value items: eviction, last use, expiry and ownership.

use super::fixture::Fixture;
use crate::store::contract::Store;
use crate::store::item::{Item, Namespace, Owner};
use crate::testing::records::{SessionLog, assert_fails, item, key, namespace, session_namespace, state, timestamp};
use crate::types::error::Error;
use crate::types::id::{SessionId, Tenant, User};

fn cache() -> Namespace {
    namespace(Owner::User(User::default()), "cache")
}

fn user(name: &str) -> Owner {
    Owner::User(User::new(name).unwrap())
}

async fn put_all(store: &dyn Store, namespace: &Namespace, items: &[Item]) {
    for item in items {
        store.put(namespace, item, None).await.unwrap();
    }
}

async fn keys(store: &dyn Store, namespace: &Namespace) -> Vec<String> {
    store.items(namespace, None, usize::MAX).await.unwrap().into_iter().map(|i| i.key).collect()
}

/// An item round-trips, by key and in the list.
pub async fn an_item_reads_back(Fixture { store, .. }: Fixture) {
    let full = Item {
        value: r#"{ "b": 1.50, "a" : "\u0000ä" }"#.to_owned(),
        used_at: timestamp(2),
        uses: 1 << 40,
        expires_at: Some(timestamp(1000)),
        ..item("full", 1)
    };
    let items = [full, item("plain", 3)];
    put_all(&*store, &cache(), &items).await;
    for item in &items {
        assert_eq!(store.get(&cache(), &item.key, None).await.unwrap().as_ref(), Some(item));
    }
    assert_eq!(store.items(&cache(), None, 9).await.unwrap(), items);
    assert_eq!(store.get(&cache(), "other", None).await.unwrap(), None);
}

/// Counting by name counts the items of every tenant and owner, and of no other name.
pub async fn items_are_counted_by_name(Fixture { store, .. }: Fixture) {
    assert_eq!(store.count_items("cache").await.unwrap(), 0);
    let other = Namespace { owner: Owner::Tenant, tenant: Tenant::new("other").unwrap(), name: "cache".to_owned() };
    let memory = Namespace { name: "memory".to_owned(), ..other.clone() };
    for (namespace, keys) in [(cache(), ["a", "b"].as_slice()), (other.clone(), &["a"]), (memory, &["a", "b", "c"])] {
        let items: Vec<_> = keys.iter().map(|key| item(key, 1)).collect();
        put_all(&*store, &namespace, &items).await;
    }
    assert_eq!(store.count_items("cache").await.unwrap(), 3);
    store.remove(&other, "a").await.unwrap();
    assert_eq!((store.count_items("cache").await.unwrap(), store.count_items("memory").await.unwrap()), (2, 3));
}

/// Keys and values may be any string, and values may be large.
pub async fn unusual_items_are_stored(Fixture { store, .. }: Fixture) {
    let long = "k".repeat(500);
    let keys =
        ["", " ", "../up", "a/b", "a\\b", "it's", "\"q\"", "%", "_", "A", "a", "ä", "😀", "a\nb", ".", long.as_str()];
    let mut items: Vec<_> =
        keys.iter().map(|k| Item { value: serde_json::Value::from(*k).to_string(), ..item(k, 1) }).collect();
    items.push(Item { value: format!("\"{}\"", "ä".repeat(1 << 19)), ..item("large", 2) });
    put_all(&*store, &cache(), &items).await;
    for item in &items {
        assert_eq!(store.get(&cache(), &item.key, None).await.unwrap().as_ref(), Some(item), "{:?}", item.key);
    }
    items.sort_by(|a, b| a.key.cmp(&b.key));
    assert_eq!(store.items(&cache(), None, usize::MAX).await.unwrap(), items);
}

/// A value may contain control characters; only NUL is rejected.
pub async fn control_characters_are_stored(Fixture { store, .. }: Fixture) {
    let refused =
        [Item { key: "a\0b".to_owned(), ..item("k", 1) }, Item { value: "\"a\0b\"".to_owned(), ..item("k", 1) }];
    for item in refused {
        let error = store.put(&cache(), &item, None).await.unwrap_err();
        assert_eq!(error.code(), "invalid", "{error}");
    }
    assert_eq!(store.items(&cache(), None, 9).await.unwrap(), []);
    let unusual = Item { value: "\"tab\t, bell\u{7}, \u{85}, \u{feff}\"".to_owned(), ..item("k", 1) };
    store.put(&cache(), &unusual, None).await.unwrap();
    assert_eq!(store.get(&cache(), "k", None).await.unwrap(), Some(unusual));
}

/// A put replaces the item with the same key.
pub async fn an_item_replaces_its_predecessor(Fixture { store, .. }: Fixture) {
    let old = Item { expires_at: Some(timestamp(50)), value: "1".to_owned(), uses: 9, ..item("k", 9) };
    let new = Item { value: "2".to_owned(), ..item("k", 2) };
    put_all(&*store, &cache(), &[old, new.clone()]).await;
    assert_eq!(store.get(&cache(), "k", None).await.unwrap(), Some(new.clone()));
    assert_eq!(store.items(&cache(), None, 9).await.unwrap(), [new]);
    assert_eq!(store.expire(timestamp(100), 9).await.unwrap(), 0);
}

/// Beyond the cap, the least recently used item is evicted.
pub async fn the_least_recently_used_is_evicted_first(Fixture { store, .. }: Fixture) {
    put_all(&*store, &cache(), &[item("a", 30), item("b", 10), item("c", 20)]).await;
    store.put(&cache(), &item("d", 40), Some(4)).await.unwrap();
    assert_eq!(keys(&*store, &cache()).await, ["a", "b", "c", "d"]);
    store.put(&cache(), &item("e", 50), Some(4)).await.unwrap();
    assert_eq!(keys(&*store, &cache()).await, ["a", "c", "d", "e"]);
    // A lower cap takes effect immediately.
    store.put(&cache(), &item("f", 60), Some(2)).await.unwrap();
    assert_eq!(keys(&*store, &cache()).await, ["e", "f"]);
    // Other namespaces are not counted.
    let other = namespace(user("other"), "cache");
    store.put(&other, &item("x", 1), Some(1)).await.unwrap();
    assert_eq!(keys(&*store, &cache()).await, ["e", "f"]);
}

/// The item just put is never evicted, however old its last use and however low the cap.
pub async fn the_new_item_is_never_evicted(Fixture { store, .. }: Fixture) {
    put_all(&*store, &cache(), &[item("a", 30), item("b", 10)]).await;
    store.put(&cache(), &item("c", 1), Some(2)).await.unwrap();
    assert_eq!(keys(&*store, &cache()).await, ["a", "c"]);
    store.put(&cache(), &item("d", 0), Some(1)).await.unwrap();
    assert_eq!(keys(&*store, &cache()).await, ["d"]);
    store.put(&cache(), &item("e", 0), Some(0)).await.unwrap();
    assert_eq!(keys(&*store, &cache()).await, ["e"]);
}

/// Replacing an item in a full namespace evicts nothing.
pub async fn replacing_an_item_evicts_nothing(Fixture { store, .. }: Fixture) {
    put_all(&*store, &cache(), &[item("a", 10), item("b", 20), item("c", 30)]).await;
    store.put(&cache(), &item("b", 40), Some(3)).await.unwrap();
    assert_eq!(store.items(&cache(), None, 9).await.unwrap(), [item("a", 10), item("b", 40), item("c", 30)]);
}

/// A read with a use time updates and counts the use; a read without one does not.
pub async fn use_is_recorded_and_counted(Fixture { store, .. }: Fixture) {
    put_all(&*store, &cache(), &[item("a", 10), item("b", 10)]).await;
    for seconds in [20, 30, 40] {
        let got = store.get(&cache(), "a", Some(timestamp(seconds))).await.unwrap().unwrap();
        assert_eq!((got.key, got.value), ("a".to_owned(), item("a", 10).value));
        store.get(&cache(), "a", None).await.unwrap();
    }
    let used = Item { used_at: timestamp(40), uses: 3, ..item("a", 10) };
    assert_eq!(store.get(&cache(), "a", None).await.unwrap(), Some(used.clone()));
    assert_eq!(store.items(&cache(), None, 9).await.unwrap(), [used, item("b", 10)]);
}

/// Several items are read and used at once; missing ones are left out.
pub async fn several_items_are_read_at_once(Fixture { store, .. }: Fixture) {
    put_all(&*store, &cache(), &[item("a", 1), item("b", 2), item("c", 3)]).await;
    let read = async |keys: &[&str], used_at| {
        let mut items = store.get_many(&cache(), keys, used_at).await.unwrap();
        items.sort_by(|a, b| a.key.cmp(&b.key));
        items
    };
    assert_eq!(read(&["c", "x", "a"], None).await, [item("a", 1), item("c", 3)]);
    let used = |key, created| Item { used_at: timestamp(9), uses: 1, ..item(key, created) };
    assert_eq!(read(&["c", "x", "a"], Some(timestamp(9))).await, [used("a", 1), used("c", 3)]);
    assert_eq!(read(&["a", "b", "c"], None).await, [used("a", 1), item("b", 2), used("c", 3)]);
    assert_eq!(read(&[], Some(timestamp(10))).await, []);
    assert_eq!(read(&["x", "a\0"], Some(timestamp(10))).await, []);
}

/// A used item is evicted later.
pub async fn use_delays_eviction(Fixture { store, .. }: Fixture) {
    put_all(&*store, &cache(), &[item("a", 10), item("b", 20), item("c", 30)]).await;
    store.get(&cache(), "a", Some(timestamp(40))).await.unwrap();
    store.put(&cache(), &item("d", 50), Some(3)).await.unwrap();
    assert_eq!(keys(&*store, &cache()).await, ["a", "c", "d"]);
}

/// Items are listed in byte order of their keys, in pages.
pub async fn items_are_listed_by_key(Fixture { store, .. }: Fixture) {
    let mut sorted =
        ["10", "9", "A", "Z", "_", "a", "a-b", "a:b", "aB", "ab", "z", "Ä", "ä", "ﬀ", "😀"].map(|k| item(k, 1));
    put_all(&*store, &cache(), &sorted).await;
    sorted.sort_by(|a, b| a.key.cmp(&b.key));
    for limit in [1, 2, 4, 15, 16] {
        let mut pages = Vec::new();
        let mut after = None::<String>;
        loop {
            let page = store.items(&cache(), after.as_deref(), limit).await.unwrap();
            assert!(page.len() <= limit);
            let Some(last) = page.last() else { break };
            after = Some(last.key.clone());
            pages.extend(page);
            assert!(pages.len() <= sorted.len(), "the pages contain duplicates: {pages:?}");
        }
        assert_eq!(pages, sorted);
    }
    assert_eq!(store.items(&cache(), None, 0).await.unwrap(), []);
    // The key to continue after need not exist.
    assert_eq!(store.items(&cache(), Some("a0"), 1).await.unwrap(), [item("a:b", 1)]);
}

/// An item can be removed once.
pub async fn an_item_is_removed_once(Fixture { store, .. }: Fixture) {
    put_all(&*store, &cache(), &[item("a", 1), item("b", 2)]).await;
    assert!(store.remove(&cache(), "a").await.unwrap());
    assert!(!store.remove(&cache(), "a").await.unwrap());
    assert_eq!(store.get(&cache(), "a", None).await.unwrap(), None);
    assert_eq!(store.items(&cache(), None, 9).await.unwrap(), [item("b", 2)]);
}

/// Expired items are removed in every namespace of every owner; others stay.
pub async fn expired_items_are_removed(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::begin(key("other", "s"), Default::default(), timestamp(0));
    log.save(&*store).await;
    let namespaces = [
        cache(),
        session_namespace(&log.key, "cache"),
        namespace(Owner::Tenant, "x"),
        namespace(Owner::Group("g".into()), "x"),
    ];
    let until = |key, seconds| Item { expires_at: Some(timestamp(seconds)), ..item(key, 1) };
    for namespace in &namespaces {
        put_all(&*store, namespace, &[until("a", 10), until("b", 20), until("c", 30), item("d", 1)]).await;
    }
    assert_eq!(store.expire(timestamp(5), 100).await.unwrap(), 0);
    assert_eq!(store.expire(timestamp(25), 100).await.unwrap(), 2 * namespaces.len());
    assert_eq!(store.expire(timestamp(25), 100).await.unwrap(), 0);
    for namespace in &namespaces {
        assert_eq!(store.items(namespace, None, 9).await.unwrap(), [until("c", 30), item("d", 1)]);
    }
    assert_eq!(store.expire(timestamp(1000), usize::MAX).await.unwrap(), namespaces.len());
}

/// An expiry pass removes at most `limit` items.
pub async fn expiry_has_a_limit(Fixture { store, .. }: Fixture) {
    for n in 0..5 {
        let expiring = Item { expires_at: Some(timestamp(n)), ..item(&n.to_string(), 0) };
        store.put(&cache(), &expiring, None).await.unwrap();
    }
    let mut passes = Vec::new();
    for limit in [0, 2, 2, 2, 2] {
        passes.push(store.expire(timestamp(100), limit).await.unwrap());
    }
    assert_eq!(passes, [0, 2, 2, 1, 0]);
    assert_eq!(keys(&*store, &cache()).await, [""; 0]);
}

/// Namespaces are separated by name, owner and tenant: equal keys are different items.
pub async fn namespaces_are_separate(Fixture { store, .. }: Fixture) {
    let ids = ["a", "tenant"].map(|id| SessionId::new(id).unwrap());
    for id in &ids {
        SessionLog::new(id.as_str()).save(&*store).await;
    }
    let group = |name: &str| Owner::Group(name.to_owned());
    let owners =
        [Owner::Tenant, user("a"), user("A"), user("a/b"), user("tenant"), user(".."), group("a"), group("a/b")];
    let owners = owners.into_iter().chain([group(""), group("b")]).chain(ids.map(Owner::Session));
    let mut namespaces: Vec<_> =
        owners.flat_map(|o| ["cache", "memory", "b/cache"].map(|name| namespace(o.clone(), name))).collect();
    let sessionless = namespaces.iter().filter(|s| !matches!(s.owner, Owner::Session(_)));
    let of_other_tenant: Vec<_> =
        sessionless.map(|s| Namespace { tenant: Tenant::new("other").unwrap(), ..s.clone() }).collect();
    namespaces.extend(of_other_tenant);
    for (n, namespace) in namespaces.iter().enumerate() {
        store.put(namespace, &item("k", n as i64), Some(1)).await.unwrap();
    }
    for (n, namespace) in namespaces.iter().enumerate() {
        assert_eq!(store.get(namespace, "k", None).await.unwrap(), Some(item("k", n as i64)), "{namespace:?}");
        assert_eq!(store.items(namespace, None, 9).await.unwrap(), [item("k", n as i64)], "{namespace:?}");
    }
    assert!(store.remove(&namespaces[0], "k").await.unwrap());
    for (n, namespace) in namespaces.iter().enumerate().skip(1) {
        assert_eq!(store.get(namespace, "k", None).await.unwrap(), Some(item("k", n as i64)), "{namespace:?}");
    }
}

/// An item cannot be put into a namespace of a missing session.
pub async fn a_namespace_requires_its_session(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::begin(key("other", "s"), Default::default(), timestamp(0));
    log.save(&*store).await;
    let of_missing_session = session_namespace(&key("default", "s"), "cache");
    let refused = store.put(&of_missing_session, &item("k", 1), Some(9)).await;
    assert_fails(refused, Error::NotFound { session_id: log.key.session.clone() });
    assert_eq!(store.items(&of_missing_session, None, 9).await.unwrap(), []);
    // Once the session exists, its namespace is empty.
    SessionLog::new("s").save(&*store).await;
    assert_eq!(store.items(&of_missing_session, None, 9).await.unwrap(), []);
    store.put(&of_missing_session, &item("k", 1), Some(9)).await.unwrap();
}

/// All namespaces of one owner are deleted, and nothing else is.
pub async fn only_namespaces_of_the_owner_are_deleted(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("ada");
    log.push_message("one").save(&*store).await;
    let ada = [namespace(user("ada"), "cache"), namespace(user("ada"), "memory")];
    let other_namespaces = [
        namespace(user("bob"), "memory"),
        namespace(Owner::Group("ada".to_owned()), "memory"),
        namespace(Owner::Tenant, "memory"),
        session_namespace(&log.key, "memory"),
        Namespace { tenant: Tenant::new("other").unwrap(), ..ada[0].clone() },
    ];
    let remembered = item("k", 1);
    for namespace in ada.iter().chain(&other_namespaces) {
        store.put(namespace, &remembered, None).await.unwrap();
    }
    let before = state(&*store, &other_namespaces, &[]).await;
    store.delete_owner(&Tenant::default(), &user("ada")).await.unwrap();
    for namespace in &ada {
        assert_eq!(store.items(namespace, None, 9).await.unwrap(), []);
    }
    assert_eq!(state(&*store, &other_namespaces, &[]).await, before);
    // Deletion is idempotent, and the namespace can be filled again.
    store.delete_owner(&Tenant::default(), &user("ada")).await.unwrap();
    store.put(&ada[0], &remembered, None).await.unwrap();
    assert_eq!(store.items(&ada[0], None, 9).await.unwrap(), [remembered]);
    // Deleting a session's namespaces does not delete the session.
    store.delete_owner(&Tenant::default(), &Owner::Session(log.key.session.clone())).await.unwrap();
    assert_eq!(store.items(&other_namespaces[3], None, 9).await.unwrap(), []);
    assert_eq!(store.head(&log.key).await.unwrap(), Some(log.head()));
}
