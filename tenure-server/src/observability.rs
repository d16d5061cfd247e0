//! What operators see: metrics, logs and traces.

pub mod metrics;
pub mod telemetry;
