use super::*;
use crate::rules::next::{RunRules, next};
use crate::rules::prompt::history;
use crate::rules::session::Point;
use crate::types::entry::{
    CheckpointEntry, Decision, ReviewDecided, ReviewOpened, RewindEntry, RunOutcome, SessionCreated, SessionPatch,
};
use crate::types::id::{CheckpointLabel, Principal, ReviewId, RunId, SessionId};
use crate::types::message::Message;
use crate::types::tool::Tool;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Map, json};

/// An event of a generated session.
#[derive(Clone, Debug)]
enum Event {
    /// A user message arrives and a run starts.
    Ask,
    /// The model makes tool calls: their number, how many are started, and how many get a result.
    Calls(usize, usize, usize),
    /// The model answers and the run ends.
    Answer,
    /// A message with this role arrives at any time; the flag makes it an instruction that replaces the
    /// initial ones.
    Message(&'static str, bool),
    Info,
    Checkpoint,
    /// A review is opened.
    Review,
    /// The oldest open review is decided.
    Decide,
    Rewind(Index),
    Compact(Index),
    Uncompact,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => Just(Event::Ask),
        4 => (1..3usize, 0..3usize, 0..3usize).prop_map(|(n, started, finished)| Event::Calls(n, started, finished)),
        8 => Just(Event::Answer),
        1 => Just(Event::Message("user", false)),
        1 => Just(Event::Message("system", false)),
        1 => Just(Event::Message("system", true)),
        1 => Just(Event::Info),
        2 => Just(Event::Checkpoint),
        1 => Just(Event::Review),
        1 => Just(Event::Decide),
        1 => any::<Index>().prop_map(Event::Rewind),
        1 => any::<Index>().prop_map(Event::Compact),
        1 => Just(Event::Uncompact),
    ]
}

/// A log and the session folded from it.
struct Log {
    records: Vec<Record>,
    session: Session,
}

impl Log {
    fn new() -> Self {
        let key = Principal::default().key(&SessionId::new("s").unwrap());
        let entry = Entry::created(SessionCreated::default());
        let records = vec![Record { seq: 1, at: "2026-01-01T00:00:00Z".parse().unwrap(), entry }];
        Self { session: Session::replay(&key, records.clone()).unwrap(), records }
    }

    fn push(&mut self, entry: Entry) {
        let record = Record { seq: self.session.head().seq + 1, at: self.records[0].at, entry };
        self.session.apply(&record);
        self.records.push(record);
    }

    fn push_message(&mut self, message: Message, replaces_instructions: bool) {
        self.push(Entry::Message(MessageEntry {
            run: self.session.head().run.clone(),
            replaces_instructions,
            ..MessageEntry::from(message)
        }));
    }

    fn end(&mut self) {
        if let Some(run) = self.session.head().run.clone() {
            self.push(Entry::RunEnded { run, outcome: RunOutcome::Completed, error: None, code: None });
        }
    }

    fn apply_event(&mut self, event: &Event) {
        let n = self.session.head().seq;
        match event {
            Event::Ask => {
                self.end();
                self.push_message(Message::user(&format!("question {n}")), false);
                let run = RunId::new(format!("run-{n}")).unwrap();
                self.push(Entry::RunStarted { run, claim: None, detail: Map::new() });
            }
            Event::Calls(calls, started, finished) => {
                let Some(run) = self.session.head().run.clone() else { return };
                let ids: Vec<String> = (0..*calls).map(|i| format!("call-{i}")).collect();
                let call =
                    |id: &String| json!({"id": id, "type": "function", "function": {"name": "t", "arguments": "{}"}});
                let calls: Vec<_> = ids.iter().map(call).collect();
                let message = json!({"role": "assistant", "content": format!("let me see {n}"), "tool_calls": calls});
                self.push_message(Message::from_value(&message).unwrap(), false);
                for call in ids.iter().take(*started) {
                    self.push(Entry::ToolStarted {
                        run: run.clone(),
                        call: call.clone(),
                        tool: "t".to_owned(),
                        detail: Map::new(),
                    });
                }
                for id in ids.iter().take(*finished) {
                    self.push_message(Message::tool(id, &format!("result {n}")), false);
                }
            }
            Event::Answer => {
                self.push_message(Message::assistant(&format!("answer {n}")), false);
                self.end();
            }
            Event::Message("user", replaces) => self.push_message(Message::user(&format!("by the way {n}")), *replaces),
            Event::Message(_, replaces) => self.push_message(Message::system(&format!("be brief {n}")), *replaces),
            Event::Info => self.push(Entry::info(SessionPatch::default())),
            Event::Checkpoint => {
                let label = CheckpointLabel::new(format!("c-{n}")).unwrap();
                let run = self.session.head().run.clone();
                self.push(Entry::Checkpoint(CheckpointEntry {
                    label,
                    auto: true,
                    run,
                    step: Some(n),
                    state: Map::new(),
                }));
            }
            Event::Review => {
                let Some(run) = self.session.head().run.clone() else { return };
                let review = ReviewId::of(&self.session.head().info.session_id, n + 1);
                self.push(Entry::review_opened(ReviewOpened {
                    review,
                    step: "t".to_owned(),
                    run: Some(run),
                    call: Some("call-0".to_owned()),
                    queue: None,
                    lost: false,
                    timeout: None,
                    detail: Map::new(),
                }));
            }
            Event::Decide => {
                let Some(open) = self.session.open_reviews().next().map(|r| r.opened.clone()) else { return };
                let decided = ReviewDecided {
                    review: open.review,
                    step: open.step,
                    decision: Decision::Approved,
                    reviewer: "eve".to_owned(),
                    notes: None,
                    arguments: None,
                    previous: None,
                };
                self.push(Entry::review_decided(decided));
            }
            Event::Rewind(to) => {
                let to = Point::Position(to.index(self.session.messages.len() + 1));
                let point = self.session.locate(&to).unwrap();
                self.push(Entry::Rewound(RewindEntry { to: point.seq, digest: point.digest }));
            }
            Event::Compact(upto) => {
                let covered = self.session.summary().map_or(0, |s| s.position);
                let rest = &self.session.messages[covered..];
                if rest.is_empty() {
                    return;
                }
                let upto = rest[upto.index(rest.len())].seq;
                let summary = Some(Message::system(&format!("in short {n}")));
                self.push(Entry::Compacted { upto, summary });
            }
            Event::Uncompact => self.push(Entry::Compacted { upto: 0, summary: None }),
        }
    }

    /// Folds the last `size` records, if they suffice.
    fn partial(&self, size: usize, window: &Window) -> Option<Session> {
        let newest = &self.records[self.records.len() - size..];
        let since = newest.first()?.seq;
        let prefix = self.session.head().prompt_prefix.as_ref()?;
        let before: Vec<Record> = prefix
            .ranges_before(since)
            .flat_map(|(from, to)| self.records[from as usize - 1..to as usize].iter().cloned())
            .collect();
        Session::fold_partial(self.session.head().clone(), &before, newest, window)
    }
}

/// Asserts that everything a run reads is the same in the partial and in the full session.
fn assert_same(partial: &Session, full: &Session, window: &Window) {
    assert_eq!(history(partial, window), history(full, window));
    let tools = [Tool { name: "t".to_owned(), ..Tool::default() }];
    let rules = RunRules { tools: &tools, review: &[], client_tools: false };
    assert_eq!(next(partial, &rules), next(full, &rules));
    assert_eq!(partial.open_reviews().collect::<Vec<_>>(), full.open_reviews().collect::<Vec<_>>());
    assert_eq!(partial.older.0 + partial.messages.len(), full.messages.len());
    let expected = full.checkpoints.iter().filter(|c| partial.checkpoints.iter().any(|t| t.seq == c.seq));
    assert_eq!(partial.checkpoints.iter().collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    let Some(run) = &full.head().run else { return };
    assert_eq!(partial.run(run), full.run(run));
    let count_own =
        |session: &Session| session.messages.iter().rev().take_while(|m| m.run.as_ref() == Some(run)).count();
    assert_eq!(count_own(partial), count_own(full));
    let run_checkpoints = |session: &Session| {
        let since = session.run(run).map(|r| r.seq).unwrap();
        session.checkpoints.iter().filter(|c| c.seq > since).cloned().collect::<Vec<_>>()
    };
    assert_eq!(run_checkpoints(partial), run_checkpoints(full));
    assert!(full.messages.iter().all(|m| partial.as_partial().contains_message(m.seq)));
}

fn window() -> impl Strategy<Value = Window> {
    (prop::option::of(0..4usize), prop::option::of(0..200usize))
        .prop_map(|(max_turns, max_tokens)| Window { max_turns, max_tokens })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// For any history, a partial session that is considered sufficient is equivalent to the whole, and stays
    /// so while the run continues.
    #[test]
    fn a_partial_session_is_equivalent_to_the_full_session(
        initial in prop::collection::vec(any::<bool>(), 0..3),
        events in prop::collection::vec(event(), 0..60),
        later in prop::collection::vec((1..3usize, 0..3usize, 0..3usize), 0..4),
        window in window(),
    ) {
        let mut log = Log::new();
        for replaces in initial {
            log.apply_event(&Event::Message("system", replaces));
        }
        events.iter().for_each(|event| log.apply_event(event));
        let replayed = Session::replay(&log.session.head().key(), log.records.clone()).unwrap();
        prop_assert_eq!(replayed.head(), log.session.head());
        let mut partials: Vec<Session> = (1..log.records.len()).filter_map(|size| log.partial(size, &window)).collect();
        partials.iter().for_each(|partial| assert_same(partial, &log.session, &window));
        for (n, started, finished) in later {
            let before = log.records.len();
            log.apply_event(&Event::Calls(n, started, finished));
            log.apply_event(&Event::Checkpoint);
            for partial in &mut partials {
                log.records[before..].iter().for_each(|record| drop(partial.apply(record)));
                assert_same(partial, &log.session, &window);
            }
        }
    }
}

/// Partial sessions do exist, so that the property above is not vacuously true.
#[test]
fn a_few_records_are_enough_in_a_long_session() {
    let window = Window { max_turns: Some(2), max_tokens: None };
    let mut log = Log::new();
    log.apply_event(&Event::Message("system", false));
    for _ in 0..100 {
        for event in [Event::Ask, Event::Calls(1, 1, 1), Event::Checkpoint, Event::Answer, Event::Checkpoint] {
            log.apply_event(&event);
        }
    }
    log.apply_event(&Event::Ask);
    let turn = 9;
    let shown = history(&log.session, &window);
    let partial = log.partial(turn * 4, &window).expect("four turns contain the last two");
    assert!(partial.messages.len() < 20, "{}", partial.messages.len());
    assert_eq!(history(&partial, &window), shown);
    assert_eq!((shown.len(), shown[0].text()), (6, "be brief 1".to_owned()));
    assert!(log.partial(turn, &window).is_none(), "one turn does not");
    assert!(log.partial(turn * 40, &Window::default()).is_none(), "where all is shown, all is needed");

    // A summary replaces the turns that it covers, so that these need not be loaded.
    log.apply_event(&Event::Answer);
    let upto = log.session.messages[log.session.messages.len() - 10].seq;
    log.push(Entry::Compacted { upto, summary: Some(Message::system("in short")) });
    log.apply_event(&Event::Ask);
    let partial = log.partial(60, &Window::default()).expect("the summary covers the rest");
    assert_eq!(history(&partial, &Window::default()), history(&log.session, &Window::default()));
    assert_eq!(
        history(&partial, &window)[..2].iter().map(|m| m.text()).collect::<Vec<_>>(),
        ["be brief 1", "in short"]
    );

    // New instructions replace the old ones, wherever they are in the log.
    log.apply_event(&Event::Message("system", true));
    let replaced = format!("be brief {}", log.session.head().seq - 1);
    for _ in 0..20 {
        log.apply_event(&Event::Ask);
        log.apply_event(&Event::Answer);
    }
    log.apply_event(&Event::Ask);
    let partial = log.partial(25, &window).expect("enough");
    assert_eq!(history(&partial, &window), history(&log.session, &window));
    assert_eq!(history(&partial, &window)[0].text(), replaced);

    // The current run must be loaded from its start, even if it has added more than the window shows.
    for _ in 0..5 {
        log.apply_event(&Event::Calls(1, 1, 1));
        log.apply_event(&Event::Message("user", false));
    }
    let end = log.session.head().seq as usize;
    let started = log.session.runs.last().unwrap().seq as usize;
    assert!(log.partial(end - started - 2, &window).is_none(), "the start of the run is missing");
    assert!(log.partial(end - started + 10, &window).is_some());
    log.apply_event(&Event::Review);
    for _ in 0..5 {
        log.apply_event(&Event::Message("user", false));
        log.apply_event(&Event::Calls(1, 1, 1));
    }
    log.end();

    // A started call without a result matters even after its run has ended: it may have been executed.
    log.apply_event(&Event::Ask);
    for _ in 0..20 {
        log.apply_event(&Event::Message("user", false));
        log.push_message(Message::assistant("hm"), false);
    }
    log.apply_event(&Event::Calls(1, 1, 0));
    log.end();
    assert!(log.partial(30, &window).is_none(), "the start of the run is missing");
    let partial = log.partial(60, &window).expect("now it is");
    assert_same(&partial, &log.session, &window);

    // After a rewind discarded them, the instructions are searched in the whole log.
    let point = log.session.locate(&Point::Position(30)).unwrap();
    log.push(Entry::Rewound(RewindEntry { to: point.seq, digest: point.digest }));
    assert_eq!(log.session.head().prompt_prefix, None);
    assert!(log.partial(60, &window).is_none());
}

/// Instructions that are not contiguous in the log are not represented by a prefix.
#[test]
fn instructions_that_are_not_contiguous_have_no_prefix() {
    let mut log = Log::new();
    log.apply_event(&Event::Message("system", false));
    log.apply_event(&Event::Ask);
    let point = log.session.locate(&Point::Position(1)).unwrap();
    log.push(Entry::Rewound(RewindEntry { to: point.seq, digest: point.digest }));
    assert_eq!(
        log.session
            .head()
            .prompt_prefix
            .as_ref()
            .and_then(|prefix| prefix.instructions.as_ref())
            .map(|span| (span.from, span.to)),
        Some((2, 2))
    );
    log.apply_event(&Event::Message("system", false));
    assert_eq!(log.session.head().prompt_prefix, None);
}

/// An open review must be loaded, however old it is and even if no run opened it.
#[test]
fn an_open_review_is_part_of_the_partial_session() {
    let window = Window { max_turns: Some(1), max_tokens: None };
    let mut log = Log::new();
    log.apply_event(&Event::Ask);
    log.apply_event(&Event::Review);
    let Entry::ReviewOpened(opened) = log.records.last().unwrap().entry.clone() else { unreachable!() };
    log.end();
    log.push_message(Message::assistant("hm"), false);
    let review = ReviewId::of(&log.session.head().info.session_id, log.session.head().seq + 1);
    log.push(Entry::review_opened(ReviewOpened { review, run: None, ..*opened }));
    for _ in 0..20 {
        log.push_message(Message::user("well?"), false);
        log.push_message(Message::assistant("hm"), false);
    }
    let opened_at = log.session.open_reviews().next().unwrap().seq as usize;
    let since = log.records.len() - opened_at;
    assert!((1..=since).all(|size| log.partial(size, &window).is_none()), "it is older than that");
    assert_same(&log.partial(since + 1, &window).unwrap(), &log.session, &window);
}
