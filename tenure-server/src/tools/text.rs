//! Formatting of texts for models: truncation of tool results, and durations.

use std::time::Duration;

/// Maximum size in bytes of a tool result. More is of no use to the model, and the limit bounds memory.
pub const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Bytes reserved for the truncation note, so that a truncated text including its note is within the limit.
const NOTE_BYTES: usize = 64;

/// Truncates a text to at most [`MAX_ANSWER_BYTES`] bytes, including the note that says how much was omitted.
pub fn clip(mut text: String) -> String {
    if text.len() > MAX_ANSWER_BYTES {
        let total = text.len();
        let mut end = MAX_ANSWER_BYTES - NOTE_BYTES;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str(&format!("\n[... {} bytes omitted ...]", total - end));
    }
    text
}

/// Formats a duration in human-readable units.
pub fn format_duration(time: Duration) -> String {
    tenure::policy::HumanDuration::of(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_answers_are_truncated() {
        let clipped = clip("é".repeat(MAX_ANSWER_BYTES));
        assert!(clipped.len() <= MAX_ANSWER_BYTES, "{}", clipped.len());
        assert!(clipped.ends_with("bytes omitted ...]"));
        assert!(
            MAX_ANSWER_BYTES <= tenure::policy::RunPolicy::default().max_result_bytes,
            "a clipped result ends no run"
        );
        assert_eq!(clip("short".into()), "short");
    }
}
