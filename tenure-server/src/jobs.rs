//! Work in the background: runs, schedules, memories and summaries.

pub mod compact;
pub mod memory;
pub mod runs;
pub mod schedules;
