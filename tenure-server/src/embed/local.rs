//! An embedding model that runs in this process.

use super::bert::Bert;
use super::vector::normalize;
use super::weights::Weights;
use super::wordpiece::TokenIds;
use crate::config::embeddings::LOCAL_MODEL_NAME;
use anyhow::{Context, anyhow, bail};
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// The BLAKE3 hash of the files of [`LOCAL_MODEL_NAME`].
pub const LOCAL_MODEL_HASH: &str = "82c66dfde10c549afadc56acc32690697f091ab9923c65438ed6dfaaa37f03de";

/// The files of a model. Of the two tokenizer formats, `tokenizer.json` takes precedence over `vocab.txt`.
const FILES: [&str; 4] = ["config.json", "tokenizer.json", "vocab.txt", "model.safetensors"];
/// Maximum size in bytes of a model file.
const MAX_FILE_BYTES: u64 = 2 << 30;
/// Maximum number of tokens of a text that are embedded, as in the training of this model family. The rest is ignored.
const MAX_TOKENS: usize = 256;
/// Maximum number of texts per blocking task, so that one query does not have to wait for a batch of a thousand texts.
const BATCH_SIZE: usize = 16;
/// A BERT embedding model in this process, with its tokenizer.
pub struct LocalModel {
    name: String,
    bytes: usize,
    model: Arc<(TokenIds, Bert)>,
    permits: Semaphore,
}

impl std::fmt::Debug for LocalModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Local({})", self.name)
    }
}

impl LocalModel {
    /// Loads a model from a directory and validates all of it. Blocks for a while: must not be called on an async
    /// thread.
    pub fn load(dir: &Path) -> anyhow::Result<Self> {
        if !dir.join("model.safetensors").exists() {
            bail!("no model found in {}; run `tenure models pull`, or set `embeddings.model: none`", dir.display());
        }
        Self::read(dir).with_context(|| format!("cannot load the model in {}", dir.display()))
    }

    fn read(dir: &Path) -> anyhow::Result<Self> {
        let [config, json, vocab, weights] = FILES.map(|name| read(dir, name));
        let config = config?.context("config.json is missing")?;
        let weights = weights?.context("model.safetensors is missing")?;
        let json = json?;
        let (text, tokens) = match (&json, &vocab?) {
            (Some(json), _) => (json.clone(), TokenIds::from_json(json).map_err(|e| anyhow!("tokenizer.json: {e}"))?),
            (None, Some(vocab)) => (vocab.clone(), TokenIds::from_vocab(vocab).map_err(|e| anyhow!("vocab.txt: {e}"))?),
            (None, None) => bail!("both tokenizer.json and vocab.txt are missing"),
        };
        check_pooling(read(dir, "1_Pooling/config.json")?)?;
        let invalid_weights = |e| anyhow!("model.safetensors: {e}");
        let bert = Bert::new(&config, &Weights::parse(&weights).map_err(invalid_weights)?).map_err(invalid_weights)?;
        if tokens.largest() >= bert.vocabulary_size() {
            bail!("the tokenizer has token ids beyond the vocabulary of the weights");
        }
        let model_hash = hash_model_files([&config, &text, &weights].map(|file| &file[..]));
        // Vectors with different model names are never compared, so a different model must get a different name
        // (D-080).
        let name = if model_hash == LOCAL_MODEL_HASH {
            LOCAL_MODEL_NAME.to_owned()
        } else {
            format!("local-{}", &model_hash[..12])
        };
        let bytes = config.len() + text.len() + weights.len();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self { name, bytes, model: Arc::new((tokens, bert)), permits: Semaphore::new(cores) })
    }

    /// Returns the model's name. A model other than [`LOCAL_MODEL_NAME`] is named by its hash (D-080).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of dimensions of an embedding.
    pub fn dimensions(&self) -> usize {
        self.model.1.dimensions()
    }

    /// Returns the total size in bytes of the model's files.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a unit-length embedding for each text, and the total number of tokens. Runs on blocking threads, at
    /// most one per core at a time.
    pub async fn embed(&self, texts: Vec<String>) -> Result<(Vec<Vec<f32>>, usize), String> {
        let mut vectors = Vec::with_capacity(texts.len());
        let mut count = 0;
        let mut texts = texts.into_iter().peekable();
        while texts.peek().is_some() {
            let batch: Vec<String> = texts.by_ref().take(BATCH_SIZE).collect();
            let model = self.model.clone();
            let _permit = self.permits.acquire().await.map_err(|e| e.to_string())?;
            let work = move || -> Vec<(Vec<f32>, usize)> {
                let (tokens, bert) = &*model;
                let max = MAX_TOKENS.min(bert.max_positions());
                let ids = batch.iter().map(|text| tokens.encode(text, max));
                ids.map(|ids| (normalize(bert.vector(&ids)), ids.len())).collect()
            };
            for (vector, token_count) in tokio::task::spawn_blocking(work).await.map_err(|e| e.to_string())? {
                vectors.push(vector);
                count += token_count;
            }
        }
        Ok((vectors, count))
    }
}

/// Computes the BLAKE3 hash of a model's files: configuration, tokenizer, weights.
pub fn hash_model_files(files: [&[u8]; 3]) -> String {
    let mut hasher = blake3::Hasher::new();
    for file in files {
        hasher.update(&(file.len() as u64).to_le_bytes()).update(file);
    }
    hasher.finalize().to_hex().to_string()
}

/// Reads a file of the model. Returns `None` if it does not exist.
fn read(dir: &Path, name: &str) -> anyhow::Result<Option<Vec<u8>>> {
    let path = dir.join(name);
    match std::fs::metadata(&path) {
        Ok(file) if file.len() > MAX_FILE_BYTES => bail!("{name} exceeds {MAX_FILE_BYTES} bytes"),
        Ok(_) => std::fs::read(&path).map(Some).with_context(|| format!("cannot read {name}")),
        Err(_) => Ok(None),
    }
}

/// Rejects a model that declares a pooling other than the mean over its tokens.
fn check_pooling(pooling: Option<Vec<u8>>) -> anyhow::Result<()> {
    #[derive(Deserialize)]
    struct Pooling {
        pooling_mode_mean_tokens: Option<bool>,
    }
    let Some(pooling) = pooling else { return Ok(()) };
    let pooling: Pooling = serde_json::from_slice(&pooling).context("1_Pooling/config.json")?;
    if pooling.pooling_mode_mean_tokens == Some(false) {
        bail!("unsupported pooling (1_Pooling/config.json); only mean pooling over tokens is supported");
    }
    Ok(())
}
