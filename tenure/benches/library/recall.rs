//! Recall among many memories.

use crate::*;
use base64::Engine;
use std::sync::Arc;
use tenure::store::{Item, Namespace, Owner, Store};

const LENGTH: usize = 384;

/// Random numbers that depend only on the seed.
fn random(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    })
}

/// Random words out of 5,000.
fn sentence(seed: usize, words: usize) -> String {
    random(seed as u64).take(words).map(|r| format!("word{}", r % 5_000)).collect::<Vec<_>>().join(" ")
}

fn vector(seed: usize) -> Vec<i8> {
    random(seed as u64 + 77).take(LENGTH).map(|r| (r % 255) as i8).collect()
}

/// An embedder without computation cost.
fn instant_embedder() -> Embedder {
    Embedder::new("bench", |texts| async move {
        Ok(texts.iter().map(|t| vector(t.len()).iter().map(|n| f32::from(*n)).collect()).collect())
    })
}

/// Writes memories in their storage format directly to the store.
async fn write_memories(store: &Arc<dyn Store>, count: usize) {
    let at = jiff::Timestamp::UNIX_EPOCH;
    let mut tasks = Vec::new();
    for worker in 0..64 {
        let store = store.clone();
        let namespace = Namespace {
            tenant: bench_principal().tenant,
            owner: Owner::User(bench_principal().user),
            name: "memory".to_owned(),
        };
        tasks.push(tokio::spawn(async move {
            for n in (worker..count).step_by(64) {
                let bytes: Vec<u8> = vector(n).into_iter().map(|n| n as u8).collect();
                let bytes = base64::engine::general_purpose::STANDARD_NO_PAD.encode(bytes);
                let vector = serde_json::json!({"model": "bench", "bytes": bytes});
                let value = serde_json::json!({"text": sentence(n, 12), "sources": {" bench": []}, "vector": vector});
                let item = Item {
                    key: format!("mem_{n:08}"),
                    value: value.to_string(),
                    created_at: at,
                    used_at: at,
                    uses: 0,
                    expires_at: None,
                };
                store.put(&namespace, &item, None).await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

/// Recall among 100,000 memories of one user compared with 1,000; and recall by words and
/// similarity compared with words alone.
pub async fn among(report: &mut Report) {
    for kind in ["sqlite", "jsonl", "postgres"] {
        let dir = tempfile::tempdir().unwrap();
        let mut medians = Vec::new();
        for count in [1_000, 100_000] {
            let mut schema = None;
            let url = match kind {
                "sqlite" => format!("sqlite:{}", dir.path().join(format!("{count}.db")).display()),
                "jsonl" => format!("jsonl:{}", dir.path().join(format!("{count}")).display()),
                _ => {
                    let Some(new) = PostgresSchema::new() else { continue };
                    schema.insert(new).url()
                }
            };
            let by_words = Tenure::open(&url).await.unwrap();
            write_memories(by_words.store(), count).await;
            let by_both = Tenure::with_store(
                by_words.store().clone(),
                Options { embedder: Some(instant_embedder()), ..Options::default() },
            );
            // The first recall of a process loads the index.
            for tenure in [&by_words, &by_both] {
                tenure.recall(&bench_principal(), &MemoryTarget::Own, "word1", 8).await.unwrap();
            }
            let mut times = [Vec::new(), Vec::new()];
            for i in 0..100 {
                let question = sentence(1_000_000 + i, 4);
                for (tenure, times) in [&by_words, &by_both].into_iter().zip(&mut times) {
                    times.push(
                        timed(async {
                            tenure.recall(&bench_principal(), &MemoryTarget::Own, &question, 8).await.unwrap()
                        })
                        .await,
                    );
                }
            }
            medians.push(times.map(median));
        }
        let [[small, small_both], [large, large_both]] = medians[..] else { continue };
        for (method, large, small) in [("words", large, small), ("words and meaning", large_both, small_both)] {
            report.row(
                format!("recall by {method} among 100,000 memories, {kind}, beside among 1,000"),
                ms(large),
                ms(small),
                ratio(large, small),
                Promise::AtMost(5.0),
            );
        }
        report.row(
            format!("recall by words and meaning among 100,000, {kind}, beside by words"),
            ms(large_both),
            ms(large),
            ratio(large_both, large),
            Promise::AtMost(3.0),
        );
    }
}

/// The overhead of memory scope `none` at the start of a turn, compared with no assistant: expected
/// to be unmeasurable.
pub async fn scope_none(report: &mut Report) {
    let dir = tempfile::tempdir().unwrap();
    let tenure = Tenure::open(&format!("sqlite:{}", dir.path().join("t.db").display())).await.unwrap();
    tenure.declare(Assistant {
        name: "none".into(),
        memory: Some(MemoryConfig { scope: MemoryScope::None, ..MemoryConfig::default() }),
        ..Assistant::default()
    });
    tenure.declare(Assistant { name: "plain".into(), ..Assistant::default() });
    let mut times = [Vec::new(), Vec::new()];
    for i in 0..400 {
        for (assistant, times) in ["none", "plain"].into_iter().zip(&mut times) {
            let request = TurnRequest {
                session: Some(id(assistant)),
                messages: vec![Message::user(&format!("{i} {}", words(200, i)))],
                history: Some(HistoryMode::Append),
                assistant: Some(assistant.to_owned()),
                ..TurnRequest::default()
            };
            times.push(timed(async { tenure.begin_turn(&bench_principal(), request).await.unwrap() }).await);
        }
    }
    let [none, plain] = times.map(median);
    report.row(
        "beginning a turn with the scope `none`, beside without a memory",
        ms(none),
        ms(plain),
        ratio(none, plain),
        Promise::AtMost(1.1),
    );
}
