//! Memories: scopes, recall, sources and retraction.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use tenure::{memory::*, policy::*, run::*, session::*, *};

/// An embedder that maps a few synonyms to the same dimension, and adds a little noise for all
/// other words.
fn synonym_embedder(name: &str, awake: &Arc<AtomicBool>) -> Embedder {
    const SYNONYMS: [&[&str]; 5] = [
        &["tea", "drink", "beverage", "tee", "お茶"],
        &["dog", "pet", "animal", "hund"],
        &["metric", "kilometres", "units", "miles"],
        &["allergic", "nuts", "peanuts", "food"],
        &["berlin", "lives", "home", "city"],
    ];
    let awake = awake.clone();
    Embedder::new(name, move |texts| {
        let awake = awake.load(SeqCst);
        async move {
            let vector = |text: &String| {
                let mut numbers = vec![0.0; 64];
                for word in text.to_lowercase().split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()) {
                    let known = SYNONYMS.iter().position(|words| words.contains(&word));
                    let noise = 8 + word.bytes().fold(7usize, |n, b| (n * 31 + b as usize) % 9973) % 56;
                    numbers[known.unwrap_or(noise)] += if known.is_some() { 1.0 } else { 0.2 };
                }
                numbers
            };
            if awake { Ok(texts.iter().map(vector).collect()) } else { Err("the embedder sleeps".into()) }
        }
    })
}

fn awake() -> Arc<AtomicBool> {
    Arc::new(AtomicBool::new(true))
}

fn assistant(name: &str, scope: MemoryScope, change: impl FnOnce(&mut MemoryConfig)) -> Assistant {
    let mut memory = MemoryConfig { scope, ..MemoryConfig::default() };
    change(&mut memory);
    Assistant { name: name.to_owned(), memory: Some(memory), ..Assistant::default() }
}

/// Declares one assistant of each scope, two in the same group, and one without memory
/// configuration.
fn declare_assistants(tenure: &Tenure) {
    let group = |m: &mut MemoryConfig| m.group = Some("lab".to_owned());
    for a in [
        assistant("none", MemoryScope::None, |_| ()),
        assistant("session", MemoryScope::Session, |_| ()),
        assistant("user", MemoryScope::User, |_| ()),
        assistant("group", MemoryScope::Group, group),
        assistant("colleague", MemoryScope::Group, group),
        Assistant { name: "plain".to_owned(), ..Assistant::default() },
    ] {
        tenure.declare(a);
    }
}

async fn begin(t: &Tenure, principal: &Principal, session: &str, assistant: &str) -> MemoryTarget {
    let new = NewSession { assistant: Some(assistant.to_owned()), ..new_session(session) };
    t.create(principal, new).await.unwrap();
    MemoryTarget::Session(id(session))
}

fn bob() -> Principal {
    Principal::new("acme", "bob").unwrap()
}

fn fact(text: &str) -> NewMemory {
    NewMemory { text: text.to_owned(), ..NewMemory::default() }
}

async fn recall(t: &Tenure, principal: &Principal, memory_target: &MemoryTarget, question: &str) -> Vec<String> {
    t.recall(principal, memory_target, question, 10)
        .await
        .unwrap()
        .memories
        .into_iter()
        .map(|h| h.memory.text)
        .collect()
}

async fn all(t: &Tenure, principal: &Principal, memory_target: &MemoryTarget) -> BTreeSet<String> {
    t.memory_list(principal, memory_target, None, None, 100).await.unwrap().into_iter().map(|m| m.text).collect()
}

fn set(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(|t| (*t).to_owned()).collect()
}

async fn last_seq(t: &Tenure, principal: &Principal, session: &str) -> Seq {
    t.load(principal, &id(session)).await.unwrap().messages.last().unwrap().seq
}

on_every_store! {
    /// The assistant's policy determines the scope of a memory; its sessions inherit it.
    async fn scopes(test: &mut TestTenure) {
        let t = &test.tenure;
        declare_assistants(t);
        for (assistant, principal) in [("session", ada()), ("user", ada()), ("group", ada())] {
            let memory_target = begin(t, &principal, assistant, assistant).await;
            t.remember(&principal, &memory_target, fact(&format!("ada said it to {assistant}"))).await.unwrap();
        }
        let other = begin(t, &ada(), "s2", "session").await;
        let user = begin(t, &ada(), "u2", "user").await;
        let colleague = begin(t, &bob(), "c2", "colleague").await;
        let bobs = begin(t, &bob(), "s3", "session").await;
        let bobs_user = begin(t, &bob(), "u3", "user").await;
        assert_eq!(all(t, &ada(), &MemoryTarget::Session(id("session"))).await, set(&["ada said it to session"]));
        assert_eq!(all(t, &ada(), &other).await, set(&[]), "another session of the same user");
        assert_eq!(all(t, &ada(), &user).await, set(&["ada said it to user"]), "another session of the same user");
        assert_eq!(recall(t, &bob(), &colleague, "what was said?").await, ["ada said it to group"], "another assistant of the group");
        assert_eq!(all(t, &bob(), &bobs).await, set(&[]));
        assert_eq!(all(t, &bob(), &bobs_user).await, set(&[]), "another user");
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["ada said it to user"]));
        assert_eq!(all(t, &ada(), &MemoryTarget::Assistant("user".into())).await, set(&["ada said it to user"]));
        assert_eq!(all(t, &bob(), &MemoryTarget::Assistant("group".into())).await, set(&["ada said it to group"]));
        let other_tenant = Principal::new("other", "ada").unwrap();
        assert_eq!(all(t, &other_tenant, &MemoryTarget::Own).await, set(&[]), "another tenant");
        assert_eq!(all(t, &other_tenant, &MemoryTarget::Assistant("group".into())).await, set(&[]), "another tenant's group of the same name");
        assert_eq!(t.recall(&bob(), &MemoryTarget::Session(id("user")), "said", 5).await.unwrap_err().code(), "not_found");
        let plain = begin(t, &ada(), "p", "plain").await;
        let remembered = t.remember(&ada(), &plain, fact("x")).await.unwrap();
        assert_eq!(remembered.scope, MemoryScope::Session, "the default");
        t.create(&ada(), new_session("free")).await.unwrap();
        let remembered = t.remember(&ada(), &MemoryTarget::Session(id("free")), fact("x")).await.unwrap();
        assert_eq!(remembered.scope, MemoryScope::Session, "a session without an assistant");
        for (memory_target, want) in [
            (begin(t, &ada(), "n", "none").await, "memory.scope"),
            (MemoryTarget::Assistant("none".into()), "memory.scope"),
            (MemoryTarget::Assistant("session".into()), "session_id"),
            (MemoryTarget::Assistant("nobody".into()), "does not exist"),
        ] {
            let error = t.remember(&ada(), &memory_target, fact("x")).await.unwrap_err();
            assert!(error.to_string().contains(want), "{memory_target:?}: {error}");
        }
    }

    /// Equal texts are one memory; beyond the cap, the least recently used is evicted; all expire
    /// after their retention.
    async fn deduplication_cap_and_retention(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(assistant("small", MemoryScope::User, |m| (m.max_entries, m.retention) = (Some(3), Some("30d".parse().unwrap()))));
        let memory_target = begin(t, &ada(), "x", "small").await;
        let first = t.remember(&ada(), &memory_target, fact(" likes tea \n")).await.unwrap();
        assert_eq!((first.text.as_str(), first.scope, first.expires_at), ("likes tea", MemoryScope::User, Some(test.now() + SignedDuration::from_hours(24 * 30))));
        for text in ["has a dog", "lives in Berlin"] {
            test.advance(SignedDuration::from_secs(1));
            t.remember(&ada(), &memory_target, fact(text)).await.unwrap();
        }
        test.advance(SignedDuration::from_secs(1));
        let again = t.remember(&ada(), &memory_target, NewMemory { metadata: json!({"a": 1}).as_object().unwrap().clone(), ..fact("likes tea") }).await.unwrap();
        assert_eq!((&again.id, again.metadata["a"].clone()), (&first.id, json!(1)));
        assert_eq!(all(t, &ada(), &memory_target).await.len(), 3);
        test.advance(SignedDuration::from_secs(1));
        assert_eq!(t.recall(&ada(), &memory_target, "which dog?", 1).await.unwrap().memories[0].memory.text, "has a dog");
        test.advance(SignedDuration::from_secs(1));
        t.remember(&ada(), &memory_target, fact("the fourth")).await.unwrap();
        assert_eq!(all(t, &ada(), &memory_target).await, set(&["has a dog", "likes tea", "the fourth"]), "Berlin was used least recently");
        let loaded = t.memory(&ada(), &memory_target, &first.id).await.unwrap().unwrap();
        assert_eq!((loaded.uses, loaded.sources), (0, vec![MemorySource { session_id: Some(id("x")), messages: vec![], user: None }]));
        assert!(t.forget_memory(&ada(), &memory_target, &first.id).await.unwrap());
        assert!(!t.forget_memory(&ada(), &memory_target, &first.id).await.unwrap());
        assert_eq!(t.memory(&ada(), &memory_target, &first.id).await.unwrap(), None);
        test.advance(SignedDuration::from_hours(24 * 31));
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&[]), "their time is over");
        assert_eq!(recall(t, &ada(), &MemoryTarget::Own, "dog fourth").await, Vec::<String>::new());
        for (text, code) in [("", "invalid"), (" \n", "invalid"), ("a\0b", "invalid"), (&*"x".repeat(20_000), "too_large")] {
            assert_eq!(t.remember(&ada(), &MemoryTarget::Own, fact(text)).await.unwrap_err().code(), code);
        }
        let messages = NewMemory { messages: vec![1], ..fact("x") };
        assert_eq!(t.remember(&ada(), &MemoryTarget::Own, messages).await.unwrap_err().code(), "invalid");
    }

    /// Recall by words and by similarity in any language. Without an embedder it uses words only,
    /// and reports that.
    async fn by_words_and_by_meaning(test: &mut TestTenure) {
        let facts = ["She likes green tea", "Her dog is called Rex", "Sie mag grünen Tee", "彼女は緑茶が好きです", "Use metric units always", "Он живёт в Москве"];
        let switch = awake();
        test.reopen_with(|o| o.embedder = Some(synonym_embedder("first", &switch))).await;
        let t = test.tenure.clone();
        for text in facts {
            t.remember(&ada(), &MemoryTarget::Own, fact(text)).await.unwrap();
        }
        let recalled = t.recall(&ada(), &MemoryTarget::Own, "which animal?", 5).await.unwrap();
        assert_eq!((recalled.memories[0].memory.text.as_str(), recalled.by_meaning), (facts[1], true), "no word of it is there");
        assert!(recalled.memories[0].similarity.unwrap() > 0.3);
        switch.store(false, SeqCst);
        let recalled = t.recall(&ada(), &MemoryTarget::Own, "Was ist mit GRUNEN Tee?", 5).await.unwrap();
        assert!(!recalled.by_meaning && recalled.note.unwrap().contains("sleeps"));
        assert_eq!(recalled.memories[0].memory.text, facts[2]);
        assert_eq!(recall(&t, &ada(), &MemoryTarget::Own, "緑茶").await[0], facts[3], "where words are not written apart");
        assert_eq!(recall(&t, &ada(), &MemoryTarget::Own, "где живёт?").await[0], facts[5]);
        assert_eq!(recall(&t, &ada(), &MemoryTarget::Own, "which animal?").await, Vec::<String>::new());
        assert_eq!(recall(&t, &ada(), &MemoryTarget::Own, "").await, Vec::<String>::new());
        // A memory stored while the embedder is unavailable has no vector yet.
        t.remember(&ada(), &MemoryTarget::Own, fact("Her cat is an animal too")).await.unwrap();
        switch.store(true, SeqCst);
        let t = test.second_node();
        assert_eq!(t.recall(&ada(), &MemoryTarget::Own, "cat", 5).await.unwrap().note.unwrap(), "similarity search was not used: no embedder is configured");
    }

    /// Redacted text is neither stored in a memory or a recall event nor sent to the embedder.
    async fn redacted(test: &mut TestTenure) {
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        let embedded = seen.clone();
        let rule = RedactionRule::new("number", r"\d{4,}", None).unwrap();
        let embedder = Embedder::new("spy", move |texts| {
            embedded.lock().unwrap().extend(texts.clone());
            async move { Ok(texts.iter().map(|_| vec![1.0, 2.0]).collect()) }
        });
        test.reopen_with(|o| (o.redaction, o.embedder) = (vec![rule].try_into().unwrap(), Some(embedder))).await;
        let t = &test.tenure;
        let remembered = t.remember(&ada(), &MemoryTarget::Own, fact("her card is 98765432")).await.unwrap();
        assert_eq!(remembered.text, "her card is [redacted: number]");
        assert_eq!(recall(t, &ada(), &MemoryTarget::Own, "is 98765432 her card?").await, [remembered.text]);
        assert_eq!(count_in_store(test, "98765432").await, 0);
        assert!(seen.lock().unwrap().len() == 2 && !seen.lock().unwrap().iter().any(|t| t.contains("98765432")));
    }

    /// After a change of the embedding model, existing memories are found by words until they are
    /// embedded again, and by similarity afterwards.
    async fn another_model(test: &mut TestTenure) {
        let switch = awake();
        test.reopen_with(|o| o.embedder = Some(synonym_embedder("first", &switch))).await;
        declare_assistants(&test.tenure);
        let session = begin(&test.tenure, &ada(), "x", "session").await;
        for n in 0..70 {
            test.tenure.remember(&ada(), &MemoryTarget::Own, fact(&format!("number {n} of many"))).await.unwrap();
        }
        for memory_target in [&MemoryTarget::Own, &session] {
            test.tenure.remember(&ada(), memory_target, fact("Rex is her dog")).await.unwrap();
        }
        test.reopen_with(|o| o.embedder = Some(synonym_embedder("second", &switch))).await;
        declare_assistants(&test.tenure);
        let t = &test.tenure;
        assert_eq!(recall(t, &ada(), &MemoryTarget::Own, "Rex").await[0], "Rex is her dog");
        assert_eq!(recall(t, &ada(), &MemoryTarget::Own, "pet").await, Vec::<String>::new(), "vectors of two models are not compared");
        assert_eq!(recall(t, &ada(), &session, "pet").await, ["Rex is her dog"], "few enough to be made at once");
        let mut notifications = 0;
        assert_eq!(t.embed_all(|n| notifications += n).await.unwrap(), 71);
        assert_eq!((notifications, t.embed_all(|_| ()).await.unwrap()), (71, 0));
        assert_eq!(recall(t, &ada(), &MemoryTarget::Own, "pet").await[0], "Rex is her dog");
        assert_eq!(t.memory_list(&ada(), &MemoryTarget::Own, None, None, 100).await.unwrap().len(), 71);
    }

    /// Memories stored or deleted by another node are seen here, also by similarity search.
    async fn another_node(test: &mut TestTenure) {
        let switch = awake();
        test.reopen_with(|o| o.embedder = Some(synonym_embedder("first", &switch))).await;
        let first_node = test.tenure.clone();
        let second_node = Tenure::with_store(first_node.store().clone(), Options { clock: test.clock.clone(), embedder: Some(synonym_embedder("first", &switch)), ..Options::default() });
        first_node.remember(&ada(), &MemoryTarget::Own, fact("She likes tea")).await.unwrap();
        assert_eq!(recall(&first_node, &ada(), &MemoryTarget::Own, "pet").await, ["She likes tea"]);
        assert_eq!(recall(&second_node, &ada(), &MemoryTarget::Own, "beverage").await, ["She likes tea"]);
        let rex = second_node.remember(&ada(), &MemoryTarget::Own, fact("Rex is her dog")).await.unwrap();
        for minutes in [0, 1, 58, 70] {
            test.advance(SignedDuration::from_mins(minutes));
            assert_eq!(recall(&first_node, &ada(), &MemoryTarget::Own, "pet").await, ["Rex is her dog", "She likes tea"], "after {minutes} minutes");
        }
        first_node.forget_memory(&ada(), &MemoryTarget::Own, &rex.id).await.unwrap();
        assert_eq!(recall(&second_node, &ada(), &MemoryTarget::Own, "pet").await, ["She likes tea"]);
    }

    /// Rewinding or purging a session retracts memories that have no other source. Expiry and
    /// retention do not (D-072).
    async fn provenance(test: &mut TestTenure) {
        let t = &test.tenure;
        declare_assistants(t);
        let x = begin(t, &ada(), "x", "user").await;
        let y = begin(t, &ada(), "y", "user").await;
        t.append(&ada(), &id("x"), turn_messages(1)).await.unwrap();
        let kept_seq = last_seq(t, &ada(), "x").await;
        t.append(&ada(), &id("x"), turn_messages(2)).await.unwrap();
        let rewound_seq = last_seq(t, &ada(), "x").await;
        let from = |text: &str, messages: &[Seq]| NewMemory { messages: messages.to_vec(), ..fact(text) };
        for (text, messages) in [("from what stays", &[kept_seq][..]), ("from what is cut", &[rewound_seq]), ("from both", &[kept_seq, rewound_seq]), ("from the session", &[])] {
            t.remember(&ada(), &x, from(text, messages)).await.unwrap();
        }
        t.remember(&ada(), &x, from("said in two sessions", &[rewound_seq])).await.unwrap();
        t.remember(&ada(), &y, fact("said in two sessions")).await.unwrap();
        assert_eq!(t.remember(&ada(), &x, from("never", &[rewound_seq + 50])).await.unwrap_err().code(), "no_such_point");
        t.fork(&ada(), &id("x"), Fork::at(Point::End).id(Some(id("fork")))).await.unwrap();
        t.rewind(&ada(), &id("fork"), "turn-1").await.unwrap();
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await.len(), 5, "a fork is another session");
        t.rewind(&ada(), &id("x"), "turn-1").await.unwrap();
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["from what stays", "from both", "from the session", "said in two sessions"]));
        // The whole conversation is sent again with a different answer.
        let edited: Vec<Message> = [&turn_messages(1)[..3], &[Message::assistant("another answer"), Message::user("go on")]].concat();
        t.reconcile(&ada(), &id("x"), &edited, HistoryMode::Full).await.unwrap();
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["from the session", "said in two sessions"]));
        assert!(t.purge(&ada(), &id("x"), None).await.unwrap());
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["said in two sessions"]));
        // The session expires and is purged after its retention; the memories of its user outlive
        // it (D-072).
        test.advance(SignedDuration::from_hours(24 * 8));
        t.sweep().await.unwrap();
        test.advance(SignedDuration::from_hours(24 * 31));
        assert_eq!(t.sweep().await.unwrap().purged.len(), 2);
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["said in two sessions"]));
    }

    /// Memories with session scope are deleted with the session.
    async fn the_end_of_a_session(test: &mut TestTenure) {
        let t = &test.tenure;
        declare_assistants(t);
        let x = begin(t, &ada(), "x", "session").await;
        t.remember(&ada(), &x, fact("xyzzy-gone")).await.unwrap();
        t.purge(&ada(), &id("x"), None).await.unwrap();
        let x = begin(t, &ada(), "x", "session").await;
        assert_eq!(all(t, &ada(), &x).await, set(&[]));
    }

    /// Erasing a user leaves no byte of their text: not in their own memories, nor in a group's, a
    /// vector, a recall event or a dream.
    async fn erasing_leaves_no_byte(test: &mut TestTenure) {
        let (switch, marker) = (awake(), "xyzzy-memory-0042");
        test.reopen_with(|o| o.embedder = Some(synonym_embedder("first", &switch))).await;
        declare_assistants(&test.tenure);
        let (t, eve) = (test.tenure.clone(), Principal::new("acme", "xyzzy-memory-0042-eve").unwrap());
        let group = begin(&t, &eve, "g", "group").await;
        let session = begin(&t, &eve, "s", "session").await;
        let old = begin(&t, &eve, "old", "group").await;
        for memory_target in [&MemoryTarget::Own, &group, &session, &MemoryTarget::Assistant("group".into()), &old] {
            t.remember(&eve, memory_target, fact(&format!("{marker} said to {memory_target:?}"))).await.unwrap();
            t.recall(&eve, memory_target, &format!("{marker}?"), 5).await.unwrap();
        }
        t.remember(&ada(), &MemoryTarget::Assistant("group".into()), fact("ada said this")).await.unwrap();
        // One of the sessions has been purged by retention before.
        t.delete(&eve, &id("old"), None).await.unwrap();
        test.advance(SignedDuration::from_hours(24 * 40));
        t.sweep().await.unwrap();
        t.restore(&eve, &id("s"), None).await.unwrap();
        let rules = DreamRules { recalls: 1, questions: 1, days: 1 };
        assert_eq!(t.dream(&admin(), &rules, false).await.unwrap().promoted.len(), 1);
        assert_eq!(all(&t, &ada(), &MemoryTarget::Assistant("group".into())).await.len(), 4);
        assert!(count_in_store(test, marker).await > 0 || test.url() == "memory:", "the scan finds what is there");
        t.erase(&admin(), &eve.user).await.unwrap();
        assert_eq!(count_in_store(test, marker).await, 0);
        assert_eq!(all(&t, &ada(), &MemoryTarget::Assistant("group".into())).await, set(&["ada said this"]));
        assert!(t.dreams(&admin()).await.unwrap()[0].promoted.is_empty());
        assert_eq!(recall(&t, &ada(), &MemoryTarget::Assistant("group".into()), marker).await, ["ada said this"]);
    }

    /// A retracted memory, whether its source was rewound or purged or it was deleted explicitly,
    /// is in no row and no file any more (D-073).
    async fn retracting_leaves_no_byte(test: &mut TestTenure) {
        let (switch, marker) = (awake(), "plugh-memory-0043");
        test.reopen_with(|o| o.embedder = Some(synonym_embedder("first", &switch))).await;
        declare_assistants(&test.tenure);
        let t = test.tenure.clone();
        for assistant in ["session", "user", "group"] {
            for (retraction, session) in ["rewound", "purged", "told"].map(|retraction| (retraction, format!("{assistant}-{retraction}"))) {
                let memory_target = begin(&t, &ada(), &session, assistant).await;
                t.append(&ada(), &id(&session), turn_messages(1)).await.unwrap();
                let seq = last_seq(&t, &ada(), &session).await;
                for n in 0..20 {
                    let other = if n % 2 == 0 { "likes" } else { "drinks" };
                    t.remember(&ada(), &memory_target, fact(&format!("{other} tea number {n} of {session}, at home in the city"))).await.unwrap();
                }
                let text = format!("{marker} {session} likes tea");
                let remembered = t.remember(&ada(), &memory_target, NewMemory { messages: vec![seq], ..fact(&text) }).await.unwrap();
                assert!(recall(&t, &ada(), &memory_target, &format!("which tea {session}")).await.contains(&text));
                assert!(count_in_store(test, marker).await > 0 || test.url() == "memory:", "the scan finds what is there");
                match retraction {
                    "rewound" => drop(t.rewind(&ada(), &id(&session), Point::Position(1)).await.unwrap()),
                    "purged" => assert!(t.purge(&ada(), &id(&session), None).await.unwrap()),
                    _ => assert!(t.forget_memory(&ada(), &memory_target, &remembered.id).await.unwrap()),
                }
                assert_eq!(count_in_store(test, marker).await, 0, "{session}");
            }
        }
    }

    /// A memory that is recalled often, for different questions and on different days, is promoted;
    /// no other is.
    async fn dreams(test: &mut TestTenure) {
        let t = &test.tenure;
        declare_assistants(t);
        let (x, u) = (begin(t, &ada(), "x", "session").await, begin(t, &ada(), "u", "user").await);
        t.append(&ada(), &id("x"), turn_messages(1)).await.unwrap();
        let seq = last_seq(t, &ada(), "x").await;
        t.remember(&ada(), &x, NewMemory { messages: vec![seq], ..fact("likes tea") }).await.unwrap();
        t.remember(&ada(), &x, fact("asked on one day about coffee")).await.unwrap();
        t.remember(&ada(), &x, fact("always the same question on milk")).await.unwrap();
        t.remember(&ada(), &u, fact("is the user's already: juice")).await.unwrap();
        for day in 0..3 {
            for question in ["tea?", "some tea, what kind", "tea", "milk", "Milk!"].iter().chain(&["coffee", "black coffee", "coffee beans"][..if day == 0 { 3 } else { 0 }]) {
                recall(t, &ada(), &x, question).await;
                recall(t, &ada(), &u, "juice").await;
            }
            test.advance(SignedDuration::from_hours(24));
        }
        let rules = DreamRules::default();
        let would = t.dream(&admin(), &rules, true).await.unwrap();
        assert_eq!((would.promoted.len(), would.promoted[0].recalls, would.promoted[0].questions, would.promoted[0].days), (1, 9, 2, 3));
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["is the user's already: juice"]), "only a dry run");
        assert!(t.dreams(&admin()).await.unwrap().is_empty());
        let dream = t.dream(&admin(), &rules, false).await.unwrap();
        assert_eq!((dream.promoted.clone(), dream.promoted[0].user.as_str()), (would.promoted, "ada"));
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["is the user's already: juice", "likes tea"]));
        assert_eq!(all(t, &ada(), &x).await.len(), 3, "the session keeps its own");
        assert!(t.dream(&admin(), &rules, false).await.unwrap().promoted.is_empty(), "once is enough");
        assert_eq!(t.dreams(&admin()).await.unwrap(), vec![dream.clone()]);
        assert_eq!((t.dreams(&ada()).await.unwrap_err().code(), t.undo_dream(&ada(), &dream.id).await.unwrap_err().code()), ("invalid", "invalid"));
        assert_eq!(t.undo_dream(&admin(), &dream.id).await.unwrap(), Some(1));
        assert_eq!(t.undo_dream(&admin(), &dream.id).await.unwrap(), None);
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["is the user's already: juice"]));
        // Promote again, then retract the source.
        assert_eq!(t.dream(&ada(), &rules, false).await.unwrap().promoted.len(), 1, "for one's own sessions");
        t.rewind(&ada(), &id("x"), Point::Position(1)).await.unwrap();
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["is the user's already: juice"]));
    }

    /// Memories are injected as one marked block after the instructions, in later rounds too, and
    /// the answer reports which (D-076).
    async fn a_turn_with_memories(test: &mut TestTenure) {
        let t = &test.tenure;
        t.declare(clerk(|a| {
            a.instructions = Some("Be kind.".to_owned());
            a.memory = Some(MemoryConfig { scope: MemoryScope::User, max_tokens: Some(60), ..MemoryConfig::default() });
            a.tools = vec![ToolSource::Memory];
        }));
        let tea = t.remember(&ada(), &MemoryTarget::Own, fact("likes green tea")).await.unwrap();
        test.advance(SignedDuration::from_hours(24));
        let cups = t.remember(&ada(), &MemoryTarget::Own, fact("enjoys black\n tea")).await.unwrap();
        test.advance(SignedDuration::from_secs(1));
        let first = [
            ("c1", "memory", json!({"action": "remember", "text": "takes no sugar"})),
            ("c2", "memory", json!({"action": "recall", "query": "green"})),
        ];
        let second = [
            ("c3", "memory", json!({"action": "forget", "id": tea.id})),
            ("c4", "memory", json!({"action": "dance"})),
        ];
        let (model, none) = (ScriptedModel::new([tool_calls_answer(&first), tool_calls_answer(&second), text_answer("Done.")]), CountingTools::default());
        let TurnStart::Run(turn) = t.begin_turn(&ada(), question("Which tea?")).await.unwrap() else { panic!("a turn") };
        let injected: Vec<_> = turn.reconcile_report().memories.iter().map(|m| m.id.clone()).collect();
        assert_eq!(injected, [cups.id.clone(), tea.id.clone()], "the newest first");
        turn.execute(Executors::new(&model).tools(&none)).await.unwrap();
        let prompts = model.prompts();
        for prompt in &prompts {
            assert_eq!((prompt[0].text(), prompt[1].role()), ("Be kind.".to_owned(), Role::System));
            let lines: Vec<_> = prompt[1].text().lines().map(str::to_owned).collect();
            assert!(lines[0].starts_with("[memories]") && lines[3] == "[/memories]");
            assert_eq!(lines[1..3], ["- 2026-01-02: enjoys black tea", "- 2026-01-01: likes green tea"]);
        }
        assert_eq!(prompts.len(), 3);
        let messages = conversation(&session_x(t).await);
        assert!(messages[2].contains("remembered") && messages[3].contains("likes green tea") && messages[5].contains("true"), "{messages:?}");
        assert!(messages[6].contains("dance") && messages[6].contains("remember"), "{messages:?}");
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["enjoys black\n tea", "takes no sugar"]));
        let updated = t.memory_list(&ada(), &MemoryTarget::Own, None, None, 10).await.unwrap().into_iter().find(|m| m.text.contains("sugar")).unwrap();
        let call = session_x(t).await.messages[1].seq;
        assert_eq!(updated.sources, [MemorySource { session_id: Some(id("x")), messages: vec![call], user: None }]);
        // A rewind to the start of the turn retracts the memory that the call stored.
        t.rewind(&ada(), &id("x"), Point::Position(1)).await.unwrap();
        assert_eq!(all(t, &ada(), &MemoryTarget::Own).await, set(&["enjoys black\n tea"]));
    }

    /// Nothing is injected where the policy does not request it, and a failing embedder does not
    /// fail a turn.
    async fn a_turn_without_memories(test: &mut TestTenure) {
        let switch = awake();
        test.reopen_with(|o| o.embedder = Some(synonym_embedder("first", &switch))).await;
        let t = &test.tenure;
        t.remember(&ada(), &MemoryTarget::Own, fact("likes tea")).await.unwrap();
        switch.store(false, SeqCst);
        let size = |scope, inject| Some(MemoryConfig { scope, inject: Some(inject), ..MemoryConfig::default() });
        for (memory, injected_count) in [(None, 0), (size(MemoryScope::None, true), 0), (size(MemoryScope::Session, true), 0), (size(MemoryScope::User, false), 0), (size(MemoryScope::User, true), 1)] {
            let _ = t.purge(&ada(), &id("x"), None).await;
            t.declare(clerk(|a| (a.memory, a.tools) = (memory.clone(), vec![ToolSource::Memory])));
            let model = ScriptedModel::new([text_answer("Hm.")]);
            run_turn(t, question("Which tea?"), &model, &CountingTools::default()).await.unwrap();
            let shown = model.last_prompt();
            assert_eq!((shown.len(), shown.iter().filter(|m| m.contains("likes tea")).count()), (1 + injected_count, injected_count), "{memory:?}");
        }
    }
}

/// Memories are also injected into a run that is taken over by another node.
#[tokio::test(flavor = "multi_thread")]
async fn a_claimed_run_keeps_its_memories() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    let t = &test.tenure;
    let with_memory = || {
        clerk(|a| {
            a.memory = Some(MemoryConfig { scope: MemoryScope::User, ..MemoryConfig::default() });
            a.tools = vec![ToolSource::Memory];
        })
    };
    t.declare(with_memory());
    t.remember(&ada(), &MemoryTarget::Own, fact("likes tea")).await.unwrap();
    let (model, none) = (ScriptedModel::new([text_answer("Tea it is.")]), CountingTools::default());
    let TurnStart::Run(turn) =
        t.begin_turn(&ada(), TurnRequest { resumable: resumable(), ..question("Which tea?") }).await.unwrap()
    else {
        panic!()
    };
    drop(turn);
    test.advance(SignedDuration::from_mins(10));
    let other = test.second_node();
    other.declare(with_memory());
    let head = other.head(&ada(), &id("x")).await.unwrap();
    let turn = other.claim_orphaned_run(&head).await.unwrap().unwrap();
    turn.execute(Executors::new(&model).tools(&none)).await.unwrap();
    assert!(model.last_prompt()[0].contains("likes tea"), "{:?}", model.last_prompt());
}

/// Concurrent writes and deletions: no memory and no source is lost.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_writes_lose_no_memory() {
    let test = TestTenure::new(StoreKind::Sqlite).await.unwrap();
    declare_assistants(&test.tenure);
    let mut tasks = Vec::new();
    for n in 0..16 {
        let t = test.tenure.clone();
        tasks.push(tokio::spawn(async move {
            let memory_target = begin(&t, &ada(), &format!("s{n}"), "user").await;
            t.remember(&ada(), &memory_target, fact("said by all")).await.unwrap();
            t.remember(&ada(), &memory_target, fact(&format!("said by {n}"))).await.unwrap();
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let all = test.tenure.memory_list(&ada(), &MemoryTarget::Own, None, None, 100).await.unwrap();
    assert_eq!(all.len(), 17);
    assert_eq!(all.iter().find(|m| m.text == "said by all").unwrap().sources.len(), 16);
}

/// An embedder that hangs does not block a recall: after the timeout, only words are used.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_embedder_that_hangs() {
    let hangs = Embedder::new("hangs", |_| std::future::pending());
    let tenure = Tenure::open_with("memory:", Options { embedder: Some(hangs), ..Options::default() }).await.unwrap();
    tenure.remember(&ada(), &MemoryTarget::Own, fact("likes tea")).await.unwrap();
    let recalled = tenure.recall(&ada(), &MemoryTarget::Own, "tea", 5).await.unwrap();
    assert_eq!((recalled.memories.len(), recalled.by_meaning), (1, false));
}

mod random {
    use super::*;
    use proptest::prelude::*;

    const PRINCIPALS: [(&str, &str); 4] = [("acme", "ada"), ("acme", "bob"), ("other", "ada"), ("other", "eve")];
    const ASSISTANTS: [&str; 4] = ["session", "user", "group", "colleague"];

    /// The text of a memory names its author, assistant and session.
    fn words(principal: usize, assistant: usize, session: usize) -> String {
        format!("tea for {} {} {} s{session}", PRINCIPALS[principal].0, PRINCIPALS[principal].1, ASSISTANTS[assistant])
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

        /// A recall never returns a memory outside the caller's scope, and returns all within it.
        #[test]
        fn a_recall_returns_exactly_the_memories_in_scope(remembered in prop::collection::vec((0usize..4, 0usize..4, 0usize..2), 1..12), meaning in any::<bool>()) {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            runtime.block_on(async {
                let embedder = meaning.then(|| synonym_embedder("first", &awake()));
                let t = Tenure::open_with("memory:", Options { embedder, ..Options::default() }).await.unwrap();
                declare_assistants(&t);
                let principal = |i: usize| Principal::new(PRINCIPALS[i].0, PRINCIPALS[i].1).unwrap();
                let name = |i: usize, a: usize, s: usize| format!("{}-{}-{s}", PRINCIPALS[i].1, ASSISTANTS[a]);
                for i in 0..4 {
                    for (a, assistant) in ASSISTANTS.into_iter().enumerate() {
                        for s in 0..2 {
                            begin(&t, &principal(i), &name(i, a, s), assistant).await;
                        }
                    }
                }
                for (i, a, s) in &remembered {
                    t.remember(&principal(*i), &MemoryTarget::Session(id(&name(*i, *a, *s))), fact(&words(*i, *a, *s))).await.unwrap();
                }
                for (i, (tenant, user)) in PRINCIPALS.into_iter().enumerate() {
                    for (a, assistant) in ASSISTANTS.into_iter().enumerate() {
                        for s in 0..2 {
                            let recalled: BTreeSet<String> = recall(&t, &principal(i), &MemoryTarget::Session(id(&name(i, a, s))), "which drink, tea?").await.into_iter().collect();
                            let in_scope = remembered.iter().filter(|(j, b, r)| PRINCIPALS[*j].0 == tenant && match assistant {
                                "session" => (*j, *b, *r) == (i, a, s),
                                "user" => *j == i && *b == a,
                                _ => *b >= 2,
                            });
                            let in_scope: BTreeSet<String> = in_scope.map(|(j, b, r)| words(*j, *b, *r)).collect();
                            assert!(recalled.is_subset(&in_scope), "{tenant} {user} to {assistant}: {recalled:?}");
                            assert_eq!(recalled.len(), in_scope.len().min(10));
                        }
                    }
                }
            });
        }
    }
}
