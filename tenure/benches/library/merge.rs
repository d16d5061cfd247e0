//! Reconciling a request with its session: the cost depends on the request, not on the session.

use crate::support::Report;
use crate::support::*;
use std::hint::black_box;
use std::time::Duration;
use tenure::{log::*, rules::*, run::*, session::*};

const REPEATS: usize = 200;

fn session(turns: usize) -> Session {
    let at = "2026-01-01T00:00:00Z".parse().unwrap();
    let run = RunId::generate();
    let message_entries = (0..turns).flat_map(turn).map(|message| match message.role() {
        Role::Assistant => MessageEntry::by_run(&run, message),
        _ => MessageEntry::from(message),
    });
    let entries = [Entry::created(SessionCreated::default())].into_iter().chain(message_entries.map(Entry::Message));
    let records = (1..).zip(entries).map(|(seq, entry)| Record { seq, at, entry });
    Session::replay(&bench_principal().key(&id("s")), records.collect::<Vec<_>>()).unwrap()
}

fn merge(session: &Session, messages: &[Message]) -> Duration {
    let incoming = IncomingRequest { messages, ..IncomingRequest::default() };
    median((0..REPEATS).map(|_| time(|| black_box(reconcile(session, &incoming))).0).collect())
}

pub fn requests(report: &mut Report) {
    let short = session(25);
    let long = session(2500);
    // The local list of a tool loop: the last question, its call and its result.
    let tool_loop = |session: &Session| -> Vec<Message> {
        let last = &session.messages[session.messages.len() - 4..];
        last[..3].iter().map(|m| m.message.clone()).collect()
    };
    let measured = merge(&long, &tool_loop(&long));
    let baseline = merge(&short, &tool_loop(&short));
    let label = "merging a tool loop's list with 10,000 messages, beside with 100";
    report.row(label, micros(measured), micros(baseline), ratio(measured, baseline), Promise::AtMost(2.0));
    // The complete list and a new question, compared with parsing it.
    let mut all: Vec<Message> = long.messages.iter().map(|m| m.message.clone()).collect();
    all.push(Message::user("And then?"));
    let texts: Vec<String> = all.iter().map(|m| m.as_str().to_owned()).collect();
    let parse = || texts.iter().map(|text| Message::parse(text).unwrap()).collect::<Vec<_>>();
    let baseline = median((0..20).map(|_| time(|| black_box(parse())).0).collect());
    let measured = merge(&long, &all);
    let label = "merging a list of 10,000 messages, beside parsing it";
    report.row(label, ms(measured), ms(baseline), ratio(measured, baseline), Promise::AtMost(1.0));
}

fn micros(d: Duration) -> String {
    format!("{:.1} µs", d.as_secs_f64() * 1e6)
}
