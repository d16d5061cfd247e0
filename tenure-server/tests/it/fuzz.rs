//! Runs the corpus of the fuzz targets, and many mutations of each file: a small part of `cargo fuzz` on every test
//! run.

#[path = "../../../fuzz/targets.rs"]
mod targets;

use std::path::PathBuf;

fn corpus(target: &str, more: &[&str]) -> Vec<Vec<u8>> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for dir in [format!("fuzz/corpus/{target}").as_str()].iter().chain(more) {
        for file in std::fs::read_dir(root.join(dir)).unwrap() {
            let path = file.unwrap().path();
            let known = ["json", "jsonl", "txt"].map(Some);
            if known.contains(&path.extension().and_then(|e| e.to_str())) {
                files.push(std::fs::read(path).unwrap());
            }
        }
    }
    assert!(files.len() > 2, "the corpus is there");
    files
}

/// Deterministic mutations: truncates, duplicates, swaps and overwrites.
fn damaged(bytes: &[u8], seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = |n: usize| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x % n.max(1) as u64) as usize
    };
    let mut bytes = bytes.to_vec();
    for _ in 0..=next(4) {
        let a = next(bytes.len() + 1);
        let b = next(bytes.len() + 1);
        let (a, b) = (a.min(b), a.max(b));
        match next(5) {
            0 => drop(bytes.drain(a..b)),
            1 => bytes.truncate(a),
            2 => {
                let part = bytes[a..b].to_vec();
                bytes.splice(a..a, part);
            }
            3 if a < bytes.len() => bytes[a] = b"{}[]\",:0\\n\0\xff-"[next(13)],
            _ => bytes.splice(a..a, *b"null").for_each(drop),
        }
    }
    bytes
}

fn run(target: fn(&[u8]), corpus: Vec<Vec<u8>>, times: u64) {
    for bytes in corpus {
        target(&bytes);
        (0..times).for_each(|seed| target(&damaged(&bytes, seed)));
    }
}

#[test]
fn requests() {
    run(targets::request, corpus("request", &[]), 60);
}

#[test]
fn reconciling() {
    run(targets::reconcile, corpus("reconcile", &[]), 300);
}

#[test]
fn imported_sessions() {
    run(targets::foreign, corpus("foreign", &["tenure/tests/fixtures/foreign"]), 60);
}

#[test]
fn jsonl_files() {
    run(targets::jsonl, corpus("jsonl", &["tenure/tests/fixtures/formats/1/jsonl/acme"]), 60);
}
