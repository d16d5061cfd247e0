//! Every hot path beside the raw limit: the same bytes with the same durability, in one run, as ratios. `make bench` runs all of it;
//! `cargo bench -p tenure --all-features -- append load` runs parts. Absolute times depend on the machine and its mood; ratios less so.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a bench measures time and may stop at the first surprise"
)]

mod disk;
mod lists;
mod memory;
mod peers;
mod raw;
mod reads;
mod writes;

use std::time::{Duration, Instant};
use tenure::*;

/// One line of the result: what was measured, how it compares, and what was promised.
pub struct Row {
    pub what: String,
    pub ours: String,
    pub beside: String,
    pub ratio: f64,
    pub promise: Promise,
}

#[derive(Clone, Copy)]
pub enum Promise {
    AtMost(f64),
    AtLeast(f64),
    None,
}

pub struct Report(Vec<Row>);

impl Report {
    pub fn row(
        &mut self,
        what: impl Into<String>,
        ours: impl Into<String>,
        beside: impl Into<String>,
        ratio: f64,
        promise: Promise,
    ) {
        let row = Row { what: what.into(), ours: ours.into(), beside: beside.into(), ratio, promise };
        println!("{}", line(&row));
        self.0.push(row);
    }
}

fn line(row: &Row) -> String {
    let (promise, kept) = match row.promise {
        Promise::AtMost(x) => (format!("at most {x}"), row.ratio <= x),
        Promise::AtLeast(x) => (format!("at least {x}"), row.ratio >= x),
        Promise::None => (String::new(), true),
    };
    let verdict = if kept { "" } else { " **missed**" };
    format!("| {} | {} | {} | {:.2} | {promise}{verdict} |", row.what, row.ours, row.beside, row.ratio)
}

pub fn who() -> Principal {
    Principal::new("bench", "u3").unwrap()
}

pub fn id(s: &str) -> SessionId {
    SessionId::new(s).unwrap()
}

fn words(n: usize, seed: usize) -> String {
    let list = ["the ", "agent ", "session ", "of ", "memory ", "query ", "retry ", "result "];
    let (mut text, mut x) = (String::with_capacity(n + 8), seed as u64 * 2654435761 + 12345);
    while text.len() < n {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1);
        text.push_str(list[(x >> 60) as usize & 7]);
    }
    text.truncate(n);
    text
}

/// A turn of the common workload: user 200 characters, a tool call, its result of 1 KB, an answer of 600.
pub fn turn(i: usize) -> Vec<Message> {
    let (u, a, t, f) =
        (words(200, i % 64), words(60, 1000 + i % 64), words(1024, 2000 + i % 64), words(600, 3000 + i % 64));
    let texts = [
        format!(r#"{{"role":"user","content":"{u}","id":"m{i}-0"}}"#),
        format!(
            r#"{{"role":"assistant","content":"","tool_calls":[{{"id":"call_{i:08x}","type":"function","function":{{"name":"search","arguments":"{{\"query\": \"{a}\", \"limit\": 5}}"}}}}],"id":"m{i}-1"}}"#
        ),
        format!(r#"{{"role":"tool","tool_call_id":"call_{i:08x}","content":"{t}","id":"m{i}-2"}}"#),
        format!(r#"{{"role":"assistant","content":"{f}","id":"m{i}-3"}}"#),
    ];
    texts.iter().map(|t| Message::parse(t).unwrap()).collect()
}

/// A plain append: what raw rows do too.
pub fn plain(messages: Vec<Message>) -> Append {
    Append { checkpoint: AutoCheckpoint::Off, ..messages.into() }
}

pub fn median(mut xs: Vec<Duration>) -> Duration {
    xs.sort();
    xs[xs.len() / 2]
}

pub fn time<T>(f: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let value = f();
    (start.elapsed(), value)
}

pub async fn timed<T>(f: impl Future<Output = T>) -> Duration {
    let start = Instant::now();
    f.await;
    start.elapsed()
}

pub fn ms(d: Duration) -> String {
    format!("{:.3} ms", d.as_secs_f64() * 1e3)
}

pub fn ratio(a: Duration, b: Duration) -> f64 {
    a.as_secs_f64() / b.as_secs_f64()
}

/// Fills a session with many turns, in large steps.
pub async fn fill(tenure: &Tenure, session: &SessionId, messages: usize) {
    for from in (0..messages / 4).step_by(1000) {
        let said: Vec<Message> = (from..(from + 1000).min(messages / 4)).flat_map(turn).collect();
        tenure.append(&who(), session, plain(said)).await.unwrap();
    }
}

pub async fn create(tenure: &Tenure, name: &str) -> SessionId {
    tenure.create(&who(), New { id: Some(id(name)), ..New::default() }).await.unwrap();
    id(name)
}

fn main() {
    let chosen: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wants = |name: &str| chosen.is_empty() || chosen.iter().any(|c| c == name);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some(memory::CHILD) {
        return runtime.block_on(memory::child(args));
    }
    let mut report = Report(Vec::new());
    println!("| what | ours | beside | ratio | promise |\n|---|---|---|---|---|");
    runtime.block_on(async {
        if wants("append") {
            writes::append(&mut report).await;
        }
        if wants("writers") {
            writes::writers(&mut report).await;
        }
        if wants("disk") {
            disk::bytes(&mut report).await;
        }
        if wants("load") {
            reads::load(&mut report).await;
        }
        if wants("fork") {
            reads::fork(&mut report).await;
        }
        if wants("list") {
            lists::newest(&mut report).await;
        }
        if wants("match") {
            lists::content_match(&mut report).await;
        }
        if wants("peers") {
            peers::side_by_side(&mut report).await;
        }
    });
    let missed = report.0.iter().filter(|r| line(r).contains("missed")).count();
    println!("\n{} measured, {missed} missed", report.0.len());
}
