//! Bounded quotations of untrusted input in error messages.

/// So many characters of a text that came from outside are repeated in an error.
const MAX_EXCERPT: usize = 60;

/// A text that came from outside as an error repeats it: in quotes, escaped, and cut off if it is long.
pub fn excerpt(text: impl AsRef<str>) -> String {
    let text = text.as_ref();
    match text.char_indices().nth(MAX_EXCERPT) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}
