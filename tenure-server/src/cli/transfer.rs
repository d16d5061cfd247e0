//! `tenure sessions export` and `import`: sessions as files.

use super::client::{ApiClient, PageStream, session_path, with_query};
use super::output::{clean, count, field, line, note, print};
use crate::error::with_causes;
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
use tenure::session::{EXPORT_FORMAT, file_name, session_file_name};
use tenure::{SessionId, private_files};

const IMPORT: &str = "/sessions/import";

/// The sessions to export, and the format.
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
    /// Lossless: everything needed to continue the session elsewhere
    Tenure,
    /// The messages, as OpenAI's clients know them
    Openai,
    /// As mistral.rs exports sessions
    Mistralrs,
    /// One message per line
    Jsonl,
}

/// The files to import.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Files, directories, - for standard input, or the URL of a PostgreSQL database of LangGraph
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// The format, instead of detecting it: tenure, openai, mistralrs, claude-code, responses, chatgpt
    #[arg(long, value_name = "FORM", value_parser = parse_format)]
    format: Option<import::ImportFormat>,
    /// The id of the session, if there is only one
    #[arg(long, value_name = "ID")]
    id: Option<String>,
}

fn parse_format(text: &str) -> tenure::Result<import::ImportFormat> {
    text.parse()
}

/// A progress bar on standard error, hidden if that is not a terminal.
pub fn bar(total: Option<u64>, message: &'static str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr()).with_message(message);
    let style = match total {
        Some(_) => "{msg} {pos}/{len} {wide_bar} {eta}",
        None => "{spinner} {msg} {pos}",
    };
    bar.with_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn export_path(id: &str, format: TransferFormat) -> anyhow::Result<String> {
    let name = format.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default();
    with_query(&session_path(id, "/export"), &[("format", name)])
}

/// The name of the file that a session is exported to.
fn export_name(id: &str) -> String {
    SessionId::new(id).map_or_else(|_| file_name(id), |id| session_file_name(&id))
}

/// Exports one session or all of them.
pub async fn export(client: &ApiClient, args: &ExportArgs) -> anyhow::Result<ExitCode> {
    let Some(dir) = &args.all else {
        let id = client.resolve(args.id.as_deref().unwrap_or_default()).await?;
        let path = export_path(id.as_str(), args.format)?;
        match &args.output {
            Some(file) => report_skipped(save(client, &path, file).await?.as_deref()),
            None => {
                let answer = client.send(Method::GET, &path, None).await?;
                report_skipped(answer.skipped.as_deref());
                let mut text = answer.text().await?;
                if !text.ends_with('\n') {
                    text.push('\n');
                }
                print(text)?;
            }
        }
        return Ok(ExitCode::SUCCESS);
    };
    private_files::create_dir_all(dir).with_context(|| format!("cannot create the directory {}", dir.display()))?;
    let (sessions, _) = PageStream::new(client, "/sessions", &[], usize::MAX).all().await?;
    let mut failed = 0;
    let mut users = BTreeSet::new();
    let mut skipped = None;
    let bar = bar(Some(sessions.len() as u64), "exported");
    let extension = if args.format == TransferFormat::Jsonl { "jsonl" } else { "json" };
    for session in &sessions {
        let id = field(session, "id");
        users.insert(field(session, "user"));
        match save(client, &export_path(id, args.format)?, &dir.join(format!("{}.{extension}", export_name(id)))).await
        {
            Ok(session_skipped) => skipped = skipped.or(session_skipped),
            Err(e) => {
                failed += 1;
                bar.suspend(|| note(format!("{id}: {}", with_causes(&e))));
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    line(format!("{} sessions are in {}", sessions.len() - failed, dir.display()))?;
    report_skipped(skipped.as_deref());
    if users.len() > 1 {
        note(format!(
            "they belong to {} users, which the files do not record; to keep them apart, export each user with --user to a separate directory",
            users.len()
        ));
    }
    if failed > 0 {
        bail!("{failed} sessions could not be exported");
    }
    Ok(ExitCode::SUCCESS)
}

/// Reports what the format cannot represent.
fn report_skipped(list: Option<&str>) {
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
    let write_error = || format!("cannot write {}", file.display());
    let mut out = private_files::create(&part).with_context(write_error)?;
    while let Some(bytes) = answer.body.next().await {
        out.write_all(&bytes?).with_context(write_error)?;
    }
    out.sync_all().and_then(|()| fs::rename(&part, file)).with_context(write_error)?;
    Ok(answer.skipped)
}

/// An import in progress.
struct Importer<'a> {
    client: &'a ApiClient,
    /// The id of the session, if it was given.
    id: Option<SessionId>,
    /// Whether the report is JSON.
    json: bool,
    bar: ProgressBar,
    sessions: Vec<Value>,
    skipped: Vec<Value>,
    duplicate_of: Vec<Value>,
    failed: Vec<Value>,
}

/// Imports the sessions in files and databases under their ids, and lists what could not be converted.
pub async fn import(client: &ApiClient, args: &ImportArgs, json: bool) -> anyhow::Result<ExitCode> {
    let id = args.id.as_ref().map(SessionId::new).transpose()?;
    let mut files = Vec::new();
    for path in &args.paths {
        collect_files(path, &mut files)?;
    }
    let mut importer = Importer {
        client,
        id,
        json,
        bar: bar(Some(files.len() as u64), "imported"),
        sessions: Vec::new(),
        skipped: Vec::new(),
        duplicate_of: Vec::new(),
        failed: Vec::new(),
    };
    for file in &files {
        match database_url(file) {
            Some(url) => importer.database(url, files.len()).await?,
            None => importer.file(file, args.format, files.len()).await?,
        }
        importer.bar.inc(1);
    }
    importer.bar.finish_and_clear();
    let Importer { sessions, skipped, duplicate_of, failed, .. } = importer;
    let imported_count = sessions.len();
    let failed_count = failed.len();
    if json {
        let report = json!({
            "sessions": sessions, "left_out": skipped, "duplicate_of": duplicate_of, "failed": failed,
        });
        line(report.to_string())?;
    } else if files.len() + imported_count > 2 {
        line(format!("{imported_count} sessions from {}", count(&json!(files.len()), "source")))?;
    }
    match failed_count {
        0 => Ok(ExitCode::SUCCESS),
        _ => bail!("{failed_count} could not be imported; the others were imported"),
    }
}

/// The URL, if an argument is that of a PostgreSQL database.
fn database_url(argument: &Path) -> Option<&str> {
    let is_url = |text: &&str| ["postgres://", "postgresql://"].iter().any(|scheme| text.starts_with(scheme));
    argument.to_str().filter(is_url)
}

/// Collects the files to import. Directories are searched recursively, for known file extensions only.
fn collect_files(path: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    if database_url(path).is_some() || !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    let list = fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut paths = list.map(|entry| entry.map(|e| e.path())).collect::<Result<Vec<_>, _>>()?;
    paths.sort();
    let is_supported = |p: &PathBuf| {
        let extension = p.extension().and_then(|e| e.to_str()).unwrap_or_default();
        p.is_dir() || ["json", "jsonl", "db", "sqlite", "sqlite3"].contains(&extension)
    };
    paths.retain(is_supported);
    paths.iter().try_for_each(|p| collect_files(p, files))
}

/// Reads the sessions in a file.
fn read(file: &Path, format: Option<import::ImportFormat>) -> tenure::Result<Vec<tenure::Result<ImportedSession>>> {
    let read_error = |e: std::io::Error| tenure::Error::invalid("", format!("cannot be read: {e}"));
    let mut bytes = Vec::new();
    if file.as_os_str() == "-" {
        std::io::stdin().read_to_end(&mut bytes).map_err(read_error)?;
    } else {
        File::open(file).and_then(|mut f| f.read_to_end(&mut bytes)).map_err(read_error)?;
    }
    if bytes.starts_with(b"SQLite format 3\0") {
        drop(bytes);
        return import::read_database(file);
    }
    let text = String::from_utf8(bytes).map_err(|_| tenure::Error::invalid("", "it is not text (UTF-8)"))?;
    import::read(&text, format)
}

impl Importer<'_> {
    /// Imports the sessions of a file.
    async fn file(&mut self, file: &Path, format: Option<import::ImportFormat>, sources: usize) -> anyhow::Result<()> {
        let name = file.display().to_string();
        let sessions = match read(file, format) {
            Ok(sessions) => sessions,
            Err(e) => {
                self.fail(&name, &e.into());
                return Ok(());
            }
        };
        self.check_id(&name, sources, sessions.len() as u64)?;
        for imported in sessions {
            self.session(imported, &name).await?;
        }
        Ok(())
    }

    /// Imports the threads of a database, one after the other.
    async fn database(&mut self, url: &str, sources: usize) -> anyhow::Result<()> {
        // Without the password.
        let name = tenure::store::redacted(url);
        let mut database = match import::read_postgres(url).await {
            Ok(database) => database,
            Err(e) => {
                self.fail(&name, &e.into());
                return Ok(());
            }
        };
        self.check_id(&name, sources, database.total())?;
        self.bar.inc_length(database.total());
        loop {
            match database.next_session().await {
                Ok(Some(imported)) => self.session(imported, &name).await?,
                Ok(None) => return Ok(()),
                Err(e) => {
                    self.fail(&name, &e.into());
                    return Ok(());
                }
            }
            self.bar.inc(1);
        }
    }

    /// An id can be given to a single session only.
    fn check_id(&self, name: &str, sources: usize, sessions: u64) -> anyhow::Result<()> {
        if self.id.is_some() && (sessions > 1 || sources > 1) {
            bail!("--id applies to a single session, but {name} contains several");
        }
        Ok(())
    }

    /// Imports a session, or reports why that is not possible. The error is that of writing to the terminal.
    async fn session(&mut self, imported: tenure::Result<ImportedSession>, name: &str) -> anyhow::Result<()> {
        let outcome = match imported {
            Ok(imported) => self.put(imported, name).await,
            Err(e) => Err(e.into()),
        };
        match outcome {
            Err(e) if e.downcast_ref::<std::io::Error>().is_some() => return Err(e),
            Err(e) => self.fail(name, &e),
            Ok(()) => {}
        }
        Ok(())
    }

    async fn put(&mut self, imported: ImportedSession, file: &str) -> anyhow::Result<()> {
        let ImportedSession { format, mut export, skipped: left_out, .. } = imported;
        // The session has been converted to our own format.
        export.tenure = EXPORT_FORMAT;
        let id = self.id.as_ref().map(|id| ("id", id.as_str()));
        let path = with_query(IMPORT, id.as_slice())?;
        let renamed = id.is_some();
        let answer = self.client.send(Method::POST, &path, Some(serde_json::to_string(&export)?)).await?;
        let mut answer: Value = answer.json().await?;
        let Value::Array(sessions) = answer["sessions"].take() else {
            bail!("the server's response does not list the imported sessions")
        };
        let server_skipped = answer["left_out"].as_array_mut().map(std::mem::take).unwrap_or_default();
        let duplicates = answer["duplicate_of"].as_array_mut().map(std::mem::take).unwrap_or_default();
        let client_skipped = left_out.iter().map(|l| json!({"place": l.location, "why": l.reason}));
        let mut lines = Vec::new();
        for session in &sessions {
            let id = field(session, "id");
            let mut text = format!("{id}: {} from {file} ({format})", count(&session["message_count"], "message"));
            if let Some(own) = export.session_id.as_ref().filter(|own| own.as_str() != id && !renamed) {
                text.push_str(&format!("; its own id {own} is taken"));
            }
            lines.push(text);
        }
        if !duplicates.is_empty() {
            let ids: Vec<&str> = duplicates.iter().filter_map(Value::as_str).collect();
            lines.push(if sessions.is_empty() {
                format!(
                    "{file} was imported before, as {}; nothing was changed (--id imports it again)",
                    ids.join(", ")
                )
            } else {
                format!("  the same export was imported before: {}", ids.join(", "))
            });
            self.duplicate_of.extend(duplicates);
        }
        for mut entry in client_skipped.chain(server_skipped) {
            lines.push(format!("  left out: {}: {}", field(&entry, "place"), field(&entry, "why")));
            entry["file"] = json!(file);
            self.skipped.push(entry);
        }
        self.sessions.extend(sessions);
        if self.json { Ok(()) } else { Ok(self.bar.suspend(|| lines.iter().try_for_each(|l| line(clean(l))))?) }
    }

    fn fail(&mut self, file: &str, e: &anyhow::Error) {
        let reason = match e.downcast_ref::<tenure::Error>() {
            Some(tenure::Error::Invalid { param, message }) if !param.is_empty() => format!("{param}: {message}"),
            _ => with_causes(e),
        };
        if !self.json {
            self.bar.suspend(|| note(format!("not imported: {file}: {}", clean(&reason))));
        }
        self.failed.push(json!({"file": file, "error": reason}));
    }
}
