//! Determines the next step of a run from the session alone. Starting, resuming after a crash, resuming after
//! a review and continuing in a fork are therefore the same operation.
//!
//! Each tool call of the model's last answer has a result, is made, is sent to review, or is left to the
//! client. A call that was started and has no result may or may not have been executed: unless it can safely
//! be retried, a person decides that too.

use crate::rules::human_question::{HumanQuestion, answer_text};
use crate::rules::partial::PartialSession;
use crate::rules::session::{Review, Session, ToolCallStart};
use crate::types::entry::{Decision, ReviewDecided};
use crate::types::id::Seq;
use crate::types::message::{Message, Role, ToolCall};
use crate::types::policy::ReviewRule;
use crate::types::tool::Tool;
use serde_json::{Map, Value};

/// The settings of a run that determine its next step, besides the session.
#[derive(Clone, Copy, Debug)]
pub struct RunRules<'a> {
    /// The tools that can be called here.
    pub tools: &'a [Tool],
    /// The tool calls that need a reviewer's approval.
    pub review: &'a [ReviewRule],
    /// Whether the client declared tools of its own. Then a call of an unknown tool is left to the client.
    pub client_tools: bool,
}

/// The next step of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum NextStep {
    /// Call the model.
    Model,
    /// Make these tool calls.
    Tools(Vec<PendingCall>),
    /// Open reviews for these calls.
    Review(Vec<ReviewRequest>),
    /// Wait for a reviewer's decision.
    Wait,
    /// The run is complete: there is an answer, or there are calls for the client to make.
    Done,
}

/// A tool call to execute, or to answer without executing it.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingCall {
    /// The tool call.
    pub call: ToolCall,
    /// The action to take.
    pub action: CallAction,
}

/// The action for a tool call.
#[derive(Clone, Debug, PartialEq)]
pub enum CallAction {
    /// Execute the tool with these arguments.
    Call(Map<String, Value>),
    /// Store this text as the result, without executing the tool.
    Respond(String),
}

/// A request to review a tool call.
#[derive(Clone, Debug, PartialEq)]
pub struct ReviewRequest {
    /// The tool call.
    pub call: ToolCall,
    /// The index of the review rule that applies. `None` means that no rule does.
    pub rule: Option<usize>,
    /// Whether the call was started and has no result. The reviewer then decides whether it was executed.
    pub lost: bool,
    /// The arguments that would be used or were used.
    pub arguments: Value,
}

/// Returns the next step of a run in this session.
pub fn next(session: &Session, rules: &RunRules<'_>) -> NextStep {
    if session.open_reviews().next().is_some() {
        return NextStep::Wait;
    }
    next_after(session.as_partial(), &[], rules)
}

/// Returns the next step after these additional messages. The cost depends on the last turn only, not on the
/// length of the session.
pub(crate) fn next_after(session: PartialSession<'_>, new: &[Message], rules: &RunRules<'_>) -> NextStep {
    let stored = session.messages.iter().rev().map(|stored| (stored.seq, &stored.message));
    let messages = new.iter().rev().map(|m| (Seq::MAX, m)).chain(stored).filter(|(_, m)| !m.role().is_instruction());
    let mut results = Vec::new();
    for (since, message) in messages {
        if let Some(id) = message.tool_call_id() {
            results.push(id);
            continue;
        }
        let calls = message.tool_calls();
        if calls.is_empty() {
            let answered = message.role() == Role::Assistant && results.is_empty();
            return if answered { NextStep::Done } else { NextStep::Model };
        }
        let open = calls.into_iter().filter(|c| !results.contains(&c.id));
        let open: Vec<_> = open.map(|call| OpenCall::of(session, since, call)).collect();
        return if open.is_empty() { NextStep::Model } else { decide(open, rules) };
    }
    if results.is_empty() { NextStep::Done } else { NextStep::Model }
}

/// A call without a result, and what the log records about it.
struct OpenCall<'a> {
    call: ToolCall,
    started: Option<Seq>,
    review: Option<&'a Review>,
    /// The arguments by which a reviewer replaced the model's.
    corrected: Option<&'a Map<String, Value>>,
}

impl<'a> OpenCall<'a> {
    /// Collects what the log records about a call. Only records after the answer count, because models reuse
    /// ids.
    fn of(session: PartialSession<'a>, since: Seq, call: ToolCall) -> Self {
        let started = calls_started_after(session, since).find(|s| s.call == call.id && !s.cached).map(|s| s.seq);
        let later = session.reviews.iter().rev().take_while(|r| r.seq > since);
        let decided = later.filter(|r| r.opened.call.as_ref() == Some(&call.id) && r.decided.is_some());
        let decided: Vec<&Review> = decided.collect();
        let corrections = decided.iter().filter_map(|r| Some(&r.decided.as_ref()?.1));
        let mut corrections = corrections.filter(|d| d.decision == Decision::Corrected);
        let corrected = corrections.find_map(|d| d.arguments.as_ref()?.as_object());
        Self { started, review: decided.first().copied(), corrected, call }
    }

    /// Returns the latest decided review of the call, with its decision.
    fn decision(&self) -> Option<(&'a Review, &'a ReviewDecided)> {
        self.review.and_then(|r| Some((r, &r.decided.as_ref()?.1)))
    }

    /// Returns the action that makes the call, with the reviewer's arguments if there are any, else with the
    /// model's.
    fn action(&self) -> CallAction {
        self.corrected
            .map_or_else(|| call_with_model_arguments(&self.call), |corrected| CallAction::Call(corrected.clone()))
    }

    /// Builds the review request for the call.
    fn review_request(self, rule: Option<usize>, lost: bool) -> ReviewRequest {
        let text = || Value::from(self.call.arguments.as_str());
        let arguments = match self.corrected {
            Some(arguments) => Value::Object(arguments.clone()),
            None => serde_json::from_str(&self.call.arguments).unwrap_or_else(|_| text()),
        };
        ReviewRequest { call: self.call, rule, lost, arguments }
    }
}

/// Returns the calls that were started after a record, newest first. Runs do not overlap, so older ones need
/// not be scanned.
fn calls_started_after(session: PartialSession<'_>, since: Seq) -> impl Iterator<Item = &ToolCallStart> {
    let older = session.runs.iter().rev().take_while(|r| r.seq > since).count() + 1;
    let runs = session.runs.iter().rev().take(older);
    runs.flat_map(|r| r.tools_started.iter().rev()).take_while(move |s| s.seq > since)
}

/// Chooses the step for the open calls. Calls that need no review are made first.
fn decide(open: Vec<OpenCall<'_>>, rules: &RunRules<'_>) -> NextStep {
    let mut pending = Vec::new();
    let mut requests = Vec::new();
    for open_call in open {
        match decide_call(&open_call, rules) {
            Some(Ok(action)) => pending.push(PendingCall { call: open_call.call, action }),
            Some(Err((rule, lost))) => requests.push(open_call.review_request(rule, lost)),
            None => {}
        }
    }
    match (pending.is_empty(), requests.is_empty()) {
        (false, _) => NextStep::Tools(pending),
        (true, false) => NextStep::Review(requests),
        (true, true) => NextStep::Done,
    }
}

/// Decides one call: the action to take, or the reason why a review is needed (the rule, and whether the call
/// is lost). `None` means that the call is left to the client.
fn decide_call(open_call: &OpenCall<'_>, rules: &RunRules<'_>) -> Option<Result<CallAction, (Option<usize>, bool)>> {
    let call = &open_call.call;
    let Some(tool) = rules.tools.iter().find(|t| t.name == call.name) else {
        let message = || format!("There is no tool {:?}.", call.name);
        return (!rules.client_tools && has_tools(rules)).then(|| Ok(CallAction::Respond(message())));
    };
    let decision = open_call.decision();
    let arguments = call_with_model_arguments(call);
    let arguments = match &arguments {
        CallAction::Call(arguments) => Some(arguments),
        CallAction::Respond(_) => None,
    };
    let rule = || rules.review.iter().position(|r| r.applies(tool, arguments));
    if tool.asks_human {
        return Some(decide_question(arguments, decision.map(|(_, decided)| decided)).ok_or_else(|| (rule(), false)));
    }
    // Started after the last decision about it, or without any decision.
    let lost = open_call.started.is_some_and(|seq| decision.is_none_or(|(review, _)| review.seq < seq));
    if lost && !tool.is_repeatable() {
        return Some(Err((rule(), true)));
    }
    let action = match decision {
        None => match rule() {
            Some(rule) => return Some(Err((Some(rule), false))),
            None => open_call.action(),
        },
        Some((review, d)) => match (review.opened.lost, d.decision) {
            (_, Decision::Corrected) | (false, Decision::Approved) | (true, Decision::Rejected) => open_call.action(),
            (true, Decision::Approved) => {
                CallAction::Respond(with_notes("A reviewer confirmed that this call was executed.", d))
            }
            (false, Decision::Rejected) => {
                CallAction::Respond(with_notes("A reviewer rejected this call; it was not executed.", d))
            }
        },
    };
    Some(Ok(action))
}

/// Decides a call that asks a person: the decision is the result. `None` means that a person must decide.
fn decide_question(arguments: Option<&Map<String, Value>>, decided: Option<&ReviewDecided>) -> Option<CallAction> {
    if let Some(decided) = decided {
        return Some(CallAction::Respond(answer_text(decided)));
    }
    let question = arguments.ok_or_else(|| "the arguments are not a JSON object".to_owned());
    let invalid = question.and_then(HumanQuestion::from_arguments).err()?;
    Some(CallAction::Respond(format!("[no person was asked: {invalid}]")))
}

/// Returns false if there are no tools here: then all calls are left to the client, whatever they name.
fn has_tools(rules: &RunRules<'_>) -> bool {
    !rules.tools.is_empty()
}

/// Appends the reviewer's notes to a result text.
fn with_notes(text: &str, decided: &ReviewDecided) -> String {
    match &decided.notes {
        Some(notes) => format!("{text} Note: {notes}"),
        None => text.to_owned(),
    }
}

/// Returns the action that makes the call with the model's arguments. Missing arguments are an empty object.
pub(crate) fn call_with_model_arguments(call: &ToolCall) -> CallAction {
    let text = if call.arguments.trim().is_empty() { "{}" } else { &call.arguments };
    match serde_json::from_str(text) {
        Ok(arguments) => CallAction::Call(arguments),
        Err(e) => CallAction::Respond(format!("The arguments are not a JSON object ({e}); the tool was not called.")),
    }
}
