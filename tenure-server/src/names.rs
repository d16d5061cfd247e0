//! Conversion of arbitrary names to restricted character sets: tool names for model servers, and segments of URLs.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};

/// Maximum length of a tool name that model servers accept.
const MAX_TOOL_NAME: usize = 64;

/// Converts a name to a valid tool name: at most 64 ASCII letters, digits, `_` and `-`. Other characters become `_`.
pub fn callable_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' };
    name.chars().take(MAX_TOOL_NAME).map(plain).collect()
}

/// Characters that are not percent-encoded in a segment of a URL's path.
const IN_SEGMENTS: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b':');

/// Encodes a text as one segment of a URL's path.
pub fn url_segment(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, &IN_SEGMENTS)
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
    fn a_segment_of_a_url_contains_any_text() {
        for (text, want) in
            [("a:b.c-1_~", "a:b.c-1_~"), ("user@example.com", "user%40example.com"), ("a/b é%", "a%2Fb%20%C3%A9%25")]
        {
            assert_eq!(url_segment(text).to_string(), want);
        }
    }
}
