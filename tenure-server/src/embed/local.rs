//! An embedding model that runs in this process.

use super::bert::{Bert, BertConfig};
use super::modules::{Head, ModuleEntry, Pooling, read, read_json};
use super::prefixes::Prefixes;
use super::tokenizer::Tokenizer;
use super::weights::Weights;
use crate::config::embeddings::LOCAL_MODEL_NAME;
use anyhow::{Context, anyhow, bail};
use futures_util::{StreamExt, TryStreamExt, stream};
use ndarray::{Axis, Slice};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// The BLAKE3 hash of the files of [`LOCAL_MODEL_NAME`].
pub const LOCAL_MODEL_HASH: &str = "82c66dfde10c549afadc56acc32690697f091ab9923c65438ed6dfaaa37f03de";

/// The file of the weights, if there is only one.
const WEIGHTS_FILE: &str = "model.safetensors";
/// The file that lists the files of the weights, if there are several.
const INDEX_FILE: &str = "model.safetensors.index.json";
/// Maximum number of tokens of a text that are embedded, unless `sentence_bert_config.json` has another number. The
/// rest is ignored.
const DEFAULT_MAX_TOKENS: usize = 256;
/// Maximum number of tokens that are processed together, unless a single text has more. Larger matrices are hardly
/// faster (D-079), and a question has to wait for those that were started before.
const BATCH_TOKENS: usize = 256;

/// An embedding model in this process, with its tokenizer.
pub struct LocalModel {
    name: String,
    prefixes: Prefixes,
    bytes: usize,
    parts: Arc<Parts>,
    permits: Semaphore,
}

/// What computes the vector of a text.
struct Parts {
    tokenizer: Tokenizer,
    encoder: Bert,
    head: Head,
    max_tokens: usize,
}

/// The deserialized fields of `sentence_bert_config.json`.
#[derive(Default, Deserialize)]
struct LengthConfig {
    max_seq_length: Option<usize>,
    #[serde(default)]
    do_lower_case: bool,
}

/// The deserialized fields of the index of several weight files.
#[derive(Deserialize)]
struct WeightIndex {
    weight_map: BTreeMap<String, String>,
}

impl std::fmt::Debug for LocalModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Local({})", self.name)
    }
}

impl LocalModel {
    /// Returns true if a directory contains a model, valid or not.
    pub fn exists(dir: &Path) -> bool {
        [WEIGHTS_FILE, INDEX_FILE, "modules.json", "config.json"].iter().any(|file| dir.join(file).exists())
    }

    /// Loads a model from a directory and validates all of it. Blocks for a while: must not be called on an async
    /// thread.
    pub fn load(dir: &Path) -> anyhow::Result<Self> {
        if !Self::exists(dir) {
            bail!("no model found in {}; run `tenure models pull`, or set `embeddings.model: none`", dir.display());
        }
        Self::read(dir).with_context(|| format!("cannot load the model in {}", dir.display()))
    }

    fn read(dir: &Path) -> anyhow::Result<Self> {
        let modules = ModuleEntry::read_all(dir)?;
        let encoder_dir = &modules[0].dir(dir);
        let weights = read_weights(encoder_dir)?;
        let config = read(encoder_dir, "config.json")?.context("config.json is missing")?;
        let lengths: LengthConfig = read_json(encoder_dir, "sentence_bert_config.json")?.unwrap_or_default();
        let (vocabulary, tokenizer) = read_tokenizer(encoder_dir)?;
        let tokenizer = if lengths.do_lower_case { tokenizer.in_lower_case() } else { tokenizer };
        let shape = BertConfig::parse(&config).map_err(|e| anyhow!("config.json: {e}"))?;
        let encoder = Weights::parse(weights.iter().map(Vec::as_slice)).and_then(|w| Bert::new(&shape, w));
        let encoder = encoder.map_err(|e| anyhow!("{WEIGHTS_FILE}: {e}"))?;
        if tokenizer.largest() >= encoder.vocabulary_size() {
            bail!("the tokenizer has token ids beyond the vocabulary of the weights");
        }
        let head = Head::read(dir, &modules, encoder.dimensions())?;
        let max_tokens = lengths.max_seq_length.unwrap_or(DEFAULT_MAX_TOKENS).min(encoder.max_positions());
        if max_tokens <= tokenizer.special_tokens() {
            bail!("sentence_bert_config.json: `max_seq_length` is {max_tokens}, not enough for a word");
        }
        let mut files: Vec<&[u8]> = [&config, &vocabulary].into_iter().chain(&weights).map(Vec::as_slice).collect();
        let bytes = files.iter().map(|f| f.len()).sum::<usize>() + head.dense_files.iter().map(Vec::len).sum::<usize>();
        // The name of a model with these settings is the hash of its files alone.
        let usual = head.pooling == Pooling::Mean && max_tokens == DEFAULT_MAX_TOKENS && !lengths.do_lower_case;
        let settings = format!("{:?} {max_tokens} {}", head.pooling, lengths.do_lower_case);
        if !usual || !head.dense_files.is_empty() {
            files.push(settings.as_bytes());
            files.extend(head.dense_files.iter().map(Vec::as_slice));
        }
        // Vectors with different model names are never compared, so a different model must get a different name
        // (D-080).
        let model_hash = hash_model_files(&files);
        let name = if model_hash == LOCAL_MODEL_HASH {
            LOCAL_MODEL_NAME.to_owned()
        } else {
            format!("local-{}", &model_hash[..12])
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            name,
            prefixes: Prefixes::of_local_model(dir, &config)?,
            bytes,
            parts: Arc::new(Parts { tokenizer, encoder, head, max_tokens }),
            permits: Semaphore::new(cores),
        })
    }

    /// Returns the model's name. A model other than [`LOCAL_MODEL_NAME`] is named by its hash (D-080).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the prefixes that the model's files or the name of its directory call for.
    pub fn prefixes(&self) -> &Prefixes {
        &self.prefixes
    }

    /// Returns the number of dimensions of an embedding.
    pub fn dimensions(&self) -> usize {
        self.parts.head.dimensions
    }

    /// Returns the total size in bytes of the model's files.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a unit-length embedding for each text, and the total number of tokens. Runs on blocking threads, at
    /// most one per core at a time. Texts are embedded as they are, without a prefix.
    pub async fn embed(&self, texts: Vec<String>) -> Result<(Vec<Vec<f32>>, usize), String> {
        let parts = self.parts.clone();
        let encode = move || texts.iter().map(|text| parts.tokenizer.encode(text, parts.max_tokens)).collect();
        let ids: Vec<Vec<u32>> = tokio::task::spawn_blocking(encode).await.map_err(|e| e.to_string())?;
        let count = ids.iter().map(Vec::len).sum();
        let batches = stream::iter(batches(ids)).map(|batch| self.embed_batch(batch));
        // At most this many batches of one call wait, so that another call does not wait for all of them.
        let cores = self.permits.available_permits().max(1);
        let vectors: Vec<Vec<Vec<f32>>> = batches.buffered(cores).try_collect().await?;
        Ok((vectors.into_iter().flatten().collect(), count))
    }

    async fn embed_batch(&self, batch: Vec<Vec<u32>>) -> Result<Vec<Vec<f32>>, String> {
        let parts = self.parts.clone();
        let _permit = self.permits.acquire().await.map_err(|e| e.to_string())?;
        tokio::task::spawn_blocking(move || parts.vectors(&batch)).await.map_err(|e| e.to_string())
    }
}

impl Parts {
    fn vectors(&self, texts: &[Vec<u32>]) -> Vec<Vec<f32>> {
        let tokens = self.encoder.token_vectors(texts);
        let mut start = 0;
        let rows = texts.iter().map(|ids| {
            start += ids.len();
            Slice::from(start - ids.len()..start)
        });
        rows.map(|rows| self.head.apply(tokens.slice_axis(Axis(0), rows))).collect()
    }
}

/// Groups texts, in their order, into batches of at most [`BATCH_TOKENS`] tokens.
fn batches(texts: Vec<Vec<u32>>) -> Vec<Vec<Vec<u32>>> {
    let mut batches: Vec<Vec<Vec<u32>>> = Vec::new();
    let mut tokens = 0;
    for ids in texts {
        tokens += ids.len();
        match batches.last_mut().filter(|_| tokens <= BATCH_TOKENS) {
            Some(batch) => batch.push(ids),
            None => {
                tokens = ids.len();
                batches.push(vec![ids]);
            }
        }
    }
    batches
}

/// Reads the files of the weights: one, or those that the index lists.
fn read_weights(dir: &Path) -> anyhow::Result<Vec<Vec<u8>>> {
    if let Some(weights) = read(dir, WEIGHTS_FILE)? {
        return Ok(vec![weights]);
    }
    let Some(WeightIndex { weight_map }) = read_json(dir, INDEX_FILE)? else {
        bail!(
            "{WEIGHTS_FILE} is missing; other formats of weights are not supported. `tenure models pull` installs {LOCAL_MODEL_NAME}"
        );
    };
    let names: BTreeSet<String> = weight_map.into_values().collect();
    let read_part = |name: &String| {
        if Path::new(name).file_name() != Some(name.as_ref()) {
            bail!("{INDEX_FILE}: {name:?} is not the name of a file");
        }
        read(dir, name)?.ok_or_else(|| anyhow!("{name} is missing, which {INDEX_FILE} lists"))
    };
    names.iter().map(read_part).collect()
}

/// Reads the tokenizer, and the file of its vocabulary. `tokenizer.json` takes precedence over `vocab.txt`.
fn read_tokenizer(dir: &Path) -> anyhow::Result<(Vec<u8>, Tokenizer)> {
    if let Some(json) = read(dir, "tokenizer.json")? {
        let tokenizer = Tokenizer::from_json(&json).map_err(|e| anyhow!("tokenizer.json: {e}"))?;
        return Ok((json, tokenizer));
    }
    let Some(vocab) = read(dir, "vocab.txt")? else {
        bail!("both tokenizer.json and vocab.txt are missing; other tokenizer files are not supported");
    };
    let config = read(dir, "tokenizer_config.json")?;
    let tokenizer = Tokenizer::from_vocab(&vocab, config.as_deref()).map_err(|e| anyhow!("vocab.txt: {e}"))?;
    Ok((vocab, tokenizer))
}

/// Computes the BLAKE3 hash of a model's files: configuration, tokenizer, weights, and whatever else matters.
pub fn hash_model_files(files: &[&[u8]]) -> String {
    let mut hasher = blake3::Hasher::new();
    for file in files {
        hasher.update(&(file.len() as u64).to_le_bytes()).update(file);
    }
    hasher.finalize().to_hex().to_string()
}
