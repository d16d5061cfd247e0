//! Recorded request sequences of real clients, replayed through the pure reconcile function: after
//! each request the session must equal the one the trace expects, and the prompt must be valid and
//! complete.
//!
//! `tests/fixtures/traces/README.md` describes the format; `scripts/record-traces.sh` records new
//! ones.

use serde::Deserialize;
use serde_json::Value;
use std::path::PathBuf;
use tenure::{log::*, policy::*, rules::*, run::*, session::*, *};

#[derive(Debug, Deserialize)]
pub struct Trace {
    pub requests: Vec<Request>,
}

#[derive(Debug, Deserialize)]
pub struct Request {
    pub messages: Vec<Message>,
    #[serde(default)]
    pub answer: Vec<Message>,
    #[serde(default)]
    pub failed: bool,
    #[serde(default)]
    pub side: bool,
    #[serde(default)]
    pub retry_count: Option<String>,
    pub expected: Expected,
}

#[derive(Debug, Deserialize)]
pub struct Expected {
    #[serde(default)]
    pub stored_after: Vec<String>,
    #[serde(default, rename = "or")]
    pub alternatives: Vec<Vec<String>>,
    #[serde(default)]
    pub compare: Option<String>,
    #[serde(default)]
    pub shown: Option<Vec<String>>,
}

impl Expected {
    /// Returns true if the stored session is one of the accepted ones.
    pub fn accepts(&self, stored: &[String]) -> bool {
        let questions =
            |lines: &[String]| -> Vec<String> { lines.iter().filter(|l| l.starts_with("user: ")).cloned().collect() };
        let only_questions = self.compare.as_deref() == Some("questions");
        let mut right = [&self.stored_after].into_iter().chain(&self.alternatives);
        right.any(|lines| if only_questions { questions(lines) == questions(stored) } else { lines == stored })
    }
}

pub fn traces() -> Vec<(String, Trace)> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/traces");
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "json"));
    paths.sort();
    assert!(paths.len() > 100, "the traces are there");
    let read = |path: &PathBuf| {
        let trace = serde_json::from_str(&std::fs::read_to_string(path).unwrap());
        (path.file_stem().unwrap().to_string_lossy().into_owned(), trace.unwrap())
    };
    paths.iter().map(read).collect()
}

/// A message in the notation of the traces.
pub fn line(message: &Message) -> Option<String> {
    let short = |id: &str| id.chars().skip(id.chars().count().saturating_sub(5)).collect::<String>();
    let text = message.text();
    Some(match message.role() {
        Role::System | Role::Developer => return None,
        Role::Tool => format!("tool {}: {text}", short(&message.tool_call_id().unwrap_or_default())),
        Role::Assistant if !message.tool_calls().is_empty() => {
            let calls = message.tool_calls().into_iter().map(|c| format!("{}#{}", c.name, short(&c.id)));
            format!("calls {}", calls.collect::<Vec<_>>().join(" "))
        }
        Role::Assistant => format!("assistant: {text}"),
        Role::User => {
            let parts = message.to_value()["content"].as_array().cloned().unwrap_or_default();
            let picture = if parts.iter().any(|p| p["type"] == "image_url") { " +picture" } else { "" };
            format!("user: {text}{picture}")
        }
    })
}

fn lines<'a>(messages: impl IntoIterator<Item = &'a Message>) -> Vec<String> {
    messages.into_iter().filter_map(line).collect()
}

/// An in-memory log.
pub struct Log {
    records: Vec<Record>,
}

impl Log {
    pub fn new() -> Self {
        let mut log = Self { records: Vec::new() };
        log.push(Entry::created(SessionCreated::default()));
        log
    }

    fn push(&mut self, entry: Entry) {
        let at = "2026-01-01T00:00:00Z".parse().unwrap();
        self.records.push(Record { seq: self.records.len() as Seq + 1, at, entry });
    }

    pub fn session(&self) -> Session {
        Session::replay(&Principal::default().key(&SessionId::new("s").unwrap()), self.records.clone()).unwrap()
    }

    pub fn lines(&self) -> Vec<String> {
        lines(self.session().messages.iter().map(|m| &m.message))
    }

    /// Applies a request and its answer. Returns the plan and the prompt.
    pub fn exchange(
        &mut self,
        messages: &[Message],
        answer: &[Message],
        outcome: RunOutcome,
    ) -> (ReconcilePlan, Vec<Message>) {
        self.apply_request(&IncomingRequest { messages, ..IncomingRequest::default() }, answer, outcome)
    }

    /// Applies a request to the log. Returns the plan and the prompt.
    fn apply_request(
        &mut self,
        incoming: &IncomingRequest<'_>,
        answer: &[Message],
        outcome: RunOutcome,
    ) -> (ReconcilePlan, Vec<Message>) {
        let session = self.session();
        let plan = reconcile(&session, incoming);
        if plan.retained < session.messages.len() {
            let resolved = session.locate(&Point::Position(plan.retained)).unwrap();
            self.push(Entry::Rewound(RewindEntry { to: resolved.seq, digest: resolved.digest }));
        }
        for entry in plan.message_entries(self.records.len() as Seq + 1) {
            self.push(Entry::Message(entry));
        }
        let run = RunId::generate();
        self.push(Entry::RunStarted { run: run.clone(), claim: None, detail: Default::default() });
        let shown = plan.overlay.history(&self.session(), &Window::default());
        assert!(is_valid(&shown), "{shown:?}");
        for message in answer {
            self.push(Entry::Message(MessageEntry::by_run(&run, message.clone())));
        }
        self.push(Entry::RunEnded { run, outcome, error: None, code: None });
        (plan, shown)
    }

    fn request(&mut self, request: &Request) -> (ReconcilePlan, Vec<Message>) {
        let is_retry = request.retry_count.as_deref().is_some_and(|n| n != "0");
        let outcome = if request.failed { RunOutcome::Failed } else { RunOutcome::Completed };
        let incoming = IncomingRequest { messages: &request.messages, is_retry, ..IncomingRequest::default() };
        self.apply_request(&incoming, &request.answer, outcome)
    }
}

#[test]
fn every_recorded_sequence_ends_with_the_right_session() {
    let mut wrong = Vec::new();
    for (name, trace) in traces() {
        let mut log = Log::new();
        for (i, request) in trace.requests.iter().enumerate().filter(|(_, r)| !r.side) {
            let (plan, shown) = log.request(request);
            let stored = log.lines();
            let counted = plan.matched + plan.appended() + plan.ephemeral + plan.orphans.len();
            let prompt = request.messages.iter().take_while(|m| m.role().is_instruction()).count();
            let sent = request.messages.len() - prompt;
            assert_eq!(counted, sent, "{name}, request {i}: every message is counted once: {plan:?}");
            if !request.expected.accepts(&stored) {
                wrong.push(format!("{name}, request {i}\n  stored   {stored:#?}\n  expected {:#?}", request.expected));
                break;
            }
            if let Some(expected) = &request.expected.shown
                && lines(&shown) != *expected
            {
                wrong.push(format!("{name}, request {i}\n  shown    {:#?}\n  expected {expected:#?}", lines(&shown)));
            }
        }
    }
    assert!(wrong.is_empty(), "{} traces are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn the_format_is_known_completely() {
    let known = ["messages", "tools", "stream", "retry_count", "by", "answer", "failed", "side", "expected"];
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/traces");
    for (name, _) in traces() {
        let text = std::fs::read_to_string(dir.join(format!("{name}.json"))).unwrap();
        let trace: Value = serde_json::from_str(&text).unwrap();
        for request in trace["requests"].as_array().unwrap() {
            let unknown = request.as_object().unwrap().keys().find(|k| !known.contains(&k.as_str()));
            assert_eq!(unknown, None, "{name}");
        }
    }
}
