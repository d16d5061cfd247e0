//! Work in the background.

pub mod compact;
pub mod memory;
pub mod runs;
pub mod schedules;
mod start;
pub mod sweep;

pub use start::start_all;
