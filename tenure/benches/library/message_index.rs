//! The message index: what it costs, and what it finds, beside a raw FTS5 table or a raw GIN index.

use crate::*;
use rusqlite::{Connection, params};
use tenure::store::{IndexWord, MessageMatches, MessageQuery, Store};

/// The size of the vocabulary of [`Text`].
const VOCABULARY: usize = 50_000;

/// Text whose words have the frequencies of natural language (Zipf), reproducible from a seed.
pub struct Text {
    words: Vec<String>,
    /// The cumulative frequency of each word.
    cumulative: Vec<f64>,
    state: u64,
}

impl Text {
    pub fn new(seed: u64) -> Self {
        let syllables =
            ["ka", "lo", "mi", "ter", "ran", "so", "ve", "de", "un", "pi", "gra", "ne", "tu", "ba", "el", "or"];
        let word = |n: usize| {
            let mut rest = n;
            let mut word = String::new();
            loop {
                word.push_str(syllables[rest % 16]);
                rest /= 16;
                if rest == 0 {
                    return word;
                }
            }
        };
        let mut sum = 0.0;
        let cumulative = (0..VOCABULARY).map(|n| {
            sum += 1.0 / (n as f64 + 2.7);
            sum
        });
        let cumulative = cumulative.collect();
        Self { words: (0..VOCABULARY).map(word).collect(), cumulative, state: seed }
    }

    /// A text of about this many bytes.
    pub fn next(&mut self, bytes: usize) -> String {
        let mut text = String::with_capacity(bytes + 16);
        while text.len() < bytes {
            self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let at = (self.state >> 11) as f64 / (1u64 << 53) as f64 * self.cumulative[VOCABULARY - 1];
            text.push_str(&self.words[self.cumulative.partition_point(|sum| *sum < at)]);
            text.push(' ');
        }
        text.truncate(text.trim_end().len());
        text
    }
}

fn options(message_index: bool) -> Options {
    Options { message_index, ..lists::options_without_ttl() }
}

/// A turn of 1 KB + 1 KB with the index, compared with the same turn without it; and what both take on disk,
/// compared with the text.
pub async fn cost(report: &mut Report) {
    const TURNS: usize = 4_000;
    let dir = tempfile::tempdir().unwrap();
    let mut postgres = Vec::new();
    let mut urls =
        vec![("SQLite", [true, false].map(|on| format!("sqlite:{}", dir.path().join(format!("{on}.db")).display())))];
    if let (Some(on), Some(off)) = (PostgresSchema::new(), PostgresSchema::new()) {
        urls.push(("PostgreSQL", [on.url(), off.url()]));
        postgres.extend([on, off]);
    }
    for (name, urls) in urls {
        let mut text = Text::new(7);
        let with = Tenure::open_with(&urls[0], options(true)).await.unwrap();
        let without = Tenure::open_with(&urls[1], options(false)).await.unwrap();
        let mut sessions = Vec::new();
        for n in 0..40 {
            create(&without, &format!("s{n}")).await;
            sessions.push(create(&with, &format!("s{n}")).await);
        }
        let mut times = [Vec::new(), Vec::new()];
        let mut bytes = 0;
        for n in 0..TURNS {
            let messages = vec![Message::user(&text.next(1000)), Message::assistant(&text.next(1000))];
            bytes += messages.iter().map(|m| m.text().len()).sum::<usize>();
            let session = &sessions[n % sessions.len()];
            for k in [n % 2, (n + 1) % 2] {
                let append = plain(messages.clone());
                let tenure = [&with, &without][k];
                times[k].push(timed(async { tenure.append(&bench_principal(), session, append).await.unwrap() }).await);
            }
        }
        let mean = |times: &[Duration]| times.iter().sum::<Duration>() / times.len() as u32;
        let [on, off] = &times;
        let row = |average: &str| format!("append a turn with the message index, beside without, {name}, {average}");
        report.row(row("mean"), ms(mean(on)), ms(mean(off)), ratio(mean(on), mean(off)), Promise::None);
        let (on, off) = (median(on.clone()), median(off.clone()));
        report.row(row("median"), ms(on), ms(off), ratio(on, off), Promise::AtMost(1.25));
        drop((with, without));
        let sizes = match &*postgres {
            [on, off] if name == "PostgreSQL" => [on, off].map(|schema| {
                let sql = format!(
                    "select sum(pg_total_relation_size(c.oid)) from pg_class c join pg_namespace n on \
                     n.oid = c.relnamespace where n.nspname = '{}' and c.relkind = 'r'",
                    schema.name()
                );
                run("psql", schema.server(), &["-Atqc", &sql]).trim().parse::<u64>().unwrap()
            }),
            _ => [true, false].map(|on| disk::size(&dir.path().join(format!("{on}.db")))),
        };
        let kb = |b: u64| format!("{} KB", b / 1024);
        for (label, size, promise) in [("with", sizes[0], Promise::AtMost(1.45)), ("without", sizes[1], Promise::None)]
        {
            let label = format!("disk {label} the message index, beside the text of the messages, {name}");
            report.row(label, kb(size), kb(bytes as u64), size as f64 / bytes as f64, promise);
        }
    }
}

/// The number of messages among which a rare word is searched. `TENURE_BENCH_MESSAGES` changes it.
fn messages() -> usize {
    std::env::var("TENURE_BENCH_MESSAGES").map_or(1_000_000, |n| n.parse().unwrap())
}

/// A word that five of a million messages have: the message index, compared with a raw FTS5 table of the same texts.
pub async fn rare_word(report: &mut Report) {
    const BATCH: usize = 1_000;
    let count = messages();
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("measured.db").display());
    let tenure = Tenure::open_with(&url, options(true)).await.unwrap();
    let raw = Connection::open(dir.path().join("raw.db")).unwrap();
    raw.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;
         CREATE VIRTUAL TABLE m USING fts5(text, content = '', detail = none)",
    )
    .unwrap();
    let mut text = Text::new(11);
    for batch in 0..count / BATCH {
        let session = create(&tenure, &format!("s{batch:05}")).await;
        let mut texts: Vec<String> = (0..BATCH).map(|_| text.next(300)).collect();
        if batch % (count / BATCH / 5).max(1) == 0 {
            texts[BATCH / 2].push_str(" zanzibar");
        }
        raw.execute_batch("BEGIN").unwrap();
        for (n, text) in texts.iter().enumerate() {
            let mut insert = raw.prepare_cached("INSERT INTO m (rowid, text) VALUES (?1, ?2)").unwrap();
            insert.execute(params![(batch * BATCH + n) as i64, text]).unwrap();
        }
        raw.execute_batch("COMMIT").unwrap();
        let messages: Vec<Message> = texts.iter().map(|text| Message::user(text)).collect();
        tenure.append(&bench_principal(), &session, plain(messages)).await.unwrap();
    }
    let store: &dyn Store = &**tenure.store();
    let index = store.message_index().unwrap();
    let mut measured = Vec::new();
    let mut baseline = Vec::new();
    for _ in 0..101 {
        let mut select =
            raw.prepare_cached("SELECT rowid FROM m WHERE m MATCH 'zanzibar' ORDER BY rowid DESC LIMIT 21").unwrap();
        let (elapsed, rows) = time(|| select.query_map([], |r| r.get::<_, i64>(0)).unwrap().count());
        baseline.push(elapsed);
        let query = MessageQuery {
            rules: tenure.word_rules(),
            tenant: bench_principal().tenant,
            user: None,
            words: vec![IndexWord { text: "zanzibar".to_owned(), is_prefix: false }],
            limit: 21,
        };
        let start = Instant::now();
        let MessageMatches::Found(found) = index.find(&query).await.unwrap() else { panic!("the index is incomplete") };
        measured.push(start.elapsed());
        assert_eq!(found.len(), rows);
    }
    let (measured, baseline) = (median(measured), median(baseline));
    let label = format!("a rare word among {count} messages in the message index, beside a raw FTS5 table");
    report.row(label, ms(measured), ms(baseline), ratio(measured, baseline), Promise::AtMost(3.0));
}
