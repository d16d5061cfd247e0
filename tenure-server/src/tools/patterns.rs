//! Pattern lists for names of tools and keys of metadata.

use serde_json::{Map, Value};
use tenure::policy::matches_pattern;

/// Returns the metadata whose keys a list of patterns includes.
pub fn selected_metadata(patterns: &[String], metadata: Option<&Map<String, Value>>) -> Map<String, Value> {
    let is_selected = |(key, _): &(&String, &Value)| match_patterns(patterns, key) == Some(true);
    let selected = metadata.into_iter().flatten().filter(is_selected);
    selected.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Returns whether a list of patterns includes (`Some(true)`) or excludes (`Some(false)`, with the prefix `!`) a
/// name; the last matching pattern wins. `None` means that no pattern matches.
pub fn match_patterns(patterns: &[String], name: &str) -> Option<bool> {
    patterns.iter().rev().find_map(|pattern| match pattern.strip_prefix('!') {
        Some(pattern) => matches_pattern(pattern, name).then_some(false),
        None => matches_pattern(pattern, name).then_some(true),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, name, want) in [
            ("read", "read", true),
            ("read", "reads", false),
            ("read*", "read_file", true),
            ("*_file", "read_file", true),
            ("*a*b*", "xaybz", true),
            ("*a*b", "xaybz", false),
            ("*", "", true),
            ("*é", "né", true),
        ] {
            assert_eq!(matches_pattern(pattern, name), want, "{pattern} {name}");
        }
        let patterns = ["get_*".to_owned(), "!get_lock".to_owned()];
        assert_eq!(
            ["get_x", "get_lock", "put_x"].map(|name| match_patterns(&patterns, name)),
            [Some(true), Some(false), None]
        );
    }
}
