//! `tenure sessions export` and `import`: sessions as files.

use super::client::{ApiClient, PageStream, with_query};
use super::output::{clean, count, field, line, note, print};
use anyhow::{Context, bail};
use axum::http::Method;
use clap::{Args, ValueEnum};
use futures_util::StreamExt;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tenure::import::{self, ImportedSession};
use tenure::{EXPORT_FORMAT, SessionId, private_files};

const IMPORT: &str = "/sessions/import";

/// What to write, and how.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The session
    #[arg(required_unless_present = "all")]
    id: Option<String>,
    /// All sessions, each to a file in this directory
    #[arg(long, value_name = "DIR", conflicts_with_all = ["id", "output"])]
    all: Option<PathBuf>,
    /// The form
    #[arg(long, value_enum, default_value_t = TransferFormat::Tenure)]
    format: TransferFormat,
    /// The file (default: standard output)
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The form of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransferFormat {
    /// Everything that is needed to go on elsewhere
    Tenure,
    /// The messages, as OpenAI's clients know them
    Openai,
    /// As mistral.rs exports sessions
    Mistralrs,
    /// One message per line
    Jsonl,
}

/// What to read.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Files, directories, or - for standard input
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// The form, if it is not to be recognised: tenure, openai, mistralrs, claude-code, responses
    #[arg(long, value_name = "FORM", value_parser = form)]
    format: Option<import::ImportFormat>,
    /// The id of the session, if there is only one
    #[arg(long, value_name = "ID")]
    id: Option<String>,
}

fn form(word: &str) -> tenure::Result<import::ImportFormat> {
    word.parse()
}

/// A progress bar on standard error, hidden if that is not a terminal.
pub fn bar(total: Option<u64>, what: &'static str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr()).with_message(what);
    let style = match total {
        Some(_) => "{msg} {pos}/{len} {wide_bar} {eta}",
        None => "{spinner} {msg} {pos}",
    };
    bar.with_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn export_path(id: &str, form: TransferFormat) -> anyhow::Result<String> {
    let name = form.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default();
    with_query(&format!("/sessions/{id}/export"), &[("format", name)])
}

/// Exports one session or all of them.
pub async fn export(client: &ApiClient, what: &ExportArgs) -> anyhow::Result<ExitCode> {
    let Some(dir) = &what.all else {
        let id = client.resolve(what.id.as_deref().unwrap_or_default()).await?;
        let path = export_path(id.as_str(), what.format)?;
        match &what.output {
            Some(file) => tell_left_out(save(client, &path, file).await?.as_deref()),
            None => {
                let answer = client.send(Method::GET, &path, None).await?;
                tell_left_out(answer.left_out.as_deref());
                let mut text = answer.text().await?;
                if !text.ends_with('\n') {
                    text.push('\n');
                }
                print(text)?;
            }
        }
        return Ok(ExitCode::SUCCESS);
    };
    private_files::create_dir_all(dir).with_context(|| format!("can not make the directory {}", dir.display()))?;
    let (sessions, _) = PageStream::new(client, "/sessions", &[], usize::MAX).all().await?;
    let (mut failed, mut users, mut left_out) = (0, BTreeSet::new(), None);
    let bar = bar(Some(sessions.len() as u64), "exported");
    let end = if what.format == TransferFormat::Jsonl { "jsonl" } else { "json" };
    for session in &sessions {
        let id = field(session, "id");
        users.insert(field(session, "user"));
        match save(client, &export_path(id, what.format)?, &dir.join(format!("{id}.{end}"))).await {
            Ok(told) => left_out = left_out.or(told),
            Err(e) => {
                failed += 1;
                bar.suspend(|| note(format!("{id}: {e:#}")));
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    line(format!("{} sessions are in {}", sessions.len() - failed, dir.display()))?;
    tell_left_out(left_out.as_deref());
    if users.len() > 1 {
        note(format!(
            "they belong to {} users, which a file does not say; to keep them apart, export with --user, each to a directory of its own",
            users.len()
        ));
    }
    if failed > 0 {
        bail!("{failed} sessions could not be exported");
    }
    Ok(ExitCode::SUCCESS)
}

/// Reports what the format cannot represent.
fn tell_left_out(list: Option<&str>) {
    if let Some(list) = list {
        note(format!("this format leaves out: {}", clean(&list.replace(',', ", "))));
    }
}

/// Downloads to a temporary file and renames it when complete, so that a partial file never appears under its name.
/// Returns what the format cannot represent.
async fn save(client: &ApiClient, path: &str, file: &Path) -> anyhow::Result<Option<String>> {
    let mut answer = client.send(Method::GET, path, None).await?;
    let mut part = file.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let wrong = || format!("can not write {}", file.display());
    let mut out = private_files::create(&part).with_context(wrong)?;
    while let Some(bytes) = answer.body.next().await {
        out.write_all(&bytes?).with_context(wrong)?;
    }
    out.sync_all().and_then(|()| fs::rename(&part, file)).with_context(wrong)?;
    Ok(answer.left_out)
}

/// Progress of an import.
#[derive(Default)]
struct TransferSummary {
    sessions: Vec<Value>,
    left_out: Vec<Value>,
    duplicate_of: Vec<Value>,
    failed: Vec<Value>,
}

/// Imports the sessions in files under their ids, and lists what could not be converted.
pub async fn import(client: &ApiClient, what: &ImportArgs, json: bool) -> anyhow::Result<ExitCode> {
    let id = what.id.as_ref().map(SessionId::new).transpose()?;
    let mut files = Vec::new();
    for path in &what.paths {
        collect(path, &mut files)?;
    }
    let mut done = TransferSummary::default();
    let bar = bar(Some(files.len() as u64), "imported");
    for file in &files {
        let name = file.display().to_string();
        match read(file, what.format) {
            Err(e) => fail(&mut done, &bar, &name, &e.into(), json),
            Ok(found) => {
                if id.is_some() && (found.len() > 1 || files.len() > 1) {
                    bail!("--id is for one session, and there are several in {name}");
                }
                for foreign in found {
                    let put = match foreign {
                        Ok(foreign) => put(client, foreign, id.as_ref(), &name, &mut done, &bar, json).await,
                        Err(e) => Err(e.into()),
                    };
                    if let Err(e) = put {
                        if e.downcast_ref::<std::io::Error>().is_some() {
                            return Err(e);
                        }
                        fail(&mut done, &bar, &name, &e, json);
                    }
                }
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let TransferSummary { sessions, left_out, duplicate_of, failed } = done;
    let (right, wrong) = (sessions.len(), failed.len());
    match json {
        true => {
            let told = json!({
                "sessions": sessions, "left_out": left_out, "duplicate_of": duplicate_of, "failed": failed,
            });
            line(told.to_string())?;
        }
        false if files.len() + right > 2 => line(format!("{right} sessions from {} files", files.len()))?,
        false => {}
    }
    match wrong {
        0 => Ok(ExitCode::SUCCESS),
        _ => bail!("{wrong} could not be imported; the others are in"),
    }
}

/// Collects the files to import. Directories are searched recursively, for known file extensions only.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    let list = fs::read_dir(path).with_context(|| format!("can not read {}", path.display()))?;
    let mut inside = list.map(|entry| entry.map(|e| e.path())).collect::<Result<Vec<_>, _>>()?;
    inside.sort();
    let known = |p: &PathBuf| {
        let end = p.extension().and_then(|e| e.to_str()).unwrap_or_default();
        p.is_dir() || ["json", "jsonl", "db", "sqlite", "sqlite3"].contains(&end)
    };
    inside.retain(known);
    inside.iter().try_for_each(|p| collect(p, files))
}

/// Reads the sessions in a file.
fn read(file: &Path, form: Option<import::ImportFormat>) -> tenure::Result<Vec<tenure::Result<ImportedSession>>> {
    let wrong = |e: std::io::Error| tenure::Error::invalid("", format!("can not be read: {e}"));
    let mut bytes = Vec::new();
    match file.as_os_str() == "-" {
        true => std::io::stdin().read_to_end(&mut bytes).map_err(wrong)?,
        false => File::open(file).and_then(|mut f| f.read_to_end(&mut bytes)).map_err(wrong)?,
    };
    if bytes.starts_with(b"SQLite format 3\0") {
        drop(bytes);
        return import::read_agents_db(file);
    }
    let text = String::from_utf8(bytes).map_err(|_| tenure::Error::invalid("", "it is not text (UTF-8)"))?;
    import::read(&text, form)
}

async fn put(
    client: &ApiClient,
    foreign: ImportedSession,
    id: Option<&SessionId>,
    file: &str,
    done: &mut TransferSummary,
    bar: &ProgressBar,
    json: bool,
) -> anyhow::Result<()> {
    let ImportedSession { format, mut export, left_out } = foreign;
    // The session has been converted to our own format.
    export.tenure = EXPORT_FORMAT;
    let id = id.map(|id| ("id", id.as_str()));
    let (path, renamed) = (with_query(IMPORT, id.as_slice())?, id.is_some());
    let answer = client.send(Method::POST, &path, Some(serde_json::to_string(&export)?)).await?;
    let mut answer: Value = answer.json().await?;
    let Value::Array(sessions) = answer["sessions"].take() else { bail!("the server did not say what it imported") };
    let theirs = answer["left_out"].as_array_mut().map(std::mem::take).unwrap_or_default();
    let duplicates = answer["duplicate_of"].as_array_mut().map(std::mem::take).unwrap_or_default();
    let ours = left_out.iter().map(|l| json!({"place": l.place, "why": l.why}));
    let mut lines = Vec::new();
    for session in &sessions {
        let id = field(session, "id");
        let mut told = format!("{id}: {} from {file} ({format})", count(&session["message_count"], "message"));
        if let Some(own) = export.session_id.as_ref().filter(|own| own.as_str() != id && !renamed) {
            told.push_str(&format!("; its own id {own} is taken"));
        }
        lines.push(told);
    }
    if !duplicates.is_empty() {
        let ids: Vec<&str> = duplicates.iter().filter_map(Value::as_str).collect();
        lines.push(format!("  the same export was imported before: {}", ids.join(", ")));
        done.duplicate_of.extend(duplicates);
    }
    for mut left in ours.chain(theirs) {
        lines.push(format!("  left out: {}: {}", field(&left, "place"), field(&left, "why")));
        left["file"] = json!(file);
        done.left_out.push(left);
    }
    done.sessions.extend(sessions);
    match json {
        true => Ok(()),
        false => Ok(bar.suspend(|| lines.iter().try_for_each(|l| line(clean(l))))?),
    }
}

fn fail(done: &mut TransferSummary, bar: &ProgressBar, file: &str, e: &anyhow::Error, json: bool) {
    let why = match e.downcast_ref::<tenure::Error>() {
        Some(tenure::Error::Invalid { param, message }) if !param.is_empty() => format!("{param}: {message}"),
        _ => format!("{e:#}"),
    };
    if !json {
        bar.suspend(|| note(format!("not imported: {file}: {}", clean(&why))));
    }
    done.failed.push(json!({"file": file, "error": why}));
}
