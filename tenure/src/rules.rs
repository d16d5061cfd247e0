//! Pure functions over the types: what a log means, what a model is sent, what a run does next. No clock, no store, no `async`.

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
