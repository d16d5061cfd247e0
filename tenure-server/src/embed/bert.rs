//! Forward pass of a BERT, RoBERTa or XLM-RoBERTa encoder: from the token ids of texts to a vector for each token.
//! The tokens of several texts are the rows of one matrix, so that no padding is needed (D-079).

use super::weights::Weights;
use ndarray::{Array1, Array2, ArrayView2, Axis, Slice};
use serde::Deserialize;

/// Maximum number of layers. No model of this family has more.
const MAX_LAYERS: usize = 64;

/// The model types with this architecture, and whether their positions begin after that of the padding token.
const MODEL_TYPES: [(&str, bool); 4] = [("bert", false), ("roberta", true), ("xlm-roberta", true), ("camembert", true)];

/// A loaded encoder.
pub struct Bert {
    word_embeddings: Array2<f32>,
    /// For each position in a text; includes the embedding of the token type.
    position_embeddings: Array2<f32>,
    norm: LayerNorm,
    layers: Vec<EncoderLayer>,
}

/// The deserialized fields of a `config.json`.
#[derive(Deserialize)]
pub struct BertConfig {
    model_type: String,
    hidden_act: Activation,
    hidden_size: usize,
    intermediate_size: usize,
    layer_norm_eps: f32,
    max_position_embeddings: usize,
    #[serde(default)]
    pad_token_id: Option<usize>,
    num_attention_heads: usize,
    num_hidden_layers: usize,
    #[serde(default)]
    type_vocab_size: usize,
    vocab_size: usize,
}

impl BertConfig {
    /// Parses a `config.json`, and checks that this module supports the model.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let invalid = |e| format!("not the configuration of a BERT model: {e}");
        let value: serde_json::Value = serde_json::from_slice(json).map_err(invalid)?;
        let (kind, positions) = (&value["model_type"], value["position_embedding_type"].as_str());
        if !MODEL_TYPES.iter().any(|(name, _)| *kind == *name) || positions.is_some_and(|p| p != "absolute") {
            return Err(format!(
                "unsupported model type {kind} with {} positions; supported are {} with absolute positions",
                positions.unwrap_or("absolute"),
                MODEL_TYPES.map(|(name, _)| name).join(", ")
            ));
        }
        let config: Self = serde_json::from_value(value).map_err(invalid)?;
        let (size, heads, layers) = (config.hidden_size, config.num_attention_heads, config.num_hidden_layers);
        if size == 0 || heads == 0 || !size.is_multiple_of(heads) || !(1..=MAX_LAYERS).contains(&layers) {
            return Err(format!("inconsistent sizes: hidden size {size}, {heads} heads, {layers} layers"));
        }
        if config.max_position_embeddings < config.first_position().saturating_add(2)
            || !(0.0..1.0).contains(&config.layer_norm_eps)
        {
            return Err("inconsistent sizes: `max_position_embeddings` or `layer_norm_eps`".into());
        }
        Ok(config)
    }

    /// The number of the first position of a text. RoBERTa begins after the id of the padding token.
    fn first_position(&self) -> usize {
        let after_padding = MODEL_TYPES.contains(&(self.model_type.as_str(), true));
        if after_padding { self.pad_token_id.unwrap_or(1).saturating_add(1) } else { 0 }
    }
}

/// A linear layer.
pub struct Linear {
    weight: Array2<f32>,
    bias: Array1<f32>,
}

/// Whether a linear layer has a bias.
#[derive(Clone, Copy)]
pub enum Bias {
    /// Its tensor must exist.
    Present,
    /// It is zero.
    Absent,
}

struct LayerNorm {
    weight: Array1<f32>,
    bias: Array1<f32>,
    epsilon: f32,
}

/// The activation function of the intermediate layer.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Activation {
    /// x · Φ(x).
    Gelu,
    /// Its approximation with the hyperbolic tangent.
    #[serde(rename = "gelu_new", alias = "gelu_pytorch_tanh")]
    GeluTanh,
    Relu,
}

struct EncoderLayer {
    heads: usize,
    activation: Activation,
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    attention_norm: LayerNorm,
    intermediate: Linear,
    output: Linear,
    norm: LayerNorm,
}

impl Bert {
    /// Builds a model from its configuration and weights. All shapes are validated here, so that inference cannot
    /// fail.
    pub fn new(shape: &BertConfig, weights: Weights<'_>) -> Result<Self, String> {
        let size = shape.hidden_size;
        // A model for another task has the encoder under a name of its own.
        let weights = &weights.relative_to("embeddings.word_embeddings.weight")?;
        let matrix = |name: &str, rows| weights.matrix(&format!("embeddings.{name}_embeddings.weight"), rows, size);
        let all_positions = matrix("position", shape.max_position_embeddings)?;
        let mut position_embeddings =
            all_positions.slice_axis(Axis(0), Slice::from(shape.first_position()..)).to_owned();
        // Every text has token type 0, so that embedding is added to the position embeddings in advance.
        if shape.type_vocab_size > 0 {
            position_embeddings += &matrix("token_type", shape.type_vocab_size)?.row(0);
        }
        let layer = |i| EncoderLayer::new(weights, &format!("encoder.layer.{i}"), shape);
        Ok(Self {
            word_embeddings: matrix("word", shape.vocab_size)?,
            position_embeddings,
            norm: LayerNorm::new(weights, "embeddings", shape)?,
            layers: (0..shape.num_hidden_layers).map(layer).collect::<Result<_, _>>()?,
        })
    }

    /// Returns the size of the vocabulary.
    pub fn vocabulary_size(&self) -> usize {
        self.word_embeddings.nrows()
    }

    /// Returns the maximum number of tokens of a text.
    pub fn max_positions(&self) -> usize {
        self.position_embeddings.nrows()
    }

    /// Returns the number of dimensions of an embedding.
    pub fn dimensions(&self) -> usize {
        self.word_embeddings.ncols()
    }

    /// Computes the vectors of all tokens of several texts, as rows of one matrix. Each text must contain at least
    /// one token and at most [`Bert::max_positions`], each less than [`Bert::vocabulary_size`].
    pub fn token_vectors(&self, texts: &[Vec<u32>]) -> Array2<f32> {
        let count = texts.iter().map(Vec::len).sum();
        let mut x = Array2::zeros((count, self.dimensions()));
        let tokens = texts.iter().flat_map(|ids| ids.iter().zip(self.position_embeddings.rows()));
        for (mut row, (id, position)) in x.rows_mut().into_iter().zip(tokens) {
            row += &self.word_embeddings.row(*id as usize);
            row += &position;
        }
        self.norm.apply(&mut x);
        let lengths: Vec<usize> = texts.iter().map(Vec::len).collect();
        for layer in &self.layers {
            x = layer.apply(x, &lengths);
        }
        x
    }
}

impl EncoderLayer {
    fn new(weights: &Weights<'_>, prefix: &str, shape: &BertConfig) -> Result<Self, String> {
        let size = shape.hidden_size;
        let intermediate_size = shape.intermediate_size;
        let linear = |name: &str, outputs, inputs| {
            Linear::new(weights, &format!("{prefix}.{name}"), outputs, inputs, Bias::Present)
        };
        Ok(Self {
            heads: shape.num_attention_heads,
            activation: shape.hidden_act,
            query: linear("attention.self.query", size, size)?,
            key: linear("attention.self.key", size, size)?,
            value: linear("attention.self.value", size, size)?,
            attention_output: linear("attention.output.dense", size, size)?,
            attention_norm: LayerNorm::new(weights, &format!("{prefix}.attention.output"), shape)?,
            intermediate: linear("intermediate.dense", intermediate_size, size)?,
            output: linear("output.dense", size, intermediate_size)?,
            norm: LayerNorm::new(weights, &format!("{prefix}.output"), shape)?,
        })
    }

    /// Applies the layer to the tokens of texts of these lengths.
    fn apply(&self, x: Array2<f32>, lengths: &[usize]) -> Array2<f32> {
        let mut x = self.attention_output.apply(&self.attention(&x, lengths).view()) + x;
        self.attention_norm.apply(&mut x);
        let mut intermediate = self.intermediate.apply(&x.view());
        intermediate.mapv_inplace(|x| self.activation.apply(x));
        let mut x = self.output.apply(&intermediate.view()) + x;
        self.norm.apply(&mut x);
        x
    }

    /// Multi-head self-attention, in each text over its own tokens.
    fn attention(&self, x: &Array2<f32>, lengths: &[usize]) -> Array2<f32> {
        let [query, key, value] = [&self.query, &self.key, &self.value].map(|l| l.apply(&x.view()));
        let mut context = Array2::zeros(x.raw_dim());
        let width = x.ncols() / self.heads;
        let mut start = 0;
        for length in lengths {
            let rows = Slice::from(start..start + length);
            start += length;
            let [query, key, value] = [&query, &key, &value].map(|x| x.slice_axis(Axis(0), rows));
            let mut context = context.slice_axis_mut(Axis(0), rows);
            for head in 0..self.heads {
                let columns = Slice::from(head * width..(head + 1) * width);
                let [query, key, value] = [&query, &key, &value].map(|x| x.slice_axis(Axis(1), columns));
                let mut scores = query.dot(&key.t()) / (width as f32).sqrt();
                for mut row in scores.rows_mut() {
                    let largest = row.fold(f32::NEG_INFINITY, |largest, n| largest.max(*n));
                    row.mapv_inplace(|n| (n - largest).exp());
                    row /= row.sum();
                }
                context.slice_axis_mut(Axis(1), columns).assign(&scores.dot(&value));
            }
        }
        context
    }
}

impl Linear {
    /// Reads the tensors `prefix.weight` and `prefix.bias`.
    pub fn new(weights: &Weights<'_>, prefix: &str, outputs: usize, inputs: usize, bias: Bias) -> Result<Self, String> {
        let weight = weights.matrix(&format!("{prefix}.weight"), outputs, inputs)?;
        let bias = match bias {
            Bias::Present => weights.vector(&format!("{prefix}.bias"), outputs)?,
            Bias::Absent => Array1::zeros(outputs),
        };
        Ok(Self { weight, bias })
    }

    /// Returns the number of components of an output.
    pub fn outputs(&self) -> usize {
        self.bias.len()
    }

    /// Applies the layer to each row.
    pub fn apply(&self, x: &ArrayView2<'_, f32>) -> Array2<f32> {
        x.dot(&self.weight.t()) + &self.bias
    }
}

impl LayerNorm {
    fn new(weights: &Weights<'_>, prefix: &str, shape: &BertConfig) -> Result<Self, String> {
        let vector = |name: &str| weights.vector(&format!("{prefix}.LayerNorm.{name}"), shape.hidden_size);
        Ok(Self { weight: vector("weight")?, bias: vector("bias")?, epsilon: shape.layer_norm_eps })
    }

    fn apply(&self, x: &mut Array2<f32>) {
        let size = x.ncols() as f32;
        for mut row in x.rows_mut() {
            let mean = row.sum() / size;
            row -= mean;
            let deviation = (row.fold(0.0, |sum, n| sum + n * n) / size + self.epsilon).sqrt();
            row /= deviation;
            row *= &self.weight;
            row += &self.bias;
        }
    }
}

impl Activation {
    fn apply(self, x: f32) -> f32 {
        match self {
            Self::Gelu => gelu(x),
            Self::GeluTanh => {
                let inner = (2.0 * std::f32::consts::FRAC_1_PI).sqrt() * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }
            Self::Relu => x.max(0.0),
        }
    }
}

/// The GELU activation function: x · Φ(x).
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// The error function, accurate to 2 · 10⁻⁷ (Abramowitz and Stegun, 7.1.26).
fn erf(x: f32) -> f32 {
    const FACTORS: [f32; 5] = [1.061_405_4, -1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6];
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let sum = FACTORS.iter().fold(0.0, |sum, factor| (sum + factor) * t);
    (1.0 - sum * (-x * x).exp()).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_function() {
        for (x, want) in [(0.0, 0.0), (0.5, 0.520_499_9), (1.0, 0.842_700_8), (2.0, 0.995_322_3), (5.0, 1.0)] {
            assert!((erf(x) - want).abs() < 5e-7 && (erf(-x) + want).abs() < 5e-7, "{x}: {}", erf(x));
        }
        assert!((gelu(1.0) - 0.841_344_7).abs() < 1e-6 && gelu(-20.0).abs() < 1e-6);
    }
}
