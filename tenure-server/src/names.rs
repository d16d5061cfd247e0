//! Conversion of arbitrary names to restricted character sets: tool names for model servers, and file names.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Maximum length of a tool name that model servers accept.
const MAX_TOOL_NAME: usize = 64;

/// Converts a name to a valid tool name: at most 64 ASCII letters, digits, `_` and `-`. Other characters become `_`.
pub fn callable_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' };
    name.chars().take(MAX_TOOL_NAME).map(plain).collect()
}

/// Characters that are not percent-encoded in a file name.
const IN_FILE_NAMES: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b':').remove(b'.');

/// Converts a name to a single safe path component. Most names stay unchanged; characters that could escape the
/// directory are percent-encoded (`%2F`), and a name that is longer than 200 bytes when encoded is replaced by its
/// BLAKE3 hash.
pub fn file_name(name: &str) -> String {
    let mut safe = utf8_percent_encode(name, &IN_FILE_NAMES).to_string();
    if safe.starts_with('.') {
        safe.replace_range(..1, "%2E");
    }
    if safe.len() <= 200 { safe } else { format!("%{}", blake3::hash(name.as_bytes()).to_hex()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_have_callable_names() {
        assert_eq!(callable_name("a.b/c é-1"), "a_b_c__-1");
        assert_eq!(callable_name(&"x".repeat(99)).len(), 64);
    }

    #[test]
    fn file_names_cannot_leave_their_directory() {
        for (name, want) in [("acme", "acme"), ("a.b:c-d_e", "a.b:c-d_e"), ("..", "%2E."), ("a/../b", "a%2F..%2Fb")] {
            assert_eq!(file_name(name), want);
        }
        assert_eq!(file_name("é\\ "), "%C3%A9%5C%20");
        assert!(file_name(&"é".repeat(64)).len() < 100, "a name must fit into a directory");
    }
}
