//! Runs: model calls and tool calls, executed step by step. Every step is committed, so that a run
//! can be resumed after a crash.

pub(crate) mod begin;
pub(crate) mod compact;
pub(crate) mod execute;
pub(crate) mod executors;
pub(crate) mod idempotency;
pub(crate) mod lease;
pub(crate) mod open_run;
pub(crate) mod reconcile_report;
pub(crate) mod request;
pub(crate) mod resume;
pub(crate) mod tool_cache;
pub(crate) mod turn;
pub(crate) mod turn_plan;
