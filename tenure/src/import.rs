//! Import of sessions from other programs: converts their files to an [`Export`], ready for
//! [`crate::Tenure::import`].
//!
//! [`read`] detects the format from the content. Data that cannot be represented in a session is
//! never dropped silently: it is listed in [`Foreign::left_out`] with its location and the reason
//! (D-094). A session that cannot be parsed is an error that names the path of the problem, and
//! does not prevent the import of the others.

mod builder;
mod claude_code;
mod detect;
mod mistralrs;
mod openai_responses;
mod raw_object;
mod tenure;

#[cfg(feature = "sqlite")]
mod openai_agents;

pub use mistralrs::to_mistralrs;
#[cfg(feature = "sqlite")]
pub use openai_agents::read_agents_db;

use crate::session::transfer::Export;
use crate::types::error::{Error, Result};
use crate::types::excerpt::excerpt;
use crate::types::message::Message;
use detect::{Doc, split};
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// A file format of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Format {
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
}

const FORMATS: [Format; 5] = [Format::Tenure, Format::OpenAi, Format::MistralRs, Format::ClaudeCode, Format::Responses];

impl Format {
    /// The name of the format, as in options and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Format::Tenure => "tenure",
            Format::OpenAi => "openai",
            Format::MistralRs => "mistralrs",
            Format::ClaudeCode => "claude-code",
            Format::Responses => "responses",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Format {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let known = FORMATS.map(Format::as_str).join(", ");
        let found = FORMATS.into_iter().find(|f| f.as_str() == s);
        found.ok_or_else(|| {
            Error::invalid("format", format!("unknown format {s}; it must be one of {known}", s = excerpt(s)))
        })
    }
}

/// A session of another program, converted to an export.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Foreign {
    /// The detected or given format.
    pub format: Format,
    /// The converted session.
    pub export: Export,
    /// The data that could not be converted.
    pub left_out: Vec<LeftOut>,
}

/// A part of the input that cannot be represented in a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// The location: a path such as `messages[3].content[1]`, a line such as `line 7`, or both.
    pub place: String,
    /// A description of the data, and the reason why it is not in the session.
    pub why: String,
}

impl Foreign {
    /// Removes a model that is not configured where the session is imported, and lists it as left out.
    pub fn keep_model(&mut self, is_known: impl Fn(&str) -> bool) {
        if let Some(model) = self.export.model.take_if(|model| !is_known(model)) {
            let why = format!(
                "the model {model} is not configured here; the session will use the default model",
                model = excerpt(model)
            );
            self.left_out.push(LeftOut::new("model", why));
        }
    }
}

impl LeftOut {
    fn new(place: impl Into<String>, why: impl Into<String>) -> Self {
        Self { place: place.into(), why: why.into() }
    }
}

/// Reads the sessions in a text. `hint` is the format, if it is known; `None` means that it is
/// detected from the content.
///
/// The outer error means that no format was detected, or that the text is neither JSON nor JSONL.
/// Otherwise there is one result per session, in the order of the text; an invalid session is an
/// error with the path of the problem ([`Error::Invalid`]: `line 4: messages[2].content`), and does
/// not affect the others.
pub fn read(text: &str, hint: Option<Format>) -> Result<Vec<Result<Foreign>>> {
    let docs = split(text)?;
    let Some(format) = hint.or_else(|| detect::recognise(&docs)) else {
        if docs.iter().any(|d| d.has("messages")) {
            return Err(Error::invalid("messages", "`messages` must be a list of messages"));
        }
        let known = FORMATS.map(Format::as_str).join(", ");
        return Err(Error::invalid("", format!("this is no session in a form that is known ({known})")));
    };
    Ok(match format {
        Format::ClaudeCode => claude_code::read(&docs),
        Format::Responses => vec![openai_responses::read(&docs)],
        // Each document is a session.
        _ if docs.iter().any(|d| d.has("messages")) => {
            let form = |d: &Doc<'_>| hint.or_else(|| detect::kind(d)).unwrap_or(format);
            docs.iter().map(|d| tenure::read(d, form(d))).collect()
        }
        // Each document is a message.
        Format::MistralRs => vec![tagged(&docs)],
        _ => vec![messages(&docs)],
    })
}

/// One session that consists of plain messages.
fn messages(docs: &[Doc<'_>]) -> Result<Foreign> {
    let parse = |d: &Doc<'_>| Message::parse(d.raw).map_err(|e| at(&d.place("messages"), e));
    let messages = docs.iter().map(parse).collect::<Result<_>>()?;
    let export = Export { messages, ..Export::default() };
    Ok(Foreign { format: Format::OpenAi, export, left_out: Vec::new() })
}

/// One session that consists of messages of mistral.rs only.
fn tagged(docs: &[Doc<'_>]) -> Result<Foreign> {
    let (list, mut left_out) = (docs.iter().map(|d| d.raw).collect::<Vec<_>>(), Vec::new());
    let messages = mistralrs::Listed::default().messages(&list, &mut left_out)?;
    Ok(Foreign { format: Format::MistralRs, export: Export { messages, ..Export::default() }, left_out })
}

/// Prefixes the path of an invalid parameter with a location: `messages[3]` is joined with a dot,
/// words such as `line 4` with a colon.
fn at(place: &str, e: Error) -> Error {
    match e {
        Error::Invalid { param, message } => Error::Invalid { param: path(place, &param), message },
        other => other,
    }
}

/// Joins a location and a path.
fn path(place: &str, rest: &str) -> String {
    match (place.is_empty(), rest.is_empty()) {
        (true, _) => rest.to_owned(),
        (_, true) => place.to_owned(),
        _ if place.contains(' ') && !place.contains(": ") => format!("{place}: {rest}"),
        _ => format!("{place}.{rest}"),
    }
}
