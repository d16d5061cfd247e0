//! A model in this process.

use super::bert::Bert;
use super::vector::unit;
use super::weights::Weights;
use super::wordpiece::TokenIds;
use crate::config::embeddings::LOCAL_MODEL_NAME;
use anyhow::{Context, anyhow, bail};
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// The BLAKE3 hash of the files of [`LOCAL_MODEL_NAME`].
pub const HASH: &str = "82c66dfde10c549afadc56acc32690697f091ab9923c65438ed6dfaaa37f03de";

/// The files of a model, the tokenizer's two forms in the order in which they are looked for.
const FILES: [&str; 4] = ["config.json", "tokenizer.json", "vocab.txt", "model.safetensors"];
/// So large a file may be.
const MAX_FILE_BYTES: u64 = 2 << 30;
/// So many pieces of a text are looked at, as this family was trained.
const MAX_TOKENS: usize = 256;
/// So many texts are done in one go, so that one question need not wait for a thousand texts.
const AT_ONCE: usize = 16;
/// A model in this process.
pub struct LocalModel {
    name: String,
    bytes: usize,
    model: Arc<(TokenIds, Bert)>,
    at_once: Semaphore,
}

impl std::fmt::Debug for LocalModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Local({})", self.name)
    }
}

impl LocalModel {
    /// Reads a model's directory and checks all of it. Takes a while: not for an async thread.
    pub fn load(dir: &Path) -> anyhow::Result<Self> {
        if !dir.join("model.safetensors").exists() {
            bail!(
                "there is no model in {}; get it with `tenure models pull`, or set `embeddings.model: none`",
                dir.display()
            );
        }
        Self::read(dir).with_context(|| format!("the model in {} can not be used", dir.display()))
    }

    fn read(dir: &Path) -> anyhow::Result<Self> {
        let [config, json, vocab, weights] = FILES.map(|name| read(dir, name));
        let (config, weights) = (config?.context("it has no config.json")?, weights?.context("it has no weights")?);
        let json = json?;
        let (text, tokens) = match (&json, &vocab?) {
            (Some(json), _) => (json.clone(), TokenIds::from_json(json).map_err(|e| anyhow!("tokenizer.json: {e}"))?),
            (None, Some(vocab)) => (vocab.clone(), TokenIds::from_vocab(vocab).map_err(|e| anyhow!("vocab.txt: {e}"))?),
            (None, None) => bail!("it has neither a tokenizer.json nor a vocab.txt"),
        };
        means(read(dir, "1_Pooling/config.json")?)?;
        let wrong = |e| anyhow!("model.safetensors: {e}");
        let bert = Bert::new(&config, &Weights::parse(&weights).map_err(wrong)?).map_err(wrong)?;
        if tokens.largest() >= bert.words() {
            bail!("its tokenizer has pieces that the weights do not know");
        }
        let hash = hash([&config, &text, &weights].map(|file| &file[..]));
        // Vectors of different names are never compared: another model needs another name.
        let name = if hash == HASH { LOCAL_MODEL_NAME.to_owned() } else { format!("local-{}", &hash[..12]) };
        let bytes = config.len() + text.len() + weights.len();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self { name, bytes, model: Arc::new((tokens, bert)), at_once: Semaphore::new(cores) })
    }

    /// Its name. A model other than the one that can be pulled is called after its hash.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many numbers a vector has.
    pub fn dimensions(&self) -> usize {
        self.model.1.dimensions()
    }

    /// Bytes of its files.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A vector of length one for each text, and how many pieces of words were looked at. Works on threads of its own, on no more
    /// than there are cores.
    pub async fn embed(&self, texts: Vec<String>) -> Result<(Vec<Vec<f32>>, usize), String> {
        let (mut vectors, mut count) = (Vec::with_capacity(texts.len()), 0);
        let mut texts = texts.into_iter().peekable();
        while texts.peek().is_some() {
            let some: Vec<String> = texts.by_ref().take(AT_ONCE).collect();
            let model = self.model.clone();
            let _permit = self.at_once.acquire().await.map_err(|e| e.to_string())?;
            let work = move || -> Vec<(Vec<f32>, usize)> {
                let (tokens, bert) = &*model;
                let max = MAX_TOKENS.min(bert.places());
                let ids = some.iter().map(|text| tokens.encode(text, max));
                ids.map(|ids| (unit(bert.vector(&ids)), ids.len())).collect()
            };
            for (vector, pieces) in tokio::task::spawn_blocking(work).await.map_err(|e| e.to_string())? {
                vectors.push(vector);
                count += pieces;
            }
        }
        Ok((vectors, count))
    }
}

/// The hash of a model's files: configuration, tokenizer, weights.
pub fn hash(files: [&[u8]; 3]) -> String {
    let mut hasher = blake3::Hasher::new();
    for file in files {
        hasher.update(&(file.len() as u64).to_le_bytes()).update(file);
    }
    hasher.finalize().to_hex().to_string()
}

/// A file, if it is there.
fn read(dir: &Path, name: &str) -> anyhow::Result<Option<Vec<u8>>> {
    let path = dir.join(name);
    match std::fs::metadata(&path) {
        Ok(file) if file.len() > MAX_FILE_BYTES => bail!("{name} is over {MAX_FILE_BYTES} bytes"),
        Ok(_) => std::fs::read(&path).map(Some).with_context(|| format!("can not read {name}")),
        Err(_) => Ok(None),
    }
}

/// Refuses a model whose vectors are not the mean over its pieces, if it says so.
fn means(pooling: Option<Vec<u8>>) -> anyhow::Result<()> {
    #[derive(Deserialize)]
    struct Pooling {
        pooling_mode_mean_tokens: Option<bool>,
    }
    let Some(pooling) = pooling else { return Ok(()) };
    let pooling: Pooling = serde_json::from_slice(&pooling).context("1_Pooling/config.json")?;
    if pooling.pooling_mode_mean_tokens == Some(false) {
        bail!(
            "its vectors are not the mean over the pieces of a text (1_Pooling/config.json); only such are known here"
        );
    }
    Ok(())
}
