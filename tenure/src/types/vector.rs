//! Embedding vectors, quantized to one byte per dimension.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde::{Deserialize, Serialize};

/// A quantized embedding vector as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Vector {
    /// The name of the embedding model.
    pub model: String,
    /// One signed byte per dimension, in base64.
    pub bytes: String,
}

impl Vector {
    /// Quantizes a vector computed by the named model.
    pub fn new(model: &str, numbers: &[f32]) -> Self {
        let bytes: Vec<u8> = quantize(numbers).into_iter().map(|n| n as u8).collect();
        Self { model: model.to_owned(), bytes: STANDARD_NO_PAD.encode(bytes) }
    }

    /// Decodes the components. `None` if the stored base64 is invalid.
    pub fn numbers(&self) -> Option<Vec<i8>> {
        let bytes = STANDARD_NO_PAD.decode(&self.bytes).ok()?;
        Some(bytes.into_iter().map(|b| b as i8).collect())
    }
}

/// Quantizes a vector to one signed byte per dimension, scaled by its largest component. Only the direction
/// is preserved, because similarity depends on nothing else.
pub(crate) fn quantize(numbers: &[f32]) -> Vec<i8> {
    let largest = numbers.iter().fold(f32::MIN_POSITIVE, |largest, n| largest.max(n.abs()));
    numbers.iter().map(|n| (n / largest * 127.0).round() as i8).collect()
}
