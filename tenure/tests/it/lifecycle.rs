//! Expiry, the session cap, hooks, retention and the clock, on every store.

use crate::on_every_store;
use crate::places::*;
use jiff::SignedDuration;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tenure::{log::*, maintenance::*, memory::*, policy::*, review::*, rules::*, run::*, session::*, *};

const DAY: SignedDuration = SignedDuration::from_hours(24);

fn keys(keys: &[SessionKey]) -> Vec<&str> {
    keys.iter().map(|k| k.session.as_str()).collect()
}

on_every_store! {
    /// A session expires after seven days without activity, immediately and without the sweep;
    /// after thirty more it is purged.
    async fn expire_restore_purge(home: &mut Home) {
        let principal = ada();
        for name in ["idle", "busy", "waiting"] {
            home.tenure.create(&principal, named(name)).await.unwrap();
            home.tenure.append(&principal, &id(name), vec![picture("see", name)]).await.unwrap();
        }
        home.tenure.pause(&principal, &id("waiting"), Some("review")).await.unwrap();
        home.pass(DAY * 6);
        home.tenure.append(&principal, &id("busy"), turn(1)).await.unwrap();
        home.pass(DAY * 2);
        let error = home.tenure.load(&principal, &id("idle")).await.unwrap_err();
        assert!(error.code() == "gone" && error.to_string().contains("expired"), "{error}");
        assert_eq!(home.tenure.append(&principal, &id("idle"), turn(1)).await.unwrap_err().code(), "gone");
        let report = home.tenure.sweep().await.unwrap();
        assert_eq!((keys(&report.expired), report.purged.len(), report.failed.len()), (vec!["idle"], 0, 0));
        assert_eq!(home.tenure.sweep().await.unwrap(), SweepReport::default(), "the next pass finds nothing to do");
        home.reopen().await;
        assert_eq!(home.tenure.load(&principal, &id("busy")).await.unwrap().messages.len(), 5);
        assert_eq!(home.tenure.load(&principal, &id("waiting")).await.unwrap().head().status, Status::Paused, "who waits does not expire");
        home.tenure.activate(&principal, &id("waiting")).await.unwrap();
        home.tenure.append(&principal, &id("waiting"), turn(1)).await.unwrap();
        home.tenure.pause(&principal, &id("waiting"), None).await.unwrap();
        home.tenure.restore(&principal, &id("idle"), None).await.unwrap();
        assert_eq!(texts(&home.tenure.load(&principal, &id("idle")).await.unwrap()), raw(&[picture("see", "idle")]));
        home.pass(DAY * 8);
        assert_eq!(keys(&home.tenure.sweep().await.unwrap().expired).len(), 2);
        home.tenure.delete(&principal, &id("waiting"), None).await.unwrap();
        home.pass(DAY * 29);
        assert_eq!(home.tenure.sweep().await.unwrap(), SweepReport::default());
        home.pass(DAY * 2);
        let report = home.tenure.sweep().await.unwrap();
        assert_eq!(report.purged.len(), 3, "{report:?}");
        for name in ["idle", "busy", "waiting"] {
            assert_eq!(home.tenure.load_any(&principal, &id(name)).await.unwrap_err().code(), "not_found");
        }
    }

    /// An assistant can configure its own time to live; writes count as activity, reads do not.
    async fn ttl_per_assistant(home: &mut Home) {
        let principal = ada();
        for (name, ttl) in [("quick", "60s"), ("ever", "never")] {
            let sessions = SessionConfig { ttl: Some(ttl.parse().unwrap()), retention: None, ..SessionConfig::default() };
            home.tenure.declare(Assistant { name: name.into(), sessions, ..Assistant::default() });
        }
        for name in ["quick", "ever"] {
            home.tenure.create(&principal, NewSession { assistant: Some(name.into()), ..named(name) }).await.unwrap();
        }
        home.pass(SignedDuration::from_secs(50));
        home.tenure.load(&principal, &id("quick")).await.unwrap();
        home.pass(SignedDuration::from_secs(20));
        assert_eq!(home.tenure.load(&principal, &id("quick")).await.unwrap_err().code(), "gone");
        home.pass(DAY * 1000);
        assert_eq!(keys(&home.tenure.sweep().await.unwrap().expired), ["quick"]);
        home.tenure.load(&principal, &id("ever")).await.unwrap();
    }

    /// Hooks receive the complete session before it ends, at least once; a failing hook is retried
    /// and does not block other sessions.
    async fn hooks(home: &mut Home) {
        let principal = ada();
        for name in ["good", "bad"] {
            home.tenure.create(&principal, named(name)).await.unwrap();
            home.tenure.append(&principal, &id(name), turn(1)).await.unwrap();
        }
        let seen = Arc::new(Mutex::new(Vec::new()));
        let failures = Arc::new(AtomicUsize::new(2));
        let log = seen.clone();
        let remaining_failures = failures.clone();
        home.tenure.on_expire(move |session, reason| {
            log.lock().unwrap().push((session.head().info.session_id.to_string(), session.messages.len(), reason));
            let fail = session.head().info.session_id.as_str() == "bad" && remaining_failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
            async move { if fail { Err("out of order".into()) } else { Ok(()) } }
        });
        home.pass(DAY * 8);
        let report = home.tenure.sweep().await.unwrap();
        assert_eq!(keys(&report.expired), ["good"]);
        assert_eq!(report.failed.len(), 1);
        assert!(report.failed[0].1.contains("out of order"), "{report:?}");
        assert_eq!(home.tenure.sweep().await.unwrap(), SweepReport::default(), "not at once");
        home.pass(SignedDuration::from_mins(2));
        assert_eq!(home.tenure.sweep().await.unwrap().failed.len(), 1);
        home.pass(SignedDuration::from_mins(2));
        assert_eq!(keys(&home.tenure.sweep().await.unwrap().expired), ["bad"]);
        let calls = seen.lock().unwrap().clone();
        assert_eq!(calls.len(), 4);
        assert!(calls.iter().all(|(_, n, reason)| *n == 4 && *reason == EndReason::Expired));
    }

    /// Over the cap, the longest idle sessions are evicted first, with their hooks, and can be
    /// restored (D-017).
    async fn cap(home: &mut Home) {
        home.reopen_with(|o| o.max_sessions = 3).await;
        let principal = ada();
        for n in 0..6 {
            home.pass(SignedDuration::from_secs(1));
            home.tenure.create(&principal, named(&format!("s{n}"))).await.unwrap();
        }
        home.tenure.append(&principal, &id("s0"), turn(1)).await.unwrap();
        let fired = Arc::new(Mutex::new(Vec::new()));
        let log = fired.clone();
        home.tenure.on_expire(move |session, reason| {
            log.lock().unwrap().push((session.head().info.session_id.to_string(), reason));
            async { Ok(()) }
        });
        let report = home.tenure.sweep().await.unwrap();
        assert_eq!(keys(&report.evicted), ["s1", "s2", "s3"]);
        assert_eq!(fired.lock().unwrap().len(), 3);
        assert!(fired.lock().unwrap().iter().all(|(_, reason)| *reason == EndReason::Evicted));
        assert!(home.tenure.sweep().await.unwrap().evicted.is_empty());
        home.tenure.restore(&principal, &id("s1"), None).await.unwrap();
    }

    /// Eviction that takes several passes: the longest idle sessions go first, and the newest stay.
    async fn cap_in_many_passes(home: &mut Home) {
        home.reopen_with(|o| (o.max_sessions, o.limits.max_sweep) = (2, 3)).await;
        let principal = ada();
        for n in 0..9 {
            home.pass(SignedDuration::from_secs(1));
            home.tenure.create(&principal, named(&format!("s{n}"))).await.unwrap();
        }
        home.pass(SignedDuration::from_secs(1));
        home.tenure.append(&principal, &id("s0"), turn(1)).await.unwrap();
        home.tenure.pause(&principal, &id("s4"), None).await.unwrap();
        for (want, more) in [(vec!["s1", "s2", "s3"], true), (vec!["s4", "s5", "s6"], true), (vec!["s7"], false)] {
            let report = home.tenure.sweep().await.unwrap();
            assert_eq!((keys(&report.evicted), report.more, report.failed.len()), (want, more, 0));
        }
        assert_eq!(home.tenure.sweep().await.unwrap(), SweepReport::default());
    }

    /// Sessions with failing hooks do not block eviction, even if they are the longest idle and
    /// fill a whole pass.
    async fn a_stuck_cap(home: &mut Home) {
        home.reopen_with(|o| (o.max_sessions, o.limits.max_sweep) = (1, 2)).await;
        for n in 0..6 {
            home.pass(SignedDuration::from_secs(1));
            home.tenure.create(&ada(), named(&format!("s{n}"))).await.unwrap();
        }
        home.tenure.on_expire(|session, _| {
            let fails = ["s0", "s1"].contains(&session.head().info.session_id.as_str());
            async move { if fails { Err("gone".to_owned()) } else { Ok(()) } }
        });
        let mut evicted = Vec::new();
        for _ in 0..4 {
            home.pass(SignedDuration::from_mins(2));
            let report = home.tenure.sweep().await.unwrap();
            assert!(report.evicted.is_empty() != report.failed.is_empty(), "{report:?}");
            evicted.extend(report.evicted);
        }
        assert_eq!(keys(&evicted), ["s2", "s3", "s4"]);
    }

    /// Slow and failing hooks do not delay other sessions beyond the pass.
    async fn many_hooks(home: &mut Home) {
        for n in 0..60 {
            home.tenure.create(&ada(), named(&format!("s{n}"))).await.unwrap();
        }
        let calls = Arc::new(AtomicUsize::new(0));
        let count = calls.clone();
        home.tenure.on_expire(move |session, _| {
            count.fetch_add(1, Ordering::SeqCst);
            let n: usize = session.head().info.session_id.as_str()[1..].parse().unwrap();
            async move {
                match n % 10 {
                    0 => Err("the disk is full".to_owned()),
                    1 => {
                        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                        Ok(())
                    }
                    _ => Ok(()),
                }
            }
        });
        home.pass(DAY * 8);
        let report = home.tenure.sweep().await.unwrap();
        assert_eq!((report.expired.len(), report.failed.len(), calls.load(Ordering::SeqCst)), (54, 6, 60));
        assert!(report.failed.iter().all(|(key, reason)| key.session.as_str().ends_with('0') && reason.contains("disk is full")));
        home.pass(SignedDuration::from_mins(2));
        assert_eq!(home.tenure.sweep().await.unwrap().failed.len(), 6, "only those are tried again");
        assert_eq!(calls.load(Ordering::SeqCst), 66);
    }

    /// Checkpoint hooks are called for each checkpoint after its commit; a failing hook does not
    /// fail the operation.
    async fn watched_checkpoints(home: &mut Home) {
        let principal = ada();
        home.tenure.create(&principal, named("x")).await.unwrap();
        home.tenure.append(&principal, &id("x"), turn(1)).await.unwrap();
        let received = Arc::new(Mutex::new(Vec::new()));
        let log = received.clone();
        let beside = home.beside();
        home.tenure.on_checkpoint(move |head, label, seq| {
            let log = log.clone();
            let beside = beside.clone();
            async move {
                let checkpoints = beside.checkpoints(&ada(), &head.info.session_id).await.unwrap();
                log.lock().unwrap().push((label.to_string(), seq, checkpoints.last().unwrap().seq));
                Err("never mind".to_owned())
            }
        });
        home.tenure.append(&principal, &id("x"), vec![Message::user("no answer yet")]).await.unwrap();
        let by_hand = home.tenure.checkpoint(&principal, &id("x"), Some(CheckpointLabel::new("mine").unwrap())).await.unwrap();
        home.tenure.append(&principal, &id("x"), turn(2)).await.unwrap();
        let mut session = Session::load(&home.tenure, &principal, &id("x")).await.unwrap();
        let saved = session.add_checkpoint("saved", home.now()).unwrap();
        session.push(Message::user("and more"), home.now());
        session.save(&home.tenure).await.unwrap();
        let all = home.tenure.checkpoints(&principal, &id("x")).await.unwrap();
        let turn = all.iter().find(|c| c.label.as_str() == "turn-2").unwrap().seq;
        let want = [("mine", by_hand.seq), ("turn-2", turn), ("saved", saved.seq)].map(|(l, seq)| (l.to_owned(), seq, seq));
        assert_eq!(*received.lock().unwrap(), want);
    }

    /// A pass is bounded, reports that more work remains, and the passes terminate.
    async fn bounded_pass(home: &mut Home) {
        home.reopen_with(|o| o.limits.max_sweep = 4).await;
        for n in 0..10 {
            home.tenure.create(&ada(), named(&format!("s{n}"))).await.unwrap();
        }
        home.pass(DAY * 8);
        let mut passes = 0;
        let mut expired = 0;
        loop {
            let report = home.tenure.sweep().await.unwrap();
            assert!(report.expired.len() <= 4);
            expired += report.expired.len();
            passes += 1;
            if !report.more { break; }
        }
        assert_eq!((expired, passes), (10, 3));
    }

    /// Invariant 10: a clock jump loses no session (D-016).
    async fn the_clock_can_jump(home: &mut Home) {
        let principal = ada();
        home.tenure.create(&principal, named("x")).await.unwrap();
        home.tenure.append(&principal, &id("x"), turn(1)).await.unwrap();
        home.tenure.create(&principal, named("deleted")).await.unwrap();
        home.tenure.delete(&principal, &id("deleted"), None).await.unwrap();
        home.clock.jump(DAY * 400);
        let report = home.tenure.sweep().await.unwrap();
        assert!(report.suspended.as_deref().unwrap_or_default().contains("jumped"), "{report:?}");
        assert!(report.expired.is_empty() && report.purged.is_empty());
        home.clock.jump(-DAY * 400);
        home.tenure.append(&principal, &id("x"), turn(2)).await.unwrap();
        home.clock.jump(-DAY * 400);
        home.tenure.append(&principal, &id("x"), turn(3)).await.unwrap();
        assert!(home.tenure.sweep().await.unwrap().suspended.is_some());
        home.clock.jump(DAY * 400);
        assert_eq!(home.tenure.sweep().await.unwrap(), SweepReport::default());
        home.reopen().await;
        let s = home.tenure.load(&principal, &id("x")).await.unwrap();
        assert_eq!(s.messages.len(), 12);
        assert!(s.head().active_at >= s.head().info.created_at && s.head().info.updated_at >= s.head().info.created_at);
        home.tenure.restore(&principal, &id("deleted"), None).await.unwrap();
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
        tenure.create(&ada(), named(&format!("s{n}"))).await.unwrap();
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
