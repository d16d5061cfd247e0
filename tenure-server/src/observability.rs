//! Observability for operators: metrics, logs and traces.

pub mod catalog;
mod json_log;
pub mod metrics;
pub mod process;
pub mod telemetry;
