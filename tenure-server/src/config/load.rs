//! Loading the configuration: the file, then the environment, then flags; later sources override earlier ones.

use super::{Config, DEFAULT_FILE, DEFAULT_LISTEN};
use anyhow::{Context, anyhow, bail};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

impl Config {
    /// Loads and validates the configuration: the file, then the environment, then `flags` (pairs of `path.to.key`
    /// and value).
    pub fn load(file: Option<&Path>, flags: &[(&str, String)]) -> anyhow::Result<Self> {
        let explicit = explicit_file(file);
        let path = explicit.clone().unwrap_or_else(|| DEFAULT_FILE.into());
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if explicit.is_none() && e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
        };
        let mut tree = tree(&text).with_context(|| format!("in {}", path.display()))?;
        let mut env: Vec<_> = std::env::vars().filter(|(name, _)| name.starts_with("TENURE_")).collect();
        env.sort();
        for (name, value) in env {
            // Variables that are not configuration settings: the file name, the command line's server and key, and
            // settings of tests.
            if name == "TENURE_CONFIG"
                || name.starts_with("TENURE_TEST_")
                || name == "TENURE_SERVER"
                || name == "TENURE_KEY"
            {
                continue;
            }
            let key_path = name["TENURE_".len()..].to_ascii_lowercase().replace("__", ".");
            set(&mut tree, &key_path, &value).with_context(|| format!("in the environment variable {name}"))?;
        }
        for (key_path, value) in flags {
            set(&mut tree, key_path, value)?;
        }
        Self::from_tree(tree)
    }

    /// Parses and validates the text of a configuration file.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        Self::from_tree(tree(text)?)
    }

    /// Returns the file that [`Config::load`] reads. `None` if there is none.
    pub fn file(file: Option<&Path>) -> Option<PathBuf> {
        explicit_file(file).or_else(|| Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.exists()))
    }

    fn from_tree(mut tree: Value) -> anyhow::Result<Self> {
        resolve_aliases(&mut tree)?;
        remove_nulls(&mut tree, &serde_json::to_value(Self::default())?, SECTION_DEPTH);
        let config: Self = serde_path_to_error::deserialize(tree).map_err(|e| {
            let path = e.path().to_string();
            let reason = e.into_inner().to_string();
            anyhow!("{path}: {}", with_suggestion(&reason))
        })?;
        config.check()?;
        Ok(config)
    }
}

/// The file that a flag or the environment names.
fn explicit_file(file: Option<&Path>) -> Option<PathBuf> {
    file.map(Path::to_owned).or_else(|| std::env::var_os("TENURE_CONFIG").map(PathBuf::from))
}

/// The depth of the sections' own keys. Deeper values, such as metadata, are data in which `null` has a meaning.
const SECTION_DEPTH: usize = 2;

/// Removes known keys without a value, so that they have their defaults: `models:` with only comments below it is
/// the same as no `models`.
fn remove_nulls(tree: &mut Value, defaults: &Value, depth: usize) {
    if let (Value::Object(map), 1..) = (tree, depth) {
        map.retain(|name, value| !value.is_null() || defaults.get(name).is_none());
        map.iter_mut().for_each(|(name, value)| remove_nulls(value, &defaults[name], depth - 1));
    }
}

fn tree(text: &str) -> anyhow::Result<Value> {
    if text.lines().all(|l| l.trim().is_empty() || l.trim_start().starts_with('#')) {
        return Ok(Value::Object(Map::new()));
    }
    let tree: Value = serde_saphyr::from_str(text)?;
    if !tree.is_object() {
        bail!("a configuration is a mapping such as `listen: {DEFAULT_LISTEN}`");
    }
    Ok(tree)
}

/// Other names of keys, and the keys that they mean.
const ALIASES: [(&str, &str); 3] = [
    ("short_term.max_sessions", "sessions.max_sessions"),
    ("short_term.session_ttl", "sessions.ttl"),
    ("transcripts_dir", "transcripts.dir"),
];

/// Moves values from other names of keys to the keys themselves. A value under both names is an error that names
/// the key.
fn resolve_aliases(tree: &mut Value) -> anyhow::Result<()> {
    for (alias, key) in ALIASES {
        let Some(value) = remove(tree, alias) else { continue };
        if tree.pointer(&format!("/{}", key.replace('.', "/"))).is_some() {
            bail!("{alias}: the same as `{key}`, which is set too; keep `{key}`");
        }
        insert(tree, key, value)?;
    }
    let Some(assistant) = remove(tree, "assistant") else { return Ok(()) };
    if !assistant.is_object() {
        bail!("assistant: one assistant is a mapping such as `name: helper`; a list of them is `assistants`");
    }
    match tree.as_object_mut().map(|map| map.entry("assistants").or_insert_with(|| Value::Array(Vec::new()))) {
        Some(Value::Array(list)) => list.push(assistant),
        _ => bail!("assistants: must be a list"),
    }
    Ok(())
}

/// Removes a value by its dotted path.
fn remove(tree: &mut Value, key_path: &str) -> Option<Value> {
    match key_path.split_once('.') {
        Some((name, rest)) => remove(tree.get_mut(name)?, rest),
        None => tree.as_object_mut()?.remove(key_path),
    }
}

/// Sets one value by its dotted path. The value is parsed as YAML, and taken as text if that fails.
fn set(tree: &mut Value, key_path: &str, value: &str) -> anyhow::Result<()> {
    let parsed = serde_saphyr::from_str(value).ok();
    // `memory:` is the URL of a store, not a mapping without a value.
    let parsed = parsed.filter(|v: &Value| !v.is_object() || value.trim_start().starts_with('{'));
    insert(tree, key_path, parsed.unwrap_or_else(|| Value::from(value)))
}

/// Inserts a value by its dotted path, and the mappings on the way.
fn insert(tree: &mut Value, key_path: &str, value: Value) -> anyhow::Result<()> {
    let mut node = tree;
    let mut names = key_path.split('.').peekable();
    while let Some(name) = names.next() {
        let Value::Object(map) = node else {
            bail!("{key_path}: cannot set a key below a value that is not a mapping")
        };
        if names.peek().is_none() {
            map.insert(name.to_owned(), value);
            return Ok(());
        }
        node = map.entry(name).or_insert_with(|| Value::Object(Map::new()));
    }
    Ok(())
}

/// Adds the most similar known name to serde's error about an unknown field.
fn with_suggestion(reason: &str) -> String {
    let names: Vec<&str> = reason.split('`').skip(1).step_by(2).collect();
    match (reason.starts_with("unknown field"), names.split_first()) {
        (true, Some((wrong, known))) if !known.is_empty() => {
            let best = known.iter().min_by_key(|k| strsim::levenshtein(wrong, k)).unwrap_or(&known[0]);
            format!("unknown key `{wrong}`; did you mean `{best}`? (known: {})", known.join(", "))
        }
        _ => reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_the_default() {
        let example = Config::parse(include_str!("../../../tenure.example.yaml")).unwrap();
        assert_eq!(example, Config::default());
    }

    /// Removes the mark of a comment from lines that are commented settings: `#` before at least two spaces. Editors
    /// remove one space with it.
    fn uncommented(lines: &[&str], chosen: impl Fn(usize) -> bool, mark: &str) -> String {
        let line = |(i, line): (usize, &&str)| match line.strip_prefix(mark) {
            Some(rest) if line.starts_with("#  ") && chosen(i) => rest.to_owned(),
            _ => (*line).to_owned(),
        };
        lines.iter().enumerate().map(line).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn every_line_of_the_example_can_be_uncommented() {
        let example = include_str!("../../../tenure.example.yaml");
        let lines: Vec<&str> = example.lines().collect();
        let settings: Vec<usize> = (0..lines.len()).filter(|i| lines[*i].starts_with("#  ")).collect();
        assert!(settings.len() > 30);
        for mark in ["#", "# "] {
            for i in &settings {
                let text = uncommented(&lines, |line| line == *i, mark);
                assert!(tree(&text).is_ok(), "line {} without {mark:?}: {:?}", i + 1, tree(&text));
            }
            // Each block, from its first to its last commented line.
            for block in settings.chunk_by(|a, b| a + 1 == *b) {
                let text = uncommented(&lines, |line| block.contains(&line), mark);
                assert!(tree(&text).is_ok(), "{}: {:?}", lines[block[0]], tree(&text));
            }
            let all = Config::parse(&uncommented(&lines, |_| true, mark)).unwrap();
            assert_eq!((all.models.len(), all.assistants.len(), all.schedules.len()), (1, 1, 1));
            assert_eq!((all.redaction.is_empty(), all.on_expire.webhooks.len()), (false, 1));
            assert_eq!((all.assistants[0].tools.len(), all.limits.keys.max_sessions), (7, Some(10_000)));
        }
    }

    #[test]
    fn a_key_without_a_value_has_its_default() {
        let config = Config::parse("models:\nsessions:\nlimits: {max_page: }\n").unwrap();
        assert_eq!(config, Config::default());
        assert!(Config::parse("sesions:\n").unwrap_err().to_string().contains("did you mean `sessions`"));
        let data = Config::parse("assistants: [{name: a, metadata: {x: null}}]").unwrap();
        assert_eq!(data.assistants[0].metadata["x"], Value::Null);
    }

    #[test]
    fn an_unknown_key_names_the_nearest_known_one() {
        let error = Config::parse("sessions: {tll: 2h}").unwrap_err().to_string();
        assert!(
            error.contains("sessions") && error.contains("`tll`") && error.contains("did you mean `ttl`"),
            "{error}"
        );
        assert!(Config::parse("sessions: {ttl: soon}").unwrap_err().to_string().contains("sessions.ttl"));
    }

    /// The snippets of the documentation of other servers can be used as they are.
    #[test]
    fn other_names_of_keys_are_accepted() {
        let assistant = "assistant:\n  name: customer-support-agent\n  memory:\n    scope: user\n    retention: 30d\n    max_entries: 1000\n";
        let config = Config::parse(assistant).unwrap();
        let list = Config::parse(
            "assistants: [{name: customer-support-agent, memory: {scope: user, retention: 30d, max_entries: 1000}}]",
        );
        assert_eq!(config, list.unwrap());
        let both = format!("{assistant}assistants: [{{name: other}}]");
        let names: Vec<_> = Config::parse(&both).unwrap().assistants.into_iter().map(|a| a.name).collect();
        assert_eq!(names, ["other", "customer-support-agent"]);

        assert_eq!(Config::parse("short_term:\n  max_history_turns: 50\n").unwrap().short_term.max_history_turns, 50);
        assert_eq!(Config::parse("short_term:\n  max_sessions: 10000\n").unwrap().sessions.max_sessions, 10_000);
        assert_eq!(Config::parse("short_term:\n  max_sessions: 0\n").unwrap().sessions.max_sessions, 0);
        let ttl = Config::parse("short_term:\n  session_ttl: 24h\n").unwrap().sessions.ttl;
        assert_eq!(ttl, "24h".parse().unwrap());
        assert_eq!(Config::parse("transcripts_dir: out").unwrap().transcripts.dir, "out");
        for (yaml, want) in [
            ("short_term: {session_ttl: 1h}\nsessions: {ttl: 2h}", "keep `sessions.ttl`"),
            ("short_term: {session_ttl: soon}", "sessions.ttl"),
            ("assistant: [{name: a}]", "assistants"),
            ("assistant: {nam: a}", "did you mean `name`"),
        ] {
            let error = Config::parse(yaml).unwrap_err().to_string();
            assert!(error.contains(want), "{yaml}: {error}");
        }
    }

    #[test]
    fn flags_win_and_secrets_are_hidden() {
        let mut tree = tree("store: 'memory:'\nlimits: {max_page: 7}").unwrap();
        set(&mut tree, "store", "postgres://me:secret@db/x").unwrap();
        set(&mut tree, "sessions.ttl", "2h").unwrap();
        set(&mut tree, "transcripts.dir", "memory:").unwrap();
        let config = Config::from_tree(tree).unwrap();
        assert_eq!(config.transcripts.dir, "memory:");
        assert_eq!((config.limits.max_page, config.sessions.ttl), (7, "2h".parse().unwrap()));
        let shown = config.to_redacted_yaml().unwrap();
        assert!(!shown.contains("secret") && shown.contains("me:***@db"), "{shown}");
        assert_eq!(Config::parse(&shown).unwrap().sessions, config.sessions);
    }

    #[test]
    fn an_invalid_rule_is_reported_with_its_location() {
        for (yaml, want) in [
            ("redaction: [{name: a, pattern: x}, {name: b, pattern: '('}]", "redaction[1]: "),
            ("redaction: [{name: a, pattern: '('}]", "unclosed group"),
            ("redaction: [{name: a, patern: x}]", "did you mean `pattern`"),
            ("redaction: [{name: a, pattern: x}, {name: a, pattern: z}]", "two rules"),
            ("transcripts: {live: true}", "transcripts.dir"),
        ] {
            let error = Config::parse(yaml).unwrap_err().to_string();
            assert!(error.contains(want) && !error.contains('\n'), "{yaml}: {error}");
        }
        let config = Config::parse("redaction: [{name: email, pattern: '\\S+@\\S+'}]").unwrap();
        assert_eq!(config.options().redaction.apply("to a@b").0, "to [redacted: email]");
        assert_eq!(Config::parse(&config.to_redacted_yaml().unwrap()).unwrap().redaction, config.redaction);
    }

    #[test]
    fn names_must_be_unique() {
        let two = "models: [{name: a, base_url: http://x/v1}, {name: a, base_url: http://y/v1}]";
        assert!(Config::parse(two).unwrap_err().to_string().contains("two models"));
        let unknown = "assistants: [{name: a, model: nobody}]";
        assert!(Config::parse(unknown).unwrap_err().to_string().contains("nobody"));
    }
}
