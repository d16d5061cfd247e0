//! Expiry, the session cap, hooks, retention and the clock, on every store.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tenure::{maintenance::*, policy::*, run::*, session::*, *};

const DAY: SignedDuration = SignedDuration::from_hours(24);

fn keys(keys: &[SessionKey]) -> Vec<&str> {
    keys.iter().map(|k| k.session.as_str()).collect()
}

on_every_store! {
    /// A session expires after seven days without activity, immediately and without the sweep;
    /// after thirty more it is purged.
    async fn expire_restore_purge(test: &mut TestTenure) {
        let principal = ada();
        for name in ["idle", "busy", "waiting"] {
            test.tenure.create(&principal, new_session(name)).await.unwrap();
            test.tenure.append(&principal, &id(name), vec![image_message("see", name)]).await.unwrap();
        }
        test.tenure.pause(&principal, &id("waiting"), Some("review")).await.unwrap();
        test.advance(DAY * 6);
        test.tenure.append(&principal, &id("busy"), turn_messages(1)).await.unwrap();
        test.advance(DAY * 2);
        let error = test.tenure.load(&principal, &id("idle")).await.unwrap_err();
        assert!(error.code() == "gone" && error.to_string().contains("expired"), "{error}");
        assert_eq!(test.tenure.append(&principal, &id("idle"), turn_messages(1)).await.unwrap_err().code(), "gone");
        let report = test.tenure.sweep().await.unwrap();
        assert_eq!((keys(&report.expired), report.purged.len(), report.failed.len()), (vec!["idle"], 0, 0));
        assert_eq!(test.tenure.sweep().await.unwrap(), SweepReport::default(), "the next pass finds nothing to do");
        test.reopen().await;
        assert_eq!(test.tenure.load(&principal, &id("busy")).await.unwrap().messages.len(), 5);
        assert_eq!(test.tenure.load(&principal, &id("waiting")).await.unwrap().head().status, Status::Paused, "who waits does not expire");
        test.tenure.activate(&principal, &id("waiting")).await.unwrap();
        test.tenure.append(&principal, &id("waiting"), turn_messages(1)).await.unwrap();
        test.tenure.pause(&principal, &id("waiting"), None).await.unwrap();
        test.tenure.restore(&principal, &id("idle"), None).await.unwrap();
        assert_eq!(texts(&test.tenure.load(&principal, &id("idle")).await.unwrap()), raw(&[image_message("see", "idle")]));
        test.advance(DAY * 8);
        assert_eq!(keys(&test.tenure.sweep().await.unwrap().expired).len(), 2);
        test.tenure.delete(&principal, &id("waiting"), None).await.unwrap();
        test.advance(DAY * 29);
        assert_eq!(test.tenure.sweep().await.unwrap(), SweepReport::default());
        test.advance(DAY * 2);
        let report = test.tenure.sweep().await.unwrap();
        assert_eq!(report.purged.len(), 3, "{report:?}");
        for name in ["idle", "busy", "waiting"] {
            assert_eq!(test.tenure.load_any(&principal, &id(name)).await.unwrap_err().code(), "not_found");
        }
    }

    /// An assistant can configure its own time to live; writes count as activity, reads do not.
    async fn ttl_per_assistant(test: &mut TestTenure) {
        let principal = ada();
        for (name, ttl) in [("quick", "60s"), ("ever", "never")] {
            let sessions = SessionConfig { ttl: Some(ttl.parse().unwrap()), retention: None, ..SessionConfig::default() };
            test.tenure.declare(Assistant { name: name.into(), sessions, ..Assistant::default() });
        }
        for name in ["quick", "ever"] {
            test.tenure.create(&principal, NewSession { assistant: Some(name.into()), ..new_session(name) }).await.unwrap();
        }
        test.advance(SignedDuration::from_secs(50));
        test.tenure.load(&principal, &id("quick")).await.unwrap();
        test.advance(SignedDuration::from_secs(20));
        assert_eq!(test.tenure.load(&principal, &id("quick")).await.unwrap_err().code(), "gone");
        test.advance(DAY * 1000);
        assert_eq!(keys(&test.tenure.sweep().await.unwrap().expired), ["quick"]);
        test.tenure.load(&principal, &id("ever")).await.unwrap();
    }

    /// Lists evaluate expiry when they are requested: `expired` includes sessions that no sweep has visited,
    /// `active` excludes them, and pages and offsets stay complete.
    async fn lists_evaluate_expiry(test: &mut TestTenure) {
        let principal = ada();
        let quick = SessionConfig { ttl: Some("1h".parse().unwrap()), ..SessionConfig::default() };
        test.tenure.declare(Assistant { name: "quick".into(), sessions: quick, ..Assistant::default() });
        for n in 0..12 {
            let assistant = (n % 2 == 0).then(|| "quick".to_owned());
            test.tenure.create(&principal, NewSession { assistant, ..new_session(&format!("s{n:02}")) }).await.unwrap();
            test.advance(SignedDuration::from_secs(1));
        }
        let swept = |n: usize| format!("s{n:02}");
        test.advance(SignedDuration::from_hours(2));
        let owner = || OwnerFilter::User(principal.tenant.clone(), principal.user.clone());
        for (status, want) in [(Status::Expired, [10, 8, 6, 4, 2, 0]), (Status::Active, [11, 9, 7, 5, 3, 1])] {
            let query = SessionQuery { status: vec![status], ..SessionQuery::new(owner(), 4) };
            let first = test.tenure.list(&principal, query.clone()).await.unwrap();
            assert_eq!(first.heads.len(), 4, "a page is full");
            let second = test.tenure.list(&principal, SessionQuery { cursor: first.next, ..query.clone() }).await.unwrap();
            assert_eq!(second.next, None);
            let all: Vec<_> = first.heads.into_iter().chain(second.heads).collect();
            assert!(all.iter().all(|h| h.status == status), "{all:?}");
            let ids: Vec<String> = all.iter().map(|h| h.info.session_id.to_string()).collect();
            assert_eq!(ids, want.map(swept));
            let skipped = test.tenure.list(&principal, SessionQuery { offset: 3, ..query }).await.unwrap();
            assert_eq!(skipped.heads.iter().map(|h| h.info.session_id.to_string()).collect::<Vec<_>>(), ids[3..]);
        }
        assert_eq!(test.tenure.sweep().await.unwrap().expired.len(), 6, "nothing was swept before");
    }

    /// Creating a session over the cap evicts the least recently used one with its hooks, on every path that
    /// creates a session and without a sweep. A run in progress is not evicted.
    async fn creation_enforces_the_cap(test: &mut TestTenure) {
        let principal = ada();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let options = Options { max_sessions: 3, clock: test.clock.clone(), ..Options::default() };
        let tenure = Tenure::with_store(test.tenure.store().clone(), options);
        let log = seen.clone();
        tenure.on_expire(move |session, reason| {
            log.lock().unwrap().push((session.head().info.session_id.to_string(), reason));
            async { Ok(()) }
        });
        let live = async || {
            let owner = OwnerFilter::User(principal.tenant.clone(), principal.user.clone());
            let page = tenure.list(&principal, SessionQuery::new(owner, 10)).await.unwrap();
            page.heads.iter().map(|h| h.info.session_id.to_string()).collect::<Vec<_>>()
        };
        for name in ["a", "b", "c"] {
            tenure.create(&principal, new_session(name)).await.unwrap();
            test.clock.advance(SignedDuration::from_secs(1));
        }
        // The oldest one is used again, so that it is no longer the least recently used.
        tenure.append(&principal, &id("a"), turn_messages(1)).await.unwrap();
        test.clock.advance(SignedDuration::from_secs(1));
        assert_eq!(*seen.lock().unwrap(), []);
        let model = ScriptedModel::new([json!({"role": "assistant", "content": "hi"})]);
        let request = TurnRequest { session: Some(id("chat")), messages: vec![Message::user("hi")], ..TurnRequest::default() };
        let TurnStart::Run(turn) = tenure.begin_turn(&principal, request).await.unwrap() else { panic!() };
        assert_eq!(live().await, ["chat", "a", "c"], "chat");
        test.clock.advance(SignedDuration::from_secs(1));
        tenure.fork(&principal, &id("a"), Fork::at(Point::End).id(id("fork"))).await.unwrap();
        assert_eq!(live().await, ["fork", "chat", "a"], "fork");
        test.clock.advance(SignedDuration::from_secs(1));
        let export = Export { messages: turn_messages(1), ..Export::default() };
        tenure.import_new(&principal, &id("import"), &export).await.unwrap();
        assert_eq!(live().await, ["import", "fork", "chat"], "import");
        test.clock.advance(SignedDuration::from_secs(1));
        tenure.create(&principal, new_session("last")).await.unwrap();
        assert_eq!(live().await, ["last", "import", "chat"], "the run in progress is not evicted");
        turn.execute(Executors::new(&model)).await.unwrap();
        let evicted: Vec<(String, EndReason)> = ["b", "c", "a", "fork"].map(|s| (s.to_owned(), EndReason::Evicted)).into();
        assert_eq!(*seen.lock().unwrap(), evicted);
        let error = tenure.load(&principal, &id("b")).await.unwrap_err();
        assert!(error.to_string().contains("expired"), "{error}");
        tenure.restore(&principal, &id("b"), None).await.unwrap();
    }

    /// A hook that fails does not fail the creation: the sweep evicts the session later.
    async fn a_failing_hook_does_not_prevent_creation(test: &mut TestTenure) {
        let principal = ada();
        let failing = Arc::new(std::sync::atomic::AtomicBool::new(true));
        let options = Options { max_sessions: 1, clock: test.clock.clone(), ..Options::default() };
        let tenure = Tenure::with_store(test.tenure.store().clone(), options);
        let fails = failing.clone();
        tenure.on_expire(move |_, _| {
            let fail = fails.load(Ordering::SeqCst);
            async move { if fail { Err("out of order".into()) } else { Ok(()) } }
        });
        for name in ["a", "b"] {
            tenure.create(&principal, new_session(name)).await.unwrap();
            test.clock.advance(SignedDuration::from_secs(1));
        }
        tenure.load(&principal, &id("a")).await.unwrap();
        failing.store(false, Ordering::SeqCst);
        assert_eq!(keys(&tenure.sweep().await.unwrap().evicted), ["a"]);
        tenure.load(&principal, &id("b")).await.unwrap();
    }

    /// Hooks receive the complete session before it ends, at least once; a failing hook is retried
    /// and does not block other sessions.
    async fn hooks(test: &mut TestTenure) {
        let principal = ada();
        for name in ["good", "bad"] {
            test.tenure.create(&principal, new_session(name)).await.unwrap();
            test.tenure.append(&principal, &id(name), turn_messages(1)).await.unwrap();
        }
        let seen = Arc::new(Mutex::new(Vec::new()));
        let failures = Arc::new(AtomicUsize::new(2));
        let (log, remaining_failures) = (seen.clone(), failures.clone());
        test.tenure.on_expire(move |session, reason| {
            log.lock().unwrap().push((session.head().info.session_id.to_string(), session.messages.len(), reason));
            let fail = session.head().info.session_id.as_str() == "bad" && remaining_failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
            async move { if fail { Err("out of order".into()) } else { Ok(()) } }
        });
        test.advance(DAY * 8);
        let report = test.tenure.sweep().await.unwrap();
        assert_eq!(keys(&report.expired), ["good"]);
        assert_eq!(report.failed.len(), 1);
        assert!(report.failed[0].1.contains("out of order"), "{report:?}");
        assert_eq!(test.tenure.sweep().await.unwrap(), SweepReport::default(), "not at once");
        test.advance(SignedDuration::from_mins(2));
        assert_eq!(test.tenure.sweep().await.unwrap().failed.len(), 1);
        test.advance(SignedDuration::from_mins(2));
        assert_eq!(keys(&test.tenure.sweep().await.unwrap().expired), ["bad"]);
        let calls = seen.lock().unwrap().clone();
        assert_eq!(calls.len(), 4);
        assert!(calls.iter().all(|(_, n, reason)| *n == 4 && *reason == EndReason::Expired));
    }

    /// If the cap is lowered, the sweep evicts the longest idle sessions first, with their hooks, and they can
    /// be restored (D-017).
    async fn cap(test: &mut TestTenure) {
        let principal = ada();
        for n in 0..6 {
            test.advance(SignedDuration::from_secs(1));
            test.tenure.create(&principal, new_session(&format!("s{n}"))).await.unwrap();
        }
        test.reopen_with(|o| o.max_sessions = 3).await;
        test.tenure.append(&principal, &id("s0"), turn_messages(1)).await.unwrap();
        let fired = Arc::new(Mutex::new(Vec::new()));
        let log = fired.clone();
        test.tenure.on_expire(move |session, reason| {
            log.lock().unwrap().push((session.head().info.session_id.to_string(), reason));
            async { Ok(()) }
        });
        let report = test.tenure.sweep().await.unwrap();
        assert_eq!(keys(&report.evicted), ["s1", "s2", "s3"]);
        assert_eq!(fired.lock().unwrap().len(), 3);
        assert!(fired.lock().unwrap().iter().all(|(_, reason)| *reason == EndReason::Evicted));
        assert!(test.tenure.sweep().await.unwrap().evicted.is_empty());
        test.tenure.restore(&principal, &id("s1"), None).await.unwrap();
    }

    /// Eviction that takes several passes: the longest idle sessions go first, and the newest stay.
    async fn cap_in_many_passes(test: &mut TestTenure) {
        let principal = ada();
        for n in 0..9 {
            test.advance(SignedDuration::from_secs(1));
            test.tenure.create(&principal, new_session(&format!("s{n}"))).await.unwrap();
        }
        test.reopen_with(|o| (o.max_sessions, o.limits.max_sweep) = (2, 3)).await;
        test.advance(SignedDuration::from_secs(1));
        test.tenure.append(&principal, &id("s0"), turn_messages(1)).await.unwrap();
        test.tenure.pause(&principal, &id("s4"), None).await.unwrap();
        for (want, more) in [(vec!["s1", "s2", "s3"], true), (vec!["s4", "s5", "s6"], true), (vec!["s7"], false)] {
            let report = test.tenure.sweep().await.unwrap();
            assert_eq!((keys(&report.evicted), report.more, report.failed.len()), (want, more, 0));
        }
        assert_eq!(test.tenure.sweep().await.unwrap(), SweepReport::default());
    }

    /// Sessions with failing hooks do not block eviction, even if they are the longest idle and
    /// fill a whole pass.
    async fn a_stuck_cap(test: &mut TestTenure) {
        for n in 0..6 {
            test.advance(SignedDuration::from_secs(1));
            test.tenure.create(&ada(), new_session(&format!("s{n}"))).await.unwrap();
        }
        test.reopen_with(|o| (o.max_sessions, o.limits.max_sweep) = (1, 2)).await;
        test.tenure.on_expire(|session, _| {
            let fails = ["s0", "s1"].contains(&session.head().info.session_id.as_str());
            async move { if fails { Err("gone".into()) } else { Ok(()) } }
        });
        let mut evicted = Vec::new();
        for _ in 0..4 {
            test.advance(SignedDuration::from_mins(2));
            let report = test.tenure.sweep().await.unwrap();
            assert!(report.evicted.is_empty() != report.failed.is_empty(), "{report:?}");
            evicted.extend(report.evicted);
        }
        assert_eq!(keys(&evicted), ["s2", "s3", "s4"]);
    }

    /// Slow and failing hooks do not delay other sessions beyond the pass.
    async fn many_hooks(test: &mut TestTenure) {
        for n in 0..60 {
            test.tenure.create(&ada(), new_session(&format!("s{n}"))).await.unwrap();
        }
        let calls = Arc::new(AtomicUsize::new(0));
        let count = calls.clone();
        test.tenure.on_expire(move |session, _| {
            count.fetch_add(1, Ordering::SeqCst);
            let n: usize = session.head().info.session_id.as_str()[1..].parse().unwrap();
            async move {
                match n % 10 {
                    0 => Err("the disk is full".into()),
                    1 => {
                        tokio::time::sleep(std::time::Duration::from_millis(100)).await; // pacing: a slow hook
                        Ok(())
                    }
                    _ => Ok(()),
                }
            }
        });
        test.advance(DAY * 8);
        let report = test.tenure.sweep().await.unwrap();
        assert_eq!((report.expired.len(), report.failed.len(), calls.load(Ordering::SeqCst)), (54, 6, 60));
        assert!(report.failed.iter().all(|(key, reason)| key.session.as_str().ends_with('0') && reason.contains("disk is full")));
        test.advance(SignedDuration::from_mins(2));
        assert_eq!(test.tenure.sweep().await.unwrap().failed.len(), 6, "only those are tried again");
        assert_eq!(calls.load(Ordering::SeqCst), 66);
    }

    /// Checkpoint hooks are called for each checkpoint after its commit; a failing hook does not
    /// fail the operation.
    async fn watched_checkpoints(test: &mut TestTenure) {
        let principal = ada();
        test.tenure.create(&principal, new_session("x")).await.unwrap();
        test.tenure.append(&principal, &id("x"), turn_messages(1)).await.unwrap();
        let received = Arc::new(Mutex::new(Vec::new()));
        let (log, beside) = (received.clone(), test.second_node());
        test.tenure.on_checkpoint(move |head, label, seq| {
            let (log, beside) = (log.clone(), beside.clone());
            async move {
                let checkpoints = beside.checkpoints(&ada(), &head.info.session_id).await.unwrap();
                log.lock().unwrap().push((label.to_string(), seq, checkpoints.last().unwrap().seq));
                Err("never mind".into())
            }
        });
        test.tenure.append(&principal, &id("x"), vec![Message::user("no answer yet")]).await.unwrap();
        let by_hand = test.tenure.checkpoint(&principal, &id("x"), Some(CheckpointLabel::new("mine").unwrap())).await.unwrap();
        test.tenure.append(&principal, &id("x"), turn_messages(2)).await.unwrap();
        let mut session = Session::load(&test.tenure.principal(principal.clone()), &id("x")).await.unwrap();
        let saved = session.add_checkpoint("saved", test.now()).unwrap();
        session.push(Message::user("and more"), test.now());
        test.tenure.save(&mut session).await.unwrap();
        let all = test.tenure.checkpoints(&principal, &id("x")).await.unwrap();
        let turn = all.iter().find(|c| c.label.as_str() == "turn-2").unwrap().seq;
        let want = [("mine", by_hand.seq), ("turn-2", turn), ("saved", saved.seq)].map(|(l, seq)| (l.to_owned(), seq, seq));
        assert_eq!(*received.lock().unwrap(), want);
    }

    /// A pass is bounded, reports that more work remains, and the passes terminate.
    async fn bounded_pass(test: &mut TestTenure) {
        test.reopen_with(|o| o.limits.max_sweep = 4).await;
        for n in 0..10 {
            test.tenure.create(&ada(), new_session(&format!("s{n}"))).await.unwrap();
        }
        test.advance(DAY * 8);
        let mut passes = 0;
        let mut expired = 0;
        loop {
            let report = test.tenure.sweep().await.unwrap();
            assert!(report.expired.len() <= 4);
            expired += report.expired.len();
            passes += 1;
            if !report.more { break; }
        }
        assert_eq!((expired, passes), (10, 3));
    }

    /// Invariant 10: a clock jump loses no session (D-016).
    async fn the_clock_can_jump(test: &mut TestTenure) {
        let principal = ada();
        test.tenure.create(&principal, new_session("x")).await.unwrap();
        test.tenure.append(&principal, &id("x"), turn_messages(1)).await.unwrap();
        test.tenure.create(&principal, new_session("deleted")).await.unwrap();
        test.tenure.delete(&principal, &id("deleted"), None).await.unwrap();
        test.clock.jump(DAY * 400);
        let report = test.tenure.sweep().await.unwrap();
        assert!(report.suspended.as_deref().unwrap_or_default().contains("jumped"), "{report:?}");
        assert!(report.expired.is_empty() && report.purged.is_empty());
        test.clock.jump(-DAY * 400);
        test.tenure.append(&principal, &id("x"), turn_messages(2)).await.unwrap();
        test.clock.jump(-DAY * 400);
        test.tenure.append(&principal, &id("x"), turn_messages(3)).await.unwrap();
        assert!(test.tenure.sweep().await.unwrap().suspended.is_some());
        test.clock.jump(DAY * 400);
        assert_eq!(test.tenure.sweep().await.unwrap(), SweepReport::default());
        test.reopen().await;
        let s = test.tenure.load(&principal, &id("x")).await.unwrap();
        assert_eq!(s.messages.len(), 12);
        assert!(s.head().active_at >= s.head().info.created_at && s.head().info.updated_at >= s.head().info.created_at);
        test.tenure.restore(&principal, &id("deleted"), None).await.unwrap();
    }
}

/// Not a test of its own: the process that [`killed_after_the_hook`] starts. Its second hook exits,
/// so that for some sessions the first hook was called and nothing is committed yet.
#[tokio::test]
async fn victim() {
    let Ok(url) = std::env::var("TENURE_HOOKS_URL") else { return };
    let options = Options { clock: Clock::manual("2026-02-01T00:00:00Z".parse().unwrap()), ..Options::default() };
    let tenure = Tenure::open_with(&url, options).await.unwrap();
    tenure.on_expire(|session, _| {
        println!("FIRED {}", session.head().info.session_id);
        async { Ok(()) }
    });
    let remaining = AtomicUsize::new(20);
    tenure.on_expire(move |_, _| {
        if remaining.fetch_sub(1, Ordering::SeqCst) == 0 {
            std::process::abort();
        }
        async { Ok(()) }
    });
    tenure.sweep().await.unwrap();
}

/// A process that crashes between a hook and its commit: no session ends without its hook, and a
/// hook whose commit is missing is called again.
async fn killed_after_the_hook(kind: &str) {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("{kind}:{}", dir.path().join("store").display());
    let clock = Clock::manual("2026-01-01T00:00:00Z".parse().unwrap());
    let options = Options { clock: clock.clone(), ..Options::default() };
    let tenure = Tenure::open_with(&url, options.clone()).await.unwrap();
    for n in 0..40 {
        tenure.create(&ada(), new_session(&format!("s{n}"))).await.unwrap();
    }
    drop(tenure);
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["lifecycle::victim", "--exact", "--nocapture", "--test-threads=1"])
        .env("TENURE_HOOKS_URL", &url)
        .output()
        .unwrap();
    assert!(!out.status.success(), "it was to die");
    let out = String::from_utf8(out.stdout).unwrap();
    let fired: BTreeSet<&str> = out.split("FIRED ").skip(1).filter_map(|rest| rest.split_whitespace().next()).collect();
    clock.advance(DAY * 31);
    let tenure = Tenure::open_with(&url, options).await.unwrap();
    let mut gone = BTreeSet::new();
    for n in 0..40 {
        let name = format!("s{n}");
        if tenure.head(&ada(), &id(&name)).await.unwrap().status == Status::Expired {
            assert!(fired.contains(name.as_str()), "{name} went without its hook");
            gone.insert(name);
        }
    }
    assert!(gone.len() < fired.len() && fired.len() < 40, "{} of {} went", gone.len(), fired.len());
    let again = Arc::new(Mutex::new(BTreeSet::new()));
    let log = again.clone();
    tenure.on_expire(move |session, _| {
        assert!(log.lock().unwrap().insert(session.head().info.session_id.to_string()), "once is enough");
        async { Ok(()) }
    });
    assert_eq!(tenure.sweep().await.unwrap().expired.len(), 40 - gone.len());
    assert!(again.lock().unwrap().is_disjoint(&gone));
    assert!(fired.iter().any(|name| again.lock().unwrap().contains(*name)), "what was not written down is told again");
}

#[tokio::test]
async fn killed_after_the_hook_on_sqlite() {
    killed_after_the_hook("sqlite").await;
}

#[tokio::test]
async fn killed_after_the_hook_on_jsonl() {
    killed_after_the_hook("jsonl").await;
}
