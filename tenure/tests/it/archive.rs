//! Requests to sessions that have ended: none of them destroys data.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use std::sync::{Arc, Mutex};
use tenure::{log::*, memory::*, policy::*, run::*, session::*, *};

const DAY: SignedDuration = SignedDuration::from_hours(24);

/// A question in session `x` with `on_expired: fresh`.
fn fresh(text: &str) -> TurnRequest {
    TurnRequest { on_expired: OnExpired::Fresh, ..question(text) }
}

fn declare(tenure: &Tenure) {
    let memory = MemoryConfig { scope: MemoryScope::Session, ..MemoryConfig::default() };
    tenure.declare(clerk(|a| a.memory = Some(memory)));
}

async fn ask(tenure: &Tenure, ask: TurnRequest) -> Result<TurnOutcome, TurnError> {
    run_turn(tenure, ask, &ScriptedModel::new([text_answer("Fine.")]), &CountingTools::default()).await
}

/// The sessions with this status, in order of their ids.
async fn listed(tenure: &Tenure, status: Status) -> Vec<Head> {
    let mut query = SessionQuery::new(OwnerFilter::AllTenants, 50);
    query.status = vec![status];
    let mut heads = tenure.list(&ada(), query).await.unwrap().heads;
    heads.sort_by(|a, b| a.info.session_id.cmp(&b.info.session_id));
    heads
}

on_every_store! {
    /// `fresh` ends an expired session with its hooks, once. The session can be read and restored
    /// under another id until its retention ends (D-018).
    async fn fresh_archives_the_old_session(test: &mut TestTenure) {
        declare(&test.tenure);
        let calls = Arc::new(Mutex::new(Vec::new()));
        let (expire_calls, archive_calls) = (calls.clone(), calls.clone());
        test.tenure.on_expire(move |session, _| {
            expire_calls.lock().unwrap().push(format!("end {} {}", session.head().info.session_id, session.messages.len()));
            async { Ok(()) }
        });
        test.tenure.on_archive(move |old, new| {
            archive_calls.lock().unwrap().push(format!("move {} {}", old.info.session_id, new.info.session_id));
            async { Ok(()) }
        });
        let t = &test.tenure;
        ask(t, TurnRequest { messages: vec![image_message("see", "old")], ..fresh("") }).await.unwrap();
        ask(t, fresh("Gone?")).await.unwrap();
        t.rewind(&ada(), &id("x"), Point::Turn(1)).await.unwrap();
        t.update(&ada(), &id("x"), SessionPatch { title: Patch::Set("Old".into()), ..SessionPatch::default() }).await.unwrap();
        let memory_target = MemoryTarget::Session(id("x"));
        t.remember(&ada(), &memory_target, NewMemory { text: "likes tea".into(), ..NewMemory::default() }).await.unwrap();
        t.fork(&ada(), &id("x"), Fork::at(Point::Position(1)).id(Some(id("fork")))).await.unwrap();
        let before = session_x(t).await;
        test.advance(DAY * 8);
        let t = &test.tenure;
        ask(t, fresh("New")).await.unwrap();
        assert_eq!(conversation(&session_x(t).await), ["user: New", "assistant: Fine."]);
        let ended = test.now().strftime("%Y%m%dT%H%M%S%.6fZ").to_string();
        let archive = id(&format!("x:{ended}"));
        assert_eq!(*calls.lock().unwrap(), ["end x 2".to_owned(), format!("move x {archive}")]);
        let mut heads = listed(t, Status::Expired).await;
        // The fork has expired, too.
        heads.retain(|h| h.info.session_id != id("fork"));
        assert_eq!(heads.len(), 1, "{heads:?}");
        let head = &heads[0];
        assert_eq!(head.info.session_id, archive);
        assert_eq!((head.info.created_at, head.info.title.as_deref()), (before.head().info.created_at, Some("Old")));
        assert_eq!(head.parent, None, "it has the records itself");
        assert!(t.sweep().await.unwrap().expired.iter().all(|k| k.session.as_str() != archive.as_str()));
        assert_eq!(calls.lock().unwrap().iter().filter(|t| t.starts_with("end x ")).count(), 1, "the sweep does not tell again");
        test.reopen().await;
        declare(&test.tenure);
        let t = &test.tenure;
        assert_eq!(t.load(&ada(), &archive).await.unwrap_err().code(), "gone");
        t.restore(&ada(), &archive, None).await.unwrap();
        let old = t.load(&ada(), &archive).await.unwrap();
        assert_eq!(old.messages, before.messages, "with their times, runs and pictures");
        assert_eq!(old.runs.len(), before.runs.len());
        assert_eq!(labels(&old), labels(&before));
        let discarded = t.discarded(&ada(), &archive).await.unwrap();
        assert!(discarded.iter().flat_map(|d| &d.messages).any(|m| m.message.text() == "Gone?"));
        let memories = async |name: &SessionId| t.memory_list(&ada(), &MemoryTarget::Session(name.clone()), None, None, 9).await.unwrap();
        assert_eq!(memories(&archive).await.iter().map(|m| m.text.as_str()).collect::<Vec<_>>(), ["likes tea"]);
        assert_eq!(memories(&id("x")).await.len(), 0);
        t.restore(&ada(), &id("fork"), None).await.unwrap();
        assert_eq!(texts(&t.load(&ada(), &id("fork")).await.unwrap()), texts(&before)[..1]);
        assert_eq!(t.examine(|_| ()).await.unwrap(), [], "every card is what its log says");
        // A purge also removes the archived session's memories.
        t.purge(&ada(), &archive, None).await.unwrap();
        assert_eq!(t.load_any(&ada(), &archive).await.unwrap_err().code(), "not_found");
        assert_eq!(texts(&t.load(&ada(), &id("fork")).await.unwrap()), texts(&before)[..1]);
        // Archive a second time, and let the retention end.
        test.advance(DAY * 8);
        ask(&test.tenure, fresh("Third")).await.unwrap();
        assert_eq!(test.tenure.sweep().await.unwrap().purged.len(), 0);
        test.advance(DAY * 29);
        test.tenure.sweep().await.unwrap();
        let archives = |heads: Vec<Head>| heads.iter().filter(|h| h.info.session_id.as_str().starts_with("x:")).count();
        assert_eq!(archives(listed(&test.tenure, Status::Expired).await), 1);
        test.advance(DAY * 2);
        test.tenure.sweep().await.unwrap();
        assert_eq!(archives(listed(&test.tenure, Status::Expired).await), 0);
    }

    /// A session that the sweep has already ended is not ended again, and its retention is not
    /// extended.
    async fn fresh_after_the_sweep(test: &mut TestTenure) {
        declare(&test.tenure);
        ask(&test.tenure, fresh("Old")).await.unwrap();
        test.advance(DAY * 8);
        test.tenure.sweep().await.unwrap();
        let ended = test.now();
        let count = Arc::new(Mutex::new(0));
        let seen = count.clone();
        test.tenure.on_expire(move |_, _| {
            *seen.lock().unwrap() += 1;
            async { Ok(()) }
        });
        test.advance(DAY * 20);
        ask(&test.tenure, fresh("New")).await.unwrap();
        assert_eq!(*count.lock().unwrap(), 0);
        let heads = listed(&test.tenure, Status::Expired).await;
        assert_eq!((heads.len(), heads[0].status_at), (1, ended));
        test.advance(DAY * 11);
        assert_eq!(test.tenure.sweep().await.unwrap().purged.len(), 1);
    }

    /// If a hook fails, the expired session is unchanged, the request fails, and the hook is
    /// retried.
    async fn a_failing_hook_keeps_the_session(test: &mut TestTenure) {
        declare(&test.tenure);
        ask(&test.tenure, fresh("Old")).await.unwrap();
        let fails = Arc::new(Mutex::new(true));
        let failing = fails.clone();
        test.tenure.on_expire(move |_, _| {
            let fail = *failing.lock().unwrap();
            async move { if fail { Err("out of order".into()) } else { Ok(()) } }
        });
        test.advance(DAY * 8);
        let error = ask(&test.tenure, fresh("New")).await.unwrap_err();
        assert!(error.code() == "unavailable" && error.to_string().contains("out of order"), "{error}");
        let old = test.tenure.load_any(&ada(), &id("x")).await.unwrap();
        assert_eq!((conversation(&old), old.head().status), (vec!["user: Old".to_owned(), "assistant: Fine.".to_owned()], Status::Active));
        *fails.lock().unwrap() = false;
        ask(&test.tenure, fresh("New")).await.unwrap();
        assert_eq!(conversation(&session_x(&test.tenure).await), ["user: New", "assistant: Fine."]);
        assert_eq!(listed(&test.tenure, Status::Expired).await.len(), 1);
    }

    /// A crash at any step loses nothing and duplicates nothing.
    async fn a_crash_at_any_step_of_fresh(test: &mut TestTenure) {
        for step in 0..4 {
            for failure_point in [FailurePoint::BeforeCommit, FailurePoint::AfterCommit] {
                declare(&test.tenure);
                let question = format!("Old {step} {failure_point:?}");
                ask(&test.tenure, TurnRequest { session: Some(id(&format!("s{step}{failure_point:?}"))), ..fresh(&question) }).await.unwrap();
                test.advance(DAY * 8);
                let store = FailingStore::new(test.tenure.store(), Some((step, failure_point)));
                let crashing_node = Tenure::with_store(store.clone(), Options { clock: test.clock.clone(), ..Options::default() });
                declare(&crashing_node);
                let name = id(&format!("s{step}{failure_point:?}"));
                let again = || TurnRequest { session: Some(name.clone()), ..fresh("New") };
                assert!(ask(&crashing_node, again()).await.is_err());
                assert!(store.has_failed(), "step {step}");
                let surviving_node = test.second_node();
                declare(&surviving_node);
                test.advance(SignedDuration::from_hours(1));
                ask(&surviving_node, again()).await.unwrap();
                let messages = conversation(&surviving_node.load(&ada(), &name).await.unwrap());
                assert_eq!(messages.last().unwrap(), "assistant: Fine.", "{step} {failure_point:?}");
                assert!(!messages[0].contains("Old"), "{step} {failure_point:?}: {messages:?}");
                let mut copies = 0;
                for head in listed(&surviving_node, Status::Expired).await {
                    let old = surviving_node.load_any(&ada(), &head.info.session_id).await.unwrap();
                    copies += usize::from(conversation(&old) == [format!("user: {question}"), "assistant: Fine.".to_owned()]);
                }
                assert_eq!(copies, 1, "{step} {failure_point:?}");
            }
        }
    }

    /// Two nodes that request a new session, concurrently with a client that restores and continues
    /// the old one: no acknowledged write is lost.
    async fn concurrent_fresh_and_restore_lose_nothing(test: &mut TestTenure) {
        declare(&test.tenure);
        let mut acknowledged = Vec::new();
        for round in 0..8 {
            acknowledged.push(format!("Old {round}"));
            ask(&test.tenure, fresh(acknowledged.last().unwrap())).await.unwrap();
            test.advance(DAY * 8);
            let nodes = [test.second_node(), test.second_node(), test.second_node()];
            nodes.iter().for_each(declare);
            let texts = ["A", "B", "C"].map(|node| format!("{node} {round}"));
            let restoring = async {
                nodes[2].restore(&ada(), &id("x"), None).await?;
                nodes[2].append(&ada(), &id("x"), vec![Message::user(&texts[2])]).await
            };
            let (a, b, c) = tokio::join!(ask(&nodes[0], fresh(&texts[0])), ask(&nodes[1], fresh(&texts[1])), restoring);
            for (is_acknowledged, text) in [(a.is_ok(), &texts[0]), (b.is_ok(), &texts[1]), (c.is_ok(), &texts[2])] {
                acknowledged.extend(is_acknowledged.then(|| text.clone()));
            }
            assert!(a.is_ok() && b.is_ok(), "{a:?} {b:?}");
        }
        let mut stored = Vec::new();
        for head in test.tenure.store().heads(&SessionQuery::new(OwnerFilter::AllTenants, 100)).await.unwrap() {
            let session = test.tenure.load_any(&ada(), &head.info.session_id).await.unwrap();
            stored.extend(session.messages.iter().map(|m| m.message.text()));
        }
        let lost: Vec<_> = acknowledged.iter().filter(|text| !stored.contains(text)).collect();
        assert!(lost.is_empty(), "{lost:?}");
    }

    /// No request except a purge changes a deleted session or reuses its id (D-019).
    async fn a_deleted_session_is_not_replaced(test: &mut TestTenure) {
        declare(&test.tenure);
        let t = &test.tenure;
        ask(t, fresh("Old")).await.unwrap();
        let before = texts(&session_x(t).await);
        t.delete(&ada(), &id("x"), None).await.unwrap();
        let assert_gone = |e: Error| assert!(e.code() == "gone" && e.to_string().contains("deleted"), "{e}");
        for on_expired in [OnExpired::Restore, OnExpired::Fresh, OnExpired::Reject] {
            let again = TurnRequest { on_expired, ..question("Again") };
            assert_gone(t.begin_turn(&ada(), again.clone()).await.unwrap_err());
            assert_gone(t.preview(&ada(), &again).await.unwrap_err());
            test.advance(DAY * 8);
        }
        let export = Export { messages: vec![Message::user("instead")], ..Export::default() };
        assert_gone(t.import(&ada(), &id("x"), export.clone(), None).await.unwrap_err());
        assert_gone(t.append(&ada(), &id("x"), turn_messages(1)).await.unwrap_err());
        assert_gone(t.rewind(&ada(), &id("x"), Point::Position(0)).await.unwrap_err());
        assert_gone(t.fork(&ada(), &id("x"), Point::End).await.unwrap_err());
        assert_gone(t.start_run(&ada(), &id("x"), OnBusy::Queue, resumable()).await.unwrap_err());
        assert_gone(t.update(&ada(), &id("x"), SessionPatch::default()).await.unwrap_err());
        assert_eq!(t.import_new(&ada(), &id("x"), &export).await.unwrap_err().code(), "exists");
        assert_eq!(t.create(&ada(), new_session("x")).await.unwrap_err().code(), "exists");
        t.restore(&ada(), &id("x"), None).await.unwrap();
        assert_eq!(texts(&session_x(t).await), before);
    }
}

/// With `store: false`, the prompt contains what a request to the expired session would contain.
#[tokio::test]
async fn a_preview_of_an_expired_session() {
    let test = TestTenure::new(StoreKind::Memory).await.unwrap();
    declare(&test.tenure);
    ask(&test.tenure, fresh("Old")).await.unwrap();
    test.advance(DAY * 8);
    for (on_expired, shown) in [(OnExpired::Restore, Some(3)), (OnExpired::Fresh, Some(1)), (OnExpired::Reject, None)] {
        let preview = test.tenure.preview(&ada(), &TurnRequest { on_expired, ..question("Again") }).await;
        assert_eq!(preview.as_ref().map(Vec::len).ok(), shown, "{on_expired:?}: {preview:?}");
    }
    assert_eq!(test.tenure.head(&ada(), &id("x")).await.unwrap().status, Status::Active, "nothing was changed");
}
