//! Full-text search over the items of a namespace.

use super::fixture::Fixture;
use crate::store::contract::Store;
use crate::store::item::{Item, Namespace, Owner};
use crate::testing::records::{SessionLog, item, namespace, session_namespace, timestamp};
use crate::types::id::{Tenant, User};

fn memory() -> Namespace {
    namespace(Owner::User(User::default()), "memory")
}

async fn put(store: &dyn Store, namespace: &Namespace, key: &str, text: &str) {
    store.put(namespace, &Item { text: Some(text.to_owned()), ..item(key, 1) }, None).await.unwrap();
}

/// The keys of the hits, best match first.
async fn search_ranked(store: &dyn Store, namespace: &Namespace, text: &str) -> Vec<String> {
    let hits = store.search(namespace, text, 100).await.unwrap_or_else(|e| panic!("{text:?}: {e}"));
    hits.into_iter().map(|h| h.item.key).collect()
}

/// The keys of the hits in key order, for items that rank equally.
async fn search_keys(store: &dyn Store, namespace: &Namespace, text: &str) -> Vec<String> {
    let mut keys = search_ranked(store, namespace, text).await;
    keys.sort();
    keys
}

/// Any word of the query matches an item's text, and the complete item is returned.
pub async fn items_are_found_by_a_word(Fixture { store, .. }: Fixture) {
    put(&*store, &memory(), "a", "Ada likes green tea.").await;
    put(&*store, &memory(), "b", "Bob likes coffee, black").await;
    put(&*store, &memory(), "c", "nobody knows").await;
    store.put(&memory(), &Item { value: r#""tea""#.to_owned(), ..item("tea", 1) }, None).await.unwrap();
    assert_eq!(search_keys(&*store, &memory(), "tea").await, ["a"]);
    assert_eq!(search_keys(&*store, &memory(), "coffee").await, ["b"]);
    assert_eq!(search_keys(&*store, &memory(), "likes").await, ["a", "b"]);
    assert_eq!(search_keys(&*store, &memory(), "who drinks tea, or coffee?").await, ["a", "b"]);
    assert_eq!(search_keys(&*store, &memory(), "water").await, [""; 0]);
    let hit = &store.search(&memory(), "tea", 9).await.unwrap()[0];
    assert_eq!(hit.item, Item { text: Some("Ada likes green tea.".to_owned()), ..item("a", 1) });
}

/// Words are compared case-insensitively in every language.
pub async fn words_have_no_case(Fixture { store, .. }: Fixture) {
    put(&*store, &memory(), "a", "GREEN Tea").await;
    put(&*store, &memory(), "b", "Äpfel und ÖL").await;
    put(&*store, &memory(), "c", "ПРИВЕТ мир").await;
    for (text, want) in
        [("green", "a"), ("TEA", "a"), ("äpfel", "b"), ("ÄPFEL", "b"), ("öl", "b"), ("привет", "c"), ("Мир", "c")]
    {
        assert_eq!(search_keys(&*store, &memory(), text).await, [want], "{text}");
    }
}

/// A part of a word does not match.
pub async fn only_whole_words_count(Fixture { store, .. }: Fixture) {
    put(&*store, &memory(), "a", "the categories of running water").await;
    for text in ["cat", "category", "run", "ning", "wat*", "water*ing"] {
        let want: &[&str] = if text == "water*ing" { &["a"] } else { &[] };
        assert_eq!(search_keys(&*store, &memory(), text).await, want, "{text}");
    }
}

/// Items that contain more of the query's words rank higher, with a higher score; the limit returns
/// the best.
pub async fn the_best_come_first(Fixture { store, .. }: Fixture) {
    for (key, text) in [
        ("a", "red wine from france"),
        ("b", "green apple from spain"),
        ("c", "red apple from italy"),
        ("d", "blue sky over norway"),
        ("e", "white snow over sweden"),
        ("f", "black coal under england"),
    ] {
        put(&*store, &memory(), key, text).await;
    }
    let hits = store.search(&memory(), "red apple", 9).await.unwrap();
    let keys: Vec<_> = hits.iter().map(|h| h.item.key.as_str()).collect();
    assert_eq!(keys[0], "c");
    assert_eq!(keys.len(), 3, "{keys:?}");
    assert!(hits[0].score > hits[1].score && hits[1].score >= hits[2].score, "{hits:?}");
    let hits = store.search(&memory(), "red apple", 1).await.unwrap();
    assert_eq!(hits.iter().map(|h| h.item.key.as_str()).collect::<Vec<_>>(), ["c"]);
}

/// A search is restricted to its namespace.
pub async fn only_the_namespace_is_searched(Fixture { store, .. }: Fixture) {
    let mut log = SessionLog::new("s");
    log.save(&*store).await;
    let namespaces = [
        memory(),
        Namespace { name: "other".to_owned(), ..memory() },
        Namespace { tenant: Tenant::new("other").unwrap(), ..memory() },
        namespace(Owner::User(User::new("bob").unwrap()), "memory"),
        namespace(Owner::Group("default".to_owned()), "memory"),
        namespace(Owner::Tenant, "memory"),
        session_namespace(&log.key, "memory"),
    ];
    for (n, namespace) in namespaces.iter().enumerate() {
        put(&*store, namespace, &format!("k{n}"), "a secret").await;
    }
    for (n, namespace) in namespaces.iter().enumerate() {
        assert_eq!(search_keys(&*store, namespace, "secret").await, [format!("k{n}")], "{namespace:?}");
    }
    // Items stored by a commit are indexed too.
    let mut commit = log.push_message("one").commit();
    commit.items = vec![("memory".to_owned(), Item { text: Some("a surprise".to_owned()), ..item("new", 1) })];
    store.commit(&commit).await.unwrap();
    assert_eq!(search_keys(&*store, &namespaces[6], "surprise").await, ["new"]);
}

/// Every query is valid: anything that is not a word is ignored.
pub async fn no_text_is_a_syntax_error(Fixture { store, .. }: Fixture) {
    put(&*store, &memory(), "a", "an apple a day").await;
    put(&*store, &memory(), "b", "something else").await;
    let without_words = [
        "\"",
        "'",
        "*",
        "(",
        ")",
        ":",
        "-",
        "+",
        "^",
        "{",
        "}",
        "[",
        "]",
        "\\",
        "/",
        "%",
        "_",
        "&",
        "|",
        "!",
        "<->",
        "~",
        "?",
        "$1",
        ".",
        ",",
        ";",
        "--",
        "/*",
        "\0",
        "\n",
        "😀",
        "AND",
        "OR",
        "NOT",
        "NEAR",
        "NEAR(",
        "NEAR/2",
        "col:",
        "\"x",
        "x\"\"",
        "''",
        "(((",
        "AND AND",
        "OR NOT",
        "\u{feff}",
        "'; drop table items; --",
    ];
    for text in without_words {
        assert_eq!(search_keys(&*store, &memory(), text).await, [""; 0], "{text:?}");
        for text in [format!("{text} apple"), format!("apple {text}"), format!("{text} apple {text}")] {
            assert_eq!(search_keys(&*store, &memory(), &text).await, ["a"], "{text:?}");
        }
    }
    for text in
        ["\"apple\"", "(apple)", "apple*", "-apple", "^apple", "apple:", "'apple'", "apple!", "!apple", "<apple>"]
    {
        assert_eq!(search_keys(&*store, &memory(), text).await, ["a"], "{text:?}");
    }
    let long = "word ".repeat(2000) + "apple";
    assert_eq!(search_keys(&*store, &memory(), &long).await, ["a"], "a long query");
    put(&*store, &memory(), "c", "and or not near").await;
    assert_eq!(search_keys(&*store, &memory(), "NOT").await, ["c"], "a word is a word");
}

/// A query without words, or a limit of 0, returns nothing.
pub async fn an_empty_query_finds_nothing(Fixture { store, .. }: Fixture) {
    assert_eq!(search_keys(&*store, &memory(), "apple").await, [""; 0], "in an empty namespace");
    put(&*store, &memory(), "a", "an apple").await;
    put(&*store, &memory(), "b", "").await;
    put(&*store, &memory(), "c", "?!").await;
    assert_eq!(search_keys(&*store, &memory(), "").await, [""; 0]);
    assert_eq!(search_keys(&*store, &memory(), " \t\n").await, [""; 0]);
    assert_eq!(search_keys(&*store, &memory(), "?!").await, [""; 0]);
    assert_eq!(store.search(&memory(), "apple", 0).await.unwrap(), []);
}

/// An item that was changed, removed, evicted, expired or purged is no longer found by its old
/// text.
pub async fn removed_items_are_not_found(Fixture { store, .. }: Fixture) {
    put(&*store, &memory(), "a", "first words").await;
    put(&*store, &memory(), "a", "second thoughts").await;
    assert_eq!(search_keys(&*store, &memory(), "first words").await, [""; 0]);
    assert_eq!(search_keys(&*store, &memory(), "thoughts").await, ["a"]);
    store.put(&memory(), &item("a", 1), None).await.unwrap();
    assert_eq!(search_keys(&*store, &memory(), "thoughts").await, [""; 0], "the item no longer has a text");

    put(&*store, &memory(), "b", "remove me").await;
    assert!(store.remove(&memory(), "b").await.unwrap());
    assert_eq!(search_keys(&*store, &memory(), "remove").await, [""; 0]);

    put(&*store, &memory(), "c", "push me out").await;
    store.put(&memory(), &item("d", 2), Some(1)).await.unwrap();
    assert_eq!(search_keys(&*store, &memory(), "push").await, [""; 0]);

    let expiring = Item { text: Some("my time is over".to_owned()), expires_at: Some(timestamp(5)), ..item("e", 3) };
    store.put(&memory(), &expiring, None).await.unwrap();
    assert_eq!(store.expire(timestamp(6), 9).await.unwrap(), 1);
    assert_eq!(search_keys(&*store, &memory(), "time").await, [""; 0]);

    let mut log = SessionLog::new("s");
    log.save(&*store).await;
    let notes = session_namespace(&log.key, "memory");
    put(&*store, &notes, "f", "purge me").await;
    store.purge(&log.key).await.unwrap();
    SessionLog::new("s").save(&*store).await;
    assert_eq!(search_keys(&*store, &notes, "purge").await, [""; 0]);
}
