//! The names, types and descriptions of all metrics. `docs/operations.md` lists the same names; tests compare both with
//! the source and with what a server reports.

use metrics::{describe_counter, describe_gauge, describe_histogram};

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// A number that only grows.
    Counter,
    /// A number that grows and shrinks.
    Gauge,
    /// A distribution: `_bucket`, `_sum` and `_count`.
    Histogram,
}

use MetricKind::{Counter, Gauge, Histogram};

/// All metrics that the recorder collects. Those of the process are in `process.rs`.
pub const METRICS: &[(&str, MetricKind, &str)] = &[
    ("tenure_requests_total", Counter, "Answered HTTP requests"),
    ("tenure_request_seconds", Histogram, "Time to the first byte of a response"),
    ("tenure_connections", Gauge, "Open client connections"),
    ("tenure_connections_refused_total", Counter, "Connections refused by a connection limit"),
    ("tenure_connections_closed_total", Counter, "Connections closed by the server, by reason"),
    ("tenure_turns_total", Counter, "Turns by outcome"),
    ("tenure_turn_own_seconds", Histogram, "Time of a turn without the model's time"),
    ("tenure_turn_model_seconds", Histogram, "The model's time of a turn"),
    ("tenure_turns_running", Gauge, "Sessions with a turn in progress on this node"),
    ("tenure_turns_waiting", Gauge, "Requests that wait for an earlier turn of their session on this node"),
    ("tenure_rate_limited_total", Counter, "Model calls refused by a rate limit, by what the run did"),
    ("tenure_tokens_total", Counter, "Tokens reported by models, by model and kind"),
    ("tenure_model_errors_total", Counter, "Failed requests to model servers, by model and code"),
    ("tenure_tool_calls_total", Counter, "Tool calls of runs by outcome"),
    ("tenure_tool_seconds", Histogram, "Duration of tool calls, by tool"),
    ("tenure_tool_cache_total", Counter, "Lookups in the cache of tool results"),
    ("tenure_tool_cache_entries", Gauge, "Cached tool results of all sessions, counted at most every 15 seconds"),
    ("tenure_commits_total", Counter, "Commits in the store by outcome; a conflict is retried"),
    ("tenure_commit_seconds", Histogram, "Duration of commits in the store"),
    ("tenure_commit_batch_size", Histogram, "Commits that shared one transaction (SQLite)"),
    ("tenure_store_connections", Gauge, "Connections of the PostgreSQL pool by state"),
    ("tenure_hot_sessions_total", Counter, "Lookups in the cache of sessions"),
    ("tenure_memories_embedded_total", Counter, "Memories that were given a vector later"),
    ("tenure_summaries_total", Counter, "Summaries requested from models by outcome"),
    ("tenure_schedules_total", Counter, "Due times of schedules"),
    ("tenure_sweep_total", Counter, "Results of sweeps"),
    ("tenure_sweep_seconds", Histogram, "Duration of a sweep"),
    ("tenure_sessions", Gauge, "Sessions by status, counted at most every 15 seconds"),
    ("tenure_open_reviews", Gauge, "Reviews that wait for a decision, counted at most every 15 seconds"),
];

/// Registers the descriptions with the recorder, which reports them as `HELP`.
pub fn describe() {
    for (name, kind, help) in METRICS {
        match kind {
            Counter => describe_counter!(*name, *help),
            Gauge => describe_gauge!(*name, *help),
            Histogram => describe_histogram!(*name, *help),
        }
    }
}
