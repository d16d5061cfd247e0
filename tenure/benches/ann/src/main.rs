//! Recall and time of the vector search of `tenure`, beside exact search and two HNSW indexes (D-074).
//!
//! ```sh
//! cd tenure/benches/ann
//! cargo run --release -- clustered 200000 index hnsw_rs usearch
//! cargo run --release -- VECTORS:QUESTIONS 1000000 index
//! ```
//!
//! Each row: data, vectors, index, recall@10 over 100 questions, median and 95th percentile of the time of a
//! question in milliseconds, time to build in seconds, memory in MB. The data are `uniform`, `clustered`, or two
//! files of little-endian 32-bit floats, 384 for each vector: vectors computed by a model, and questions. More
//! vectors than the file has are mixed from three of its own and noise.

#[path = "../../../src/rules/vector_set.rs"]
mod vector_set;

use hnsw_rs::prelude::{DistDot, Hnsw};
use std::time::Instant;
use usearch::{IndexOptions, MetricKind, ScalarKind};
use vector_set::VectorSet;

const DIMENSION: usize = 384;
const LIMIT: usize = 10;
const QUESTIONS: usize = 100;
/// Neighbours of each node of an HNSW graph, and candidates while it is built.
const CONNECTIVITY: usize = 16;
const BUILD_CANDIDATES: usize = 128;
/// Candidates of an HNSW search: a usual value, and one for high recall.
const SEARCH_CANDIDATES: [usize; 2] = [64, 256];

type Vectors = Vec<Vec<f32>>;

/// Pseudo-random numbers (SplitMix64), the same in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Nearly normally distributed, with a standard deviation of 1/√384.
    fn component(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.unit()).sum();
        (sum - 2.0) * 3.0_f32.sqrt() / (DIMENSION as f32).sqrt()
    }

    fn vector(&mut self) -> Vec<f32> {
        normalized((0..DIMENSION).map(|_| self.component()).collect())
    }
}

fn normalized(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    vector.iter_mut().for_each(|x| *x /= length);
    vector
}

/// As `tenure::types::vector` quantizes.
fn quantized(vector: &[f32]) -> Vec<i8> {
    let largest = vector.iter().fold(f32::MIN_POSITIVE, |largest, x| largest.max(x.abs()));
    vector.iter().map(|x| (x / largest * 127.0).round() as i8).collect()
}

fn read(path: &str) -> Vectors {
    let bytes = std::fs::read(path).expect("the file is readable");
    let numbers = |vector: &[u8]| vector.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    bytes.chunks_exact(DIMENSION * 4).map(numbers).collect()
}

/// The vectors and the questions.
fn data(kind: &str, count: usize) -> (Vectors, Vectors) {
    let mut random = Random(count as u64);
    match kind.split_once(':') {
        Some((vectors, questions)) => {
            let base = read(vectors);
            let mixed = |i: usize| {
                if let Some(vector) = base.get(i) {
                    return vector.clone();
                }
                let [a, b, c] = [(); 3].map(|()| &base[random.below(base.len())]);
                let (s, t) = (random.unit(), random.unit() / 2.0);
                let mix = |j: usize| a[j] + s * b[j] + t * c[j] + 0.3 * random.component();
                normalized((0..DIMENSION).map(mix).collect())
            };
            let questions = read(questions);
            let step = questions.len().div_ceil(QUESTIONS);
            ((0..count).map(mixed).collect(), questions.into_iter().step_by(step).collect())
        }
        None if kind == "uniform" => {
            ((0..count).map(|_| random.vector()).collect(), (0..QUESTIONS).map(|_| random.vector()).collect())
        }
        None => {
            let centers: Vectors = (0..count / 100).map(|_| random.vector()).collect();
            let mut near_a_center = |_| {
                let center = &centers[random.below(centers.len())];
                normalized(center.iter().map(|x| x + 0.8 * random.component()).collect())
            };
            ((0..count).map(&mut near_a_center).collect(), (0..QUESTIONS).map(near_a_center).collect())
        }
    }
}

/// The positions of the nearest vectors, by exact search.
fn exact(vectors: &Vectors, question: &[f32]) -> Vec<usize> {
    let dot = |vector: &[f32]| {
        let mut sums = [0.0; 16];
        for (a, b) in vector.as_chunks::<16>().0.iter().zip(question.as_chunks::<16>().0) {
            (0..16).for_each(|i| sums[i] += a[i] * b[i]);
        }
        sums.iter().sum::<f32>()
    };
    let mut all: Vec<(f32, usize)> = vectors.iter().enumerate().map(|(i, vector)| (dot(vector), i)).collect();
    all.select_nth_unstable_by(LIMIT, |(a, _), (b, _)| b.total_cmp(a));
    all[..LIMIT].iter().map(|(_, i)| *i).collect()
}

/// The memory of this process, in MB.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    pages.split(' ').nth(1).and_then(|n| n.parse::<usize>().ok()).unwrap_or(0) * 4096 / 1_000_000
}

struct Measurement<'a> {
    kind: &'a str,
    vectors: &'a Vectors,
    questions: &'a Vectors,
    expected: Vec<Vec<usize>>,
}

impl Measurement<'_> {
    fn row(&self, index: &str, build: f64, memory: usize, mut search: impl FnMut(&[f32]) -> Vec<usize>) {
        let mut times = Vec::new();
        let mut found = 0;
        for (question, expected) in self.questions.iter().zip(&self.expected) {
            let start = Instant::now();
            let nearest = search(question);
            times.push(start.elapsed().as_secs_f64() * 1e3);
            found += expected.iter().filter(|i| nearest.contains(i)).count();
        }
        times.sort_by(f64::total_cmp);
        let recall = found as f64 / (LIMIT * times.len()) as f64;
        let (kind, count) = (self.kind, self.vectors.len());
        let (median, p95) = (times[times.len() / 2], times[times.len() * 95 / 100]);
        println!("| {kind} | {count} | {index} | {recall:.3} | {median:.2} | {p95:.2} | {build:.1} | {memory} |");
    }

    fn index(&self) {
        let (before, start) = (resident(), Instant::now());
        let mut set = VectorSet::default();
        self.vectors.iter().for_each(|vector| assert!(set.push(&quantized(vector))));
        let build = start.elapsed().as_secs_f64();
        self.row("tenure", build, resident() - before, |question| {
            let mut nearest = set.nearest(&quantized(question), LIMIT);
            nearest.sort_by(|(_, a), (_, b)| b.total_cmp(a));
            nearest.into_iter().take(LIMIT).map(|(i, _)| i).collect()
        });
    }

    fn hnsw_rs(&self) {
        let (before, start) = (resident(), Instant::now());
        let graph = Hnsw::<f32, DistDot>::new(CONNECTIVITY, self.vectors.len(), 16, BUILD_CANDIDATES, DistDot {});
        graph.parallel_insert(&self.vectors.iter().enumerate().map(|(i, vector)| (vector, i)).collect::<Vec<_>>());
        let (build, memory) = (start.elapsed().as_secs_f64(), resident() - before);
        for candidates in SEARCH_CANDIDATES {
            self.row(&format!("hnsw_rs, f32, ef {candidates}"), build, memory, |question| {
                graph.search(question, LIMIT, candidates).into_iter().map(|n| n.d_id).collect()
            });
        }
    }

    fn usearch(&self) {
        let (before, start) = (resident(), Instant::now());
        let options = IndexOptions {
            dimensions: DIMENSION,
            metric: MetricKind::Cos,
            quantization: ScalarKind::I8,
            connectivity: CONNECTIVITY,
            expansion_add: BUILD_CANDIDATES,
            ..IndexOptions::default()
        };
        let index = usearch::new_index(&options).expect("the options are valid");
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        index.reserve_capacity_and_threads(self.vectors.len(), threads).expect("there is enough memory");
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (index, vectors) = (&index, self.vectors);
                scope.spawn(move || {
                    for (i, vector) in vectors.iter().enumerate().skip(thread).step_by(threads) {
                        index.add(i as u64, vector).expect("there is room");
                    }
                });
            }
        });
        let (build, memory) = (start.elapsed().as_secs_f64(), resident() - before);
        for candidates in SEARCH_CANDIDATES {
            index.change_expansion_search(candidates);
            self.row(&format!("usearch, i8, ef {candidates}"), build, memory, |question| {
                let found = index.search(question, LIMIT).expect("the question has the right dimension");
                found.keys.into_iter().map(|key| key as usize).collect()
            });
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: DATA COUNT [index] [hnsw_rs] [usearch]";
    let kind = arguments.next().expect(usage);
    let count: usize = arguments.next().and_then(|n| n.parse().ok()).expect(usage);
    let (vectors, questions) = data(&kind, count);
    let expected = questions.iter().map(|question| exact(&vectors, question)).collect();
    let measurement = Measurement { kind: &kind, vectors: &vectors, questions: &questions, expected };
    for index in arguments {
        match index.as_str() {
            "index" => measurement.index(),
            "hnsw_rs" => measurement.hnsw_rs(),
            "usearch" => measurement.usearch(),
            other => panic!("{other}? {usage}"),
        }
    }
}
