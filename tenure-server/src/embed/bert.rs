//! Forward pass of a BERT encoder: from the token ids of a text to one embedding. Texts are processed one at a
//! time, so that no padding is needed (D-079).

use super::weights::Weights;
use ndarray::{Array1, Array2, ArrayView2, Axis, Slice};
use serde::Deserialize;

/// Maximum number of layers. No model of this family has more.
const MAX_LAYERS: usize = 64;

/// A loaded BERT encoder.
pub struct Bert {
    word_embeddings: Array2<f32>,
    position_embeddings: Array2<f32>,
    norm: LayerNorm,
    layers: Vec<EncoderLayer>,
}

/// The deserialized fields of a `config.json`.
#[derive(Deserialize)]
struct BertConfig {
    model_type: String,
    hidden_act: String,
    position_embedding_type: Option<String>,
    hidden_size: usize,
    intermediate_size: usize,
    layer_norm_eps: f32,
    max_position_embeddings: usize,
    num_attention_heads: usize,
    num_hidden_layers: usize,
    type_vocab_size: usize,
    vocab_size: usize,
}

struct Linear {
    weight: Array2<f32>,
    bias: Array1<f32>,
}

struct LayerNorm {
    weight: Array1<f32>,
    bias: Array1<f32>,
    epsilon: f32,
}

struct EncoderLayer {
    heads: usize,
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
    /// Builds a model from a `config.json` and the weights. All shapes are validated here, so that inference cannot
    /// fail.
    pub fn new(config: &[u8], weights: &Weights<'_>) -> Result<Self, String> {
        let shape: BertConfig =
            serde_json::from_slice(config).map_err(|e| format!("config.json is not that of a BERT model: {e}"))?;
        let size = shape.hidden_size;
        let absolute = shape.position_embedding_type.as_deref().is_none_or(|p| p == "absolute");
        if shape.model_type != "bert" || shape.hidden_act != "gelu" || !absolute {
            return Err(format!(
                "unsupported model type {} with {}; only plain BERT is supported",
                shape.model_type, shape.hidden_act
            ));
        }
        let heads = shape.num_attention_heads;
        if size == 0
            || heads == 0
            || !size.is_multiple_of(heads)
            || !(1..=MAX_LAYERS).contains(&shape.num_hidden_layers)
        {
            return Err(format!(
                "inconsistent sizes in config.json: hidden size {size}, {heads} heads, {} layers",
                shape.num_hidden_layers
            ));
        }
        if shape.max_position_embeddings < 2
            || shape.type_vocab_size == 0
            || !(0.0..1.0).contains(&shape.layer_norm_eps)
        {
            return Err("inconsistent sizes in config.json".into());
        }
        let matrix = |name: &str, rows| weights.matrix(&format!("embeddings.{name}_embeddings.weight"), rows, size);
        // Every text has token type 0, so that embedding is added to the position embeddings in advance.
        let position_embeddings = matrix("position", shape.max_position_embeddings)?;
        let position_embeddings = position_embeddings + matrix("token_type", shape.type_vocab_size)?.row(0);
        let layer = |i| EncoderLayer::new(weights, &format!("encoder.layer.{i}"), &shape);
        Ok(Self {
            word_embeddings: matrix("word", shape.vocab_size)?,
            position_embeddings,
            norm: LayerNorm::new(weights, "embeddings", &shape)?,
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

    /// Computes the embedding of a text: the mean over its tokens. `ids` must contain at least one token and at
    /// most [`Bert::max_positions`], each less than [`Bert::vocabulary_size`].
    pub fn vector(&self, ids: &[u32]) -> Vec<f32> {
        let mut x = self.position_embeddings.slice_axis(Axis(0), Slice::from(..ids.len())).to_owned();
        for (mut row, id) in x.rows_mut().into_iter().zip(ids) {
            row += &self.word_embeddings.row(*id as usize);
        }
        self.norm.apply(&mut x);
        for layer in &self.layers {
            x = layer.apply(x);
        }
        (x.sum_axis(Axis(0)) / ids.len() as f32).to_vec()
    }
}

impl EncoderLayer {
    fn new(weights: &Weights<'_>, prefix: &str, shape: &BertConfig) -> Result<Self, String> {
        let size = shape.hidden_size;
        let intermediate_size = shape.intermediate_size;
        let linear = |name: &str, outputs, inputs| Linear::new(weights, &format!("{prefix}.{name}"), outputs, inputs);
        Ok(Self {
            heads: shape.num_attention_heads,
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

    fn apply(&self, x: Array2<f32>) -> Array2<f32> {
        let mut x = self.attention_output.apply(&self.attention(&x).view()) + x;
        self.attention_norm.apply(&mut x);
        let mut intermediate = self.intermediate.apply(&x.view());
        intermediate.mapv_inplace(gelu);
        let mut x = self.output.apply(&intermediate.view()) + x;
        self.norm.apply(&mut x);
        x
    }

    /// Multi-head self-attention over all tokens.
    fn attention(&self, x: &Array2<f32>) -> Array2<f32> {
        let [query, key, value] = [&self.query, &self.key, &self.value].map(|l| l.apply(&x.view()));
        let mut context = Array2::zeros(x.raw_dim());
        let width = x.ncols() / self.heads;
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
        context
    }
}

impl Linear {
    fn new(weights: &Weights<'_>, prefix: &str, outputs: usize, inputs: usize) -> Result<Self, String> {
        let weight = weights.matrix(&format!("{prefix}.weight"), outputs, inputs)?;
        Ok(Self { weight, bias: weights.vector(&format!("{prefix}.bias"), outputs)? })
    }

    fn apply(&self, x: &ArrayView2<'_, f32>) -> Array2<f32> {
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
