//! Search with the message index finds what a scan of the logs finds, in the same order: random sessions with forks,
//! rewinds, titles, redaction, deletions and purges. The seed is printed; set `TENURE_TEST_SEED` to reproduce a run.

use crate::on_every_store;
use crate::support::*;
use jiff::SignedDuration;
use tenure::testing::Rng;
use tenure::{policy::*, session::*, *};

const WORDS: [&str; 16] = [
    "ferry",
    "Fähre",
    "dover",
    "Calais",
    "渡轮",
    "時間表",
    "timetable",
    "time",
    "table",
    "e-mail",
    "x@ferry.example",
    "y@rare.example",
    "ŁÓDŹ",
    "don't",
    "2026-11-18",
    "rare",
];
const QUERIES: [&str; 16] = [
    "ferry",
    "fahre",
    "\"dover calais\"",
    "tim*",
    "渡",
    "轮渡",
    "渡轮",
    "\"time table\"",
    "e-mail",
    "example",
    "lodz don't",
    "rare",
    "11-18",
    "rare ferry dover",
    "nowhere",
    "f* d* c*",
];

fn seed() -> u64 {
    let given = std::env::var("TENURE_TEST_SEED").ok().and_then(|s| s.parse().ok());
    given
        .unwrap_or_else(|| SessionId::generate().as_str().bytes().fold(7, |n, b| n * 31 % 0x1_0000_0000 + u64::from(b)))
}

fn random_text(rng: &mut Rng) -> String {
    let words: Vec<&str> = (0..1 + rng.below(5)).map(|_| *rng.pick(&WORDS)).collect();
    words.join(if rng.once_in(4) { ", " } else { " " })
}

fn random_message(rng: &mut Rng) -> Message {
    let text = random_text(rng);
    match rng.below(8) {
        0 => tool_call_message("c1", "ferry_times", &serde_json::json!({ "to": text })),
        1..4 => Message::assistant(&text),
        _ => Message::user(&text),
    }
}

/// The sessions of a random test, each with its owner.
#[derive(Default)]
struct RandomSessions {
    sessions: Vec<(Principal, SessionId)>,
    created: usize,
}

impl RandomSessions {
    /// Applies a random operation. One that the session's state does not allow changes nothing.
    async fn step(&mut self, t: &Tenure, rng: &mut Rng) {
        if self.sessions.is_empty() || rng.once_in(8) {
            let owners = [ada(), Principal::new("acme", "eve").unwrap(), Principal::new("other", "ada").unwrap()];
            let owner = rng.pick(&owners).clone();
            let name = self.new_name();
            let title = rng.once_in(2).then(|| random_text(rng));
            t.create(&owner, NewSession { title, ..new_session(name.as_str()) }).await.unwrap();
            self.sessions.push((owner, name));
            return;
        }
        let at = rng.below(self.sessions.len());
        let (owner, name) = self.sessions[at].clone();
        match rng.below(12) {
            0 | 1 => {
                let messages = t.load(&owner, &name).await.map_or(0, |session| session.messages.len());
                drop(t.rewind(&owner, &name, Point::Position(rng.below(messages + 1))).await);
            }
            2 | 3 => {
                let messages = t.load(&owner, &name).await.map_or(0, |session| session.messages.len());
                let fork = self.new_name();
                let point = if rng.once_in(3) { Point::End } else { Point::Position(rng.below(messages + 1)) };
                if t.fork(&owner, &name, Fork::at(point).id(Some(fork.clone()))).await.is_ok() {
                    self.sessions.push((owner, fork));
                }
            }
            4 => {
                let title = rng.once_in(3).then(|| random_text(rng));
                let patch = SessionPatch { title: title.into(), ..SessionPatch::default() };
                drop(t.update(&owner, &name, patch).await);
            }
            5 => drop(t.delete(&owner, &name, None).await),
            6 => drop(t.restore(&owner, &name, None).await),
            7 if rng.once_in(2) => {
                t.purge(&owner, &name, None).await.unwrap();
                self.sessions.remove(at);
            }
            _ => {
                let messages: Vec<Message> = (0..1 + rng.below(4)).map(|_| random_message(rng)).collect();
                let _: Result<_> = t.append(&owner, &name, messages).await;
            }
        }
    }

    fn new_name(&mut self) -> SessionId {
        self.created += 1;
        id(&format!("s{}", self.created))
    }
}

/// The results of all pages.
async fn all_pages(t: &Tenure, principal: &Principal, mut search: SearchRequest) -> Vec<SearchHit> {
    let mut hits = Vec::new();
    for _ in 0..2_000 {
        let page = t.search_sessions(principal, &search).await.unwrap();
        assert!(page.hits.len() <= search.query.limit && page.damaged.is_empty());
        hits.extend(page.hits);
        let Some(next) = page.next else { return hits };
        search.cursor = Some(next.to_string().parse().unwrap());
    }
    panic!("pagination does not end after {} results: {search:?}", hits.len());
}

fn random_search(rng: &mut Rng) -> SearchRequest {
    let mut search = SearchRequest::new(*rng.pick(&QUERIES), *rng.pick(&[1, 3, 20, 100]));
    search.role = rng.pick(&[None, None, None, Some(Role::User), Some(Role::Assistant)]).to_owned();
    if rng.once_in(4) {
        search.query.status = vec![Status::Active, Status::Deleted];
    }
    if rng.once_in(6) {
        search.query.title = Some("a".to_owned());
    }
    if rng.once_in(3) {
        search.max_sessions = 1 + rng.below(3);
    }
    if rng.once_in(3) {
        search.max_reads = 1 + rng.below(5);
    }
    search
}

on_every_store! {
    /// With and without the index: the same results in the same order, through all pages.
    async fn the_index_finds_what_a_scan_finds(test: &mut TestTenure) {
        let seed = seed();
        println!("TENURE_TEST_SEED={seed}");
        let mut rng = Rng::new(seed);
        let rule = || RedactionRule::new("email", r"[\w.]+@[\w.]+\w", None).unwrap();
        test.reopen_with(|options| options.redaction = vec![rule()].try_into().unwrap()).await;
        let scan = test.second_node_with(|options| {
            options.redaction = vec![rule()].try_into().unwrap();
            options.message_index = false;
        });
        let mut sessions = RandomSessions::default();
        let principals = [ada(), Principal::new("acme", "eve").unwrap(), admin(), Principal::tenant_wide("other").unwrap()];
        let (mut found, mut indexed) = (0, 0);
        for round in 0..12 {
            for _ in 0..25 {
                test.advance(SignedDuration::from_millis(rng.below(3) as i64));
                sessions.step(&test.tenure, &mut rng).await;
            }
            // The first search of a store that keeps its index in memory begins it.
            test.tenure.search_sessions(&ada(), &SearchRequest::new("ferry", 1)).await.unwrap();
            while test.tenure.maintain_message_index(10).await.unwrap() {}
            for _ in 0..30 {
                let principal = rng.pick(&principals);
                let search = random_search(&mut rng);
                let got = all_pages(&test.tenure, principal, search.clone()).await;
                let want = all_pages(&scan, principal, search.clone()).await;
                let describe = |hits: &[SearchHit]| hits.iter().map(|h| (h.session_id.to_string(), h.message.clone().map(|m| m.seq))).collect::<Vec<_>>();
                assert_eq!(describe(&got), describe(&want), "round {round}, seed {seed}, {principal:?}: {search:?}");
                assert_eq!(got, want, "round {round}, seed {seed}, {principal:?}: {search:?}");
                found += want.len();
                // The index examines the sessions in which it has found something.
                let first = SearchRequest { max_sessions: 500, max_reads: 1000, ..search.clone() };
                let examined = test.tenure.search_sessions(principal, &first).await.unwrap().scanned;
                let scanned = scan.search_sessions(principal, &first).await.unwrap().scanned;
                assert!(examined <= scanned + 1, "{examined} {scanned}");
                indexed += usize::from(examined < scanned);
                let mut ranked = all_pages(&test.tenure, principal, SearchRequest { sort: SearchSort::Relevance, max_reads: 1000, max_sessions: 500, ..search.clone() }).await;
                let order = |h: &SearchHit| (h.session_id.clone(), h.message.as_ref().map(|m| m.seq));
                let mut want: Vec<SearchHit> = want;
                ranked.sort_by_key(order);
                want.sort_by_key(order);
                assert_eq!(ranked, want, "all results are ranked, seed {seed}: {search:?}");
            }
        }
        assert!(found > 500, "{found} results");
        assert!(indexed > 50, "the index was used in {indexed} searches");
    }
}
