//! Client of an MCP server, which is either a child process or a remote address.
//!
//! The connection is opened on first use, reused, and reopened after the server has died. The list of tools is
//! requested once per connection, and again when the server notifies that it has changed.

use super::patterns::{match_patterns, selected_metadata};
use super::process_group::ProcessGroup;
use super::text::{MAX_ANSWER_BYTES, clip, format_duration};
use crate::config::{http_url, tools};
use crate::http_client::{TRACE, trace_context};
use crate::names::callable_name;
use anyhow::Context;
use rmcp::model::{CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ResourceContents};
use rmcp::model::{ClientCapabilities, ClientConfig, Implementation};
use rmcp::service::{NotificationContext, RoleClient, RunningService, ServiceError, ServiceExt};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::streamable_http_client::{StreamableHttpClientTransportConfig, StreamableHttpError};
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tenure::{
    Tool, ToolError, ToolOutput,
    policy::McpSource,
    run::{ToolContext, ToolInvocation},
};
use tracing::Instrument;

/// Timeout for starting a server; some are downloaded first.
const TIME_TO_START: Duration = Duration::from_secs(60);
/// Timeout for closing a connection.
const TIME_TO_CLOSE: Duration = Duration::from_secs(2);
/// Maximum size in bytes of one message from the server.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Maximum length in bytes of one log line of the server; longer ones are split.
const MAX_LINE_BYTES: u64 = 4 << 10;

/// The key of the session's metadata in `_meta` of a request.
const METADATA_KEY: &str = "tenure/metadata";

/// An MCP server with its cached connection and list of tools.
pub struct McpServer {
    /// Name for logs and errors: the command without its arguments, which may be secret, or the host.
    name: String,
    source: McpSource,
    transport: McpTransport,
    connection: tokio::sync::Mutex<Option<Arc<McpConnection>>>,
    /// The most recently received list of tools.
    cached_tools: Mutex<Option<Arc<Vec<McpTool>>>>,
    /// Why the last attempt to update the list of tools failed. `None` if it succeeded.
    last_error: Mutex<Option<String>>,
}

enum McpTransport {
    Program { command: String, env: Vec<(String, String)> },
    Address { url: String, client: reqwest::Client },
}

/// A tool, and its original name on the server.
struct McpTool {
    name: String,
    tool: Tool,
}

struct McpConnection {
    service: tokio::sync::Mutex<RunningService<RoleClient, Listener>>,
    peer: rmcp::Peer<RoleClient>,
    /// Whether the list of tools must be requested again.
    stale: Arc<AtomicBool>,
    group: Mutex<Option<ProcessGroup>>,
}

impl McpConnection {
    fn is_alive(&self) -> bool {
        let group = self.group.lock().unwrap_or_else(|e| e.into_inner());
        !self.peer.is_transport_closed() && !group.as_ref().is_some_and(ProcessGroup::has_ended)
    }
}

/// Handles notifications of the server.
struct Listener {
    stale: Arc<AtomicBool>,
}

impl rmcp::ClientHandler for Listener {
    fn get_info(&self) -> ClientConfig {
        ClientConfig::new(ClientCapabilities::default(), Implementation::new("tenure", env!("CARGO_PKG_VERSION")))
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.stale.store(true, Ordering::Release);
    }
}

impl McpServer {
    /// Creates a client from its declaration. The connection is opened on first use.
    pub fn new(source: &McpSource) -> anyhow::Result<Self> {
        let (name, transport) = match (&source.command, &source.url) {
            (Some(command), _) => {
                let env = tools::resolve_secrets(&source.env).context("mcp.env")?;
                (command.clone(), McpTransport::Program { command: command.clone(), env })
            }
            (None, url) => {
                let url = http_url("mcp.url", url.as_deref().unwrap_or_default())?;
                let headers = super::http::headers(&source.headers).context("mcp.headers")?;
                let client = crate::http_client::client()
                    .default_headers(headers)
                    .connect_timeout(Duration::from_secs(10))
                    .redirect(reqwest::redirect::Policy::none())
                    .build()?;
                let name = url.host_str().unwrap_or_default().to_owned();
                (name, McpTransport::Address { url: url.into(), client })
            }
        };
        let (connection, cached_tools, last_error) = Default::default();
        Ok(Self { name, source: source.clone(), transport, connection, cached_tools, last_error })
    }

    /// The name of the server in logs and errors.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the server's tools. If the server is unreachable, the last known list is returned.
    pub async fn tools(&self) -> Result<Vec<Tool>, ToolError> {
        Ok(self.list_tools().await?.iter().map(|k| k.tool.clone()).collect())
    }

    /// Executes a call. Returns `None` if the tool is not one of this server's, or if its tools are unknown.
    pub async fn call(
        &self,
        context: &ToolContext<'_>,
        call: &ToolInvocation,
    ) -> Option<Result<ToolOutput, ToolError>> {
        let tools = self.list_tools().await.ok()?;
        let name = tools.iter().find(|k| k.tool.name == call.tool)?.name.clone();
        let span = tracing::info_span!(
            target: TRACE, "tool_request", otel.name = format!("tools/call {name}"), otel.kind = "client",
        );
        let mut params = CallToolRequestParams::new(name).with_arguments(call.arguments.clone());
        if !self.source.metadata.is_empty() {
            let metadata = selected_metadata(&self.source.metadata, context.metadata);
            params.meta.get_or_insert_default().0.0.insert(METADATA_KEY.to_owned(), metadata.into());
        }
        for (name, value) in trace_context(&span) {
            params.meta.get_or_insert_default().0.0.insert(name, value.into());
        }
        Some(self.ask(params).instrument(span).await)
    }

    /// Returns why the list of tools could not be updated, or `None` if that succeeded.
    pub fn last_error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    async fn list_tools(&self) -> Result<Arc<Vec<McpTool>>, ToolError> {
        let refreshed = self.refresh_tools().await;
        *self.last_error.lock().unwrap_or_else(|e| e.into_inner()) = refreshed.as_ref().err().map(|e| match e {
            ToolError::NotCalled(reason) | ToolError::Lost(reason) => reason.clone(),
        });
        let mut cached = self.cached_tools.lock().unwrap_or_else(|e| e.into_inner());
        match (refreshed, &*cached) {
            (Ok(Some(tools)), _) => Ok(cached.insert(Arc::new(tools)).clone()),
            (_, Some(previous)) => Ok(previous.clone()),
            (Err(e), None) => Err(e),
            (Ok(None), None) => Ok(Arc::default()),
        }
    }

    /// Requests the list of tools if it is stale. Returns `None` if it is not.
    async fn refresh_tools(&self) -> Result<Option<Vec<McpTool>>, ToolError> {
        let connection = self.connection().await?;
        if !connection.stale.swap(false, Ordering::AcqRel) {
            return Ok(None);
        }
        let listed = tokio::time::timeout(TIME_TO_START, connection.peer.list_all_tools()).await;
        let tools = listed.map_err(|_| self.timeout_error(TIME_TO_START)).and_then(|l| l.map_err(|e| self.error(e)));
        let tools = tools.inspect_err(|_| connection.stale.store(true, Ordering::Release));
        // Listing executes no tool, so a lost request is never a lost call.
        let tools = tools.map_err(|e| match e {
            ToolError::NotCalled(reason) | ToolError::Lost(reason) => ToolError::NotCalled(reason),
        })?;
        Ok(Some(tools.into_iter().map(|tool| self.describe(tool)).collect()))
    }

    fn describe(&self, tool: rmcp::model::Tool) -> McpTool {
        let name = tool.name.into_owned();
        let hint = |hint: fn(&rmcp::model::ToolAnnotations) -> Option<bool>| {
            tool.annotations.as_ref().and_then(hint).unwrap_or(false)
        };
        let McpSource { prefix, read_only, idempotent, cache, .. } = &self.source;
        let read_only = match_patterns(read_only, &name).unwrap_or_else(|| hint(|a| a.read_only_hint));
        let tool = Tool {
            name: callable_name(&prefix.as_ref().map_or_else(|| name.clone(), |p| format!("{p}_{name}"))),
            description: tool.description.map(Into::into).or(tool.title).unwrap_or_default(),
            parameters: serde_json::Value::Object((*tool.input_schema).clone()),
            read_only,
            idempotent: match_patterns(idempotent, &name).unwrap_or_else(|| hint(|a| a.idempotent_hint)),
            // The result may depend on the metadata, which is not part of the cache's key.
            cache: match_patterns(cache, &name).unwrap_or(read_only && self.source.metadata.is_empty()),
            asks_human: false,
        };
        McpTool { name, tool }
    }

    async fn ask(&self, params: CallToolRequestParams) -> Result<ToolOutput, ToolError> {
        match self.ask_once(params.clone()).await {
            // The server has died since the last request. The call was not executed, so it is safe to retry once.
            Err(ToolError::NotCalled(_)) => self.ask_once(params).await,
            outcome => outcome,
        }
    }

    async fn ask_once(&self, params: CallToolRequestParams) -> Result<ToolOutput, ToolError> {
        let connection = self.connection().await?;
        // On timeout the request future is dropped, which sends a cancellation to the server.
        let limit = self.source.effective_timeout();
        let response = tokio::time::timeout(limit, connection.peer.call_tool_once(params)).await;
        match response.map_err(|_| self.timeout_error(limit))? {
            Ok(CallToolResponse::Complete(result)) => Ok(output(result)),
            Ok(_) => Ok(failed("the tool needs further input, which this server does not support".into())),
            Err(ServiceError::McpError(e)) => Ok(failed(e.message.into_owned())),
            Err(e) => {
                if !matches!(e, ServiceError::UnexpectedResponse) {
                    self.forget(&connection).await;
                }
                Err(self.error(e))
            }
        }
    }

    fn timeout_error(&self, limit: Duration) -> ToolError {
        ToolError::Lost(format!("the MCP server {} did not answer within {}", self.name, format_duration(limit)))
    }

    fn error(&self, e: ServiceError) -> ToolError {
        let name = &self.name;
        let sent = match &e {
            // A dead child process reads no request. A remote address may have received it.
            ServiceError::TransportSend(e) => match e.error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
                Some(StreamableHttpError::Client(e)) => !e.is_connect(),
                Some(StreamableHttpError::SessionExpired) => false,
                Some(_) => true,
                None => matches!(self.transport, McpTransport::Address { .. }),
            },
            _ => true,
        };
        match (sent, e) {
            (false, _) => ToolError::NotCalled(format!("the MCP server {name} is not running")),
            (true, ServiceError::TransportClosed) => {
                ToolError::Lost(format!("the MCP server {name} closed the connection"))
            }
            // The error's text is omitted: it may quote messages.
            (true, _) => ToolError::Lost(format!("the connection to the MCP server {name} was lost")),
        }
    }

    async fn connection(&self) -> Result<Arc<McpConnection>, ToolError> {
        let mut slot = self.connection.lock().await;
        match &*slot {
            Some(connection) if connection.is_alive() => Ok(connection.clone()),
            _ => {
                *slot = None;
                let new = match tokio::time::timeout(TIME_TO_START, self.connect()).await {
                    Ok(new) => new.map_err(|e| format!("could not connect to the MCP server {}: {e:#}", self.name)),
                    Err(_) => Err(format!("the MCP server {} did not start within 60 s", self.name)),
                };
                let new = Arc::new(new.map_err(ToolError::NotCalled)?);
                tracing::info!(server = self.name, "connected to an MCP server");
                Ok(slot.insert(new).clone())
            }
        }
    }

    async fn forget(&self, connection: &Arc<McpConnection>) {
        let mut slot = self.connection.lock().await;
        if slot.as_ref().is_some_and(|c| Arc::ptr_eq(c, connection)) {
            *slot = None;
        }
    }

    async fn connect(&self) -> anyhow::Result<McpConnection> {
        let stale = Arc::new(AtomicBool::new(true));
        let listener = Listener { stale: stale.clone() };
        let (service, group) = match &self.transport {
            McpTransport::Address { url, client } => {
                let mut config = StreamableHttpClientTransportConfig::with_uri(url.as_str());
                config.max_sse_event_size = MAX_MESSAGE_BYTES;
                (listener.serve(StreamableHttpClientTransport::with_client(client.clone(), config)).await, None)
            }
            McpTransport::Program { command, env } => {
                let mut group = self.start(command, env)?;
                let child = group.child();
                let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
                    anyhow::bail!("the process has no standard input and output");
                };
                let transport = AsyncRwTransport::new_client(output, input).with_max_line_length(MAX_MESSAGE_BYTES);
                (listener.serve(transport).await, Some(group))
            }
        };
        // The error may be long and may quote messages, so it is truncated.
        let service = service.map_err(|e| {
            let reason = e.to_string();
            anyhow::anyhow!("{}", reason.chars().take(200).collect::<String>())
        })?;
        let peer = service.peer().clone();
        Ok(McpConnection { service: service.into(), peer, stale, group: Mutex::new(group) })
    }

    fn start(&self, command: &str, env: &[(String, String)]) -> anyhow::Result<ProcessGroup> {
        let mut program = tokio::process::Command::new(command);
        program.args(&self.source.args).env_clear().envs(tools::inherited_environment());
        program.envs(env.iter().map(|(name, value)| (name, value)));
        program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = program.process_group(0).kill_on_drop(true).spawn()?;
        if let Some(log) = child.stderr.take() {
            let log = std::fs::File::from(log.into_owned_fd()?);
            let name = self.name.clone();
            // A separate thread, which ends with the process, so that its standard error is always drained.
            std::thread::Builder::new().name("mcp-stderr".into()).spawn(move || copy_to_log(log, &name))?;
        }
        Ok(ProcessGroup::new(child))
    }

    /// Closes the connection and ends the child process.
    pub async fn close(&self) {
        let Some(connection) = self.connection.lock().await.take() else { return };
        let _ = connection.service.lock().await.close_with_timeout(TIME_TO_CLOSE).await;
        let group = connection.group.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(group) = group {
            group.end().await;
        }
    }
}

fn copy_to_log(log: std::fs::File, server: &str) {
    let mut log = BufReader::new(log);
    let mut line = Vec::new();
    while matches!((&mut log).take(MAX_LINE_BYTES).read_until(b'\n', &mut line), Ok(n) if n > 0) {
        tracing::debug!(server, line = %String::from_utf8_lossy(&line).trim_end(), "log output of an MCP server");
        line.clear();
    }
}

fn failed(content: String) -> ToolOutput {
    ToolOutput { content: clip(content), failed: true }
}

/// Converts a result to text for the model. Non-text content is replaced by a marker. Structured content is used
/// only if there is no other content, because servers repeat it as text.
fn output(result: CallToolResult) -> ToolOutput {
    let mut content = String::new();
    for block in result.content {
        if !content.is_empty() {
            content.push('\n');
        }
        match block {
            ContentBlock::Text(text) => content.push_str(&text.text),
            ContentBlock::Image(image) => content.push_str(&marker("image", &image.mime_type, image.data.len())),
            ContentBlock::Audio(audio) => content.push_str(&marker("audio", &audio.mime_type, audio.data.len())),
            ContentBlock::ResourceLink(link) => content.push_str(&format!("[resource {}]", link.uri)),
            ContentBlock::Resource(resource) => match resource.resource {
                ResourceContents::TextResourceContents { text, .. } => content.push_str(&text),
                ResourceContents::BlobResourceContents { uri, .. } => content.push_str(&format!("[resource {uri}]")),
                _ => content.push_str("[resource]"),
            },
            _ => content.push_str("[unsupported content]"),
        }
        if content.len() > MAX_ANSWER_BYTES {
            break;
        }
    }
    if let (true, Some(structured)) = (content.is_empty(), result.structured_content) {
        content = structured.to_string();
    }
    ToolOutput { content: clip(content), failed: result.is_error.unwrap_or(false) }
}

fn marker(media: &str, mime_type: &str, base64: usize) -> String {
    format!("[{media}, {mime_type}, {} bytes]", base64 / 4 * 3)
}
