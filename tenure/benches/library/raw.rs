//! The raw limit: rusqlite alone, an append-only table, WAL and `synchronous=FULL`.

use rusqlite::{Connection, params};
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tenure::Message;

pub fn open(path: &Path) -> Connection {
    let db = Connection::open(path).unwrap();
    db.busy_timeout(Duration::from_secs(30)).unwrap();
    db.pragma_update(None, "journal_mode", "WAL").unwrap();
    db.pragma_update(None, "synchronous", "FULL").unwrap();
    db.execute_batch("CREATE TABLE IF NOT EXISTS m(k INTEGER PRIMARY KEY, data TEXT)").unwrap();
    db
}

pub fn insert(db: &Connection, session: i64, from: usize, messages: &[Message]) {
    let mut insert = db.prepare_cached("INSERT INTO m VALUES(?,?)").unwrap();
    for (k, m) in messages.iter().enumerate() {
        insert.execute(params![(session << 32) | (from + k) as i64, m.as_str()]).unwrap();
    }
}

/// Commits messages in one transaction.
pub fn commit(db: &Connection, session: i64, from: usize, messages: &[Message]) {
    db.execute_batch("BEGIN IMMEDIATE").unwrap();
    insert(db, session, from, messages);
    db.execute_batch("COMMIT").unwrap();
}

/// Turns per second of concurrent writers with group commit.
pub fn group_commit(path: &Path, writers: usize, time: Duration) -> f64 {
    type Job = (i64, usize, Vec<Message>, mpsc::SyncSender<()>);
    let (jobs, queue) = mpsc::channel::<Job>();
    let db = open(path);
    let writer = std::thread::spawn(move || {
        while let Ok(first) = queue.recv() {
            db.execute_batch("BEGIN IMMEDIATE").unwrap();
            let mut acks = Vec::new();
            let mut insert_job = |(session, from, messages, ack): Job| {
                insert(&db, session, from, &messages);
                acks.push(ack);
                acks.len()
            };
            insert_job(first);
            while let Ok(next) = queue.try_recv() {
                if insert_job(next) >= 256 {
                    break;
                }
            }
            db.execute_batch("COMMIT").unwrap();
            for ack in acks {
                ack.send(()).unwrap();
            }
        }
    });
    let start = Instant::now();
    let threads: Vec<_> = (0..writers)
        .map(|w| {
            let jobs = jobs.clone();
            std::thread::spawn(move || {
                let mut n = 0;
                while start.elapsed() < time {
                    let (ack, acked) = mpsc::sync_channel(1);
                    jobs.send((w as i64, n * 4, crate::turn(n), ack)).unwrap();
                    acked.recv().unwrap();
                    n += 1;
                }
                n
            })
        })
        .collect();
    let turns: usize = threads.into_iter().map(|t| t.join().unwrap()).sum();
    let rate = turns as f64 / start.elapsed().as_secs_f64();
    drop(jobs);
    writer.join().unwrap();
    rate
}

/// Reads all rows of a session as one JSON list.
pub fn load(db: &Connection, session: i64) -> String {
    let mut select =
        db.prepare_cached("SELECT data FROM m WHERE k BETWEEN ?1 << 32 AND ((?1 + 1) << 32) - 1 ORDER BY k").unwrap();
    let mut rows = select.query([session]).unwrap();
    let mut out = String::from("[");
    while let Some(row) = rows.next().unwrap() {
        if out.len() > 1 {
            out.push(',');
        }
        out.push_str(row.get_ref(0).unwrap().as_str().unwrap());
    }
    out.push(']');
    out
}
