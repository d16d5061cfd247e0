//! Texts for models: how long they may be, and how times are written.

use std::time::Duration;

/// Bytes of an answer that the model is shown; there is no use for more, and no answer may take all the memory.
pub const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Bytes reserved for the note that says how much was left out, so that a clipped text is within the limit as well.
const NOTE_BYTES: usize = 64;

/// Clips a text to at most [`MAX_ANSWER_BYTES`] bytes, the note included that says how much was left out.
pub fn clip(mut text: String) -> String {
    if text.len() > MAX_ANSWER_BYTES {
        let (all, mut end) = (text.len(), MAX_ANSWER_BYTES - NOTE_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str(&format!("\n[... {} bytes left out ...]", all - end));
    }
    text
}

/// A time as people write it.
pub fn spoken(time: Duration) -> String {
    tenure::HumanDuration::of(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_answers_are_cut_off() {
        let clipped = clip("é".repeat(MAX_ANSWER_BYTES));
        assert!(clipped.len() <= MAX_ANSWER_BYTES, "{}", clipped.len());
        assert!(clipped.ends_with("bytes left out ...]"));
        assert!(MAX_ANSWER_BYTES <= tenure::RunPolicy::default().max_result_bytes, "a clipped result ends no run");
        assert_eq!(clip("short".into()), "short");
    }
}
