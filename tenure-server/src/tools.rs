//! Tools that the server calls itself: those of MCP servers, those behind a URL, and Python.
//!
//! Where they come from is declared in the configuration, and nowhere else. What is called and what comes back is never logged.

mod http;
mod interpreter;
mod mcp;
mod process_group;
mod python;
pub mod sandbox;

use crate::config::Config;
use anyhow::Context;
use async_trait::async_trait;
use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;
use tenure::{Assistant, Call, Key, Output, Tool, ToolError, ToolSource, Tools};

/// Bytes of an answer that the model is shown; there is no use for more, and no answer may take all the memory.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// The longest name that model servers accept.
const MAX_NAME: usize = 64;

/// All the tools of this server.
pub struct Toolbox {
    /// By how they are declared: assistants that declare the same share it.
    sources: HashMap<String, Source>,
    python: python::Pool,
    /// Whether an assistant has the tool `python`.
    has_python: bool,
}

enum Source {
    Mcp(mcp::Server),
    Http(http::Endpoint),
}

impl std::fmt::Debug for Toolbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Toolbox({} sources)", self.sources.len())
    }
}

fn key(source: &ToolSource) -> String {
    serde_json::to_string(source).expect("plain data")
}

impl Toolbox {
    /// The tools of the declared assistants. Nothing is started or connected before it is needed.
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        let mut sources = HashMap::new();
        for (i, assistant) in config.assistants.iter().enumerate() {
            for (j, source) in assistant.tools.iter().enumerate() {
                let at = || format!("assistants[{i}].tools[{j}]");
                let made = match source {
                    ToolSource::Mcp(mcp) => Source::Mcp(mcp::Server::new(mcp).with_context(at)?),
                    ToolSource::Http(http) => Source::Http(http::Endpoint::new(http).with_context(at)?),
                    ToolSource::Python(_) | ToolSource::Memory => continue,
                };
                sources.insert(key(source), made);
            }
        }
        let has_python =
            config.assistants.iter().flat_map(|a| &a.tools).any(|source| matches!(source, ToolSource::Python(_)));
        Ok(Self { sources, python: python::Pool::new(config.python.clone()), has_python })
    }

    /// Removes what an earlier server left behind and checks that interpreters can be isolated; then ends idle interpreters, again and
    /// again, until `stop` ends.
    pub async fn reap_until(&self, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        if self.has_python {
            tokio::select! {
                () = self.python.prepare() => {}
                () = &mut stop => return,
            }
        }
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.python.pause()) => self.python.reap().await,
                () = &mut stop => return,
            }
        }
    }

    /// Ends every process that was started.
    pub async fn close(&self) {
        for source in self.sources.values() {
            if let Source::Mcp(server) = source {
                server.close().await;
            }
        }
        self.python.close().await;
    }

    fn source(&self, source: &ToolSource) -> Result<&Source, ToolError> {
        let declared = self.sources.get(&key(source));
        declared.ok_or_else(|| ToolError::NotCalled("tools can only be declared in the server's configuration".into()))
    }
}

#[async_trait]
impl Tools for Toolbox {
    async fn list(&self, assistant: &Assistant) -> Result<Vec<Tool>, ToolError> {
        let mut tools: Vec<Tool> = Vec::new();
        for source in &assistant.tools {
            let found = match source {
                ToolSource::Python(_) => vec![python::tool()],
                // The library's own.
                ToolSource::Memory => continue,
                declared => match self.source(declared)? {
                    Source::Mcp(server) => server.tools().await?,
                    Source::Http(endpoint) => vec![endpoint.tool().clone()],
                },
            };
            for tool in found {
                match tools.iter().any(|t| t.name == tool.name) {
                    false => tools.push(tool),
                    true => tracing::debug!(tool = tool.name, "two tools have one name; the first one counts"),
                }
            }
        }
        Ok(tools)
    }

    async fn call(&self, assistant: &Assistant, call: &Call) -> Result<Output, ToolError> {
        let mut unsure = None;
        for source in &assistant.tools {
            let found = match source {
                ToolSource::Python(python) if call.tool == python::NAME => return self.python.call(python, call).await,
                ToolSource::Python(_) | ToolSource::Memory => continue,
                declared => self.source(declared)?,
            };
            match found {
                Source::Http(endpoint) if endpoint.tool().name == call.tool => return endpoint.call(call).await,
                Source::Http(_) => {}
                Source::Mcp(server) => match server.call(call).await {
                    Some(outcome) => return outcome,
                    None => unsure = unsure.or(server.why_unknown()),
                },
            }
        }
        Err(ToolError::NotCalled(unsure.unwrap_or_else(|| format!("there is no tool {:?}", call.tool))))
    }

    async fn end(&self, session: &Key) {
        self.python.end(session).await;
    }
}

/// A name as models can call it: letters, digits, `_` and `-`, at most 64.
pub(crate) fn callable(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' };
    name.chars().take(MAX_NAME).map(plain).collect()
}

/// What is too long, without its end.
fn clip(mut text: String) -> String {
    if text.len() > MAX_ANSWER_BYTES {
        let (all, mut end) = (text.len(), MAX_ANSWER_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str(&format!("\n[... {} bytes left out ...]", all - end));
    }
    text
}

/// Whether a name fits a pattern with `*`.
fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => name
            .strip_prefix(start)
            .is_some_and(|left| (0..=left.len()).filter(|i| left.is_char_boundary(*i)).any(|i| fits(rest, &left[i..]))),
    }
}

/// Whether a list of patterns says yes or no to a name; the last one that fits counts.
fn said(patterns: &[String], name: &str) -> Option<bool> {
    patterns.iter().rev().find_map(|pattern| match pattern.strip_prefix('!') {
        Some(pattern) => fits(pattern, name).then_some(false),
        None => fits(pattern, name).then_some(true),
    })
}

/// A time as people write it.
fn spoken(time: Duration) -> String {
    tenure::Period::of(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, name, want) in [
            ("read", "read", true),
            ("read", "reads", false),
            ("read*", "read_file", true),
            ("*_file", "read_file", true),
            ("*a*b*", "xaybz", true),
            ("*a*b", "xaybz", false),
            ("*", "", true),
            ("*é", "né", true),
        ] {
            assert_eq!(fits(pattern, name), want, "{pattern} {name}");
        }
        let patterns = ["get_*".to_owned(), "!get_lock".to_owned()];
        assert_eq!(["get_x", "get_lock", "put_x"].map(|name| said(&patterns, name)), [Some(true), Some(false), None]);
    }

    #[test]
    fn names_and_lengths() {
        assert_eq!(callable("a.b/c é-1"), "a_b_c__-1");
        assert_eq!(callable(&"x".repeat(99)).len(), 64);
        let clipped = clip("é".repeat(MAX_ANSWER_BYTES));
        assert!(clipped.len() < MAX_ANSWER_BYTES + 50 && clipped.ends_with("bytes left out ...]"));
        assert_eq!(clip("short".into()), "short");
    }
}
