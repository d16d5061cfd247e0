//! The only module that reads the user's home directory from the environment.

#![expect(clippy::disallowed_methods, reason = "paths that begin with `~` are expanded here only")]

use std::path::{Path, PathBuf};

/// Expands `~` at the beginning of a path to the user's home directory: `~` alone, or followed by a slash. Any other
/// path, also one of another user (`~ada/x`), stays as it is, and so does every path if the home directory is not
/// known.
pub fn expand_home(path: impl AsRef<Path>) -> PathBuf {
    expand(path.as_ref(), std::env::home_dir())
}

fn expand(path: &Path, home: Option<PathBuf>) -> PathBuf {
    match (path.strip_prefix("~"), home.filter(|home| !home.as_os_str().is_empty())) {
        (Ok(rest), Some(home)) if rest.as_os_str().is_empty() => home,
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_leading_tilde_is_expanded() {
        let home = || Some(PathBuf::from("/home/ada"));
        for (path, want) in [
            ("~", "/home/ada"),
            ("~/", "/home/ada"),
            ("~/x.db", "/home/ada/x.db"),
            ("~//a/../b", "/home/ada/a/../b"),
            ("~bob/x", "~bob/x"),
            ("a/~/x", "a/~/x"),
            ("/~", "/~"),
            ("", ""),
        ] {
            assert_eq!(expand(Path::new(path), home()), Path::new(want), "{path}");
        }
        assert_eq!(expand(Path::new("~/x"), None), Path::new("~/x"));
        assert_eq!(expand(Path::new("~/x"), Some(PathBuf::new())), Path::new("~/x"));
    }
}
