//! The modules of a Sentence Transformers model that follow the encoder: pooling, dense layers, normalization.

use super::bert::{Bias, Linear};
use super::vector::normalize;
use super::weights::Weights;
use anyhow::{Context, anyhow, bail};
use ndarray::{Array1, ArrayView2, Axis};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

/// Maximum size in bytes of a model file.
const MAX_FILE_BYTES: u64 = 4 << 30;
/// Maximum number of components of a vector that a dense layer computes.
const MAX_DENSE_FEATURES: usize = 1 << 16;

/// Reads a file of the model. Returns `None` if it does not exist.
pub fn read(dir: &Path, name: &str) -> anyhow::Result<Option<Vec<u8>>> {
    let path = dir.join(name);
    match std::fs::metadata(&path) {
        Ok(file) if file.len() > MAX_FILE_BYTES => bail!("{name} exceeds {MAX_FILE_BYTES} bytes"),
        Ok(_) => std::fs::read(&path).map(Some).with_context(|| format!("cannot read {name}")),
        Err(_) => Ok(None),
    }
}

/// Reads a JSON file of the model. Returns `None` if it does not exist.
pub fn read_json<T: DeserializeOwned>(dir: &Path, name: &str) -> anyhow::Result<Option<T>> {
    read(dir, name)?.map(|bytes| serde_json::from_slice(&bytes).with_context(|| name.to_owned())).transpose()
}

/// How the vectors of the tokens become the vector of the text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pooling {
    /// The vector of the first token.
    Cls,
    /// The mean over all tokens.
    Mean,
    /// The sum over all tokens, divided by the square root of their number.
    MeanSqrtLength,
    /// The maximum of each component over all tokens.
    Max,
}

/// The deserialized fields of the `config.json` of a pooling module.
#[derive(Deserialize)]
struct PoolingConfig {
    pooling_mode: Option<String>,
    include_prompt: Option<bool>,
    /// `pooling_mode_…`, one for each mode.
    #[serde(flatten)]
    other: BTreeMap<String, serde_json::Value>,
}

impl Pooling {
    fn parse(config: PoolingConfig) -> anyhow::Result<Self> {
        let mut modes: Vec<&str> = config
            .other
            .iter()
            .filter(|(_, is_on)| **is_on == true)
            .filter_map(|(name, _)| name.strip_prefix("pooling_mode_"))
            .collect();
        modes.extend(config.pooling_mode.as_deref());
        if config.include_prompt == Some(false) {
            bail!("`include_prompt: false` is not supported");
        }
        Ok(match modes[..] {
            ["cls_token" | "cls"] => Self::Cls,
            ["mean_tokens" | "mean"] => Self::Mean,
            ["mean_sqrt_len_tokens"] => Self::MeanSqrtLength,
            ["max_tokens" | "max"] => Self::Max,
            _ => bail!("unsupported pooling {modes:?}; supported is one of cls, mean, mean_sqrt_len and max"),
        })
    }

    fn apply(self, tokens: ArrayView2<'_, f32>) -> Array1<f32> {
        let count = tokens.nrows() as f32;
        match self {
            Self::Cls => tokens.row(0).to_owned(),
            Self::Mean => tokens.sum_axis(Axis(0)) / count,
            Self::MeanSqrtLength => tokens.sum_axis(Axis(0)) / count.sqrt(),
            Self::Max => tokens.fold_axis(Axis(0), f32::NEG_INFINITY, |max, x| max.max(*x)),
        }
    }
}

/// A dense layer after the pooling.
pub struct Dense {
    linear: Linear,
    tanh: bool,
}

/// The deserialized fields of the `config.json` of a dense layer.
#[derive(Deserialize)]
struct DenseConfig {
    in_features: usize,
    out_features: usize,
    bias: bool,
    activation_function: String,
}

impl Dense {
    /// Reads the layer and its files: configuration and weights.
    fn read(dir: &Path, path: &str, inputs: usize) -> anyhow::Result<(Self, [Vec<u8>; 2])> {
        let file = format!("{path}/config.json");
        let json = read(dir, &file)?.ok_or_else(|| anyhow!("{file} is missing"))?;
        let config: DenseConfig = serde_json::from_slice(&json).with_context(|| file)?;
        let tanh = match config.activation_function.rsplit('.').next() {
            Some("Tanh") => true,
            Some("Identity") => false,
            _ => bail!(
                "{path}/config.json: unsupported `activation_function` {:?}; supported are Tanh and Identity",
                config.activation_function
            ),
        };
        if config.in_features != inputs || !(1..=MAX_DENSE_FEATURES).contains(&config.out_features) {
            bail!(
                "{path}/config.json: from {} to {} features, after {inputs} dimensions",
                config.in_features,
                config.out_features
            );
        }
        let file = format!("{path}/model.safetensors");
        let bytes = read(dir, &file)?.ok_or_else(|| anyhow!("{file} is missing; other formats are not supported"))?;
        let weights = Weights::parse([&bytes[..]]).map_err(|e| anyhow!("{file}: {e}"))?;
        let bias = if config.bias { Bias::Present } else { Bias::Absent };
        let linear = Linear::new(&weights, "linear", config.out_features, inputs, bias);
        Ok((Self { linear: linear.map_err(|e| anyhow!("{file}: {e}"))?, tanh }, [json, bytes]))
    }

    fn apply(&self, vector: &Array1<f32>) -> Array1<f32> {
        let mut vector = self.linear.apply(&vector.view().insert_axis(Axis(0))).remove_axis(Axis(0));
        if self.tanh {
            vector.mapv_inplace(f32::tanh);
        }
        vector
    }
}

/// What follows the pooling, in this order.
enum Stage {
    Dense(Dense),
    Normalize,
}

/// An entry of `modules.json`.
#[derive(Deserialize)]
pub struct ModuleEntry {
    /// The Python class: `sentence_transformers.models.Pooling`.
    #[serde(rename = "type")]
    class: String,
    /// Its directory; empty for that of the model.
    #[serde(default)]
    path: String,
}

impl ModuleEntry {
    /// Reads `modules.json`. Without it, a model is an encoder, with the pooling of `1_Pooling/config.json` if
    /// there is one.
    pub fn read_all(dir: &Path) -> anyhow::Result<Vec<Self>> {
        let entry = |class: &str, path: &str| Self { class: class.to_owned(), path: path.to_owned() };
        let Some(entries) = read_json::<Vec<Self>>(dir, "modules.json")? else {
            let mut entries = vec![entry("Transformer", "")];
            if dir.join("1_Pooling/config.json").exists() {
                entries.push(entry("Pooling", "1_Pooling"));
            }
            return Ok(entries);
        };
        let is_inside = |path: &str| Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
        if let Some(outside) = entries.iter().find(|entry| !is_inside(&entry.path)) {
            bail!("modules.json: the path {:?} is outside the model's directory", outside.path);
        }
        if entries.first().is_none_or(|entry| entry.kind() != "Transformer") {
            bail!("modules.json: the first module must be a Transformer");
        }
        Ok(entries)
    }

    fn kind(&self) -> &str {
        self.class.rsplit('.').next().unwrap_or_default()
    }

    /// The directory of the module's files.
    pub fn dir(&self, model: &Path) -> PathBuf {
        model.join(&self.path)
    }
}

/// The modules after the encoder.
pub struct Head {
    /// How token vectors are combined.
    pub pooling: Pooling,
    stages: Vec<Stage>,
    /// The number of components of a vector.
    pub dimensions: usize,
    /// The files of the dense layers, in their order: another file is another model.
    pub dense_files: Vec<Vec<u8>>,
}

impl Head {
    /// Reads the modules that follow an encoder whose vectors have this number of dimensions.
    pub fn read(dir: &Path, entries: &[ModuleEntry], dimensions: usize) -> anyhow::Result<Self> {
        let mut head = Self { pooling: Pooling::Mean, stages: Vec::new(), dimensions, dense_files: Vec::new() };
        for (i, entry) in entries.iter().enumerate().skip(1) {
            match entry.kind() {
                "Pooling" if i == 1 => {
                    let file = format!("{}/config.json", entry.path);
                    let config: Option<PoolingConfig> = read_json(dir, &file)?;
                    let config = config.ok_or_else(|| anyhow!("{file} is missing"))?;
                    head.pooling = Pooling::parse(config).with_context(|| file)?;
                }
                "Dense" if i > 1 => {
                    let (dense, files) = Dense::read(dir, &entry.path, head.dimensions)?;
                    head.dimensions = dense.linear.outputs();
                    head.stages.push(Stage::Dense(dense));
                    head.dense_files.extend(files);
                }
                "Normalize" => head.stages.push(Stage::Normalize),
                other => bail!(
                    "modules.json: unsupported module {other:?} at position {i}; supported is a Transformer, then optionally Pooling, then Dense and Normalize"
                ),
            }
        }
        Ok(head)
    }

    /// Computes the vector of a text, of unit length, from those of its tokens.
    pub fn apply(&self, tokens: ArrayView2<'_, f32>) -> Vec<f32> {
        let mut vector = self.pooling.apply(tokens);
        for stage in &self.stages {
            vector = match stage {
                Stage::Dense(dense) => dense.apply(&vector),
                Stage::Normalize => normalize(vector.to_vec()).into(),
            };
        }
        normalize(vector.to_vec())
    }
}
