//! A `model.safetensors`: eight bytes that say how long the header is, the header in JSON, then the numbers.

use ndarray::{Array1, Array2};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The numbers of a model, where they lie.
pub struct Weights<'a> {
    tensors: HashMap<String, Tensor>,
    data: &'a [u8],
}

#[derive(Deserialize)]
struct Tensor {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

impl<'a> Weights<'a> {
    /// Reads the header.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let (length, rest) = bytes.split_first_chunk::<8>().ok_or("it is too short")?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok().filter(|length| *length <= rest.len());
        let (header, data) = rest.split_at(length.ok_or("its header is longer than the file")?);
        let wrong = |e: serde_json::Error| format!("its header is broken: {e}");
        let mut header: Map<String, Value> = serde_json::from_slice(header).map_err(wrong)?;
        header.remove("__metadata__");
        let tensors = serde_json::from_value(Value::Object(header)).map_err(wrong)?;
        Ok(Self { tensors, data })
    }

    /// A matrix of this shape.
    pub fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Array2<f32>, String> {
        let numbers = self.numbers(name, &[rows, columns])?;
        Array2::from_shape_vec((rows, columns), numbers).map_err(|e| format!("{name}: {e}"))
    }

    /// A vector of this length.
    pub fn vector(&self, name: &str, length: usize) -> Result<Array1<f32>, String> {
        self.numbers(name, &[length]).map(Array1::from_vec)
    }

    fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        let tensor = self.tensors.get(name).ok_or_else(|| format!("it has no {name}"))?;
        if tensor.shape != shape {
            return Err(format!("{name} has the shape {:?}, and should have {shape:?}", tensor.shape));
        }
        let size = match tensor.dtype.as_str() {
            "F32" => 4,
            "F16" => 2,
            other => return Err(format!("{name} has numbers of the kind {other:?}; F32 and F16 are known here")),
        };
        let wanted = shape.iter().try_fold(size, |all: usize, n| all.checked_mul(*n));
        let (begin, end) = tensor.data_offsets;
        let bytes = self.data.get(begin..end).filter(|bytes| Some(bytes.len()) == wanted);
        let bytes = bytes.ok_or_else(|| format!("{name} does not lie where the header says"))?;
        let numbers: Vec<f32> = match size {
            4 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            _ => bytes.as_chunks::<2>().0.iter().map(|b| half(u16::from_le_bytes(*b))).collect(),
        };
        match numbers.iter().all(|n| n.is_finite()) {
            true => Ok(numbers),
            false => Err(format!("{name} holds what is not a number")),
        }
    }
}

/// A number of sixteen bits: sign, five of exponent, ten of fraction.
fn half(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    #[test]
    fn numbers_are_read() {
        let header = r#"{"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}, "b": {"dtype": "F16", "shape": [3], "data_offsets": [8, 14]}}"#;
        let data = [&1.5f32.to_le_bytes()[..], &(-2f32).to_le_bytes(), &[0, 0x3c, 0, 0xc1, 1, 0]].concat();
        let bytes = file(header, &data);
        let weights = Weights::parse(&bytes).unwrap();
        assert_eq!(weights.matrix("a", 2, 1).unwrap().as_slice(), Some(&[1.5, -2.0][..]));
        assert_eq!(weights.vector("b", 3).unwrap().to_vec(), [1.0, -2.5, 2f32.powi(-24)]);
        assert_eq!((half(0x7bff), half(0x8000).to_bits()), (65504.0, (-0f32).to_bits()));
        assert!(half(0x7c01).is_nan() && half(0xfc00) == f32::NEG_INFINITY);
    }

    #[test]
    fn broken_files_are_told() {
        let tensor = |dtype: &str, shape: &str, offsets: &str| {
            file(
                &format!(r#"{{"a": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}}}"#),
                &[0, 0, 128, 127],
            )
        };
        let huge = format!("[{0}, {0}]", usize::MAX);
        for (bytes, want) in [
            (Vec::new(), "too short"),
            (vec![1, 2, 3], "too short"),
            (u64::MAX.to_le_bytes().to_vec(), "longer than the file"),
            (file("{", &[]), "header is broken"),
            (file("[]", &[]), "header is broken"),
            (file(r#"{"a": {"dtype": "F32"}}"#, &[]), "header is broken"),
            (tensor("F32", "[-1]", "[0, 4]"), "header is broken"),
            (tensor("F32", "[1]", "[0]"), "header is broken"),
            (file("{}", &[]), "it has no a"),
            (tensor("F32", "[2]", "[0, 4]"), "shape [2]"),
            (tensor("F32", &huge, "[0, 4]"), "shape"),
            (tensor("BF16", "[1]", "[0, 2]"), "BF16"),
            (tensor("F32", "[1]", "[0, 5]"), "does not lie"),
            (tensor("F32", "[1]", "[4, 0]"), "does not lie"),
            (tensor("F32", "[1]", "[0, 3]"), "does not lie"),
            (tensor("F32", "[1]", &format!("[{0}, {0}]", usize::MAX)), "does not lie"),
            (tensor("F32", "[1]", "[0, 4]"), "not a number"),
        ] {
            let error = Weights::parse(&bytes).and_then(|w| w.vector("a", 1)).unwrap_err();
            assert!(error.contains(want), "{error:?} instead of {want:?}");
        }
        // A shape that no file can hold.
        let bytes = tensor("F32", &huge, "[0, 4]");
        assert!(
            Weights::parse(&bytes).unwrap().matrix("a", usize::MAX, usize::MAX).unwrap_err().contains("does not lie")
        );
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_much(bytes in proptest::collection::vec(any::<u8>(), 0..200), length in 0u64..220) {
            let bytes = [&length.to_le_bytes(), &bytes[..]].concat();
            let _ = Weights::parse(&bytes).and_then(|w| w.vector("a", 1));
        }
    }
}
