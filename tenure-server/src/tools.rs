//! Tools that the server calls itself: those of MCP servers, those behind a URL, and Python.
//!
//! Where they come from is declared in the configuration, and nowhere else. What is called and what comes back is never logged.

mod http;
mod interpreter;
mod mcp;
mod patterns;
mod process_group;
mod python;
pub mod sandbox;
mod text;
mod toolbox;

pub use toolbox::Toolbox;
