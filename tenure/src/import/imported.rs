//! What an import consists of: the session, what was skipped, and the format it came in.

use crate::session::transfer::export::Export;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// A file format of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum ImportFormat {
    /// Tenure's own export.
    #[serde(rename = "tenure")]
    Tenure,
    /// Messages in OpenAI's format: a list, an object with `messages`, one message per line, or one
    /// object with `messages` per line.
    #[serde(rename = "openai")]
    OpenAi,
    /// An export of mistral.rs: `messages`, `images`, `videos`, `files`; values may be tagged with
    /// `Left` and `Right`.
    #[serde(rename = "mistralrs")]
    MistralRs,
    /// A transcript of Claude Code, JSONL.
    #[serde(rename = "claude-code")]
    ClaudeCode,
    /// Items of OpenAI's Responses API, a list or one per line, as OpenAI's Agents SDK stores them.
    #[serde(rename = "responses")]
    Responses,
    /// A data export of ChatGPT (`conversations.json`).
    #[serde(rename = "chatgpt")]
    ChatGpt,
    /// A checkpoint database of LangGraph, SQLite or PostgreSQL.
    #[serde(rename = "langgraph")]
    LangGraph,
    /// A session database of Google's Agent Development Kit, SQLite.
    #[serde(rename = "adk")]
    Adk,
}

/// The formats that are text. Databases are detected by their tables.
pub(crate) const FORMATS: [ImportFormat; 6] = [
    ImportFormat::Tenure,
    ImportFormat::OpenAi,
    ImportFormat::MistralRs,
    ImportFormat::ClaudeCode,
    ImportFormat::Responses,
    ImportFormat::ChatGpt,
];

impl ImportFormat {
    /// The name of the format, as in options and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            ImportFormat::Tenure => "tenure",
            ImportFormat::OpenAi => "openai",
            ImportFormat::MistralRs => "mistralrs",
            ImportFormat::ClaudeCode => "claude-code",
            ImportFormat::Responses => "responses",
            ImportFormat::ChatGpt => "chatgpt",
            ImportFormat::LangGraph => "langgraph",
            ImportFormat::Adk => "adk",
        }
    }
}

impl fmt::Display for ImportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ImportFormat {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let known = FORMATS.map(ImportFormat::as_str).join(", ");
        let format = FORMATS.into_iter().find(|f| f.as_str() == s);
        format.ok_or_else(|| {
            Error::invalid("format", format!("unknown format {s}; it must be one of {known}", s = excerpt(s)))
        })
    }
}

/// A session of another program, converted to an export.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ImportedSession {
    /// The detected or given format.
    pub format: ImportFormat,
    /// The converted session.
    pub export: Export,
    /// The data that could not be converted.
    #[serde(rename = "left_out")]
    pub skipped: Vec<SkippedPart>,
}

/// A part of the input that cannot be represented in a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SkippedPart {
    /// The location: a path such as `messages[3].content[1]`, a line such as `line 7`, or both.
    #[serde(rename = "place")]
    pub location: String,
    /// A description of the data, and the reason why it is not in the session.
    #[serde(rename = "why")]
    pub reason: String,
}

impl ImportedSession {
    /// Removes a model that is not configured where the session is imported, and lists it as skipped.
    pub fn skip_unknown_model(&mut self, is_known: impl Fn(&str) -> bool) {
        if let Some(model) = self.export.model.take_if(|model| !is_known(model)) {
            let reason = format!(
                "the model {model} is not configured here; the session will use the default model",
                model = excerpt(model)
            );
            self.skipped.push(SkippedPart::new("model", reason));
        }
    }
}

impl SkippedPart {
    pub(crate) fn new(location: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { location: location.into(), reason: reason.into() }
    }
}

/// Prefixes the path of an invalid parameter with a location: `messages[3]` is joined with a dot,
/// words such as `line 4` with a colon.
pub(crate) fn prefix_location(location: &str, e: Error) -> Error {
    match e {
        Error::Invalid { param, message } => Error::Invalid { param: join_location(location, &param), message },
        other => other,
    }
}

/// Joins a location and a path.
pub(crate) fn join_location(location: &str, rest: &str) -> String {
    match (location.is_empty(), rest.is_empty()) {
        (true, _) => rest.to_owned(),
        (_, true) => location.to_owned(),
        _ if location.contains(' ') && !location.contains(": ") => format!("{location}: {rest}"),
        _ => format!("{location}.{rest}"),
    }
}
