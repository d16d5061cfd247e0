//! Tools that the server executes itself: tools of MCP servers, HTTP tools, and Python.
//!
//! Tool sources are declared only in the configuration (D-059). Arguments and results are never logged.

mod http;
mod interpreter;
mod mcp;
mod patterns;
mod process_group;
pub mod python;
pub mod sandbox;
mod text;
mod toolbox;

pub use toolbox::Toolbox;
