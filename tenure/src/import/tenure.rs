//! Reads a session that is one object with `messages`: Tenure's own export, plain OpenAI messages,
//! or an export of mistral.rs.

use super::mistralrs::ListedMessages;
use crate::import::detect::Document;
use crate::import::imported::{ImportFormat, ImportedSession, SkippedPart, at, path};
use crate::import::raw_object::{ForeignObject, items};
use crate::session::transfer::export::{EXPORT_FORMAT, Export};
use crate::types::error::{Error, Result};
use crate::types::head::DECISIONS;
use crate::types::message::Message;
use serde_json::{Map, Value};

/// The fields of an export besides its messages, log and media.
const INFO: [&str; 13] = [
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
];

/// The fields of the log in Tenure's own export.
const LOG: [&str; 2] = ["log", "blobs"];

/// The fields with media that an export lists separately from its messages.
pub(super) const MEDIA: [&str; 3] = ["images", "videos", "files"];

/// Reads one session.
pub(super) fn read(doc: &Document<'_>, format: ImportFormat) -> Result<ImportedSession> {
    let place = doc.place("sessions");
    foreign(doc, format, &place).map_err(|e| at(&place, e))
}

fn foreign(doc: &Document<'_>, format: ImportFormat, place: &str) -> Result<ImportedSession> {
    let wrong = || Error::invalid("", "a session is a JSON object with a list of `messages`");
    let fields = doc.fields().ok_or_else(wrong)?;
    let list = fields.get("messages").and_then(items);
    let list = list.ok_or_else(|| Error::invalid("messages", "`messages` must be a list of messages"))?;
    let (mut export, mut left_out) = info(&fields, format)?;
    if format == ImportFormat::Tenure {
        if let Some(raw) = fields.get("log") {
            export.log = crate::session::transfer::records::parse(raw)?;
        }
        if let Some(raw) = fields.get("blobs") {
            let why = "`blobs` must be an object of base64 texts, named by their hashes";
            export.blobs = serde_json::from_str(raw).map_err(|_| Error::invalid("blobs", why))?;
        }
        if export.tenure == 1 && export.metadata.remove(DECISIONS).is_some() {
            let why = "decisions are taken from the log of a session, and exports of this form have none";
            left_out.push(SkippedPart::new(format!("metadata.{DECISIONS}"), why));
        }
    }
    export.messages = match format {
        ImportFormat::MistralRs => ListedMessages::read(&fields)?.messages(&list, &mut left_out)?,
        _ => list
            .iter()
            .enumerate()
            .map(|(i, m)| Message::parse(m).map_err(|e| at(&format!("messages[{i}]"), e)))
            .collect::<Result<_>>()?,
    };
    left_out.iter_mut().for_each(|l| l.place = path(place, &l.place));
    Ok(ImportedSession { format, export, left_out })
}

/// Reads everything but the messages. In Tenure's own export an invalid field is an error; in other
/// formats the same name may have another meaning, so the field is left out.
fn info(fields: &ForeignObject<'_>, format: ImportFormat) -> Result<(Export, Vec<SkippedPart>)> {
    let (mut known, mut left_out) = (Map::from_iter([("messages".to_owned(), Value::Array(Vec::new()))]), Vec::new());
    for (name, raw) in fields.0.iter().filter(|(_, raw)| *raw != "null") {
        if format == ImportFormat::Tenure && LOG.contains(&&**name) {
            continue;
        }
        if name == "messages" || (MEDIA.contains(&&**name) && format != ImportFormat::OpenAi) {
            continue;
        }
        if !INFO.contains(&&**name) {
            left_out.push(SkippedPart::new(name, "a session has no place for this field"));
            continue;
        }
        let mut with = known.clone();
        with.insert(name.clone(), serde_json::from_str(raw).unwrap_or_default());
        match serde_json::from_value::<Export>(Value::Object(with.clone())) {
            Ok(_) => known = with,
            Err(e) if format == ImportFormat::Tenure => {
                return Err(Error::invalid(name, format!("not a valid {name}: {e}")));
            }
            Err(e) => left_out.push(SkippedPart::new(name, format!("it is not what this field is in a session: {e}"))),
        }
    }
    let export: Export = serde_json::from_value(Value::Object(known)).map_err(|e| Error::invalid("", e.to_string()))?;
    match export.tenure > EXPORT_FORMAT {
        true => Err(Error::NewerFormat { place: "the export".into(), found: export.tenure, known: EXPORT_FORMAT }),
        false => Ok((export, left_out)),
    }
}
