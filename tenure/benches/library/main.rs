//! Every performance-critical path compared with its raw limit: the same bytes with the same
//! durability, measured in the same run and reported as ratios, which depend less on the machine
//! than absolute times. `make bench` runs everything; `cargo bench -p tenure --all-features --
//! append load` runs parts.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    missing_docs,
    reason = "a bench measures time and may stop at the first surprise"
)]

mod disk;
mod lists;
mod memory;
mod merge;
mod message_index;
mod peers;
mod raw;
mod reads;
mod recall;
mod runs;
mod search;
mod support;
mod writes;

use std::time::{Duration, Instant};
use support::Report;
use support::*;
use tenure::{log::*, memory::*, policy::*, review::*, run::*, session::*, *};

fn main() {
    let selected: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let is_selected = |name: &str| selected.is_empty() || selected.iter().any(|c| c == name);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some(memory::CHILD) {
        return runtime.block_on(memory::child(args));
    }
    let mut report = Report::begin();
    runtime.block_on(async {
        if is_selected("append") {
            writes::append(&mut report).await;
        }
        if is_selected("writers") {
            writes::writers(&mut report).await;
        }
        if is_selected("disk") {
            disk::bytes(&mut report).await;
        }
        if is_selected("load") {
            reads::load(&mut report).await;
        }
        if is_selected("fork") {
            reads::fork(&mut report).await;
        }
        if is_selected("list") {
            lists::newest(&mut report).await;
        }
        if is_selected("match") {
            lists::content_match(&mut report).await;
        }
        if is_selected("merge") {
            merge::requests(&mut report);
        }
        if is_selected("recall") {
            recall::scope_none(&mut report).await;
            recall::among(&mut report).await;
        }
        if is_selected("runs") {
            runs::rounds(&mut report).await;
            runs::resume(&mut report).await;
            runs::paused(&mut report).await;
        }
        if is_selected("search") {
            search::words(&mut report).await;
        }
        if is_selected("index") {
            message_index::cost(&mut report).await;
            message_index::rare_word(&mut report).await;
        }
        if is_selected("peers") {
            peers::side_by_side(&mut report).await;
        }
    });
    report.end();
}
