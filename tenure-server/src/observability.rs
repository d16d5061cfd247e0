//! Observability for operators: metrics, logs and traces.

pub mod metrics;
pub mod telemetry;
