//! Background jobs of the server: sweeping, run recovery, schedules, summaries and memory maintenance.

pub mod compact;
pub mod memory;
pub mod runs;
pub mod schedules;
mod start;
pub mod sweep;

pub use start::start_all;
