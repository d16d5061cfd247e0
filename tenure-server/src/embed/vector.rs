//! Normalization of vectors.

/// Normalizes a vector to unit length. A zero vector stays unchanged.
pub fn normalize(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x /= length);
    }
    vector
}
