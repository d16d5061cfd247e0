//! Clients of every style take turns on one session, with tools and failures: no message is lost or
//! stored twice, and every prompt is valid.

use super::traces::Log;
use proptest::prelude::*;
use std::collections::HashMap;
use tenure::{rules::*, run::*, session::*};

/// How a client sends its history.
#[derive(Clone, Copy, Debug)]
enum Style {
    /// Sends only new messages; a tool loop sends its local list.
    Append,
    /// Sends its complete history.
    Full,
    /// Sends the most recent turns of its history.
    Window(usize),
    /// Sends the first turn and the most recent ones.
    Pinned(usize),
}

/// How a client reacts to a failed request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum OnFailure {
    /// Drops the question.
    Forget,
    /// Keeps the question in its history.
    Keep,
    /// Retries the same request immediately.
    Retry,
}

#[derive(Clone, Debug)]
struct Step {
    client: usize,
    /// Number of tool rounds before the model answers.
    rounds: usize,
    /// Index of the request of the turn that fails. `None` means that none does.
    fails_at: Option<usize>,
    on_failure: OnFailure,
}

#[derive(Debug)]
struct Client {
    style: Style,
    /// The client's history: the messages of each turn.
    turns: Vec<Vec<Message>>,
}

impl Client {
    fn request(&self) -> Vec<Message> {
        let (known, turn) = self.turns.split_at(self.turns.len() - 1);
        let newest = |n: usize| &known[known.len().saturating_sub(n)..];
        let sent = match self.style {
            Style::Append => &[],
            Style::Full => known,
            Style::Window(n) => newest(n),
            Style::Pinned(n) if known.len() > n + 1 => {
                return [&known[..1], newest(n), turn].concat().concat();
            }
            Style::Pinned(_) => known,
        };
        [sent, turn].concat().concat()
    }
}

fn calls(id: &str) -> Message {
    let call = serde_json::json!({"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}});
    Message::from_value(&serde_json::json!({"role": "assistant", "content": null, "tool_calls": [call]})).unwrap()
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let failure = prop::sample::select(vec![OnFailure::Forget, OnFailure::Keep, OnFailure::Retry]);
    let fails = prop::option::weighted(0.2, 0usize..3);
    let step = (0usize..4, 0usize..3, fails, failure);
    let step = step.prop_map(|(client, rounds, fails_at, on_failure)| Step { client, rounds, fails_at, on_failure });
    prop::collection::vec(step, 1..14)
}

fn styles() -> impl Strategy<Value = Vec<Style>> {
    let style = prop_oneof![
        Just(Style::Append),
        Just(Style::Full),
        (1usize..4).prop_map(Style::Window),
        (1usize..3).prop_map(Style::Pinned),
    ];
    prop::collection::vec(style, 4)
}

/// Executes one turn. Appends to `expected` the texts that were sent or answered, and whether the
/// client gave up the turn. A client that sends lists and gives up a turn sends another question in
/// its place, which is an edit.
fn take_turn(log: &mut Log, client: &mut Client, step: &Step, n: usize, expected: &mut Vec<(String, bool)>) {
    let first = expected.len();
    let abandon_turn = |expected: &mut Vec<(String, bool)>, client: &mut Client| {
        client.turns.pop();
        let edits = !matches!(client.style, Style::Append);
        expected[first..].iter_mut().for_each(|(_, abandoned)| *abandoned = edits);
    };
    let question = format!("question {n}");
    client.turns.push(vec![Message::user(&question)]);
    expected.push((question, false));
    let mut fails_at = step.fails_at;
    let mut round = 0;
    loop {
        let request = client.request();
        if fails_at == Some(round) {
            log.exchange(&request, &[], RunOutcome::Failed);
            match step.on_failure {
                OnFailure::Retry => {
                    fails_at = None;
                    continue;
                }
                // A client that gives up during a tool loop drops the loop.
                OnFailure::Forget => abandon_turn(expected, client),
                OnFailure::Keep if round > 0 => abandon_turn(expected, client),
                OnFailure::Keep => {}
            }
            return;
        }
        let turn = client.turns.last_mut().unwrap();
        if round == step.rounds {
            let answer = Message::assistant(&format!("answer {n}"));
            turn.push(answer.clone());
            expected.push((answer.text(), false));
            log.exchange(&request, &[answer], RunOutcome::Completed);
            return;
        }
        let call = calls(&format!("call_{n}_{round}"));
        let result = Message::tool(&format!("call_{n}_{round}"), &format!("result {n} {round}"));
        log.exchange(&request, std::slice::from_ref(&call), RunOutcome::Completed);
        turn.extend([call, result.clone()]);
        expected.push((result.text(), false));
        round += 1;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn alternating_clients_lose_and_duplicate_nothing(styles in styles(), steps in steps()) {
        let mut log = Log::new();
        let mut clients: Vec<Client> = styles.iter().map(|s| Client { style: *s, turns: Vec::new() }).collect();
        let mut expected = Vec::new();
        for (n, step) in steps.iter().enumerate() {
            take_turn(&mut log, &mut clients[step.client], step, n, &mut expected);
        }
        let session = log.session();
        let mut stored: HashMap<String, usize> = HashMap::new();
        for message in session.messages.iter().map(|m| &m.message).filter(|m| m.tool_calls().is_empty()) {
            *stored.entry(message.text()).or_default() += 1;
        }
        for (text, abandoned) in &expected {
            let times = stored.remove(text).unwrap_or(0);
            prop_assert!(times == 1 || (times == 0 && *abandoned), "{:?} in {:#?}", text, log.lines());
        }
        prop_assert!(stored.is_empty(), "{:?}", stored);
    }

    /// For any stored history and any request: a new message is stored or equals a question that
    /// stays, and a user's message is rewound only by an edit or by `history: full`.
    #[test]
    fn new_messages_are_stored_and_questions_stay(styles in styles(), steps in steps(), prefix_length in 0usize..12) {
        let mut log = Log::new();
        let mut clients: Vec<Client> = styles.iter().map(|s| Client { style: *s, turns: Vec::new() }).collect();
        let mut expected = Vec::new();
        for (n, step) in steps.iter().enumerate() {
            take_turn(&mut log, &mut clients[step.client], step, n, &mut expected);
        }
        // Any list that ends with a question: a prefix of the stored messages, followed by a new
        // one.
        let session = log.session();
        let mut messages: Vec<Message> = session.messages.iter().map(|m| m.message.clone()).collect();
        messages.truncate(prefix_length);
        messages.push(Message::user("something new"));
        let plan = reconcile(&session, &IncomingRequest { messages: &messages, ..IncomingRequest::default() });
        prop_assert_eq!(plan.append.last().map(|m| m.message.text()), Some("something new".to_owned()));
        let rewound = &session.messages[plan.retained..];
        let anchor = messages.iter().rev().find(|m| m.role() == Role::Assistant);
        let edited = rewound.first().is_some_and(|m| m.message.role() == Role::User && m.replies_to.is_some());
        let users = rewound.iter().any(|m| m.message.role() == Role::User);
        prop_assert!(!users || (edited && anchor.is_some()), "{:#?}", log.lines());
    }
}
