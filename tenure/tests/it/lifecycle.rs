//! Expiry, the cap, hooks, retention and the clock, on every store.

use crate::on_every_store;
use crate::places::*;
use jiff::SignedDuration;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tenure::*;

const DAY: SignedDuration = SignedDuration::from_hours(24);

fn keys(keys: &[Key]) -> Vec<&str> {
    keys.iter().map(|k| k.session.as_str()).collect()
}

on_every_store! {
    /// Seven days idle and a session has expired, at once and without the sweep; thirty more and it is destroyed.
    async fn expire_restore_purge(home: &mut Home) {
        let who = ada();
        for name in ["idle", "busy", "waiting"] {
            home.tenure.create(&who, named(name)).await.unwrap();
            home.tenure.append(&who, &id(name), vec![picture("see", name)]).await.unwrap();
        }
        home.tenure.pause(&who, &id("waiting"), Some("review")).await.unwrap();
        home.pass(DAY * 6);
        home.tenure.append(&who, &id("busy"), turn(1)).await.unwrap();
        home.pass(DAY * 2);
        let error = home.tenure.load(&who, &id("idle")).await.unwrap_err();
        assert!(error.code() == "gone" && error.to_string().contains("expired"), "{error}");
        assert_eq!(home.tenure.append(&who, &id("idle"), turn(1)).await.unwrap_err().code(), "gone");
        let report = home.tenure.sweep().await.unwrap();
        assert_eq!((keys(&report.expired), report.purged.len(), report.failed.len()), (vec!["idle"], 0, 0));
        assert_eq!(home.tenure.sweep().await.unwrap(), Report::default(), "the next pass finds nothing to do");
        home.reopen().await;
        assert_eq!(home.tenure.load(&who, &id("busy")).await.unwrap().messages.len(), 5);
        assert_eq!(home.tenure.load(&who, &id("waiting")).await.unwrap().status, Status::Paused, "who waits does not expire");
        home.tenure.activate(&who, &id("waiting")).await.unwrap();
        home.tenure.append(&who, &id("waiting"), turn(1)).await.unwrap();
        home.tenure.pause(&who, &id("waiting"), None).await.unwrap();
        home.tenure.restore(&who, &id("idle")).await.unwrap();
        assert_eq!(texts(&home.tenure.load(&who, &id("idle")).await.unwrap()), raw(&[picture("see", "idle")]));
        home.pass(DAY * 8);
        assert_eq!(keys(&home.tenure.sweep().await.unwrap().expired).len(), 2);
        home.tenure.delete(&who, &id("waiting")).await.unwrap();
        home.pass(DAY * 29);
        assert_eq!(home.tenure.sweep().await.unwrap(), Report::default());
        home.pass(DAY * 2);
        let report = home.tenure.sweep().await.unwrap();
        assert_eq!(report.purged.len(), 3, "{report:?}");
        for name in ["idle", "busy", "waiting"] {
            assert_eq!(home.tenure.load_any(&who, &id(name)).await.unwrap_err().code(), "not_found");
        }
    }

    /// An assistant may have a time to live of its own; activity counts, reading does not.
    async fn ttl_per_assistant(home: &mut Home) {
        let who = ada();
        for (name, ttl) in [("quick", "60s"), ("ever", "never")] {
            let sessions = Lifetime { ttl: Some(ttl.parse().unwrap()), retention: None };
            home.tenure.declare(Assistant { name: name.into(), sessions, ..Assistant::default() });
        }
        for name in ["quick", "ever"] {
            home.tenure.create(&who, New { assistant: Some(name.into()), ..named(name) }).await.unwrap();
        }
        home.pass(SignedDuration::from_secs(50));
        home.tenure.load(&who, &id("quick")).await.unwrap();
        home.pass(SignedDuration::from_secs(20));
        assert_eq!(home.tenure.load(&who, &id("quick")).await.unwrap_err().code(), "gone");
        home.pass(DAY * 1000);
        assert_eq!(keys(&home.tenure.sweep().await.unwrap().expired), ["quick"]);
        home.tenure.load(&who, &id("ever")).await.unwrap();
    }

    /// Hooks get the whole session before it goes, at least once; one that fails is called again and stops nobody else.
    async fn hooks(home: &mut Home) {
        let who = ada();
        for name in ["good", "bad"] {
            home.tenure.create(&who, named(name)).await.unwrap();
            home.tenure.append(&who, &id(name), turn(1)).await.unwrap();
        }
        let seen = Arc::new(Mutex::new(Vec::new()));
        let failures = Arc::new(AtomicUsize::new(2));
        let (log, left) = (seen.clone(), failures.clone());
        home.tenure.on_expire(move |session, why| {
            log.lock().unwrap().push((session.info.session_id.to_string(), session.messages.len(), why));
            let fail = session.info.session_id.as_str() == "bad" && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
            async move { if fail { Err("out of order".into()) } else { Ok(()) } }
        });
        home.pass(DAY * 8);
        let report = home.tenure.sweep().await.unwrap();
        assert_eq!(keys(&report.expired), ["good"]);
        assert_eq!(report.failed.len(), 1);
        assert!(report.failed[0].1.contains("out of order"), "{report:?}");
        assert_eq!(home.tenure.sweep().await.unwrap(), Report::default(), "not at once");
        home.pass(SignedDuration::from_mins(2));
        assert_eq!(home.tenure.sweep().await.unwrap().failed.len(), 1);
        home.pass(SignedDuration::from_mins(2));
        assert_eq!(keys(&home.tenure.sweep().await.unwrap().expired), ["bad"]);
        let calls = seen.lock().unwrap().clone();
        assert_eq!(calls.len(), 4);
        assert!(calls.iter().all(|(_, n, why)| *n == 4 && *why == Ending::Expired));
    }

    /// Over the cap the longest idle go first, with their hooks, and can be restored.
    async fn cap(home: &mut Home) {
        home.reopen_with(|o| o.max_sessions = 3).await;
        let who = ada();
        for n in 0..6 {
            home.pass(SignedDuration::from_secs(1));
            home.tenure.create(&who, named(&format!("s{n}"))).await.unwrap();
        }
        home.tenure.append(&who, &id("s0"), turn(1)).await.unwrap();
        let fired = Arc::new(Mutex::new(Vec::new()));
        let log = fired.clone();
        home.tenure.on_expire(move |session, why| {
            log.lock().unwrap().push((session.info.session_id.to_string(), why));
            async { Ok(()) }
        });
        let report = home.tenure.sweep().await.unwrap();
        assert_eq!(keys(&report.evicted), ["s1", "s2", "s3"]);
        assert_eq!(fired.lock().unwrap().len(), 3);
        assert!(fired.lock().unwrap().iter().all(|(_, why)| *why == Ending::Evicted));
        assert!(home.tenure.sweep().await.unwrap().evicted.is_empty());
        home.tenure.restore(&who, &id("s1")).await.unwrap();
    }

    /// A pass is bounded, says that there is more, and comes to an end.
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

    /// Invariant 10: the clock can jump, and no session is lost to it.
    async fn the_clock_can_jump(home: &mut Home) {
        let who = ada();
        home.tenure.create(&who, named("x")).await.unwrap();
        home.tenure.append(&who, &id("x"), turn(1)).await.unwrap();
        home.tenure.create(&who, named("deleted")).await.unwrap();
        home.tenure.delete(&who, &id("deleted")).await.unwrap();
        home.clock.jump(DAY * 400);
        let report = home.tenure.sweep().await.unwrap();
        assert!(report.suspended.as_deref().unwrap_or_default().contains("jumped"), "{report:?}");
        assert!(report.expired.is_empty() && report.purged.is_empty());
        home.clock.jump(-DAY * 400);
        home.tenure.append(&who, &id("x"), turn(2)).await.unwrap();
        home.clock.jump(-DAY * 400);
        home.tenure.append(&who, &id("x"), turn(3)).await.unwrap();
        assert!(home.tenure.sweep().await.unwrap().suspended.is_some());
        home.clock.jump(DAY * 400);
        assert_eq!(home.tenure.sweep().await.unwrap(), Report::default());
        home.reopen().await;
        let s = home.tenure.load(&who, &id("x")).await.unwrap();
        assert_eq!(s.messages.len(), 12);
        assert!(s.active_at >= s.info.created_at && s.info.updated_at >= s.info.created_at);
        home.tenure.restore(&who, &id("deleted")).await.unwrap();
    }
}
