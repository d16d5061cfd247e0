//! `tenure backup` and `tenure restore`: everything that a store holds, as one file.

use super::output::{line, note};
use super::target::{Needs, TargetArgs};
use super::transfer::bar;
use anyhow::{Context, bail};
use axum::http::Method;
use clap::Args;
use futures_util::StreamExt;
use serde_json::json;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tenure::maintenance::{BackupSummary, verify_backup};
use tenure::{Tenure, private_files};

/// The file of a backup.
#[derive(Debug, Args)]
pub struct BackupArgs {
    /// The file to write, which must not exist; - for standard output
    file: PathBuf,
    /// JSON, for programs
    #[arg(long)]
    json: bool,
}

/// The file to restore.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// A file that `tenure backup` wrote
    file: PathBuf,
    /// Only verify the file
    #[arg(long)]
    verify: bool,
    /// JSON, for programs
    #[arg(long)]
    json: bool,
}

impl BackupArgs {
    /// Writes a backup of the store, or of a running server's store, and verifies it.
    pub async fn run(&self, target: &TargetArgs) -> anyhow::Result<()> {
        let to_stdout = self.file.as_os_str() == "-";
        if !to_stdout && self.file.exists() {
            bail!("{} exists; choose another name", self.file.display());
        }
        let client = target.client(Needs::Sessions).await?;
        let mut body = client.send(Method::GET, "/backup", None).await?.body;
        if to_stdout {
            let mut out = io::stdout().lock();
            while let Some(chunk) = body.next().await {
                out.write_all(&chunk?)?;
            }
            return Ok(out.flush()?);
        }
        // The file gets its name when it is complete and verified.
        let partial = PathBuf::from(format!("{}.partial", self.file.display()));
        let progress = bar(None, "bytes written:");
        let written = async {
            let mut out =
                private_files::create(&partial).with_context(|| format!("cannot write {}", partial.display()))?;
            while let Some(chunk) = body.next().await {
                let chunk = chunk?;
                out.write_all(&chunk).with_context(|| format!("cannot write {}", partial.display()))?;
                progress.inc(chunk.len() as u64);
            }
            out.sync_all()?;
            anyhow::Ok(())
        };
        let written = written.await.and_then(|()| verify(&partial));
        progress.finish_and_clear();
        let summary = match written.and_then(|summary| Ok((summary, fs::rename(&partial, &self.file)?))) {
            Ok((summary, ())) => summary,
            Err(e) => {
                drop(fs::remove_file(&partial));
                return Err(e);
            }
        };
        report(&summary, "are in", &self.file, self.json)
    }
}

impl RestoreArgs {
    /// Verifies a backup, and restores it into an empty store.
    pub async fn run(&self, target: &TargetArgs) -> anyhow::Result<()> {
        if target.server.is_some() {
            bail!(
                "`tenure restore` writes a new store: run it with --store URL instead of --server, and start the server afterwards"
            );
        }
        let summary = verify(&self.file)?;
        if self.verify {
            return report(&summary, "are intact in", &self.file, self.json);
        }
        let url = target.load(&[])?.store;
        check_leftovers(&url)?;
        let tenure = Tenure::open(&url).await?;
        let progress = bar(Some(summary.records + summary.items), "restoring");
        let restored = tenure.restore_backup(&self.file, |s| progress.set_position(s.records + s.items)).await;
        progress.finish_and_clear();
        match restored {
            Ok(summary) => report(&summary, "are restored from", &self.file, self.json),
            Err(e @ tenure::Error::Invalid { .. }) => Err(e.into()),
            Err(e) => {
                let store = tenure::store::redacted(&url);
                Err(anyhow::Error::from(e)
                    .context(format!("the restored store {store} is incomplete: remove it, and restore again")))
            }
        }
    }
}

/// Refuses a SQLite file whose write-ahead log belongs to another file: SQLite would apply it.
fn check_leftovers(url: &str) -> anyhow::Result<()> {
    let Some(("sqlite", file)) = url.split_once(':') else { return Ok(()) };
    for suffix in ["-wal", "-shm", "-journal"] {
        let leftover = format!("{file}{suffix}");
        if !Path::new(file).exists() && Path::new(&leftover).exists() {
            bail!("{leftover} is left from another database: move it away before you restore to {file}");
        }
    }
    Ok(())
}

/// Reads the whole file and verifies it.
fn verify(file: &Path) -> anyhow::Result<BackupSummary> {
    let progress = bar(None, "records verified:");
    let summary = verify_backup(file, |s| progress.set_position(s.records));
    progress.finish_and_clear();
    Ok(summary?)
}

fn report(summary: &BackupSummary, relation: &str, file: &Path, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let BackupSummary { sessions, records, items, blobs, blake3, .. } = summary;
        let report = json!({"file": file, "sessions": sessions, "records": records, "items": items, "blobs": blobs, "blake3": blake3});
        return Ok(line(report.to_string())?);
    }
    let BackupSummary { sessions, records, items, blobs, .. } = summary;
    line(format!(
        "{sessions} sessions ({records} records), {items} items and {blobs} blobs {relation} {}",
        file.display()
    ))?;
    note(format!("blake3 {}", summary.blake3));
    Ok(())
}
