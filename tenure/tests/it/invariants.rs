//! The design's invariants that need no crash, on every store. (1–3 are in `crash.rs`, 6 in
//! `rules.rs`, 7 in `operations.rs`, 10 in `lifecycle.rs`, 11 in `formats.rs`.)

use crate::on_every_store;
use crate::support::*;
use serde_json::json;
use std::collections::BTreeSet;
use tenure::{log::*, policy::*, session::*, *};

on_every_store! {
    /// Invariant 4: per session, writes are linearizable; a superseded writer is never
    /// acknowledged.
    async fn writes_are_linearizable(test: &mut TestTenure) {
        let principal = ada();
        test.tenure.create(&principal, new_session("x")).await.unwrap();
        // Four instances with separate caches, with four concurrent writers each.
        let mut tasks = Vec::new();
        for node in 0..4 {
            let tenure = test.second_node();
            for writer in 0..4 {
                let tenure = tenure.clone();
                let principal = principal.clone();
                tasks.push(tokio::spawn(async move {
                    let mut acknowledged = Vec::new();
                    for n in 0..12 {
                        let text = format!("{node}-{writer}-{n}");
                        match tenure.append(&principal, &id("x"), vec![Message::user(&text)]).await {
                            Ok(appended) => acknowledged.push((text, appended.seq)),
                            Err(Error::Conflict { .. }) => {}
                            Err(e) => panic!("{e}"),
                        }
                    }
                    acknowledged
                }));
            }
        }
        let mut acknowledged = Vec::new();
        for task in tasks {
            acknowledged.extend(task.await.unwrap());
        }
        let s = test.second_node().load(&principal, &id("x")).await.unwrap();
        assert!(acknowledged.len() > 100, "most writers get through: {}", acknowledged.len());
        assert_eq!(s.messages.len(), acknowledged.len(), "what was not acknowledged is not there");
        let seqs: BTreeSet<Seq> = acknowledged.iter().map(|a| a.1).collect();
        assert_eq!(seqs.len(), acknowledged.len(), "no two writers were told the same place");
        for (text, seq) in acknowledged {
            let message = s.messages.iter().find(|m| m.seq == seq).unwrap();
            assert_eq!(message.message.text(), text);
        }
        assert_eq!(s.head().seq as usize, s.messages.len() + 1, "no holes");
    }

    /// An instance with a stale cache reads what another has written, and refreshes when it writes.
    async fn a_reader_sees_every_acknowledged_write(test: &mut TestTenure) {
        let (principal, x) = (ada(), id("x"));
        let other = test.second_node();
        test.tenure.create(&principal, new_session("x")).await.unwrap();
        for n in 0..5 {
            other.append(&principal, &x, turn_messages(n)).await.unwrap();
            assert_eq!(test.tenure.load(&principal, &x).await.unwrap().messages.len(), 4 * (2 * n + 1));
            test.tenure.append(&principal, &x, turn_messages(n)).await.unwrap();
            assert_eq!(other.load(&principal, &x).await.unwrap().messages.len(), 4 * (2 * n + 2));
        }
        // A stale cache must not make a necessary operation a no-op.
        other.pause(&principal, &x, None).await.unwrap();
        assert_eq!(test.tenure.activate(&principal, &x).await.unwrap().status, Status::Active);
        assert_eq!(other.load(&principal, &x).await.unwrap().head().status, Status::Active);
        other.rewind(&principal, &x, Point::Turn(1)).await.unwrap();
        test.tenure.append(&principal, &x, turn_messages(9)).await.unwrap();
        let (a, b) = (test.tenure.load(&principal, &x).await.unwrap(), other.load(&principal, &x).await.unwrap());
        assert_eq!(a, b);
        assert_eq!(texts(&a), raw(&[turn_messages(0), turn_messages(9)].concat()));
        let rebuilt = Session::replay(&principal.key(&x), all_records(&other, &a).await).unwrap();
        assert_eq!(Head { due_at: a.head().due_at, ..rebuilt.head().clone() }, *a.head(), "the card follows from the log");
        // After a purge and re-creation by another instance, the cached session is not mistaken for
        // the new one.
        other.purge(&principal, &x, None).await.unwrap();
        test.advance(jiff::SignedDuration::from_secs(1));
        other.create(&principal, new_session("x")).await.unwrap();
        for n in 0..6 {
            other.append(&principal, &x, turn_messages(n)).await.unwrap();
        }
        let mut fresh = other.load(&principal, &x).await.unwrap();
        while fresh.head().seq < a.head().seq {
            other.checkpoint(&principal, &x, None).await.unwrap();
            fresh = other.load(&principal, &x).await.unwrap();
        }
        test.tenure.append(&principal, &x, turn_messages(7)).await.unwrap();
        let (a, b) = (test.tenure.load(&principal, &x).await.unwrap(), other.load(&principal, &x).await.unwrap());
        assert_eq!(a, b);
        assert_eq!(a.messages.len(), 28);
    }

    /// Invariant 5: a repeated idempotency key returns the same answer, also after a restart; with
    /// a different body it is rejected.
    async fn the_same_idempotency_key_returns_the_same_response(test: &mut TestTenure) {
        let (principal, x) = (ada(), id("x"));
        test.tenure.create(&principal, new_session("x")).await.unwrap();
        let keyed = |n: usize| Append { idempotency_key: Some("k".into()), ..turn_messages(n).into() };
        let first = test.tenure.append(&principal, &x, keyed(1)).await.unwrap();
        test.tenure.append(&principal, &x, turn_messages(2)).await.unwrap();
        assert_eq!(test.tenure.append(&principal, &x, keyed(1)).await.unwrap(), first);
        test.reopen().await;
        assert_eq!(test.tenure.append(&principal, &x, keyed(1)).await.unwrap(), first);
        let error = test.tenure.append(&principal, &x, keyed(3)).await.unwrap_err();
        assert_eq!(error.code(), "idempotency_key_reused");
        assert_eq!(test.tenure.load(&principal, &x).await.unwrap().messages.len(), 8);
        // Concurrent requests with the same key are executed once.
        let mut tasks = Vec::new();
        for n in 0..16 {
            let (tenure, principal) = (if n % 2 == 0 { test.second_node() } else { test.tenure.clone() }, principal.clone());
            let append = Append { idempotency_key: Some("race".into()), ..turn_messages(5).into() };
            tasks.push(tokio::spawn(async move { tenure.append(&principal, &id("x"), append).await.unwrap() }));
        }
        let mut answers = Vec::new();
        for task in tasks {
            answers.push(task.await.unwrap());
        }
        assert!(answers.iter().all(|a| *a == answers[0]), "{answers:?}");
        assert_eq!(test.tenure.load(&principal, &x).await.unwrap().messages.len(), 12);
    }

    /// A key is forgotten at its expiry time, as every other item is.
    async fn an_idempotency_key_expires_at_its_expiry_time(test: &mut TestTenure) {
        let (principal, x) = (ada(), id("x"));
        test.tenure.create(&principal, new_session("x")).await.unwrap();
        let keyed = |n: usize| Append { idempotency_key: Some("k".into()), ..turn_messages(n).into() };
        test.tenure.append(&principal, &x, keyed(1)).await.unwrap();
        let instant = jiff::SignedDuration::from_micros(1);
        test.advance(jiff::SignedDuration::from_hours(24) - instant);
        let error = test.tenure.append(&principal, &x, keyed(2)).await.unwrap_err();
        assert_eq!(error.code(), "idempotency_key_reused", "one microsecond before");
        test.advance(instant);
        test.tenure.append(&principal, &x, keyed(2)).await.unwrap();
    }

    /// `expect` makes an append conditional.
    async fn an_append_can_be_conditional(test: &mut TestTenure) {
        let (principal, x) = (ada(), id("x"));
        let seq = test.tenure.create(&principal, new_session("x")).await.unwrap().head().seq;
        let at = |seq, n| Append { if_match: Some(seq), ..turn_messages(n).into() };
        let appended = test.tenure.append(&principal, &x, at(seq, 1)).await.unwrap();
        assert_eq!(test.tenure.append(&principal, &x, at(seq, 2)).await.unwrap_err().code(), "conflict");
        test.second_node().append(&principal, &x, at(appended.seq, 2)).await.unwrap();
        assert_eq!(test.tenure.append(&principal, &x, at(appended.seq, 3)).await.unwrap_err().code(), "conflict");
        assert_eq!(test.tenure.load(&principal, &x).await.unwrap().messages.len(), 8);
    }

    /// Invariant 9: a tenant's requests never change or reveal anything of another's; nor do a
    /// user's.
    async fn principals_see_only_their_own_sessions(test: &mut TestTenure) {
        let t = &test.tenure;
        let owner = ada();
        let strangers = [Principal::new("acme", "bob"), Principal::new("other", "ada"), Principal::tenant_wide("other")];
        t.create(&owner, NewSession { title: Some("secret".into()), tags: vec!["t".into()], ..new_session("x") }).await.unwrap();
        t.append(&owner, &id("x"), [turn_messages(1), vec![image_message("p", "K")]].concat()).await.unwrap();
        t.cache_put(&owner, &id("x"), "tool", &json!({}), &json!(1)).await.unwrap();
        let before = t.load(&owner, &id("x")).await.unwrap();
        for stranger in strangers.into_iter().map(Result::unwrap) {
            let x = id("x");
            let s = &stranger;
            let nothing = id("nothing");
            // For each operation, the error for an invisible session equals the one for an id that
            // does not exist.
            macro_rules! same {
                ($verb:ident ( $($arg:expr),* )) => {{
                    let of_stranger = t.$verb(s, &x $(, $arg)*).await.map(|_| ()).map_err(|e| e.to_string().replace("session x", "session nothing"));
                    let none = t.$verb(s, &nothing $(, $arg)*).await.map(|_| ()).map_err(|e| e.to_string());
                    assert_eq!(of_stranger, none, stringify!($verb));
                }};
            }
            same!(load());
            same!(load_any());
            same!(head());
            same!(last_messages(5));
            same!(append(turn_messages(2)));
            same!(reconcile(&turn_messages(2), HistoryMode::Auto));
            same!(update(SessionPatch::default()));
            same!(pause(None));
            same!(activate());
            same!(restore(None));
            same!(checkpoint(None));
            same!(checkpoints());
            same!(rewind(Point::Position(0)));
            same!(discarded());
            same!(fork(Point::End));
            same!(rewind_and_load(Point::End));
            same!(export());
            same!(cache_get("tool", &json!({})));
            same!(cache_put("tool", &json!({}), &json!(2)));
            same!(cache_entries());
            assert!(!t.delete(s, &x, None).await.unwrap());
            assert!(!t.purge(s, &x, None).await.unwrap());
            let visible = [Message::user("question 1"), Message::assistant("answer 1"), image_message("p", "K"), Message::assistant("-")];
            assert_eq!(t.find(s, &visible).await.unwrap(), None);
            let mut query = SessionQuery::new(OwnerFilter::User(owner.tenant.clone(), owner.user.clone()), 50);
            assert!(t.list(s, query.clone()).await.unwrap().heads.is_empty());
            query.owner = OwnerFilter::AllTenants;
            assert!(t.list(s, query).await.unwrap().heads.is_empty());
            if stranger.tenant.as_str() == "other" {
                let blob = before.messages[4].message.detach().1[0].id;
                assert_eq!(t.store().blob(&stranger.tenant, &blob).await.unwrap(), None);
                // The same id in another tenant is another session.
                t.create(s, new_session("x")).await.map(|_| ()).unwrap_or_else(|e| assert_eq!(e.code(), "exists"));
                t.purge(s, &id("x"), None).await.unwrap();
                t.erase(&Principal::tenant_wide("other").unwrap(), &owner.user).await.unwrap();
            } else {
                assert_eq!(t.erase(s, &owner.user).await.unwrap_err().code(), "invalid");
            }
        }
        assert_eq!(test.second_node().load(&owner, &id("x")).await.unwrap(), before);
    }

    /// Invariant 12: invalid input returns a clear error and changes nothing.
    async fn bad_input_changes_nothing(test: &mut TestTenure) {
        test.reopen_with(|o| {
            o.limits = Limits { max_message_bytes: 400, max_messages: 5, max_info_bytes: 300, max_item_bytes: 100, ..o.limits.clone() }
        })
        .await;
        let t = &test.tenure;
        let (principal, x) = (ada(), id("x"));
        t.create(&principal, new_session("x")).await.unwrap();
        t.append(&principal, &x, turn_messages(1)).await.unwrap();
        let before = t.load(&principal, &x).await.unwrap();
        // Invariant 13: everything has a limit, and the limit has a name.
        let big = "x".repeat(500);
        let errors = [
            ("max_message_bytes", t.append(&principal, &x, vec![Message::user("fits"), Message::user(&big)]).await.unwrap_err()),
            ("max_messages", t.append(&principal, &x, vec![Message::user("a"); 6]).await.unwrap_err()),
            ("max_info_bytes", t.update(&principal, &x, SessionPatch { title: Patch::Set(big.clone()), ..SessionPatch::default() }).await.unwrap_err()),
            ("max_info_bytes", t.create(&principal, NewSession { title: Some(big.clone()), ..new_session("y") }).await.unwrap_err()),
            ("max_item_bytes", t.cache_put(&principal, &x, "tool", &json!({}), &json!(big)).await.unwrap_err()),
            ("max_page", t.list(&principal, SessionQuery::new(OwnerFilter::AllTenants, 1000)).await.unwrap_err()),
            ("max_messages", t.import(&principal, &x, Export { messages: vec![Message::user("a"); 6], ..Export::default() }, None).await.unwrap_err()),
        ];
        for (limit, error) in errors {
            assert_eq!(error.code(), "too_large");
            assert!(error.to_string().contains(limit), "{error}");
        }
        let checkpoints = vec![ExportedCheckpoint { label: CheckpointLabel::new("l").unwrap(), position: 9, auto: false, created_at: None, state: Default::default() }];
        let error = t.import(&principal, &x, Export { messages: turn_messages(2), checkpoints, ..Export::default() }, None).await.unwrap_err();
        assert!(matches!(&error, Error::Invalid { param, .. } if param == "checkpoints[0].position"), "{error:?}");
        assert_eq!(test.second_node().load(&principal, &x).await.unwrap(), before);
        assert_eq!(test.second_node().load(&principal, &id("y")).await.unwrap_err().code(), "not_found");
        for name in ["", " a", "a ", "a\nb", "a\u{202e}b", &"x".repeat(129)] {
            assert!(SessionId::new(name).is_err_and(|e| matches!(Error::from(e), Error::Invalid { .. })), "{name}");
        }
    }

    /// Invariant 8: only purge and erase destroy data; erase leaves no byte of the user's text in
    /// any file of the store.
    async fn erase_leaves_no_byte(test: &mut TestTenure) {
        let marker = "xyzzy-Erase-Me-\u{e9}-0042";
        let principal = Principal::new("acme", "eve").unwrap();
        let t = test.tenure.clone();
        for n in 0..40 {
            let name = format!("e{n}");
            let other = format!("keep{n}");
            let metadata = json!({"secret": marker}).as_object().unwrap().clone();
            t.create(&principal, NewSession { title: Some(format!("{marker} title")), tags: vec![marker.into()], metadata, ..new_session(&name) }).await.unwrap();
            t.create(&ada(), new_session(&other)).await.unwrap();
            let long = format!("{marker} ").repeat(1 + n * n * 3);
            let messages = vec![Message::user(&long), image_message(marker, &format!("{marker}{n}")), Message::assistant(marker)];
            t.append(&principal, &id(&name), messages).await.unwrap();
            t.append(&ada(), &id(&other), turn_messages(n)).await.unwrap();
            t.cache_put(&principal, &id(&name), "tool", &json!({"q": marker}), &json!(long)).await.unwrap();
            t.append(&principal, &id(&name), Append { idempotency_key: Some(marker.into()), ..turn_messages(n).into() }).await.unwrap();
            if n % 5 == 0 {
                t.rewind(&principal, &id(&name), Point::Position(1)).await.unwrap();
                t.update(&principal, &id(&name), SessionPatch { title: Patch::Set("renamed".into()), ..SessionPatch::default() }).await.unwrap();
            }
            if n % 7 == 0 {
                t.fork(&principal, &id(&name), Fork::at(Point::End).id(Some(id(&format!("fork{n}"))))).await.unwrap();
                t.append(&principal, &id(&format!("fork{n}")), vec![Message::user(marker)]).await.unwrap();
            }
            if n % 3 == 0 {
                t.purge(&principal, &id(&name), None).await.unwrap();
            }
        }
        let namespace = tenure::store::Namespace { tenant: principal.tenant.clone(), owner: tenure::store::Owner::User(principal.user.clone()), name: "memory".into() };
        for n in 0..30 {
            let item = tenure::store::Item {
                key: format!("m{n}"), value: json!(format!("{marker} remembered {n}")).to_string(),
                created_at: test.now(), used_at: test.now(), uses: 0, expires_at: None,
            };
            t.store().put(&namespace, &item, None).await.unwrap();
        }
        assert!(count_in_store(test, marker).await > 0 || test.url() == "memory:", "the scan finds what is there");
        let receipt = t.erase(&admin(), &principal.user).await.unwrap();
        assert_eq!(receipt.sessions, 26 + 6);
        assert!(t.store().items(&namespace, None, 5).await.unwrap().is_empty());
        assert_eq!(count_in_store(test, marker).await, 0, "erased while the store is open");
        for n in 0..40 {
            assert_eq!(texts(&t.load(&ada(), &id(&format!("keep{n}"))).await.unwrap()), raw(&turn_messages(n)));
        }
        drop(t);
        test.reopen().await;
        assert_eq!(count_in_store(test, marker).await, 0, "and after it was closed");
        assert_eq!(count_in_store(test, "question 7").await > 0, test.url() != "memory:");
    }
}

async fn all_records(tenure: &Tenure, session: &Session) -> Vec<Record> {
    tenure.store().records(&session.head().key(), &tenure::store::RecordRange::after(0)).await.unwrap()
}
