//! HTTP benchmarks of the server over loopback, as ratios to the limits of the hardware and of the libraries,
//! measured in the same run. `make bench-http` runs all of them; `cargo bench -p tenure-server --bench http -- chat
//! messages` runs some.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a bench measures time and may stop at the first surprise"
)]

mod chat;
mod client;
mod fairness;
#[allow(dead_code, reason = "shared with the library's benches")]
#[path = "../../../tenure/benches/library/kit.rs"]
mod kit;
mod messages;
#[allow(dead_code, reason = "shared with the library's benches")]
#[path = "../../../tenure/benches/library/raw.rs"]
mod raw;
mod reads;
mod servers;

pub use kit::Report;
pub use kit::*;
pub use std::time::{Duration, Instant};
pub use tenure::*;

fn main() {
    let chosen: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wants = |name: &str| chosen.is_empty() || chosen.iter().any(|c| c == name);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut report = Report::begin();
    runtime.block_on(async {
        if wants("chat") {
            chat::added_latency(&mut report).await;
        }
        if wants("stream") {
            chat::first_chunk(&mut report).await;
        }
        if wants("messages") {
            messages::one_client(&mut report).await;
            messages::sixteen_clients(&mut report).await;
        }
        if wants("reads") {
            reads::full_session(&mut report).await;
            reads::last_messages(&mut report).await;
        }
        if wants("fairness") {
            fairness::chat_beside_listers(&mut report).await;
        }
        if wants("memory") {
            fairness::memory_of_recalls(&mut report).await;
            reads::memory(&mut report).await;
        }
    });
    report.end();
}
