//! Reads a session that is one object with `messages`: Tenure's own export, plain OpenAI messages,
//! or an export of mistral.rs.

use super::mistralrs::ListedMessages;
use crate::import::detect::Document;
use crate::import::imported::{ImportFormat, ImportedSession, SkippedPart, join_location, prefix_location};
use crate::import::raw_json::items;
use crate::session::transfer::export::{EXPORT_FORMAT, Export};
use crate::types::error::{Error, Result};
use crate::types::head::DECISIONS;
use crate::types::message::Message;
use crate::types::raw_object::RawObjectRef;
use serde_json::{Map, Value};

/// The fields of an export besides its messages, log and media.
const INFO_FIELDS: [&str; 14] = [
    "tenure",
    "session_id",
    "created_at",
    "updated_at",
    "assistant",
    "thread",
    "model",
    "title",
    "tags",
    "metadata",
    "style",
    "lead",
    "checkpoints",
    "message_times",
];

/// The fields of the log in Tenure's own export.
const LOG_FIELDS: [&str; 2] = ["log", "blobs"];

/// The fields with media that an export lists separately from its messages.
pub(super) const MEDIA: [&str; 3] = ["images", "videos", "files"];

/// Reads one session.
pub(super) fn read(doc: &Document<'_>, format: ImportFormat) -> Result<ImportedSession> {
    let location = doc.location("sessions");
    convert(doc, format, &location).map_err(|e| prefix_location(&location, e))
}

fn convert(doc: &Document<'_>, format: ImportFormat, location: &str) -> Result<ImportedSession> {
    let invalid = || Error::invalid("", "a session is a JSON object with a list of `messages`");
    let fields = doc.fields().ok_or_else(invalid)?;
    let list = fields.get("messages").and_then(items);
    let list = list.ok_or_else(|| Error::invalid("messages", "`messages` must be a list of messages"))?;
    let (mut export, mut skipped) = info(&fields, format)?;
    if format == ImportFormat::Tenure {
        if let Some(raw) = fields.get("log") {
            export.log = crate::session::transfer::records::parse(raw)?;
        }
        if let Some(raw) = fields.get("blobs") {
            let reason = "`blobs` must be an object that maps hashes to base64 strings";
            export.blobs = serde_json::from_str(raw).map_err(|_| Error::invalid("blobs", reason))?;
        }
        if export.tenure == 1 && export.metadata.remove(DECISIONS).is_some() {
            let reason = "decisions are imported only from the log, and exports of format version 1 have no log";
            skipped.push(SkippedPart::new(format!("metadata.{DECISIONS}"), reason));
        }
    }
    export.messages = match format {
        ImportFormat::MistralRs => ListedMessages::read(&fields)?.messages(&list, &mut skipped)?,
        _ => list
            .iter()
            .enumerate()
            .map(|(i, m)| Message::parse(m).map_err(|e| prefix_location(&format!("messages[{i}]"), e)))
            .collect::<Result<_>>()?,
    };
    skipped.iter_mut().for_each(|l| l.location = join_location(location, &l.location));
    Ok(ImportedSession { format, export, skipped })
}

/// Reads everything but the messages. In Tenure's own export an invalid field is an error; in other
/// formats the same name may have another meaning, so the field is skipped.
fn info(fields: &RawObjectRef<'_>, format: ImportFormat) -> Result<(Export, Vec<SkippedPart>)> {
    let mut known = Map::from_iter([("messages".to_owned(), Value::Array(Vec::new()))]);
    let mut skipped = Vec::new();
    for (name, raw) in fields.0.iter().filter(|(_, raw)| *raw != "null") {
        if format == ImportFormat::Tenure && LOG_FIELDS.contains(&&**name) {
            continue;
        }
        if name == "messages" || (MEDIA.contains(&&**name) && format != ImportFormat::OpenAi) {
            continue;
        }
        if !INFO_FIELDS.contains(&&**name) {
            skipped.push(SkippedPart::new(name, "unknown field: it cannot be represented in a session"));
            continue;
        }
        let mut candidate = known.clone();
        candidate.insert(name.clone(), serde_json::from_str(raw).unwrap_or_default());
        match serde_json::from_value::<Export>(Value::Object(candidate.clone())) {
            Ok(_) => known = candidate,
            Err(e) if format == ImportFormat::Tenure => {
                return Err(Error::invalid(name, format!("not a valid {name}: {e}")));
            }
            Err(e) => skipped.push(SkippedPart::new(
                name,
                format!("the value does not have the type of this field in a session: {e}"),
            )),
        }
    }
    let export: Export = serde_json::from_value(Value::Object(known)).map_err(|e| Error::invalid("", e.to_string()))?;
    if export.tenure > EXPORT_FORMAT {
        return Err(Error::NewerFormat {
            location: "the export".into(),
            version: export.tenure,
            supported: EXPORT_FORMAT,
        });
    }
    Ok((export, skipped))
}
