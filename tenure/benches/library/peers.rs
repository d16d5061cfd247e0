//! Other session stores with the same workload, in the same run: `scripts/bench-peers.sh` prepares
//! them.

use crate::*;
use std::path::Path;
use std::process::Command;

/// The OpenAI Agents SDK's `SQLiteSession` and LangGraph's SQLite saver: a turn at 0 and at 5,000
/// messages.
pub async fn side_by_side(report: &mut Report) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let scripts = std::env::var("PEERS_DIR").map_or(root.join("../shared/peers"), Into::into);
    let python = root.join("target/peers/venv/bin/python");
    if !python.exists() || !scripts.exists() {
        println!("(peers are not measured: run scripts/bench-peers.sh first; `make bench` does)");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let tenure = Tenure::open(&format!("sqlite:{}", dir.path().join("ours.db").display())).await.unwrap();
    for (name, script) in
        [("OpenAI Agents SDK, SQLiteSession", "peer_openai.py"), ("LangGraph, SQLite saver", "peer_langgraph.py")]
    {
        let out = Command::new(&python)
            .arg(scripts.join(script))
            .args(["W1", "--json", "--jump", "--n", "5000"])
            .env("PEERS", root.join("target/peers"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        let Some(result) = text.lines().rev().find_map(|l| serde_json::from_str::<serde_json::Value>(l).ok()) else {
            println!(
                "({name} could not be measured: {})",
                String::from_utf8_lossy(&out.stderr).lines().last().unwrap_or_default()
            );
            continue;
        };
        for length in [0, 5000] {
            let session = create(&tenure, &format!("{}-{length}", script.replace(['_', '.'], "-"))).await;
            fill(&tenure, &session, length).await;
            let mut times = Vec::new();
            for n in 0..200 {
                times.push(timed(async { tenure.append(&bench_principal(), &session, turn(n)).await.unwrap() }).await);
            }
            let measured = median(times);
            let Some(peer_ms) = result["result"][format!("len_{length}")]["p50_ms"].as_f64() else { continue };
            let label = format!("append a turn at {length} messages, beside {name}");
            report.row(
                label,
                ms(measured),
                format!("{peer_ms:.3} ms"),
                measured.as_secs_f64() * 1e3 / peer_ms,
                Promise::None,
            );
        }
    }
}
