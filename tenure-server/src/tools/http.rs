//! HTTP tools.
//!
//! The arguments are the JSON body of a POST. The ids are sent in headers; `Idempotency-Key` is the same for every
//! attempt of the same call. Any status is an answer: 2xx is a result, everything else a failed result. A missing
//! response is a lost call, unless the connection could not be established (D-054).

use super::patterns::selected_metadata;
use super::text::{MAX_ANSWER_BYTES, clip, format_duration};
use crate::config::{http_url, tools::resolve_secrets};
use crate::http_client::{TRACE, with_trace_context};
use anyhow::Context;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use std::time::Duration;
use tenure::{
    Tool, ToolError, ToolOutput,
    policy::HttpSource,
    run::{ToolContext, ToolInvocation},
};
use tracing::Instrument;

/// Bytes reserved for the status and the note that a response was truncated, so that a result is within the limit as well.
const NOTES_BYTES: usize = 64;

/// The header with the session's metadata.
const METADATA_HEADER: &str = "X-Tenure-Metadata";
/// Maximum size of that header in bytes: many servers reject more.
const MAX_METADATA_HEADER: usize = 8 << 10;

/// A tool that is called over HTTP.
pub struct Endpoint {
    tool: Tool,
    client: reqwest::Client,
    url: reqwest::Url,
    timeout: Duration,
    /// Patterns of the keys of metadata that are sent, and the field of the body. Without one they are sent in a
    /// header.
    metadata: Vec<String>,
    metadata_field: Option<String>,
}

/// Builds the declared headers. Their values are marked as sensitive, so that debug output omits them.
pub fn headers(secrets: &std::collections::BTreeMap<String, tenure::policy::Secret>) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in resolve_secrets(secrets)? {
        let header: HeaderName = name.parse().with_context(|| format!("{name:?} is not a valid header name"))?;
        let mut value = HeaderValue::from_str(&value)
            .with_context(|| format!("the value of {name} is not a valid header value"))?;
        value.set_sensitive(true);
        headers.insert(header, value);
    }
    Ok(headers)
}

impl Endpoint {
    /// Creates a tool from its declaration. Redirects are not followed.
    pub fn new(source: &HttpSource) -> anyhow::Result<Self> {
        let client = crate::http_client::client()
            .default_headers(headers(&source.headers)?)
            .connect_timeout(Duration::from_secs(10))
            .redirect(reqwest::redirect::Policy::none())
            .build()?;
        let tool = Tool {
            name: source.name.clone(),
            description: source.description.clone(),
            parameters: source.parameters.clone(),
            read_only: source.read_only,
            idempotent: source.idempotent,
            // The result may depend on the metadata, which is not part of the cache's key.
            cache: source.cache.unwrap_or(source.read_only && source.metadata.is_empty()),
            asks_human: false,
        };
        let url = http_url("url", &source.url)?;
        let HttpSource { metadata, metadata_field, .. } = source.clone();
        Ok(Self { tool, client, url, timeout: source.effective_timeout(), metadata, metadata_field })
    }

    /// Returns the tool's definition.
    pub fn tool(&self) -> &Tool {
        &self.tool
    }

    /// Checks that the server responds, without calling the tool: any response to `OPTIONS` will do.
    pub async fn check(&self) -> Result<(), String> {
        let request = self.client.request(reqwest::Method::OPTIONS, self.url.clone()).send();
        match tokio::time::timeout(self.timeout, request).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(e)) => Err(format!("could not connect: {}", crate::http_client::error_chain(&e.without_url()))),
            Err(_) => Err(format!("no response within {}", format_duration(self.timeout))),
        }
    }

    /// Executes a call, with the declared timeout.
    pub async fn call(&self, context: &ToolContext<'_>, call: &ToolInvocation) -> Result<ToolOutput, ToolError> {
        let session = encode_id(call.session.session.as_str());
        let run = encode_id(call.run.as_ref());
        let id = encode_id(&call.id);
        let mut arguments = call.arguments.clone();
        let metadata = selected_metadata(&self.metadata, context.metadata);
        let mut request = self
            .client
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .header("Idempotency-Key", format!("{run}/{id}"))
            .header("X-Tenure-Session", session)
            .header("X-Tenure-Run", run)
            .header("X-Tenure-Call", id);
        match &self.metadata_field {
            Some(field) => drop(arguments.insert(field.clone(), metadata.into())),
            None if !self.metadata.is_empty() => request = request.header(METADATA_HEADER, header_json(metadata)?),
            None => {}
        }
        let request = request.body(serde_json::Value::Object(arguments).to_string());
        let span = tracing::info_span!(
            target: TRACE, "tool_request", otel.name = format!("POST {}", self.tool.name), otel.kind = "client",
        );
        let request = with_trace_context(request, &span);
        match tokio::time::timeout(self.timeout, self.answer(request).instrument(span)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(ToolError::Lost(format!("no response within {}", format_duration(self.timeout)))),
        }
    }

    async fn answer(&self, request: reqwest::RequestBuilder) -> Result<ToolOutput, ToolError> {
        // The URL is removed from errors: it may contain a secret.
        let mut response = request.send().await.map_err(|e| {
            if e.is_connect() || e.is_builder() {
                ToolError::NotCalled(format!(
                    "could not connect: {}",
                    crate::http_client::error_chain(&e.without_url())
                ))
            } else {
                lost(&e.without_url())
            }
        })?;
        let status = response.status();
        let mut body = Vec::new();
        let mut truncated = false;
        while let Some(part) = response.chunk().await.map_err(|e| lost(&e.without_url()))? {
            let room = (MAX_ANSWER_BYTES - NOTES_BYTES).saturating_sub(body.len());
            body.extend_from_slice(&part[..part.len().min(room)]);
            if part.len() > room {
                truncated = true;
                break;
            }
        }
        let mut content = String::from_utf8_lossy(&body).into_owned();
        if truncated {
            content.push_str("\n[... rest omitted ...]");
        }
        if !status.is_success() {
            content = format!("HTTP {}: {content}", status.as_u16());
        }
        // Replacement characters may have made it longer.
        Ok(ToolOutput { content: clip(content), failed: !status.is_success() })
    }
}

fn lost(e: &reqwest::Error) -> ToolError {
    ToolError::Lost(format!("the connection was lost: {}", crate::http_client::error_chain(e)))
}

/// Serializes metadata as JSON in ASCII, for a header. Fails if it is too large.
fn header_json(metadata: serde_json::Map<String, serde_json::Value>) -> Result<String, ToolError> {
    let mut text = String::new();
    for c in serde_json::Value::Object(metadata).to_string().chars() {
        if c.is_ascii() && !c.is_ascii_control() {
            text.push(c);
        } else {
            text.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    if text.len() > MAX_METADATA_HEADER {
        let size = text.len();
        return Err(ToolError::NotCalled(format!(
            "the session's metadata has {size} bytes, too many for a header ({MAX_METADATA_HEADER}); select fewer keys or set `metadata_field`"
        )));
    }
    Ok(text)
}

/// Characters that are percent-encoded in header values.
const ID_ESCAPES: AsciiSet = CONTROLS.add(b' ').add(b'%');

/// Percent-encodes an id for use in a header (`%0A`).
fn encode_id(id: &str) -> String {
    utf8_percent_encode(id, &ID_ESCAPES).to_string()
}
