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
    Say(&'static str, bool),
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
        4 => (1..3usize, 0..3usize, 0..3usize).prop_map(|(n, begun, done)| Event::Calls(n, begun, done)),
        8 => Just(Event::Answer),
        1 => Just(Event::Say("user", false)),
        1 => Just(Event::Say("system", false)),
        1 => Just(Event::Say("system", true)),
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
        let record = Record { seq: self.session.seq + 1, at: self.records[0].at, entry };
        self.session.apply(&record);
        self.records.push(record);
    }

    fn say(&mut self, message: Message, lead: bool) {
        self.push(Entry::Message(MessageEntry {
            run: self.session.head().run.clone(),
            lead,
            ..MessageEntry::from(message)
        }));
    }

    fn end(&mut self) {
        if let Some(run) = self.session.head().run.clone() {
            self.push(Entry::RunEnded { run, outcome: RunOutcome::Completed, error: None, code: None });
        }
    }

    fn happen(&mut self, event: &Event) {
        let n = self.session.seq;
        match event {
            Event::Ask => {
                self.end();
                self.say(Message::user(&format!("question {n}")), false);
                let run = RunId::new(format!("run-{n}")).unwrap();
                self.push(Entry::RunStarted { run, claim: None, detail: Map::new() });
            }
            Event::Calls(calls, begun, done) => {
                let Some(run) = self.session.head().run.clone() else { return };
                let ids: Vec<String> = (0..*calls).map(|i| format!("call-{i}")).collect();
                let call =
                    |id: &String| json!({"id": id, "type": "function", "function": {"name": "t", "arguments": "{}"}});
                let calls: Vec<_> = ids.iter().map(call).collect();
                let message = json!({"role": "assistant", "content": format!("let me see {n}"), "tool_calls": calls});
                self.say(Message::from_value(&message).unwrap(), false);
                for call in ids.iter().take(*begun) {
                    let (run, call, tool) = (run.clone(), call.clone(), "t".to_owned());
                    self.push(Entry::ToolStarted { run, call, tool, detail: Map::new() });
                }
                for id in ids.iter().take(*done) {
                    self.say(Message::tool(id, &format!("result {n}")), false);
                }
            }
            Event::Answer => {
                self.say(Message::assistant(&format!("answer {n}")), false);
                self.end();
            }
            Event::Say("user", lead) => self.say(Message::user(&format!("by the way {n}")), *lead),
            Event::Say(_, lead) => self.say(Message::system(&format!("be brief {n}")), *lead),
            Event::Info => self.push(Entry::info(SessionPatch::default())),
            Event::Checkpoint => {
                let (label, run) = (CheckpointLabel::new(format!("c-{n}")).unwrap(), self.session.head().run.clone());
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
                let review = ReviewId::of(&self.session.info.session_id, n + 1);
                let (step, run, call) = ("t".to_owned(), Some(run), Some("call-0".to_owned()));
                let (queue, lost, timeout, detail) = (None, false, None, Map::new());
                self.push(Entry::review_opened(ReviewOpened { review, step, run, call, queue, lost, timeout, detail }));
            }
            Event::Decide => {
                let Some(open) = self.session.open_reviews().next().map(|r| r.opened.clone()) else { return };
                let (decision, reviewer) = (Decision::Approved, "eve".to_owned());
                let decided = ReviewDecided {
                    review: open.review,
                    step: open.step,
                    decision,
                    reviewer,
                    notes: None,
                    arguments: None,
                    previous: None,
                };
                self.push(Entry::review_decided(decided));
            }
            Event::Rewind(to) => {
                let to = Point::Position(to.index(self.session.messages.len() + 1));
                let place = self.session.locate(&to).unwrap();
                self.push(Entry::Rewound(RewindEntry { to: place.seq, mark: place.mark }));
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
    fn tail(&self, size: usize, window: &Window) -> Option<Session> {
        let newest = &self.records[self.records.len() - size..];
        let since = newest.first()?.seq;
        let front = self.session.head().front.as_ref()?;
        let before: Vec<Record> = front
            .places(since)
            .flat_map(|(from, to)| self.records[from as usize - 1..to as usize].iter().cloned())
            .collect();
        Session::tail(self.session.head().clone(), &before, newest, window)
    }
}

/// Asserts that everything a run reads is the same in the partial and in the whole session.
fn assert_same(tail: &Session, whole: &Session, window: &Window) {
    assert_eq!(history(tail, window), history(whole, window));
    let tools = [Tool { name: "t".to_owned(), ..Tool::default() }];
    let rules = RunRules { tools: &tools, review: &[], client_tools: false };
    assert_eq!(next(tail, &rules), next(whole, &rules));
    assert_eq!(tail.open_reviews().collect::<Vec<_>>(), whole.open_reviews().collect::<Vec<_>>());
    assert_eq!(tail.older.0 + tail.messages.len(), whole.messages.len());
    let known = whole.checkpoints.iter().filter(|c| tail.checkpoints.iter().any(|t| t.seq == c.seq));
    assert_eq!(tail.checkpoints.iter().collect::<Vec<_>>(), known.collect::<Vec<_>>());
    let Some(run) = &whole.head().run else { return };
    assert_eq!(tail.run(run), whole.run(run));
    let own = |session: &Session| session.messages.iter().rev().take_while(|m| m.run.as_ref() == Some(run)).count();
    assert_eq!(own(tail), own(whole));
    let set = |session: &Session| {
        let since = session.run(run).map(|r| r.seq).unwrap();
        session.checkpoints.iter().filter(|c| c.seq > since).cloned().collect::<Vec<_>>()
    };
    assert_eq!(set(tail), set(whole));
    assert!(whole.messages.iter().all(|m| tail.has(m.seq)));
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
    fn a_tail_tells_a_run_what_the_whole_session_does(
        opening in prop::collection::vec(any::<bool>(), 0..3),
        events in prop::collection::vec(event(), 0..60),
        later in prop::collection::vec((1..3usize, 0..3usize, 0..3usize), 0..4),
        window in window(),
    ) {
        let mut log = Log::new();
        for lead in opening {
            log.happen(&Event::Say("system", lead));
        }
        events.iter().for_each(|event| log.happen(event));
        let replayed = Session::replay(&log.session.key(), log.records.clone()).unwrap();
        prop_assert_eq!(replayed.head(), log.session.head());
        let mut tails: Vec<Session> = (1..log.records.len()).filter_map(|size| log.tail(size, &window)).collect();
        tails.iter().for_each(|tail| assert_same(tail, &log.session, &window));
        for (n, begun, done) in later {
            let before = log.records.len();
            log.happen(&Event::Calls(n, begun, done));
            log.happen(&Event::Checkpoint);
            for tail in &mut tails {
                log.records[before..].iter().for_each(|record| drop(tail.apply(record)));
                assert_same(tail, &log.session, &window);
            }
        }
    }
}

/// Partial sessions do exist, so that the property above is not vacuously true.
#[test]
fn a_few_records_are_enough_in_a_long_session() {
    let window = Window { max_turns: Some(2), max_tokens: None };
    let mut log = Log::new();
    log.happen(&Event::Say("system", false));
    for _ in 0..100 {
        for event in [Event::Ask, Event::Calls(1, 1, 1), Event::Checkpoint, Event::Answer, Event::Checkpoint] {
            log.happen(&event);
        }
    }
    log.happen(&Event::Ask);
    let (turn, shown) = (9, history(&log.session, &window));
    let tail = log.tail(turn * 4, &window).expect("four turns tell of two");
    assert!(tail.messages.len() < 20, "{}", tail.messages.len());
    assert_eq!(history(&tail, &window), shown);
    assert_eq!((shown.len(), shown[0].text()), (6, "be brief 1".to_owned()));
    assert!(log.tail(turn, &window).is_none(), "one turn does not");
    assert!(log.tail(turn * 40, &Window::default()).is_none(), "where all is shown, all is needed");

    // A summary replaces the turns that it covers, so that these need not be loaded.
    log.happen(&Event::Answer);
    let upto = log.session.messages[log.session.messages.len() - 10].seq;
    log.push(Entry::Compacted { upto, summary: Some(Message::system("in short")) });
    log.happen(&Event::Ask);
    let tail = log.tail(60, &Window::default()).expect("the summary tells the rest");
    assert_eq!(history(&tail, &Window::default()), history(&log.session, &Window::default()));
    assert_eq!(history(&tail, &window)[..2].iter().map(|m| m.text()).collect::<Vec<_>>(), ["be brief 1", "in short"]);

    // New instructions replace the old ones, wherever they are in the log.
    log.happen(&Event::Say("system", true));
    let replaced = format!("be brief {}", log.session.seq - 1);
    for _ in 0..20 {
        log.happen(&Event::Ask);
        log.happen(&Event::Answer);
    }
    log.happen(&Event::Ask);
    let tail = log.tail(25, &window).expect("enough");
    assert_eq!(history(&tail, &window), history(&log.session, &window));
    assert_eq!(history(&tail, &window)[0].text(), replaced);

    // The current run must be loaded from its start, even if it has added more than the window shows.
    for _ in 0..5 {
        log.happen(&Event::Calls(1, 1, 1));
        log.happen(&Event::Say("user", false));
    }
    let ends = log.session.seq as usize;
    let started = log.session.runs.last().unwrap().seq as usize;
    assert!(log.tail(ends - started - 2, &window).is_none(), "its beginning is not there");
    assert!(log.tail(ends - started + 10, &window).is_some());
    log.happen(&Event::Review);
    for _ in 0..5 {
        log.happen(&Event::Say("user", false));
        log.happen(&Event::Calls(1, 1, 1));
    }
    log.end();

    // A started call without a result matters even after its run has ended: it may have been executed.
    log.happen(&Event::Ask);
    for _ in 0..20 {
        log.happen(&Event::Say("user", false));
        log.say(Message::assistant("hm"), false);
    }
    log.happen(&Event::Calls(1, 1, 0));
    log.end();
    assert!(log.tail(30, &window).is_none(), "when the run began is not there");
    let tail = log.tail(60, &window).expect("now it is");
    assert_same(&tail, &log.session, &window);

    // After a rewind discarded them, the instructions are searched in the whole log.
    let place = log.session.locate(&Point::Position(30)).unwrap();
    log.push(Entry::Rewound(RewindEntry { to: place.seq, mark: place.mark }));
    assert_eq!(log.session.head().front, None);
    assert!(log.tail(60, &window).is_none());
}

/// Instructions that are not contiguous in the log are not represented by a prefix.
#[test]
fn what_was_said_between_instructions_is_no_instruction() {
    let mut log = Log::new();
    log.happen(&Event::Say("system", false));
    log.happen(&Event::Ask);
    let place = log.session.locate(&Point::Position(1)).unwrap();
    log.push(Entry::Rewound(RewindEntry { to: place.seq, mark: place.mark }));
    assert_eq!(log.session.head().front.as_ref().and_then(|f| f.lead.as_ref()).map(|l| (l.from, l.to)), Some((2, 2)));
    log.happen(&Event::Say("system", false));
    assert_eq!(log.session.head().front, None);
}

/// An open review must be loaded, however old it is and even if no run opened it.
#[test]
fn an_open_question_is_part_of_the_tail() {
    let window = Window { max_turns: Some(1), max_tokens: None };
    let mut log = Log::new();
    log.happen(&Event::Ask);
    log.happen(&Event::Review);
    let Entry::ReviewOpened(asked) = log.records.last().unwrap().entry.clone() else { unreachable!() };
    log.end();
    log.say(Message::assistant("hm"), false);
    let review = ReviewId::of(&log.session.info.session_id, log.session.seq + 1);
    log.push(Entry::review_opened(ReviewOpened { review, run: None, ..*asked }));
    for _ in 0..20 {
        log.say(Message::user("well?"), false);
        log.say(Message::assistant("hm"), false);
    }
    let asked = log.session.open_reviews().next().unwrap().seq as usize;
    let since = log.records.len() - asked;
    assert!((1..=since).all(|size| log.tail(size, &window).is_none()), "it is older than that");
    assert_same(&log.tail(since + 1, &window).unwrap(), &log.session, &window);
}
