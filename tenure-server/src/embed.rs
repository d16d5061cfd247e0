//! What makes vectors of texts: a model in this process, or a server that speaks OpenAI's language.

mod bert;
mod weights;
mod wordpiece;

use crate::config::embeddings::{Embeddings, LOCAL_MODEL_NAME, Which};
use crate::llm::upstream::Upstream;
use anyhow::{Context, anyhow, bail};
use bert::Bert;
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tenure::{Embedder, Fields};
use tokio::sync::Semaphore;
use weights::Weights;
use wordpiece::Tokens;

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
/// So many characters of a text are sent to a server: most refuse more than 8,000 tokens.
const MAX_LETTERS: usize = 8000;

/// What makes vectors.
#[derive(Clone, Debug, Default)]
pub enum Source {
    /// Nothing.
    #[default]
    None,
    /// A model in this process.
    Local(Arc<Local>),
    /// A server.
    Server(Arc<Server>),
}

impl Source {
    /// As it is configured. A local model is read and checked now, a server asked when it is needed.
    pub async fn open(config: &Embeddings) -> anyhow::Result<Self> {
        Ok(match config.which() {
            Which::None => Self::None,
            Which::Local(path) => {
                let path = path.to_owned();
                Self::Local(Arc::new(tokio::task::spawn_blocking(move || Local::load(&path)).await??))
            }
            Which::Server(_) => Self::Server(Arc::new(Server::new(config)?)),
        })
    }

    /// For the library.
    pub fn embedder(&self) -> Option<Embedder> {
        match self.clone() {
            Self::None => None,
            Self::Local(local) => Some(Embedder::new(local.name.clone(), move |texts| {
                let local = local.clone();
                async move { local.embed(texts).await.map(|(vectors, _)| vectors) }
            })),
            Self::Server(server) => Some(Embedder::new(server.name.clone(), move |texts| {
                let server = server.clone();
                async move { server.embed(texts).await }
            })),
        }
    }

    /// The model in this process, if this is its name.
    pub fn local(&self, name: &str) -> Option<&Arc<Local>> {
        match self {
            Self::Local(local) if local.name == name => Some(local),
            _ => None,
        }
    }

    /// The name of the model in this process.
    pub fn local_name(&self) -> Option<&str> {
        match self {
            Self::Local(local) => Some(&local.name),
            _ => None,
        }
    }
}

/// A model in this process.
pub struct Local {
    name: String,
    bytes: usize,
    model: Arc<(Tokens, Bert)>,
    at_once: Semaphore,
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Local({})", self.name)
    }
}

impl Local {
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
            (Some(json), _) => (json.clone(), Tokens::from_json(json).map_err(|e| anyhow!("tokenizer.json: {e}"))?),
            (None, Some(vocab)) => (vocab.clone(), Tokens::from_vocab(vocab).map_err(|e| anyhow!("vocab.txt: {e}"))?),
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

/// A vector of length one in the same direction.
fn unit(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x /= length);
    }
    vector
}

/// An OpenAI-compatible server that embeds.
#[derive(Debug)]
pub struct Server {
    name: String,
    upstream: Upstream,
    dimensions: Option<usize>,
    timeout: Duration,
    batch: usize,
}

/// What is read of its answer.
#[derive(Deserialize)]
struct Answer {
    data: Vec<Embedding>,
}

#[derive(Deserialize)]
struct Embedding {
    index: usize,
    embedding: Vec<f32>,
}

impl Server {
    fn new(config: &Embeddings) -> anyhow::Result<Self> {
        let (dimensions, batch) = (config.dimensions, config.batch);
        // The first numbers of a longer vector are not the same as all of a shorter one.
        let name = dimensions.map_or(config.model.clone(), |n| format!("{}:{n}", config.model));
        let timeout = config.timeout.duration().unwrap_or(Duration::MAX);
        Ok(Self { name, upstream: Upstream::new(&config.server()?)?, dimensions, timeout, batch })
    }

    /// A vector of length one for each text.
    pub async fn embed(&self, texts: Vec<String>) -> Result<Vec<Vec<f32>>, String> {
        let mut vectors = Vec::with_capacity(texts.len());
        for some in texts.chunks(self.batch) {
            let asked = tokio::time::timeout(self.timeout, self.ask(some)).await;
            let too_long = |_| format!("{} did not answer within {:?} (`embeddings.timeout`)", self.name, self.timeout);
            vectors.extend(asked.map_err(too_long)??);
        }
        Ok(vectors)
    }

    async fn ask(&self, texts: &[String]) -> Result<Vec<Vec<f32>>, String> {
        let input: Vec<&str> = texts.iter().map(|text| first(text, MAX_LETTERS)).collect();
        let mut body = Fields::default();
        body.set("input", input);
        if let Some(dimensions) = self.dimensions {
            body.set("dimensions", dimensions);
        }
        let (_, answer) = self.upstream.embed(body).await.map_err(|e| e.to_string())?;
        let wrong = |why: &str| format!("the server of {} gave no vectors: {why}", self.name);
        let answer: Answer = serde_json::from_str(&answer).map_err(|e| wrong(&e.to_string()))?;
        let mut vectors = vec![Vec::new(); texts.len()];
        for Embedding { index, embedding } in answer.data {
            let place = vectors.get_mut(index).filter(|place| place.is_empty());
            *place.ok_or_else(|| wrong(&format!("one too many, for text {index}")))? = unit(embedding);
        }
        let length = self.dimensions.unwrap_or(vectors.first().map_or(0, Vec::len));
        match vectors.iter().find(|v| v.len() != length || v.is_empty()) {
            Some(v) => Err(wrong(&format!("one has {} numbers instead of {length}", v.len()))),
            None => Ok(vectors),
        }
    }
}

/// The first characters of a text.
fn first(text: &str, letters: usize) -> &str {
    text.char_indices().nth(letters).map_or(text, |(end, _)| &text[..end])
}
