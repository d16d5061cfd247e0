//! Import of sessions from other programs: converts their files to an [`Export`], ready for
//! [`crate::Tenure::import`].
//!
//! [`read`] detects the format from the content. Data that cannot be represented in a session is
//! never dropped silently: it is listed in [`ImportedSession::skipped`] with its location and the reason
//! (D-094). A session that cannot be parsed is an error that names the path of the problem, and
//! does not prevent the import of the others.

#[cfg(feature = "sqlite")]
mod adk;
mod builder;
mod chatgpt;
mod claude_code;
#[cfg(feature = "sqlite")]
mod database;
mod detect;
pub(crate) mod imported;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod langgraph;
#[cfg(feature = "postgres")]
mod langgraph_postgres;
#[cfg(feature = "sqlite")]
mod langgraph_sqlite;
mod mistralrs;
mod mistralrs_export;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod msgpack;
mod openai_responses;
mod raw_json;
mod tenure;

#[cfg(feature = "sqlite")]
mod openai_agents;

use crate::import::imported::{FORMATS, prefix_location};
#[cfg(feature = "sqlite")]
pub use database::read_database;
pub use imported::{ImportFormat, ImportedSession, SkippedPart};
#[cfg(feature = "postgres")]
pub use langgraph_postgres::{PostgresImport, read_postgres};
pub use mistralrs_export::{to_mistralrs, to_mistralrs_tagged};

use crate::session::transfer::export::Export;
use crate::types::error::{Error, Result};
use crate::types::message::Message;
use detect::{Document, split};

/// Reads the sessions in a text. `hint` is the format, if it is known; `None` means that it is
/// detected from the content.
///
/// The outer error means that no format was detected, or that the text is neither JSON nor JSONL.
/// Otherwise there is one result per session, in the order of the text; an invalid session is an
/// error with the path of the problem ([`Error::Invalid`]: `line 4: messages[2].content`), and does
/// not affect the others.
pub fn read(text: &str, hint: Option<ImportFormat>) -> Result<Vec<Result<ImportedSession>>> {
    let docs = split(text)?;
    let Some(format) = hint.or_else(|| detect::detect_format(&docs)) else {
        if docs.iter().any(|d| d.has("messages")) {
            return Err(Error::invalid("messages", "`messages` must be a list of messages"));
        }
        let known = FORMATS.map(ImportFormat::as_str).join(", ");
        return Err(Error::invalid("", format!("the input is not a session in a supported format ({known})")));
    };
    Ok(match format {
        ImportFormat::ClaudeCode => claude_code::read(&docs),
        ImportFormat::Responses => vec![openai_responses::read(&docs)],
        ImportFormat::ChatGpt => docs.iter().map(chatgpt::read).collect(),
        // Each document is a session.
        _ if docs.iter().any(|d| d.has("messages")) => {
            let format_of = |d: &Document<'_>| hint.or_else(|| detect::detect_document_format(d)).unwrap_or(format);
            docs.iter().map(|d| tenure::read(d, format_of(d))).collect()
        }
        // Each document is a message.
        ImportFormat::MistralRs => vec![tagged_messages(&docs)],
        _ => vec![messages(&docs)],
    })
}

/// One session that consists of plain messages.
fn messages(docs: &[Document<'_>]) -> Result<ImportedSession> {
    let parse = |d: &Document<'_>| Message::parse(d.raw).map_err(|e| prefix_location(&d.location("messages"), e));
    let messages = docs.iter().map(parse).collect::<Result<_>>()?;
    let export = Export { messages, ..Export::default() };
    Ok(ImportedSession { format: ImportFormat::OpenAi, export, skipped: Vec::new() })
}

/// One session that consists of messages of mistral.rs only.
fn tagged_messages(docs: &[Document<'_>]) -> Result<ImportedSession> {
    let list = docs.iter().map(|d| d.raw).collect::<Vec<_>>();
    let mut skipped = Vec::new();
    let messages = mistralrs::ListedMessages::default().messages(&list, &mut skipped)?;
    Ok(ImportedSession { format: ImportFormat::MistralRs, export: Export { messages, ..Export::default() }, skipped })
}
