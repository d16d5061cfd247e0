//! The weights of a model, parsed from one or several safetensors files.

use half::{bf16, f16};
use ndarray::{Array1, Array2};
use safetensors::{Dtype, SafeTensorError, SafeTensors};

/// Tensors of a model, borrowed from the bytes of its files.
pub struct Weights<'a> {
    files: Vec<SafeTensors<'a>>,
    prefix: String,
}

impl<'a> Weights<'a> {
    /// Parses the headers and checks that every tensor lies within its file as declared.
    pub fn parse(files: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, String> {
        let files = files.into_iter().map(parse_file).collect::<Result<_, _>>()?;
        Ok(Self { files, prefix: String::new() })
    }

    /// Finds the tensor whose name ends with `suffix`; from now on names are relative to what precedes the
    /// suffix there. A model saved as a part of a larger one has such a prefix, as in `bert.embeddings…`.
    pub fn relative_to(mut self, suffix: &str) -> Result<Self, String> {
        let mut names = self.files.iter().flat_map(SafeTensors::names);
        let prefix = names.find_map(|name| name.strip_suffix(suffix).map(str::to_owned));
        self.prefix = prefix.ok_or_else(|| format!("the tensor {suffix} is missing"))?;
        Ok(self)
    }

    /// Returns a matrix. Fails if its shape differs, or if it contains a non-finite number.
    pub fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Array2<f32>, String> {
        let numbers = self.numbers(name, &[rows, columns])?;
        Array2::from_shape_vec((rows, columns), numbers).map_err(|e| format!("{name}: {e}"))
    }

    /// Returns a vector. Fails if its length differs, or if it contains a non-finite number.
    pub fn vector(&self, name: &str, length: usize) -> Result<Array1<f32>, String> {
        self.numbers(name, &[length]).map(Array1::from_vec)
    }

    fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        let full_name = format!("{}{name}", self.prefix);
        let tensor = self.files.iter().find_map(|file| file.tensor(&full_name).ok());
        let tensor = tensor.ok_or_else(|| format!("the tensor {name} is missing"))?;
        if tensor.shape() != shape {
            return Err(format!("{name} has shape {:?}, expected {shape:?}", tensor.shape()));
        }
        let bytes = tensor.data();
        let numbers: Vec<f32> = match tensor.dtype() {
            Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::F16 => bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::BF16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            other => return Err(format!("{name} has the unsupported type {other:?}; supported are F32, F16 and BF16")),
        };
        if numbers.iter().all(|n| n.is_finite()) {
            Ok(numbers)
        } else {
            Err(format!("{name} contains a number that is not finite"))
        }
    }
}

fn parse_file(bytes: &[u8]) -> Result<SafeTensors<'_>, String> {
    SafeTensors::deserialize(bytes).map_err(|e| match e {
        SafeTensorError::HeaderTooSmall => "the file is too short".to_owned(),
        SafeTensorError::HeaderTooLarge | SafeTensorError::InvalidHeaderLength => {
            "the header is longer than the file".to_owned()
        }
        SafeTensorError::InvalidHeaderDeserialization(e) => format!("invalid header: {e}"),
        SafeTensorError::InvalidHeader(e) => format!("invalid header: {e}"),
        SafeTensorError::InvalidOffset(name) => format!("the offsets of {name} are invalid"),
        other => format!("the offsets of a tensor are invalid: {other}"),
    })
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
        let header = r#"{"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}, "b": {"dtype": "F16", "shape": [3], "data_offsets": [8, 14]}, "c": {"dtype": "BF16", "shape": [2], "data_offsets": [14, 18]}}"#;
        let data =
            [&1.5f32.to_le_bytes()[..], &(-2f32).to_le_bytes(), &[0, 0x3c, 0, 0xc1, 1, 0], &[0xc0, 0x3f, 0, 0xc0]]
                .concat();
        let bytes = file(header, &data);
        let weights = Weights::parse([&bytes[..]]).unwrap();
        assert_eq!(weights.matrix("a", 2, 1).unwrap().as_slice(), Some(&[1.5, -2.0][..]));
        assert_eq!(weights.vector("b", 3).unwrap().to_vec(), [1.0, -2.5, 2f32.powi(-24)]);
        assert_eq!(weights.vector("c", 2).unwrap().to_vec(), [1.5, -2.0]);
    }

    #[test]
    fn tensors_are_found_in_all_files_and_below_a_prefix() {
        let one = |name: &str, number: f32| {
            file(
                &format!(r#"{{"{name}": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}}}"#),
                &number.to_le_bytes(),
            )
        };
        let (a, b) = (one("bert.a", 1.0), one("bert.b", 2.0));
        let weights = || Weights::parse([&a[..], &b[..]]).unwrap();
        let relative = weights().relative_to("a").unwrap();
        let number = |name: &str| relative.vector(name, 1).unwrap().to_vec();
        assert_eq!([number("a"), number("b")], [[1.0], [2.0]]);
        assert!(relative.vector("bert.b", 1).is_err());
        assert!(weights().relative_to("c").err().unwrap().contains("the tensor c is missing"));
    }

    #[test]
    fn broken_files_are_rejected() {
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
            (file("{", &[]), "invalid header"),
            (file("[]", &[]), "invalid header"),
            (file(r#"{"a": {"dtype": "F32"}}"#, &[]), "invalid header"),
            (tensor("F32", "[-1]", "[0, 4]"), "invalid header"),
            (tensor("F32", "[1]", "[0]"), "invalid header"),
            (file("{}", &[]), "the tensor a is missing"),
            (tensor("F32", "[1, 1]", "[0, 4]"), "shape [1, 1]"),
            (tensor("F32", "[2]", "[0, 4]"), "offsets of"),
            (tensor("F32", &huge, "[0, 4]"), "offsets of"),
            (tensor("I32", "[1]", "[0, 4]"), "I32"),
            (tensor("F32", "[1]", "[0, 5]"), "offsets of"),
            (tensor("F32", "[1]", "[4, 0]"), "offsets of"),
            (tensor("F32", "[1]", "[0, 3]"), "offsets of"),
            (tensor("F32", "[1]", &format!("[{0}, {0}]", usize::MAX)), "offsets of"),
            (tensor("F32", "[1]", "[0, 4]"), "not finite"),
        ] {
            let error = Weights::parse([&bytes[..]]).and_then(|w| w.vector("a", 1)).unwrap_err();
            assert!(error.contains(want), "{error:?} instead of {want:?}");
        }
    }

    proptest! {
        #[test]
        fn no_input_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), length in 0u64..220) {
            let bytes = [&length.to_le_bytes(), &bytes[..]].concat();
            let _ = Weights::parse([&bytes[..]]).and_then(|w| w.vector("a", 1));
        }
    }
}
