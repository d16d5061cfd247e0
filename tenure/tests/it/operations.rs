//! The operations of `Tenure`, on every store.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::json;
use tenure::{log::*, policy::*, session::*, *};

on_every_store! {
    /// The cached rendering is always that of the current session, whichever node changed it
    /// (D-013).
    async fn a_rendering_is_cached_until_the_session_changes(test: &mut TestTenure) {
        let (first_node, second_node) = (test.tenure.clone(), Tenure::with_store(test.tenure.store().clone(), Options { clock: test.clock.clone(), ..Options::default() }));
        let (principal, s) = (ada(), id("s"));
        first_node.create(&principal, new_session("s")).await.unwrap();
        let renders = std::sync::atomic::AtomicUsize::new(0);
        let make = |s: &Session| {
            renders.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let texts: Vec<_> = s.messages.iter().map(|m| m.message.text()).collect();
            format!("{} {:?} {texts:?}", s.head().status.as_str(), s.head().info.title)
        };
        let append_of = |text: &str| Append { messages: vec![Message::user(text)], ..Append::default() };
        let mut seen = Vec::new();
        for step in 0..6 {
            match step {
                0 => {}
                1 => drop(first_node.append(&principal, &s, append_of("one")).await.unwrap()),
                2 => drop(second_node.append(&principal, &s, append_of("two")).await.unwrap()),
                3 => drop(first_node.update(&principal, &s, SessionPatch { title: Patch::Set("new".to_owned()), ..SessionPatch::default() }).await.unwrap()),
                4 => drop(second_node.rewind(&principal, &s, Point::Position(1)).await.unwrap()),
                _ => drop(first_node.pause(&principal, &s, None).await.unwrap()),
            }
            let before = renders.load(std::sync::atomic::Ordering::SeqCst);
            for _ in 0..3 {
                let (seq, text) = first_node.render_cached(&principal, &s, make).await.unwrap();
                assert_eq!(seq, second_node.head(&principal, &s).await.unwrap().seq);
                seen.push(text.to_string());
            }
            assert_eq!(renders.load(std::sync::atomic::Ordering::SeqCst) - before, 1, "step {step}");
        }
        seen.dedup();
        let want = [
            "active None []",
            r#"active None ["one"]"#,
            r#"active None ["one", "two"]"#,
            r#"active Some("new") ["one", "two"]"#,
            r#"active Some("new") ["one"]"#,
            r#"paused Some("new") ["one"]"#,
        ];
        assert_eq!(seen, want);
    }

    /// Messages round-trip byte for byte, also after a restart: tool turns, images, unusual
    /// formatting.
    async fn messages_round_trip(test: &mut TestTenure) {
        let t = &test.tenure;
        let new = NewSession { title: Some("Bern".into()), tags: vec!["a".into()], model: Some("m".into()), ..new_session("s1") };
        t.create(&ada(), new).await.unwrap();
        let unusual = Message::parse(r#"{ "role":"user" , "content":"\u0000 é", "x":1.10,"b":12345678901234567890 }"#).unwrap();
        let messages = [turn_messages(1), vec![image_message("what?", "A"), unusual, Message::assistant("a cat")]].concat();
        let appended = t.append(&ada(), &id("s1"), messages[..4].to_vec()).await.unwrap();
        assert_eq!((appended.position, appended.messages), (0, 4));
        let appended = t.append(&ada(), &id("s1"), messages[4..].to_vec()).await.unwrap();
        assert_eq!((appended.position, appended.messages), (4, 7));
        let before = t.load(&ada(), &id("s1")).await.unwrap();
        assert_eq!(texts(&before), raw(&messages));
        assert_eq!(labels(&before), [("turn-1".into(), 4), ("turn-2".into(), 7)]);
        assert_eq!(before.messages_json(), format!("[{}]", raw(&messages).join(",")));
        assert_eq!(t.messages_json(&ada(), &id("s1")).await.unwrap(), before.messages_json());
        test.reopen().await;
        let after = test.tenure.load(&ada(), &id("s1")).await.unwrap();
        assert_eq!(after, before);
        assert_eq!(after.head().info.title.as_deref(), Some("Bern"));
        let tail = test.tenure.last_messages(&ada(), &id("s1"), 3).await.unwrap();
        assert_eq!(tail, after.messages[4..]);
    }

    /// A created session is readable at once, an id can be used once, and generated ids are unique.
    async fn create(test: &mut TestTenure) {
        let t = &test.tenure;
        let s = t.create(&ada(), new_session("x")).await.unwrap();
        assert_eq!((s.head().info.session_id.as_str(), s.head().seq, s.head().status), ("x", 1, Status::Active));
        let again = t.create(&ada(), new_session("x")).await.unwrap_err();
        assert_eq!(again.code(), "exists");
        let a = t.create(&ada(), NewSession::default()).await.unwrap();
        let b = t.create(&ada(), NewSession::default()).await.unwrap();
        assert_ne!(a.head().info.session_id, b.head().info.session_id);
        match t.load(&ada(), &id("nobody")).await {
            Err(Error::NotFound { session_id }) => assert_eq!(session_id, id("nobody")),
            other => panic!("{other:?}"),
        }
    }

    /// Title, tags and metadata are updated by a merge patch; `null` removes a field.
    async fn update_info(test: &mut TestTenure) {
        let t = &test.tenure;
        let metadata = json!({"a": 1, "deep": {"x": 1, "y": 2}}).as_object().unwrap().clone();
        t.create(&ada(), NewSession { metadata, title: Some("old".into()), ..new_session("x") }).await.unwrap();
        let change = SessionPatch {
            title: Patch::Clear,
            tags: Patch::Set(vec!["t".into()]),
            metadata: json!({"a": null, "deep": {"x": null, "z": 3}, "b": "two"}).as_object().unwrap().clone(),
            ..SessionPatch::default()
        };
        t.update(&ada(), &id("x"), change).await.unwrap();
        test.reopen().await;
        let info = test.tenure.load(&ada(), &id("x")).await.unwrap().head().info.clone();
        assert_eq!((info.title, info.tags), (None, vec!["t".to_owned()]));
        assert_eq!(serde_json::Value::Object(info.metadata), json!({"deep": {"y": 2, "z": 3}, "b": "two"}));
    }

    /// Paused sessions reject messages, deleted ones can be restored, purged ones cannot.
    async fn status(test: &mut TestTenure) {
        let t = &test.tenure;
        let (principal, x) = (ada(), id("x"));
        t.create(&principal, new_session("x")).await.unwrap();
        t.append(&principal, &x, turn_messages(1)).await.unwrap();
        assert_eq!(t.pause(&principal, &x, Some("review")).await.unwrap().status, Status::Paused);
        assert_eq!(t.append(&principal, &x, turn_messages(2)).await.unwrap_err().code(), "paused");
        assert_eq!(t.load(&principal, &x).await.unwrap().head().status, Status::Paused);
        assert_eq!(t.activate(&principal, &x).await.unwrap().status, Status::Active);
        t.append(&principal, &x, turn_messages(2)).await.unwrap();
        assert!(t.delete(&principal, &x, None).await.unwrap());
        assert!(t.delete(&principal, &x, None).await.unwrap(), "deleting again is fine");
        for error in [t.load(&principal, &x).await.unwrap_err(), t.append(&principal, &x, turn_messages(3)).await.unwrap_err()] {
            assert_eq!(error.code(), "gone");
            assert!(error.to_string().contains("deleted") && error.to_string().contains("restore"), "{error}");
        }
        assert_eq!(t.pause(&principal, &x, None).await.unwrap_err().code(), "gone");
        assert_eq!(t.activate(&principal, &x).await.unwrap_err().code(), "gone");
        assert!(t.list(&principal, SessionQuery::new(OwnerFilter::AllTenants, 10)).await.unwrap().heads.is_empty());
        assert_eq!(t.restore(&principal, &x, None).await.unwrap().status, Status::Active);
        assert_eq!(t.load(&principal, &x).await.unwrap().messages.len(), 8);
        assert!(t.purge(&principal, &x, None).await.unwrap());
        assert!(!t.purge(&principal, &x, None).await.unwrap());
        assert_eq!(t.load(&principal, &x).await.unwrap_err().code(), "not_found");
        assert!(!t.delete(&principal, &x, None).await.unwrap());
        t.create(&principal, new_session("x")).await.unwrap();
        assert!(t.load(&principal, &x).await.unwrap().messages.is_empty());
    }

    /// Lists are ordered newest first, paged, and contain only live sessions by default.
    async fn list(test: &mut TestTenure) {
        let t = &test.tenure;
        for n in 0..7 {
            test.advance(SignedDuration::from_secs(1));
            let new = NewSession { tags: vec![format!("t{}", n % 2)], title: Some(format!("Straße {n}")), ..new_session(&format!("s{n}")) };
            t.create(&ada(), new).await.unwrap();
        }
        let bob = Principal::new("acme", "bob").unwrap();
        t.create(&bob, new_session("b")).await.unwrap();
        test.advance(SignedDuration::from_secs(1));
        t.append(&ada(), &id("s2"), turn_messages(1)).await.unwrap();
        t.delete(&ada(), &id("s4"), None).await.unwrap();
        let ids = |page: &SessionPage| page.heads.iter().map(|h| h.info.session_id.to_string()).collect::<Vec<_>>();
        let mut query = SessionQuery::new(OwnerFilter::AllTenants, 4);
        let first = t.list(&ada(), query.clone()).await.unwrap();
        assert_eq!(ids(&first), ["s2", "s6", "s5", "s3"]);
        query.cursor = first.next;
        let second = t.list(&ada(), query).await.unwrap();
        assert_eq!((ids(&second), second.next), (vec!["s1".into(), "s0".into()], None));
        let with_filter = |change: fn(&mut SessionQuery)| {
            let mut query = SessionQuery::new(OwnerFilter::AllTenants, 10);
            change(&mut query);
            query
        };
        assert_eq!(ids(&t.list(&ada(), with_filter(|q| q.tags = vec!["t1".into()])).await.unwrap()), ["s5", "s3", "s1"]);
        assert_eq!(ids(&t.list(&ada(), with_filter(|q| q.title = Some("STRASSE".into()))).await.unwrap()), Vec::<String>::new());
        assert_eq!(ids(&t.list(&ada(), with_filter(|q| q.title = Some("straße 3".into()))).await.unwrap()), ["s3"]);
        assert_eq!(ids(&t.list(&ada(), with_filter(|q| q.status = vec![Status::Deleted])).await.unwrap()), ["s4"]);
        assert_eq!(ids(&t.list(&ada(), with_filter(|q| q.offset = 5)).await.unwrap()), ["s0"]);
        assert_eq!(t.list(&admin(), SessionQuery::new(OwnerFilter::AllTenants, 100)).await.unwrap().heads.len(), 7);
        let of_bob = SessionQuery::new(OwnerFilter::User(bob.tenant.clone(), bob.user.clone()), 100);
        assert_eq!(ids(&t.list(&admin(), of_bob.clone()).await.unwrap()), ["b"]);
        assert_eq!(t.list(&ada(), of_bob).await.unwrap().heads.len(), 6, "a user only ever lists their own");
        assert_eq!(t.list(&ada(), SessionQuery::new(OwnerFilter::AllTenants, 101)).await.unwrap_err().code(), "too_large");
    }

    /// Checkpoints are addressed by label, position and turn; discarded messages stay readable.
    async fn checkpoints_and_rewind(test: &mut TestTenure) {
        let t = &test.tenure;
        let (principal, x) = (ada(), id("x"));
        t.create(&principal, new_session("x")).await.unwrap();
        t.append(&principal, &x, turn_messages(1)).await.unwrap();
        let checkpoint = t.checkpoint(&principal, &x, Some(CheckpointLabel::new("before").unwrap())).await.unwrap();
        assert_eq!((checkpoint.position, checkpoint.auto), (4, false));
        assert!(t.checkpoint(&principal, &x, None).await.unwrap().auto);
        t.append(&principal, &x, turn_messages(2)).await.unwrap();
        t.append(&principal, &x, turn_messages(3)).await.unwrap();
        assert_eq!(t.checkpoints(&principal, &x).await.unwrap().len(), 5);
        assert_eq!(t.rewind(&principal, &x, Point::Turn(2)).await.unwrap().discarded, 4);
        assert_eq!(t.rewind(&principal, &x, "before").await.unwrap(), RewindResult { seq: 20, position: 4, discarded: 4 });
        let s = t.load(&principal, &x).await.unwrap();
        assert_eq!(texts(&s), raw(&turn_messages(1)));
        assert_eq!(labels(&s), [("turn-1".into(), 4), ("before".into(), 4)]);
        t.append(&principal, &x, turn_messages(4)).await.unwrap();
        t.rewind(&principal, &x, Point::Position(6)).await.unwrap();
        let gone = t.discarded(&principal, &x).await.unwrap();
        let gone: Vec<Vec<String>> = gone.iter().map(|d| d.messages.iter().map(|m| m.message.as_str().to_owned()).collect()).collect();
        assert_eq!(gone, [raw(&turn_messages(3)), raw(&turn_messages(2)), raw(&turn_messages(4)[2..])]);
        test.reopen().await;
        let t = &test.tenure;
        let s = t.load(&principal, &x).await.unwrap();
        assert_eq!(texts(&s), raw(&[turn_messages(1), turn_messages(4)[..2].to_vec()].concat()));
        assert_eq!(t.last_messages(&principal, &x, 3).await.unwrap(), s.messages[3..]);
        for bad in [Point::Position(7), Point::Turn(9), Point::from("nope"), Point::Seq(999)] {
            let error = t.rewind(&principal, &x, bad).await.unwrap_err();
            assert_eq!(error.code(), "no_such_point", "{error}");
        }
        assert_eq!(t.rewind(&principal, &x, Point::End).await.unwrap().discarded, 0);
        assert_eq!(t.rewind(&principal, &x, Point::Position(0)).await.unwrap().position, 0);
        assert_eq!(t.load(&principal, &x).await.unwrap().head().digest, LogDigest::default());
        let resumed = t.rewind_and_load(&principal, &x, Point::End).await.unwrap();
        assert!(resumed.messages.is_empty());
    }

    /// Invariant 7: changes to a parent or a fork never affect the other.
    async fn parent_and_fork_never_change_each_other(test: &mut TestTenure) {
        let t = &test.tenure;
        let (principal, p) = (ada(), id("p"));
        t.create(&principal, NewSession { title: Some("parent".into()), ..new_session("p") }).await.unwrap();
        for n in 1..=3 {
            t.append(&principal, &p, turn_messages(n)).await.unwrap();
        }
        t.append(&principal, &p, vec![image_message("look", "Z"), Message::assistant("nice")]).await.unwrap();
        let parent = t.load(&principal, &p).await.unwrap();
        t.fork(&principal, &p, Fork::at("turn-2").id(Some(id("a")))).await.unwrap();
        t.fork(&principal, &p, Fork::at(Point::End).id(Some(id("b")))).await.unwrap();
        t.append(&principal, &id("b"), turn_messages(9)).await.unwrap();
        t.fork(&principal, &id("b"), Fork::at(Point::Turn(1)).id(Some(id("c")))).await.unwrap(); // in the part shared with its parent
        t.fork(&principal, &id("b"), Fork::at(Point::End).id(Some(id("d")))).await.unwrap();
        t.append(&principal, &id("a"), turn_messages(8)).await.unwrap();
        t.rewind(&principal, &id("b"), Point::Turn(2)).await.unwrap();
        t.rewind(&principal, &p, Point::Position(0)).await.unwrap();
        t.append(&principal, &p, turn_messages(7)).await.unwrap();
        let want = |parts: &[Vec<Message>]| raw(&parts.concat());
        let all = parent.messages.iter().map(|m| m.message.clone()).collect::<Vec<_>>();
        let expected = [
            ("a", want(&[turn_messages(1), turn_messages(2), turn_messages(8)])),
            ("b", want(&[turn_messages(1), turn_messages(2)])),
            ("c", want(&[turn_messages(1)])),
            ("d", want(&[all.clone(), turn_messages(9)])),
            ("p", want(&[turn_messages(7)])),
        ];
        for round in 0..3 {
            for (name, texts_wanted) in &expected {
                let s = test.tenure.load(&principal, &id(name)).await;
                if round == 2 && *name == "p" {
                    assert_eq!(s.unwrap_err().code(), "not_found");
                    continue;
                }
                let s = s.unwrap();
                assert_eq!(&texts(&s), texts_wanted, "{name}, round {round}");
                let tail = test.tenure.last_messages(&principal, &id(name), 100).await.unwrap();
                assert_eq!(tail, s.messages, "{name}, round {round}");
            }
            match round {
                0 => test.reopen().await,
                // Records that the forks need survive the purge of their parent (D-001).
                _ => drop(test.tenure.purge(&principal, &p, None).await.unwrap()),
            }
        }
        assert_eq!(test.tenure.load(&principal, &id("d")).await.unwrap().head().info.title.as_deref(), Some("parent"));
        for name in ["b", "a", "d", "c"] {
            test.tenure.append(&principal, &id(name), turn_messages(20)).await.unwrap();
            assert!(test.tenure.purge(&principal, &id(name), None).await.unwrap());
        }
        assert!(test.tenure.list(&principal, SessionQuery::new(OwnerFilter::AllTenants, 9)).await.unwrap().heads.is_empty());
        assert_eq!(test.tenure.fork(&principal, &p, Point::End).await.unwrap_err().code(), "not_found");
    }

    /// A new session under a purged parent's id is a different session; the fork does not use it as
    /// its parent.
    async fn a_fork_outlives_a_parent_of_the_same_name(test: &mut TestTenure) {
        let (t, principal) = (&test.tenure, ada());
        t.create(&principal, new_session("p")).await.unwrap();
        t.append(&principal, &id("p"), turn_messages(1)).await.unwrap();
        t.fork(&principal, &id("p"), Fork::at(Point::End).id(Some(id("f")))).await.unwrap();
        t.append(&principal, &id("f"), turn_messages(2)).await.unwrap();
        t.purge(&principal, &id("p"), None).await.unwrap();
        t.create(&principal, new_session("p")).await.unwrap();
        for n in 5..9 {
            t.append(&principal, &id("p"), turn_messages(n)).await.unwrap();
        }
        t.rewind(&principal, &id("f"), Point::Position(6)).await.unwrap();
        assert_eq!(texts(&t.load(&principal, &id("f")).await.unwrap()), raw(&[turn_messages(1), turn_messages(2)[..2].to_vec()].concat()));
        assert_eq!(t.last_messages(&principal, &id("f"), usize::MAX).await.unwrap().len(), 6);
        // Saving a loaded session fails if it was paused in the meantime.
        let mut s = t.load(&principal, &id("f")).await.unwrap();
        t.pause(&principal, &id("f"), None).await.unwrap();
        s.push(Message::user("late"), test.now());
        assert_eq!(s.save(&t.principal(ada())).await.unwrap_err().code(), "conflict");
        let mut s = t.load(&principal, &id("f")).await.unwrap();
        s.push(Message::user("late"), test.now());
        assert_eq!(s.save(&t.principal(ada())).await.unwrap_err().code(), "paused");
    }

    /// Loading, editing and saving a session: a stale save fails and changes nothing.
    async fn a_loaded_session_is_edited_and_saved(test: &mut TestTenure) {
        let t = &test.tenure;
        let (principal, x) = (ada(), id("x"));
        t.create(&principal, new_session("x")).await.unwrap();
        t.append(&principal, &x, turn_messages(1)).await.unwrap();
        let mut s = Session::load(&t.principal(ada()), &x).await.unwrap();
        s.push(Message::user("more"), test.now());
        let checkpoint = s.add_checkpoint("here", test.now()).unwrap();
        s.push(image_message("see", "Q"), test.now());
        assert!(s.add_checkpoint("12", test.now()).is_err(), "digits alone are a position");
        s.save(&t.principal(ada())).await.unwrap();
        assert!(!s.is_changed());
        let loaded = Session::load(&t.principal(ada()), &x).await.unwrap();
        assert_eq!((texts(&loaded), labels(&loaded)), (texts(&s), labels(&s)));
        let mut late = loaded.clone();
        t.append(&principal, &x, vec![Message::assistant("meanwhile")]).await.unwrap();
        late.truncate_to("here", test.now()).unwrap();
        assert_eq!(late.save(&t.principal(ada())).await.unwrap_err().code(), "conflict");
        let mut s = Session::load(&t.principal(ada()), &x).await.unwrap();
        assert_eq!(s.messages.len(), 7);
        s.truncate_to(&checkpoint, test.now()).unwrap();
        assert_eq!(s.messages.len(), 5);
        s.save(&t.principal(ada())).await.unwrap();
        let mut fork = fork_session(&s, "turn-1", id("f"), test.now()).unwrap();
        assert_eq!(fork.messages.len(), 4);
        fork.push(Message::user("another way"), test.now());
        fork.save(&t.principal(ada())).await.unwrap();
        assert_eq!(t.load(&principal, &id("f")).await.unwrap().messages.len(), 5);
        // A fork at a point in the part that its source shares with its own parent.
        let fork = t.load(&principal, &id("f")).await.unwrap();
        let mut second = fork_session(&fork, Point::Position(2), id("g"), test.now()).unwrap();
        second.save(&t.principal(ada())).await.unwrap();
        assert_eq!(texts(&t.load(&principal, &id("g")).await.unwrap()), raw(&turn_messages(1)[..2]));
        assert_eq!(t.principal(ada()).list_checkpoints(&x).await.unwrap().len(), 2);
        let resumed = resume_session(&x, "turn-1", &t.principal(ada()), test.now()).await.unwrap();
        assert_eq!(resumed.messages.len(), 4);
        let checkpoints = make_checkpoints(&resumed.messages);
        let checkpoints: Vec<_> = checkpoints.iter().map(|c| (c.label.as_str(), c.position, c.auto)).collect();
        assert_eq!(checkpoints, [("turn-1.1", 3, true), ("turn-1", 4, true)]);
        if let (Some(dir), StoreKind::Jsonl) = (test.directory(), test.store.kind()) {
            let file = dir.join("sessions/acme/x.discarded.jsonl");
            let discarded = read_transcript(file).unwrap();
            assert!(discarded.problems.is_empty());
            let messages = [image_message("see", "Q"), Message::assistant("meanwhile"), Message::user("more")];
            assert_eq!(raw(&discarded.messages), raw(&messages));
        }
    }

    /// An exported session can be imported elsewhere and continued; importing over a session
    /// replaces it without destroying anything.
    async fn export_and_import(test: &mut TestTenure) {
        let t = &test.tenure;
        let (principal, x) = (ada(), id("x"));
        let metadata = json!({"k": {"deep": 1}, "gone": true}).as_object().unwrap().clone();
        t.create(&principal, NewSession { metadata, title: Some("T".into()), ..new_session("x") }).await.unwrap();
        t.append(&principal, &x, [turn_messages(1), vec![image_message("see", "P")]].concat()).await.unwrap();
        t.checkpoint(&principal, &x, Some(CheckpointLabel::new("mid").unwrap())).await.unwrap();
        t.append(&principal, &x, turn_messages(2)).await.unwrap();
        let export = t.export(&principal, &x).await.unwrap();
        let text = serde_json::to_string(&export).unwrap();
        let export: Export = serde_json::from_str(&text).unwrap();
        let before = t.load(&principal, &x).await.unwrap();
        for target in ["y", "x"] {
            t.append(&principal, &x, turn_messages(3)).await.unwrap();
            t.update(&principal, &x, SessionPatch { metadata: json!({"k": {"other": 2}}).as_object().unwrap().clone(), ..SessionPatch::default() }).await.unwrap();
            t.import(&principal, &id(target), export.clone(), None).await.unwrap();
            let after = t.load(&principal, &id(target)).await.unwrap();
            assert_eq!(texts(&after), texts(&before), "{target}");
            assert_eq!(labels(&after), labels(&before), "{target}");
            assert_eq!((&after.head().info.title, &after.head().info.metadata), (&before.head().info.title, &before.head().info.metadata), "{target}");
            assert_eq!(after.head().digest, before.head().digest);
        }
        assert_eq!(t.discarded(&principal, &x).await.unwrap().len(), 1);
        t.delete(&principal, &id("y"), None).await.unwrap();
        let over = Export { messages: turn_messages(9), ..Export::default() };
        assert_eq!(t.import(&principal, &id("y"), over, None).await.unwrap_err().code(), "gone", "a deleted session is not replaced");
        t.restore(&principal, &id("y"), None).await.unwrap();
        t.import(&principal, &id("y"), Export { messages: turn_messages(9), ..Export::default() }, None).await.unwrap();
        assert_eq!(texts(&t.load(&principal, &id("y")).await.unwrap()), raw(&turn_messages(9)));
        let bob = Principal::new("acme", "bob").unwrap();
        assert_eq!(t.import(&bob, &x, export.clone(), None).await.unwrap_err().code(), "exists");
        let newer = Export { tenure: EXPORT_FORMAT + 1, ..export };
        assert_eq!(t.import(&principal, &x, newer, None).await.unwrap_err().code(), "newer_format");
    }

    /// Cached tool results expire after an hour, are evicted by least recent use, belong to one
    /// session, and survive a restart.
    async fn tool_cache(test: &mut TestTenure) {
        let cache = CacheConfig { max_entries: Some(2), ..CacheConfig::default() };
        let small = Assistant { name: "small".into(), cache, ..Assistant::default() };
        test.tenure.put_assistant(&Principal::tenant_wide("acme").unwrap(), small).await.unwrap();
        let (principal, x) = (ada(), id("x"));
        test.tenure.create(&principal, NewSession { assistant: Some("small".into()), ..new_session("x") }).await.unwrap();
        test.tenure.create(&principal, new_session("y")).await.unwrap();
        let put = async |t: &Tenure, n: i32| t.cache_put(&principal, &x, "tool", &json!({"n": n, "z": null}), &json!({"r": n})).await.unwrap();
        let get = async |t: &Tenure, n: i32| {
            let hit = t.cache_get(&principal, &x, "tool", &json!({"z": null, "n": n})).await.unwrap();
            hit.map(|c| c.result["r"].as_i64().unwrap())
        };
        put(&test.tenure, 1).await;
        test.advance(SignedDuration::from_secs(1));
        put(&test.tenure, 2).await;
        test.advance(SignedDuration::from_secs(1));
        assert_eq!(get(&test.tenure, 1).await, Some(1)); // entry 2 is now the least recently used
        test.advance(SignedDuration::from_secs(1));
        // The use may be recorded asynchronously.
        let namespace = tenure::store::Namespace { tenant: principal.tenant.clone(), owner: tenure::store::Owner::Session(x.clone()), name: "cache".into() };
        wait_until("the use is recorded", async || {
            test.tenure.store().items(&namespace, None, 10).await.unwrap().iter().any(|i| i.uses > 0)
        })
        .await;
        put(&test.tenure, 3).await;
        test.reopen().await;
        assert_eq!((get(&test.tenure, 1).await, get(&test.tenure, 2).await, get(&test.tenure, 3).await), (Some(1), None, Some(3)));
        assert_eq!(test.tenure.cache_get(&principal, &x, "tool", &json!({"n": 1})).await.unwrap(), None, "null is a parameter");
        assert_eq!(test.tenure.cache_get(&principal, &id("y"), "tool", &json!({"n": 1, "z": null})).await.unwrap(), None);
        assert_eq!(test.tenure.cache_entries(&principal, &x).await.unwrap().len(), 2);
        test.tenure.pause(&principal, &x, None).await.unwrap();
        assert_eq!(get(&test.tenure, 3).await, Some(3), "a paused session keeps its cache");
        test.advance(SignedDuration::from_hours(1));
        assert_eq!(get(&test.tenure, 3).await, None, "time goes on");
        assert!(test.tenure.cache_entries(&principal, &x).await.unwrap().is_empty());
        assert_eq!(test.tenure.sweep().await.unwrap().items, 2);
    }

    /// Content matching finds the longest conversation, rejects ambiguous matches, and never finds
    /// another user's session.
    async fn find_by_content(test: &mut TestTenure) {
        let t = &test.tenure;
        let principal = ada();
        for name in ["one", "long"] {
            test.advance(SignedDuration::from_secs(1));
            t.create(&principal, new_session(name)).await.unwrap();
            t.append(&principal, &id(name), turn_messages(1)).await.unwrap();
        }
        t.append(&principal, &id("long"), turn_messages(2)).await.unwrap();
        let seen = |n: usize| vec![Message::user(&format!("question {n}")), Message::assistant(&format!("answer {n}"))];
        let ask = |n: usize| (1..=n).flat_map(seen).chain([Message::user("next")]).collect::<Vec<_>>();
        assert_eq!(t.find(&principal, &ask(1)).await.unwrap(), Some(id("one")));
        assert_eq!(t.find(&principal, &ask(2)).await.unwrap(), Some(id("long")));
        assert_eq!(t.find(&principal, &[vec![Message::system("sys")], ask(2)].concat()).await.unwrap(), Some(id("long")));
        let bob = Principal::new("acme", "bob").unwrap();
        let other = Principal::new("other", "ada").unwrap();
        for stranger in [bob, other, admin()] {
            assert_eq!(t.find(&stranger, &ask(2)).await.unwrap(), None);
        }
        // Many newer sessions with a shorter conversation do not hide the longest match.
        for n in 0..70 {
            test.advance(SignedDuration::from_secs(1));
            t.create(&principal, new_session(&format!("short{n}"))).await.unwrap();
            t.append(&principal, &id(&format!("short{n}")), turn_messages(1)).await.unwrap();
        }
        assert_eq!(t.find(&principal, &ask(2)).await.unwrap(), Some(id("long")));
        assert_eq!(t.find(&principal, &ask(1)).await.unwrap(), None, "which one is not told");
        assert_eq!(t.find(&principal, &[Message::user("question 1")]).await.unwrap(), None, "one message is too little");
        assert_eq!(t.find(&principal, &[Message::system("s"), Message::user("question 1")]).await.unwrap(), None);
        // Images distinguish conversations; a client that omits them still matches.
        for (name, fill) in [("cat", "C"), ("dog", "D")] {
            test.advance(SignedDuration::from_secs(1));
            t.create(&principal, new_session(name)).await.unwrap();
            t.append(&principal, &id(name), vec![image_message("what is it?", fill), Message::assistant("an animal")]).await.unwrap();
        }
        let about = |first: Message| vec![first, Message::assistant("an animal"), Message::user("sure?")];
        assert_eq!(t.find(&principal, &about(image_message("what is it?", "C"))).await.unwrap(), Some(id("cat")));
        assert_eq!(t.find(&principal, &about(image_message("what is it?", "D"))).await.unwrap(), Some(id("dog")));
        assert_eq!(t.find(&principal, &about(Message::user("what is it?"))).await.unwrap(), None, "cat or dog");
        t.delete(&principal, &id("dog"), None).await.unwrap();
        assert_eq!(t.find(&principal, &about(Message::user("what is it?"))).await.unwrap(), Some(id("cat")));
    }

    /// Reconciling merges the client's history with the stored one, and the log preserves discarded
    /// messages.
    async fn reconciliation(test: &mut TestTenure) {
        let t = &test.tenure;
        let (principal, x) = (ada(), id("x"));
        t.create(&principal, new_session("x")).await.unwrap();
        t.append(&principal, &x, turn_messages(1)).await.unwrap();
        let seen = [Message::user("question 1"), Message::assistant("answer 1")];
        let plan = t.reconcile(&principal, &x, &[&seen[..], &[Message::user("edited")]].concat(), HistoryMode::Auto).await.unwrap();
        assert_eq!((plan.retained, plan.omitted, plan.append.len()), (4, 2, 1));
        // The previous question is unanswered and the answer before it came from no run: this is
        // not treated as an edit.
        let more = [&seen[..], &[image_message("with a picture", "W")]].concat();
        let plan = t.reconcile(&principal, &x, &more, HistoryMode::Auto).await.unwrap();
        assert_eq!((plan.retained, plan.rewound), (5, 0));
        t.rewind(&principal, &x, Point::Position(5)).await.unwrap();
        let plan = t.reconcile(&principal, &x, &more, HistoryMode::Full).await.unwrap();
        assert_eq!((plan.retained, plan.rewound), (4, 1));
        test.reopen().await;
        let s = test.tenure.load(&principal, &x).await.unwrap();
        assert_eq!(texts(&s)[4..], raw(&[image_message("with a picture", "W")]));
        assert_eq!(test.tenure.discarded(&principal, &x).await.unwrap().len(), 2);
        let without = [&seen[..], &[Message::user("with a picture"), Message::assistant("pretty"), Message::user("yes")]].concat();
        let plan = test.tenure.reconcile(&principal, &x, &without, HistoryMode::Auto).await.unwrap();
        assert_eq!((plan.retained, plan.rewound, plan.append.len()), (5, 0, 2), "the picture stays in its message");
    }
}
