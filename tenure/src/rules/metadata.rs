//! The metadata of a session: fields written by clients, and the review decisions, which are derived from the
//! log.

use crate::types::entry::ReviewDecided;
use crate::types::head::DECISIONS;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

/// Applies a client's merge patch. Writes to the decisions are ignored: an imported log may contain some
/// (D-065).
pub(crate) fn apply_patch(metadata: &mut Map<String, Value>, patch: &Map<String, Value>) {
    let decisions = metadata.remove(DECISIONS);
    merge_patch(metadata, patch);
    metadata.remove(DECISIONS);
    metadata.extend(decisions.map(|d| (DECISIONS.to_owned(), d)));
}

/// Appends a decision to the metadata, in the documented format.
pub(crate) fn record_decision(metadata: &mut Map<String, Value>, d: &ReviewDecided, at: Timestamp) {
    let mut decision = json!({"step": d.step, "decision": d.decision, "reviewer": d.reviewer, "timestamp": at});
    if let Some(notes) = &d.notes {
        decision["notes"] = json!(notes);
    }
    match metadata.entry(DECISIONS).or_insert_with(|| json!([])) {
        Value::Array(all) => all.push(decision),
        other => *other = json!([decision]),
    }
}

/// Applies a JSON merge patch (RFC 7396): objects merge, `null` removes, anything else replaces.
fn merge_patch(target: &mut Map<String, Value>, patch: &Map<String, Value>) {
    for (key, value) in patch {
        match value {
            Value::Null => {
                target.remove(key);
            }
            Value::Object(inner) => {
                let slot = target.entry(key.clone()).or_insert_with(|| json!({}));
                if !slot.is_object() {
                    *slot = json!({});
                }
                if let Value::Object(map) = slot {
                    merge_patch(map, inner);
                }
            }
            plain => {
                target.insert(key.clone(), plain.clone());
            }
        }
    }
}
