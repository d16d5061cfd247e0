//! All server-side tools behind the library's `Tools` trait.

use super::{http, mcp, python};
use crate::config::Config;
use anyhow::Context;
use async_trait::async_trait;
use std::collections::HashMap;
use std::future::Future;
use tenure::{
    Tool, ToolError, ToolOutput, Tools,
    policy::ToolSource,
    run::{ToolContext, ToolInvocation},
    session::SessionKey,
};

/// Dispatches tool calls to MCP servers, HTTP endpoints and the Python pool.
pub struct Toolbox {
    /// Tool sources by their serialized declaration. Assistants with equal declarations share a source.
    sources: HashMap<String, ToolboxSource>,
    python: python::Pool,
    /// Whether any assistant has the tool `python`.
    has_python: bool,
}

enum ToolboxSource {
    Mcp(mcp::McpServer),
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
    /// Creates the tools of the declared assistants. Processes and connections are started lazily.
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        let mut sources = HashMap::new();
        for (i, assistant) in config.assistants.iter().enumerate() {
            for (j, source) in assistant.tools.iter().enumerate() {
                let location = || format!("assistants[{i}].tools[{j}]");
                let entry = match source {
                    ToolSource::Mcp(mcp) => ToolboxSource::Mcp(mcp::McpServer::new(mcp).with_context(location)?),
                    ToolSource::Http(http) => ToolboxSource::Http(http::Endpoint::new(http).with_context(location)?),
                    ToolSource::Python(_) | ToolSource::Memory | ToolSource::Metadata(_) | ToolSource::AskHuman => {
                        continue;
                    }
                };
                sources.insert(key(source), entry);
            }
        }
        let has_python =
            config.assistants.iter().flat_map(|a| &a.tools).any(|source| matches!(source, ToolSource::Python(_)));
        Ok(Self { sources, python: python::Pool::new(config.python.clone()), has_python })
    }

    /// Removes files that an earlier server left behind and checks that interpreters can be isolated; then
    /// periodically ends idle interpreters until `stop` completes.
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

    /// Connects to the source of tools and returns their names. An MCP server is started, if it is a program. An
    /// HTTP tool is not called, and the Python tool executes nothing.
    pub async fn check(&self, source: &ToolSource) -> Result<Vec<String>, String> {
        let entry = match source {
            ToolSource::Memory => return Ok(["remember", "recall", "forget"].map(str::to_owned).into()),
            ToolSource::Metadata(_) => return Ok(["read", "update"].map(str::to_owned).into()),
            ToolSource::AskHuman => return Ok(vec!["ask_human".to_owned()]),
            ToolSource::Python(_) => {
                let checked = self.python.check().await;
                return checked.map(|()| vec![python::NAME.to_owned()]).map_err(|e| format!("{e:#}"));
            }
            declared => self.source(declared).map_err(reason)?,
        };
        match entry {
            ToolboxSource::Http(endpoint) => endpoint.check().await.map(|()| vec![endpoint.tool().name.clone()]),
            ToolboxSource::Mcp(server) => {
                Ok(server.tools().await.map_err(reason)?.into_iter().map(|tool| tool.name).collect())
            }
        }
    }

    /// Starts all MCP servers and lists their tools, concurrently. Failures are logged; the server is tried again
    /// when it is needed.
    pub async fn connect(&self) {
        let servers = self.sources.values().filter_map(|source| match source {
            ToolboxSource::Mcp(server) => Some(server),
            ToolboxSource::Http(_) => None,
        });
        let connect = async |server: &mcp::McpServer| {
            if let Err(e) = server.tools().await {
                let error = reason(e);
                tracing::warn!(server = server.name(), error, "could not connect to an MCP server at the start");
            }
        };
        futures_util::future::join_all(servers.map(connect)).await;
    }

    /// Ends every process that was started.
    pub async fn close(&self) {
        for source in self.sources.values() {
            if let ToolboxSource::Mcp(server) = source {
                server.close().await;
            }
        }
        self.python.close().await;
    }

    fn source(&self, source: &ToolSource) -> Result<&ToolboxSource, ToolError> {
        let declared = self.sources.get(&key(source));
        declared.ok_or_else(|| ToolError::NotCalled("tools can only be declared in the server's configuration".into()))
    }
}

fn reason(e: ToolError) -> String {
    match e {
        ToolError::NotCalled(reason) | ToolError::Lost(reason) => reason,
    }
}

/// The tool sources of the session's assistant. A session without an assistant has none.
fn sources<'a>(context: &ToolContext<'a>) -> &'a [ToolSource] {
    context.assistant.map_or(&[], |assistant| &assistant.tools)
}

#[async_trait]
impl Tools for Toolbox {
    async fn list(&self, context: &ToolContext<'_>) -> Result<Vec<Tool>, ToolError> {
        let mut tools: Vec<Tool> = Vec::new();
        for source in sources(context) {
            let listed = match source {
                ToolSource::Python(_) => vec![python::tool()],
                // The library provides these.
                ToolSource::Memory | ToolSource::Metadata(_) | ToolSource::AskHuman => continue,
                declared => match self.source(declared)? {
                    ToolboxSource::Mcp(server) => server.tools().await?,
                    ToolboxSource::Http(endpoint) => vec![endpoint.tool().clone()],
                },
            };
            for tool in listed {
                if tools.iter().any(|t| t.name == tool.name) {
                    tracing::debug!(tool = tool.name, "duplicate tool name; the first tool is used");
                } else {
                    tools.push(tool);
                }
            }
        }
        Ok(tools)
    }

    async fn call(&self, context: &ToolContext<'_>, call: &ToolInvocation) -> Result<ToolOutput, ToolError> {
        let mut last_error = None;
        for source in sources(context) {
            let entry = match source {
                ToolSource::Python(python) if call.tool == python::NAME => return self.python.call(python, call).await,
                ToolSource::Python(_) | ToolSource::Memory | ToolSource::Metadata(_) | ToolSource::AskHuman => {
                    continue;
                }
                declared => self.source(declared)?,
            };
            match entry {
                ToolboxSource::Http(endpoint) if endpoint.tool().name == call.tool => {
                    return endpoint.call(context, call).await;
                }
                ToolboxSource::Http(_) => {}
                ToolboxSource::Mcp(server) => match server.call(context, call).await {
                    Some(outcome) => return outcome,
                    None => last_error = last_error.or(server.last_error()),
                },
            }
        }
        Err(ToolError::NotCalled(last_error.unwrap_or_else(|| format!("unknown tool {:?}", call.tool))))
    }

    async fn end(&self, session: &SessionKey) {
        self.python.end(session).await;
    }
}
