//! Pure functions over the types: folding a log, building a prompt, choosing the next step of a run. No
//! clock, no store, no `async`.

pub(crate) mod answer;
pub(crate) mod checkpoint;
pub(crate) mod decided_calls;
pub(crate) mod decision_chain;
pub(crate) mod digest;
pub(crate) mod matcher;
pub(crate) mod metadata;
pub(crate) mod next;
pub(crate) mod overlay;
pub(crate) mod partial;
pub(crate) mod prompt;
pub(crate) mod reconcile;
pub(crate) mod redaction;
pub(crate) mod review_notice;
pub(crate) mod run_entries;
pub(crate) mod session;
pub mod summary;
pub(crate) mod text;
pub(crate) mod tool_call_filter;
