//! What a run does next, from the session alone. Starting, going on after a crash, after a review, or in a fork is all the same.
//!
//! A tool call of the model's last answer has a result, or it is made, or a person is asked, or it is the client's to make. One that was
//! begun and has no result may or may not have happened: unless doing it twice does no harm, a person is asked about that too.

use crate::rules::session::{Review, Session, Started};
use crate::types::entry::{Decision, ReviewDecided};
use crate::types::id::Seq;
use crate::types::message::{Message, Role, ToolCall};
use crate::types::policy::ReviewRule;
use crate::types::tool::Tool;
use serde_json::{Map, Value};

/// What a run has to go by besides the session.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// The tools that can be called here.
    pub tools: &'a [Tool],
    /// What a person must allow.
    pub review: &'a [ReviewRule],
    /// Whether the client brought tools of its own: then a call of an unknown tool is the client's to make.
    pub client_tools: bool,
}

/// What a run does next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Ask the model.
    Model,
    /// Make these calls.
    Tools(Vec<Job>),
    /// Ask a person about these calls.
    Review(Vec<Question>),
    /// Wait until a person has decided.
    Wait,
    /// Nothing: there is an answer, or calls for the client to make.
    Done,
}

/// A call to be made, or to be answered without making it.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// The call.
    pub call: ToolCall,
    /// What to do about it.
    pub doing: Doing,
}

/// What to do about a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Doing {
    /// Make it, with these arguments.
    Call(Map<String, Value>),
    /// Its result is this; nothing is called.
    Say(String),
}

/// A question to a person.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// The call.
    pub call: ToolCall,
    /// The rule that asks, by its place.
    pub rule: Option<usize>,
    /// It was begun and has no result: was it done?
    pub lost: bool,
    /// Its arguments, as they would be or were used.
    pub arguments: Value,
}

/// What a run does next in this session.
pub fn next(session: &Session, rules: &Rules<'_>) -> Step {
    if session.open_reviews().next().is_some() {
        return Step::Wait;
    }
    next_after(session, &[], rules)
}

/// What a run does next once these were said too. Costs what the last turn has, however long the session is.
pub(crate) fn next_after(session: &Session, new: &[Message], rules: &Rules<'_>) -> Step {
    let stored = session.messages.iter().rev().map(|said| (said.seq, &said.message));
    let said = new.iter().rev().map(|m| (Seq::MAX, m)).chain(stored).filter(|(_, m)| !m.role().instructs());
    let mut results = Vec::new();
    for (since, message) in said {
        if let Some(id) = message.tool_call_id() {
            results.push(id);
            continue;
        }
        let calls = message.tool_calls();
        if calls.is_empty() {
            let answered = message.role() == Role::Assistant && results.is_empty();
            return if answered { Step::Done } else { Step::Model };
        }
        let open = calls.into_iter().filter(|c| !results.contains(&c.id));
        let open: Vec<_> = open.map(|call| Known::of(session, since, call)).collect();
        return if open.is_empty() { Step::Model } else { decide(open, rules) };
    }
    if results.is_empty() { Step::Done } else { Step::Model }
}

/// A call without a result, and what the log says of it.
struct Known<'a> {
    call: ToolCall,
    started: Option<Seq>,
    review: Option<&'a Review>,
    /// The arguments that a person has put in place of the model's.
    corrected: Option<&'a Map<String, Value>>,
}

impl<'a> Known<'a> {
    /// Models use the same ids again: only what came after the answer counts.
    fn of(session: &'a Session, since: Seq, call: ToolCall) -> Self {
        let started = begun(session, since).find(|s| s.call == call.id && !s.cached).map(|s| s.seq);
        let later = session.reviews.iter().rev().take_while(|r| r.seq > since);
        let decided = later.filter(|r| r.opened.call.as_ref() == Some(&call.id) && r.decided.is_some());
        let decided: Vec<&Review> = decided.collect();
        let corrections = decided.iter().filter_map(|r| Some(&r.decided.as_ref()?.1));
        let mut corrections = corrections.filter(|d| d.decision == Decision::Corrected);
        let corrected = corrections.find_map(|d| d.arguments.as_ref()?.as_object());
        Self { started, review: decided.first().copied(), corrected, call }
    }

    fn decision(&self) -> Option<(&'a Review, &'a ReviewDecided)> {
        self.review.and_then(|r| Some((r, &r.decided.as_ref()?.1)))
    }

    /// Makes the call: as a person has put it, or else as the model did.
    fn made(&self) -> Doing {
        self.corrected.map_or_else(|| arguments(&self.call), |arguments| Doing::Call(arguments.clone()))
    }

    fn question(self, rule: Option<usize>, lost: bool) -> Question {
        let text = || Value::from(self.call.arguments.as_str());
        let arguments = match self.corrected {
            Some(arguments) => Value::Object(arguments.clone()),
            None => serde_json::from_str(&self.call.arguments).unwrap_or_else(|_| text()),
        };
        Question { call: self.call, rule, lost, arguments }
    }
}

/// The calls that were begun after a record, newest first. Runs follow each other, so that older ones need not be looked at.
fn begun(session: &Session, since: Seq) -> impl Iterator<Item = &Started> {
    let older = session.runs.iter().rev().take_while(|r| r.seq > since).count() + 1;
    let runs = session.runs.iter().rev().take(older);
    runs.flat_map(|r| r.tools_started.iter().rev()).take_while(move |s| s.seq > since)
}

fn decide(open: Vec<Known<'_>>, rules: &Rules<'_>) -> Step {
    let (mut jobs, mut questions) = (Vec::new(), Vec::new());
    for known in open {
        match one(&known, rules) {
            Some(Ok(doing)) => jobs.push(Job { call: known.call, doing }),
            Some(Err((rule, lost))) => questions.push(known.question(rule, lost)),
            None => {}
        }
    }
    match (jobs.is_empty(), questions.is_empty()) {
        (false, _) => Step::Tools(jobs),
        (true, false) => Step::Review(questions),
        (true, true) => Step::Done,
    }
}

/// What to do about one call, or why a person must be asked; `None`: it is the client's.
fn one(known: &Known<'_>, rules: &Rules<'_>) -> Option<Result<Doing, (Option<usize>, bool)>> {
    let call = &known.call;
    let Some(tool) = rules.tools.iter().find(|t| t.name == call.name) else {
        let unknown = || format!("There is no tool {:?}.", call.name);
        return (!rules.client_tools && known_names(rules)).then(|| Ok(Doing::Say(unknown())));
    };
    let decision = known.decision();
    // Begun since a person last looked at it, or without anybody looking.
    let lost = known.started.is_some_and(|at| decision.is_none_or(|(review, _)| review.seq < at));
    if lost && !tool.is_repeatable() {
        return Some(Err((rules.review.iter().position(|r| r.covers(&call.name)), true)));
    }
    let doing = match decision {
        None => match rules.review.iter().position(|r| r.covers(&call.name)) {
            Some(rule) => return Some(Err((Some(rule), false))),
            None => known.made(),
        },
        Some((review, d)) => match (review.opened.lost, d.decision) {
            (_, Decision::Corrected) | (false, Decision::Approved) | (true, Decision::Rejected) => known.made(),
            (true, Decision::Approved) => Doing::Say(told("This was done, as a person has made sure.", d)),
            (false, Decision::Rejected) => Doing::Say(told("A person has refused this call; it was not made.", d)),
        },
    };
    Some(Ok(doing))
}

/// Without any tools here, calls are the client's business, whatever they name.
fn known_names(rules: &Rules<'_>) -> bool {
    !rules.tools.is_empty()
}

fn told(what: &str, decided: &ReviewDecided) -> String {
    match &decided.notes {
        Some(notes) => format!("{what} Note: {notes}"),
        None => what.to_owned(),
    }
}

/// Makes the call as the model put it; no arguments at all are an empty object.
pub(crate) fn arguments(call: &ToolCall) -> Doing {
    let text = if call.arguments.trim().is_empty() { "{}" } else { &call.arguments };
    match serde_json::from_str(text) {
        Ok(arguments) => Doing::Call(arguments),
        Err(e) => Doing::Say(format!("The arguments are not a JSON object ({e}); the tool was not called.")),
    }
}
