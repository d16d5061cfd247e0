//! What the SQL views `workflow_checkpoints` and `runs` must show, computed from the folded log, and random entries to
//! compare them with. For the tests of both SQL stores.

use crate::rules::session::{Checkpoint, Run, Session};
use crate::testing::Rng;
use crate::types::entry::{Entry, Record, RunOutcome};
use crate::types::head::Head;
use crate::types::id::SessionKey;
use crate::types::message::Role;
use serde_json::{Value, json};

/// Returns the state of a session at a checkpoint: that of its log up to the checkpoint.
pub(crate) fn checkpoint_state(key: &SessionKey, full_log: &[Record], checkpoint: &Checkpoint) -> Value {
    let upto = full_log.iter().filter(|r| r.seq <= checkpoint.seq).cloned();
    let session = Session::replay(key, upto).unwrap();
    let mut pending: Vec<(String, Value)> = Vec::new();
    let mut results = Vec::new();
    for message in session.messages.iter().map(|m| &m.message) {
        let value = message.to_value();
        if let Some(id) = message.tool_call_id() {
            pending.retain(|(call, _)| *call != id);
            results.push(json!({"tool_call_id": id, "content": value["content"]}));
        } else if message.role() == Role::Assistant {
            let calls = value["tool_calls"].as_array().cloned().unwrap_or_default();
            pending.extend(calls.into_iter().map(|call| (call["id"].as_str().unwrap().to_owned(), call)));
        }
    }
    json!({
        "label": checkpoint.label,
        "position": session.messages.len(),
        "messages": session.messages.iter().map(|m| m.message.to_value()).collect::<Vec<_>>(),
        "pending_tool_calls": pending.into_iter().map(|(_, call)| call).collect::<Vec<_>>(),
        "tool_results": results,
        "metadata": session.head().info.metadata,
        "state": checkpoint.state,
    })
}

/// Returns a run as `[id, status, started_at, ended_at, error, code]`, with times in microseconds.
pub(crate) fn run_row(run: &Run, head: &Head) -> Value {
    let status = match run.ended {
        Some((_, RunOutcome::Completed)) => "completed",
        Some((_, RunOutcome::Failed)) => "failed",
        Some((_, RunOutcome::Cancelled)) => "cancelled",
        None if !head.reviews.is_empty() => "paused",
        None if head.run.as_ref() == Some(&run.id) && head.paused_until().is_some() => "paused",
        None if head.lease.as_ref().is_none_or(|l| l.node.is_empty()) => "queued",
        None => "running",
    };
    let ended_at = run.ended.map(|(at, _)| at.as_microsecond());
    json!([run.id, status, run.started_at.as_microsecond(), ended_at, run.error, run.code])
}

/// Returns a random entry that the two views show something of: calls and results of tools, metadata, runs, reviews.
pub(crate) fn random_event(rng: &mut Rng, session: &Session) -> Entry {
    let seq = session.head().seq + 1;
    let call = rng.below(4);
    let open_run = session.runs.iter().rev().find(|r| r.ended.is_none());
    let entry = match rng.below(9) {
        0 | 1 => json!({"message": {"body": {"role": "assistant", "content": null, "tool_calls": [
            {"id": format!("c{call}"), "type": "function", "function": {"name": "f\0", "arguments": "{}"}},
            {"id": format!("d{seq}"), "type": "function", "function": {"name": "g", "arguments": "{\"a\":1}"}},
        ]}}}),
        2 | 3 => json!({"message": {"body":
            {"role": "tool", "tool_call_id": format!("c{call}"), "content": format!("\0 {seq} \\u0000")}}}),
        4 => json!({"info": {"title": "t", "metadata": {
            "n": seq, "deep": {format!("k{call}"): [seq, null], "gone": null}, "hitl_decisions": ["ignored"]}}}),
        5 => {
            json!({"info": {"metadata": {"deep": if call == 0 { Value::Null } else { json!({"k1": null, "x": {}}) }}}})
        }
        6 => json!({"review_decided": {"review": format!("rev_{seq}_x"), "step": "s", "decision": "approved",
            "reviewer": "eve", "notes": (call > 1).then_some("fi\0ne"), "previous": "0".repeat(64)}}),
        7 if call == 0 => json!({"review_opened": {"review": format!("rev_{seq}_x"), "step": "s"}}),
        _ => match open_run {
            Some(run) if call == 0 => json!({"run_ended": {"run": run.id, "outcome": "completed"}}),
            Some(run) => json!({"run_ended": {"run": run.id, "outcome": "failed", "error": "\"no\"", "code": "x"}}),
            None if call < 2 => json!({"run_started": {"run": format!("run-{seq}"), "detail": {"a": "\0"}}}),
            None => json!({"run_started":
                {"run": format!("run-{seq}"), "claim": {"node": "n", "until": "2026-01-01T00:00:30Z"}}}),
        },
    };
    let mut entry = entry;
    if let Some(decided) = entry.get_mut("review_decided").and_then(Value::as_object_mut) {
        decided.retain(|_, value| !value.is_null());
    }
    Entry::decode(&entry.to_string()).unwrap()
}
