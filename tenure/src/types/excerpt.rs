//! Bounded quotations of untrusted input in error messages.

/// Maximum number of characters of untrusted input that an error message quotes.
const MAX_EXCERPT: usize = 60;

/// Quotes untrusted input for an error message: in quotation marks, escaped, and truncated if it is long.
pub fn excerpt(text: impl AsRef<str>) -> String {
    let text = text.as_ref();
    match text.char_indices().nth(MAX_EXCERPT) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}
