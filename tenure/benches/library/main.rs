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
mod kit;
mod lists;
mod memory;
mod merge;
mod peers;
mod raw;
mod reads;
mod recall;
mod runs;
mod search;
mod writes;

use kit::Report;
use kit::*;
use std::time::{Duration, Instant};
use tenure::*;

fn main() {
    let chosen: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wants = |name: &str| chosen.is_empty() || chosen.iter().any(|c| c == name);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some(memory::CHILD) {
        return runtime.block_on(memory::child(args));
    }
    let mut report = Report::begin();
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
        if wants("merge") {
            merge::requests(&mut report);
        }
        if wants("recall") {
            recall::scope_none(&mut report).await;
            recall::among(&mut report).await;
        }
        if wants("runs") {
            runs::rounds(&mut report).await;
            runs::resume(&mut report).await;
            runs::paused(&mut report).await;
        }
        if wants("search") {
            search::words(&mut report).await;
        }
        if wants("peers") {
            peers::side_by_side(&mut report).await;
        }
    });
    report.end();
}
