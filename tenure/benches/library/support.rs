//! Shared parts of the benchmarks: the report, the common workload, and the external programs for
//! comparison.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
pub use tenure::testing::PostgresSchema;
use tenure::{session::*, *};

/// One row of the report: the measurement, its baseline, and the promised bound.
pub struct Row {
    pub label: String,
    pub measured: String,
    pub baseline: String,
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
    /// Prints the header of the table.
    pub fn begin() -> Self {
        println!("| what | ours | beside | ratio | promise |\n|---|---|---|---|---|");
        Self(Vec::new())
    }

    /// Prints how many rows were measured, and how many missed their bound.
    pub fn end(&self) {
        let missed = self.0.iter().filter(|r| line(r).contains("missed")).count();
        println!("\n{} measured, {missed} missed", self.0.len());
    }

    pub fn row(
        &mut self,
        label: impl Into<String>,
        measured: impl Into<String>,
        baseline: impl Into<String>,
        ratio: f64,
        promise: Promise,
    ) {
        let row = Row { label: label.into(), measured: measured.into(), baseline: baseline.into(), ratio, promise };
        println!("{}", line(&row));
        self.0.push(row);
    }
}

fn line(row: &Row) -> String {
    let (promise, is_met) = match row.promise {
        Promise::AtMost(x) => (format!("at most {x}"), row.ratio <= x),
        Promise::AtLeast(x) => (format!("at least {x}"), row.ratio >= x),
        Promise::None => (String::new(), true),
    };
    let verdict = if is_met { "" } else { " **missed**" };
    format!("| {} | {} | {} | {:.2} | {promise}{verdict} |", row.label, row.measured, row.baseline, row.ratio)
}

pub fn bench_principal() -> Principal {
    Principal::new("bench", "u3").unwrap()
}

pub fn id(s: &str) -> SessionId {
    SessionId::new(s).unwrap()
}

pub fn words(n: usize, seed: usize) -> String {
    let list = ["the ", "agent ", "session ", "of ", "memory ", "query ", "retry ", "result "];
    let mut text = String::with_capacity(n + 8);
    let mut x = seed as u64 * 2654435761 + 12345;
    while text.len() < n {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1);
        text.push_str(list[(x >> 60) as usize & 7]);
    }
    text.truncate(n);
    text
}

/// A turn of the common workload: a user message of 200 characters, a tool call, its result of 1
/// KB, and an answer of 600 characters.
pub fn turn(i: usize) -> Vec<Message> {
    let u = words(200, i % 64);
    let a = words(60, 1000 + i % 64);
    let t = words(1024, 2000 + i % 64);
    let f = words(600, 3000 + i % 64);
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

/// An append without an automatic checkpoint, which is comparable to raw rows.
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

/// Fills a session with many turns, in large batches.
pub async fn fill(tenure: &Tenure, session: &SessionId, messages: usize) {
    for from in (0..messages / 4).step_by(1000) {
        let batch: Vec<Message> = (from..(from + 1000).min(messages / 4)).flat_map(turn).collect();
        tenure.append(&bench_principal(), session, plain(batch)).await.unwrap();
    }
}

pub async fn create(tenure: &Tenure, name: &str) -> SessionId {
    tenure.create(&bench_principal(), NewSession { id: Some(id(name)), ..NewSession::default() }).await.unwrap();
    id(name)
}

/// Transactions per second of `pgbench` that inserts the same four rows with prepared statements.
pub fn pgbench(url: &str, schema: &str) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("turn.sql");
    let sql = format!(
        "\\set sid random(1, 100000)\nBEGIN;\nINSERT INTO {schema}.m(sid, data) SELECT :sid, d FROM {schema}.payload;\nCOMMIT;\n"
    );
    std::fs::write(&script, sql).unwrap();
    let sizes: Vec<String> = turn(1).iter().map(|m| m.as_str().len().to_string()).collect();
    let setup = format!(
        "drop table if exists {schema}.m, {schema}.payload; \
         create table {schema}.m(id bigserial, sid bigint, data text, primary key(sid, id)); create table {schema}.payload(d text); \
         insert into {schema}.payload select left(repeat(md5(n::text) || ' agent session memory ', 60), n) from unnest(array[{}]) n",
        sizes.join(",")
    );
    run("psql", url, &["-qc", &setup]);
    let out = run(
        "pgbench",
        url,
        &["-n", "-T", "3", "-M", "prepared", "-c", "16", "-j", "2", "-f", &script.display().to_string()],
    );
    let tps = out.lines().find_map(|l| l.strip_prefix("tps = ")).expect("pgbench reports its rate");
    tps.split(' ').next().unwrap().parse().unwrap()
}

pub fn run(program: &str, url: &str, args: &[&str]) -> String {
    let bin = Command::new("bash")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/postgres.sh"))
        .arg("bin")
        .output()
        .unwrap();
    let path = Path::new(String::from_utf8(bin.stdout).unwrap().trim()).join(program);
    let program = if path.exists() { path } else { program.into() };
    let out = Command::new(program).args(args).arg(url).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}
