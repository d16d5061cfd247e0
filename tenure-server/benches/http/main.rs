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
mod disk;
mod fairness;
mod messages;
#[allow(dead_code, reason = "shared with the library's benches")]
#[path = "../../../tenure/benches/library/raw.rs"]
mod raw;
mod reads;
mod servers;
#[allow(dead_code, reason = "shared with the library's benches")]
#[path = "../../../tenure/benches/library/support.rs"]
mod support;

pub use std::time::{Duration, Instant};
pub use support::Report;
pub use support::*;
pub use tenure::{log::*, maintenance::*, memory::*, policy::*, review::*, rules::*, run::*, session::*, *};

fn main() {
    let selected: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let is_selected = |name: &str| selected.is_empty() || selected.iter().any(|c| c == name);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut report = Report::begin();
    runtime.block_on(async {
        if is_selected("chat") {
            chat::added_latency(&mut report).await;
        }
        if is_selected("stream") {
            chat::first_chunk(&mut report).await;
        }
        if is_selected("messages") {
            messages::one_client(&mut report).await;
            messages::sixteen_clients(&mut report).await;
        }
        if is_selected("reads") {
            reads::full_session(&mut report).await;
            reads::last_messages(&mut report).await;
        }
        if is_selected("disk") {
            disk::chat_turns(&mut report).await;
        }
        if is_selected("fairness") {
            fairness::chat_beside_listers(&mut report).await;
        }
        if is_selected("memory") {
            fairness::memory_of_recalls(&mut report).await;
            reads::memory(&mut report).await;
        }
    });
    report.end();
}
