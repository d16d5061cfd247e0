//! The next step of a run, by example: a log in short notation, and the step that follows from it.

use proptest::prelude::*;
use serde_json::{Value, json};
use tenure::{log::*, policy::*, review::*, rules::*, run::*, session::*, *};

fn rules_of(review: &[ReviewRule], client_tools: bool, f: impl FnOnce(&RunRules<'_>)) {
    let tool = |name: &str| Tool { name: name.to_owned(), ..Tool::default() };
    let tools =
        [Tool { read_only: true, ..tool("look") }, Tool { idempotent: true, ..tool("set") }, tool("pay"), tool("mail")];
    f(&RunRules { tools: &tools, review, client_tools });
}

fn mail_is_reviewed() -> Vec<ReviewRule> {
    vec![ReviewRule {
        tool: "mail".into(),
        condition: None,
        queue: None,
        timeout: None,
        on_timeout: Decision::Rejected,
    }]
}

/// A log built step by step.
struct Log {
    entries: Vec<Entry>,
    run: RunId,
}

impl Log {
    fn new() -> Self {
        let run = RunId::new("r1").unwrap();
        let started = Entry::RunStarted { run: run.clone(), claim: None, detail: Default::default() };
        Self {
            entries: vec![Entry::created(SessionCreated::default()), message_entry(Message::user("Hi")), started],
            run,
        }
    }

    fn push(mut self, entry: Entry) -> Self {
        self.entries.push(entry);
        self
    }

    /// An answer with calls: `c1=look` or `c1=look{"a":1}`.
    fn calls(self, calls: &[&str]) -> Self {
        let call = |c: &&str| {
            let (id, call) = c.split_once('=').unwrap();
            let (name, arguments) = call.split_at(call.find(['{', '!', ' ']).unwrap_or(call.len()));
            json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
        };
        let calls: Vec<Value> = calls.iter().map(call).collect();
        let message = json!({"role": "assistant", "content": null, "tool_calls": calls});
        self.push(message_entry(Message::from_value(&message).unwrap()))
    }

    fn started(self, call: &str) -> Self {
        let run = self.run.clone();
        self.push(Entry::ToolStarted { run, call: call.into(), tool: "t".into(), detail: Default::default() })
    }

    fn cached(self, call: &str) -> Self {
        let detail = serde_json::Map::from_iter([("cached".to_owned(), json!(true))]);
        let run = self.run.clone();
        self.push(Entry::ToolStarted { run, call: call.into(), tool: "t".into(), detail })
    }

    fn result(self, call: &str) -> Self {
        self.push(message_entry(Message::tool(call, "done")))
    }

    fn answer(self) -> Self {
        self.push(message_entry(Message::assistant("There you are.")))
    }

    fn user_message(self) -> Self {
        self.push(message_entry(Message::user("More")))
    }

    fn seq(&self) -> Seq {
        self.entries.len() as Seq
    }

    fn review(self, call: &str, lost: bool) -> Self {
        let review = ReviewId::of(&SessionId::new("s").unwrap(), self.seq() + 1);
        let opened = ReviewOpened {
            review,
            step: "t".into(),
            run: Some(self.run.clone()),
            call: Some(call.into()),
            queue: None,
            lost,
            timeout: None,
            detail: Default::default(),
        };
        self.push(Entry::review_opened(opened))
    }

    /// Opens a review and decides it.
    fn decided(self, call: &str, lost: bool, decision: Decision) -> Self {
        let log = self.review(call, lost);
        let review = ReviewId::of(&SessionId::new("s").unwrap(), log.seq());
        let arguments = (decision == Decision::Corrected).then(|| json!({"amount": 7}));
        let decided = ReviewDecided {
            review,
            step: "t".into(),
            decision,
            reviewer: "eve".into(),
            notes: None,
            arguments,
            previous: None,
        };
        log.push(Entry::review_decided(decided))
    }

    fn rewound(self, to: Seq) -> Self {
        let digest = self.session_upto(to).head().digest.clone();
        self.push(Entry::Rewound(RewindEntry { to, digest }))
    }

    /// A fork at this point.
    fn forked(self) -> Self {
        let digest = self.session().head().digest.clone();
        let parent = Parent { session: SessionId::new("s").unwrap(), seq: self.seq(), digest };
        let mut log = self.push(Entry::created(SessionCreated { parent: Some(parent), ..SessionCreated::default() }));
        log.run = RunId::new("r2").unwrap();
        let run = log.run.clone();
        log.push(Entry::RunStarted { run, claim: None, detail: Default::default() })
    }

    fn session_upto(&self, seq: Seq) -> Session {
        let at = "2026-01-01T00:00:00Z".parse().unwrap();
        let records = (1..=seq).zip(self.entries.clone()).map(|(seq, entry)| Record { seq, at, entry });
        Session::replay(&Principal::default().key(&SessionId::new("s").unwrap()), records).unwrap()
    }

    fn session(&self) -> Session {
        self.session_upto(self.seq())
    }
}

fn message_entry(message: Message) -> Entry {
    Entry::message(message)
}

/// A step in short notation: `call c1 {"a":1}`, `result c1: …`, `review c1`, `was c1 done`.
fn describe(step: &NextStep) -> String {
    let job = |j: &PendingCall| match &j.action {
        CallAction::Call(arguments) => format!("call {} {}", j.call.id, Value::Object(arguments.clone())),
        CallAction::Respond(text) => {
            format!("result {}: {}", j.call.id, text.split(['.', '(', ';']).next().unwrap().trim())
        }
    };
    let asks =
        |q: &ReviewRequest| if q.lost { format!("was {} done", q.call.id) } else { format!("review {}", q.call.id) };
    match step {
        NextStep::Model => "model".to_owned(),
        NextStep::Tools(jobs) => jobs.iter().map(job).collect::<Vec<_>>().join(", "),
        NextStep::Review(questions) => questions.iter().map(asks).collect::<Vec<_>>().join(", "),
        NextStep::Wait => "wait".to_owned(),
        NextStep::Done => "done".to_owned(),
    }
}

#[track_caller]
fn check(log: Log, want: &str) {
    rules_of(&mail_is_reviewed(), false, |rules| assert_eq!(describe(&next(&log.session(), rules)), want));
}

use Decision::{Approved, Corrected, Rejected};

#[test]
fn messages_calls_and_results() {
    check(Log { entries: vec![Entry::created(SessionCreated::default())], ..Log::new() }, "done");
    check(Log::new(), "model");
    check(Log::new().answer(), "done");
    check(Log::new().answer().user_message(), "model");
    check(Log::new().push(message_entry(Message::system("Be kind."))), "model");
    check(Log::new().calls(&["c1=look", "c2=pay"]), "call c1 {}, call c2 {}");
    check(Log::new().calls(&["c1=look", "c2=pay"]).result("c2"), "call c1 {}");
    check(Log::new().calls(&["c1=look", "c2=pay"]).result("c2").result("c1"), "model");
    check(Log::new().calls(&["c1=look"]).result("c1").answer(), "done");
    // A system message between calls and results is not an answer.
    check(Log::new().calls(&["c1=look"]).push(message_entry(Message::system("Be brief."))).result("c1"), "model");
    check(Log::new().calls(&[r#"c1=pay{"amount":5}"#]), r#"call c1 {"amount":5}"#);
}

#[test]
fn a_call_that_was_started() {
    check(Log::new().calls(&["c1=look"]).started("c1"), "call c1 {}");
    check(Log::new().calls(&["c1=set"]).started("c1"), "call c1 {}");
    check(Log::new().calls(&["c1=pay"]).started("c1"), "was c1 done");
    check(Log::new().calls(&["c1=pay"]).cached("c1"), "call c1 {}");
    check(Log::new().calls(&["c1=pay"]).started("c1").result("c1"), "model");
    // Executable calls come first; then all reviews are opened together.
    check(Log::new().calls(&["c1=pay", "c2=look", "c3=mail"]).started("c1").started("c2"), "call c2 {}");
    check(
        Log::new().calls(&["c1=pay", "c2=look", "c3=mail"]).started("c1").started("c2").result("c2"),
        "was c1 done, review c3",
    );
    check(Log::new().calls(&["c1=pay"]).started("c1").review("c1", true), "wait");
    let lost = || Log::new().calls(&[r#"c1=pay{"amount":5}"#]).started("c1");
    check(lost().decided("c1", true, Approved), "result c1: A reviewer confirmed that this call was executed");
    check(lost().decided("c1", true, Rejected), r#"call c1 {"amount":5}"#);
    check(lost().decided("c1", true, Corrected), r#"call c1 {"amount":7}"#);
    // Started again, and lost again.
    check(lost().decided("c1", true, Rejected).started("c1"), "was c1 done");
    check(lost().decided("c1", true, Rejected).started("c1").decided("c1", true, Rejected), r#"call c1 {"amount":5}"#);
    check(lost().decided("c1", true, Rejected).started("c1").result("c1"), "model");
}

#[test]
fn a_call_that_requires_review() {
    let log_with_call = || Log::new().calls(&[r#"c1=mail{"amount":5}"#]);
    check(log_with_call(), "review c1");
    check(log_with_call().review("c1", false), "wait");
    check(log_with_call().decided("c1", false, Approved), r#"call c1 {"amount":5}"#);
    check(log_with_call().decided("c1", false, Rejected), "result c1: A reviewer rejected this call");
    check(log_with_call().decided("c1", false, Corrected), r#"call c1 {"amount":7}"#);
    check(log_with_call().decided("c1", false, Approved).started("c1"), "was c1 done");
    check(log_with_call().decided("c1", false, Approved).started("c1").result("c1"), "model");
    let again = || log_with_call().decided("c1", false, Approved).started("c1");
    check(again().decided("c1", true, Rejected), r#"call c1 {"amount":5}"#);
    check(again().decided("c1", true, Approved), "result c1: A reviewer confirmed that this call was executed");
    // Two open reviews, of which one is decided.
    let two = || Log::new().calls(&["c1=mail", "c2=mail"]).review("c1", false);
    check(two().decided("c2", false, Approved), "wait");
}

/// A correction stays in force if the call is lost and executed again.
#[test]
fn a_correction_survives_a_crash() {
    let corrected = || Log::new().calls(&[r#"c1=mail{"amount":5}"#]).decided("c1", false, Corrected).started("c1");
    check(corrected(), "was c1 done");
    check(corrected().decided("c1", true, Rejected), r#"call c1 {"amount":7}"#);
    check(
        corrected().decided("c1", true, Rejected).started("c1").decided("c1", true, Rejected),
        r#"call c1 {"amount":7}"#,
    );
    // The review of a lost call shows the corrected arguments.
    rules_of(&mail_is_reviewed(), false, |rules| {
        let NextStep::Review(requests) = next(&corrected().session(), rules) else { panic!() };
        assert_eq!(requests[0].arguments, json!({"amount": 7}));
    });
}

#[test]
fn unknown_tools_and_bad_arguments() {
    check(Log::new().calls(&["c1=fly"]), r#"result c1: There is no tool "fly""#);
    check(Log::new().calls(&["c1=fly", "c2=look"]), r#"result c1: There is no tool "fly", call c2 {}"#);
    check(Log::new().calls(&["c1=look![]"]), "result c1: The arguments are not a JSON object");
    check(Log::new().calls(&["c1=look{\"a\":"]), "result c1: The arguments are not a JSON object");
    check(Log::new().calls(&["c1=look "]), "call c1 {}");
    rules_of(&[], true, |rules| {
        let step = |log: Log| describe(&next(&log.session(), rules));
        assert_eq!(step(Log::new().calls(&["c1=fly"])), "done", "the client's to make");
        assert_eq!(step(Log::new().calls(&["c1=fly", "c2=look"])), "call c2 {}");
        assert_eq!(step(Log::new().calls(&["c1=fly", "c2=look"]).result("c2")), "done");
        assert_eq!(step(Log::new().calls(&["c1=fly", "c2=look"]).result("c2").result("c1")), "model");
    });
    let none = RunRules { tools: &[], review: &[], client_tools: false };
    assert_eq!(
        next(&Log::new().calls(&["c1=fly"]).session(), &none),
        NextStep::Done,
        "without tools here all calls are the client's"
    );
}

/// Models reuse call ids: events of an earlier round do not affect a later one.
#[test]
fn reused_call_ids() {
    let before = || Log::new().calls(&["c1=pay"]).started("c1").result("c1");
    check(before().calls(&["c1=pay"]), "call c1 {}");
    check(before().calls(&["c1=pay"]).started("c1"), "was c1 done");
    check(before().answer().user_message().calls(&["c1=pay"]), "call c1 {}");
    let allowed = || Log::new().calls(&["c1=mail"]).decided("c1", false, Approved).started("c1").result("c1");
    check(allowed().calls(&["c1=mail"]), "review c1");
    let refused = || Log::new().calls(&["c1=mail"]).decided("c1", false, Rejected).result("c1");
    check(refused().calls(&["c1=mail"]), "review c1");
    let corrected = || Log::new().calls(&["c1=pay"]).started("c1").decided("c1", true, Corrected).result("c1");
    check(corrected().calls(&["c1=pay"]), "call c1 {}");
}

#[test]
fn forks_and_rewound_sessions() {
    // A call started before the fork point may have been executed.
    check(Log::new().calls(&["c1=pay"]).started("c1").forked(), "was c1 done");
    check(Log::new().calls(&["c1=pay"]).forked(), "call c1 {}");
    check(Log::new().calls(&["c1=look"]).started("c1").forked(), "call c1 {}");
    // A review that is open in the parent is opened anew in the fork.
    check(Log::new().calls(&["c1=mail"]).review("c1", false).forked(), "review c1");
    check(Log::new().calls(&["c1=mail"]).decided("c1", false, Approved).forked(), "call c1 {}");
    // Records: 4 is the calls, 5 the start, 6 the result.
    let finished_call = || Log::new().calls(&["c1=pay"]).started("c1").result("c1");
    check(finished_call().rewound(4), "was c1 done");
    check(finished_call().rewound(2), "model");
    check(finished_call().rewound(2).calls(&["c1=pay"]), "call c1 {}");
    check(finished_call().answer().rewound(6), "model");
    // An open review of a discarded call is void.
    check(Log::new().calls(&["c1=mail"]).review("c1", false).rewound(2), "model");
    check(Log::new().calls(&["c1=mail"]).review("c1", false).rewound(4), "review c1");
}

/// A random event to append to a log, valid after any other.
fn any_entry() -> impl Strategy<Value = u8> {
    0u8..40
}

fn push_any(log: Log, kind: u8) -> Log {
    let call = ["c1", "c2", "c3"][usize::from(kind % 3)];
    let decision = [Approved, Rejected, Corrected][usize::from(kind / 3 % 3)];
    match kind {
        0..=2 => log.user_message(),
        3..=5 => log.answer(),
        6..=8 => log.calls(&["c1=look", "c2=pay", "c3=mail"]),
        9..=11 => log.calls(&["c3=fly", "c1=set![", "c1=pay"]),
        12..=15 => log.started(call),
        16..=18 => log.cached(call),
        19..=23 => log.result(call),
        24..=26 => log.review(call, kind.is_multiple_of(2)),
        27..=33 => log.decided(call, kind.is_multiple_of(2), decision),
        34..=36 => {
            let to = log.seq() / 2 + 1;
            log.rewound(to)
        }
        37 => log.forked(),
        38 => {
            let run = log.run.clone();
            log.push(Entry::RunEnded { run, outcome: RunOutcome::Failed, error: None, code: None })
        }
        _ => log.push(message_entry(Message::system("Be kind."))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    /// For any log: a call with a result is never executed again, a call that may have been
    /// executed is never silently repeated, and nothing is executed while a review is required.
    #[test]
    fn any_log_has_a_next_step(entries in proptest::collection::vec(any_entry(), 0..40), client_tools: bool) {
        let log = entries.into_iter().fold(Log::new(), push_any);
        let session = log.session();
        rules_of(&mail_is_reviewed(), client_tools, |rules| {
            let step = next(&session, rules);
            let last = session.messages.iter().rposition(|m| !m.message.tool_calls().is_empty());
            let results: Vec<_> =
                last.map(|i| session.messages[i..].iter().filter_map(|m| m.message.tool_call_id()).collect()).unwrap_or_default();
            let touched: Vec<&ToolCall> = match &step {
                NextStep::Tools(jobs) => jobs.iter().map(|j| &j.call).collect(),
                NextStep::Review(requests) => requests.iter().map(|q| &q.call).collect(),
                _ => Vec::new(),
            };
            assert!(touched.iter().all(|c| !results.contains(&c.id)), "a call with a result is left alone");
            if session.open_reviews().next().is_some() {
                assert_eq!(step, NextStep::Wait);
            }
            let NextStep::Tools(jobs) = &step else { return };
            let since = session.messages[last.unwrap()].seq;
            for job in jobs.iter().filter(|j| matches!(j.action, CallAction::Call(_))) {
                let tool = rules.tools.iter().find(|t| t.name == job.call.name).unwrap();
                let started = session.runs.iter().flat_map(|r| &r.tools_started);
                let started = started.filter(|s| s.seq > since && s.call == job.call.id && !s.cached).map(|s| s.seq).max();
                let about = |r: &&Review| r.seq > since && r.opened.call.as_ref() == Some(&job.call.id) && r.decided.is_some();
                let requests = session.reviews.iter().filter(about).map(|r| r.seq).max();
                assert!(tool.is_repeatable() || started <= requests, "it may have happened, and nobody was asked");
                assert!(tool.name != "mail" || requests.is_some(), "nobody allowed it");
            }
        });
    }
}
