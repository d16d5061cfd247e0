//! Memory usage of a process, independent of the amount of stored data. Each size is measured in a
//! separate process: the one that wrote the sessions could hide growth in memory it has already
//! allocated.

use crate::*;
use std::process::Command;

/// The first argument of a measuring process; the database and its number of sessions follow.
pub const CHILD: &str = "measure-memory";

/// The workload, which is the same for every size. The turns suffice to fill SQLite's page caches,
/// which are bounded.
const SESSIONS: usize = 1_000;
const FINDS: usize = 2_000;
const LISTS: usize = 500;
const TURNS: usize = 6_000;

/// Compares current and peak resident memory after the workload on two databases.
pub fn growth(report: &mut Report, small: (&str, usize), large: (&str, usize)) {
    let [small, large] = [small, large].map(|(url, count)| {
        let out =
            Command::new(std::env::current_exe().unwrap()).args([CHILD, url, &count.to_string()]).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let text = String::from_utf8(out.stdout).unwrap();
        let mut megabytes = text.split_whitespace().map(|kb| kb.parse::<f64>().unwrap() / 1024.0);
        [megabytes.next().unwrap(), megabytes.next().unwrap()]
    });
    for (i, label) in ["resident memory", "the most it ever was"].into_iter().enumerate() {
        report.row(
            format!("{label}, the same work on 1,000,000 sessions, beside on 10,000"),
            format!("{:.1} MB", large[i]),
            format!("{:.1} MB", small[i]),
            large[i] / small[i],
            Promise::AtMost(1.2),
        );
    }
}

/// The measuring process: opens the database, runs the workload, and prints current and peak memory
/// in KB.
pub async fn child(mut args: impl Iterator<Item = String>) {
    let url = args.next().unwrap();
    let count = args.next().unwrap().parse::<usize>().unwrap();
    let tenure = Tenure::open_with(&url, lists::options_without_ttl()).await.unwrap();
    // Spread over all sessions, of which every tenth belongs to this user.
    let nth = |i: usize| i % SESSIONS * (count / SESSIONS) + 3;
    for i in 0..FINDS {
        lists::find(&tenure, nth(i)).await;
    }
    for i in 0..LISTS {
        let mut query = SessionQuery::new(OwnerFilter::AllTenants, 20);
        query.offset = i;
        assert_eq!(tenure.list(&bench_principal(), query).await.unwrap().heads.len(), 20);
    }
    for i in 0..TURNS {
        let session = id(&format!("s{:07}", nth(i)));
        let before = tenure.load(&bench_principal(), &session).await.unwrap().messages.len();
        tenure.append(&bench_principal(), &session, plain(turn(i))).await.unwrap();
        assert_eq!(tenure.load(&bench_principal(), &session).await.unwrap().messages.len(), before + 4);
    }
    println!("{} {}", status("VmRSS"), status("VmHWM"));
}

pub fn status(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
