//! The section `python`, and validation of the assistants' `tools` that is possible before any tool is called.

use super::url::http_url;
use crate::names::callable_name;
use anyhow::{anyhow, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use tenure::store::redacted;
use tenure::{
    Assistant,
    policy::{ByteSize, HumanDuration, MemoryScope, Secret, ToolSource},
};

/// Environment variables that the program of an MCP server inherits: none that could be a secret (D-060).
const INHERITED_VARIABLES: [&str; 10] =
    ["HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER"];

/// The mount point of the session's files in the private root file system of the sandbox.
pub const SESSION_DIRECTORY: &str = "/session";

/// Maximum value of `python.max_depth`: checking disk usage holds one open file per level.
const MAX_DEPTH: usize = 200;

/// The Python tool. Available to assistants that list it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Python {
    /// The interpreter.
    pub program: String,
    /// Maximum number of interpreters; the longest idle is evicted when another is needed.
    pub max_processes: usize,
    /// Idle time after which an interpreter is terminated.
    pub idle: HumanDuration,
    /// Timeout of a call. It is then interrupted; the interpreter's state persists.
    pub timeout: HumanDuration,
    /// Time allowed for the interruption. The interpreter is then killed, and its state is lost.
    pub grace: HumanDuration,
    /// Memory of each of its processes.
    pub memory: ByteSize,
    /// Bytes of a file that it writes.
    pub file: ByteSize,
    /// Bytes of output that the model is shown of one call.
    pub output: ByteSize,
    /// Processes and threads of one interpreter.
    pub processes: usize,
    /// Bytes of all files of a session together.
    pub disk: ByteSize,
    /// Files and directories of a session.
    pub max_files: u64,
    /// Maximum nesting depth of a session's directories.
    pub max_depth: usize,
    /// Directories that it may read, besides the system's programs and libraries.
    pub read: Vec<String>,
    /// The isolation this system must enforce; otherwise no interpreter is started.
    pub require: Require,
    /// The executable that sets the sandbox up: this one. Tests, which are other programs, name the server's.
    #[serde(skip)]
    pub helper: PathBuf,
}

/// How strictly code of the Python tool must be isolated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Require {
    /// Namespaces, a private root file system, Landlock and seccomp.
    #[default]
    Full,
    /// Landlock; the rest where the system has it.
    Landlock,
    /// Nothing; each of them where the system has it.
    None,
}

impl std::fmt::Display for Require {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::Landlock => "landlock",
            Self::None => "none",
        })
    }
}

impl Default for Python {
    fn default() -> Self {
        let seconds = |n| HumanDuration::of(Duration::from_secs(n));
        Self {
            program: "python3".to_owned(),
            max_processes: 8,
            idle: seconds(600),
            timeout: seconds(30),
            grace: seconds(2),
            memory: ByteSize(512 << 20),
            file: ByteSize(64 << 20),
            output: ByteSize(64 << 10),
            processes: 64,
            disk: ByteSize(128 << 20),
            max_files: 10_000,
            max_depth: 32,
            read: Vec::new(),
            require: Require::default(),
            helper: own_executable(),
        }
    }
}

/// Validates the section `python` and the tools of all assistants.
pub(super) fn check(python: &Python, assistants: &[Assistant]) -> anyhow::Result<()> {
    for (name, period) in [("timeout", python.timeout), ("grace", python.grace)] {
        if period.duration().is_none_or(|d| d.is_zero()) {
            bail!("python.{name}: must be finite and greater than 0");
        }
    }
    if python.max_processes == 0 {
        bail!("python.max_processes: must be at least 1; to disable the tool, remove `python` from the assistants");
    }
    if python.disk.0 == 0 || python.max_files == 0 {
        bail!("python.disk and python.max_files: must be at least 1");
    }
    if !(1..=MAX_DEPTH).contains(&python.max_depth) {
        bail!("python.max_depth: it must be between 1 and {MAX_DEPTH}");
    }
    for path in &python.read {
        let absolute = std::path::absolute(path)?;
        if !is_mountable(&absolute) {
            bail!(
                "python.read: {path:?} cannot be mounted in the sandbox; use an absolute path without `..`, other than / and /session"
            );
        }
    }
    for (i, assistant) in assistants.iter().enumerate() {
        assistant.check().map_err(|e| match e {
            tenure::Error::Invalid { param, message } => anyhow!("assistants[{i}].{param}: {message}"),
            e => anyhow!("assistants[{i}]: {e}"),
        })?;
        for (j, source) in assistant.tools.iter().enumerate() {
            let is_stateless = assistant.memory.as_ref().is_some_and(|m| m.scope == MemoryScope::None);
            if *source == ToolSource::Memory && is_stateless {
                bail!("assistants[{i}].tools[{j}]: the tool `memory` needs a `memory.scope` other than `none`");
            }
            check_source(&format!("assistants[{i}].tools[{j}]"), source)?;
        }
    }
    Ok(())
}

fn check_source(key_path: &str, source: &ToolSource) -> anyhow::Result<()> {
    match source {
        ToolSource::Mcp(mcp) => match (&mcp.command, &mcp.url) {
            (Some(_), None) if mcp.headers.is_empty() => {}
            (None, Some(url)) if mcp.args.is_empty() && mcp.env.is_empty() => {
                http_url(&format!("{key_path}.mcp.url"), url)?;
            }
            (Some(_), Some(_)) | (None, None) => {
                bail!("{key_path}.mcp: an MCP server has either a `command` or a `url`")
            }
            _ => bail!("{key_path}.mcp: `args` and `env` belong to a `command`, `headers` to a `url`"),
        },
        ToolSource::Http(http) => {
            http_url(&format!("{key_path}.http.url"), &http.url)?;
            if callable_name(&http.name) != http.name || http.name.is_empty() {
                bail!("{key_path}.http.name: a tool's name has 1 to 64 letters, digits, `_` and `-`");
            }
            if !http.parameters.is_object() {
                bail!(
                    "{key_path}.http.parameters: it must be a JSON schema, such as {{type: object, properties: {{}}}}"
                );
            }
            if let Some(field) = &http.metadata_field {
                if http.metadata.is_empty() {
                    bail!("{key_path}.http.metadata_field: it needs `metadata`, the keys to send");
                }
                if field.is_empty() || http.parameters["properties"].get(field).is_some() {
                    bail!("{key_path}.http.metadata_field: it must be a name that is not one of the parameters");
                }
            }
        }
        ToolSource::Python(python) => {
            if python.timeout.is_some_and(|t| t.duration().is_none_or(|d| d.is_zero())) {
                bail!("{key_path}.python.timeout: must be finite and greater than 0");
            }
        }
        ToolSource::Memory | ToolSource::Metadata(_) | ToolSource::AskHuman => {}
    }
    Ok(())
}

/// Redacts the secrets in an assistant's tools, for printing.
pub(super) fn redact_secrets(assistant: &mut Assistant) {
    let hide_all = |secrets: &mut BTreeMap<String, Secret>| {
        for secret in secrets.values_mut() {
            if let Secret::Text(text) = secret {
                "***".clone_into(text);
            }
        }
    };
    for source in &mut assistant.tools {
        match source {
            ToolSource::Mcp(mcp) => {
                hide_all(&mut mcp.env);
                hide_all(&mut mcp.headers);
                mcp.url = mcp.url.as_deref().map(redacted);
            }
            ToolSource::Http(http) => {
                hide_all(&mut http.headers);
                http.url = redacted(&http.url);
            }
            ToolSource::Python(_) | ToolSource::Memory | ToolSource::Metadata(_) | ToolSource::AskHuman => {}
        }
    }
}

/// Resolves secrets to their values, from the file or the environment. Fails if an environment variable is not set.
pub fn resolve_secrets(secrets: &BTreeMap<String, Secret>) -> anyhow::Result<Vec<(String, String)>> {
    let resolve = |(name, secret): (&String, &Secret)| match secret {
        Secret::Text(text) => Ok((name.clone(), text.clone())),
        Secret::Env(variable) => match std::env::var(&variable.env) {
            Ok(text) => Ok((name.clone(), text)),
            Err(_) => Err(anyhow!("{name} is taken from the environment variable {}, which is not set", variable.env)),
        },
    };
    secrets.iter().map(resolve).collect()
}

/// The environment that the program of an MCP server inherits (D-060).
pub fn inherited_environment() -> Vec<(&'static str, std::ffi::OsString)> {
    INHERITED_VARIABLES.iter().filter_map(|name| Some((*name, std::env::var_os(name)?))).collect()
}

/// The path of this executable. On Linux it stays valid even if the file was replaced since the start.
pub fn own_executable() -> PathBuf {
    if cfg!(target_os = "linux") {
        return PathBuf::from("/proc/self/exe");
    }
    std::env::current_exe().unwrap_or_else(|_| PathBuf::from("tenure"))
}

/// Returns true if a path can be mounted in the sandbox: absolute, not the root, without `..`, and not below
/// `/session`.
pub fn is_mountable(path: &Path) -> bool {
    let plain = path.components().all(|part| !matches!(part, Component::ParentDir));
    path.is_absolute() && path.parent().is_some() && plain && !path.starts_with(SESSION_DIRECTORY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn only_plain_absolute_paths_are_mountable() {
        let mountable = ["/usr", "/", "relative", "/a/../b", "/session/x"].map(|path| is_mountable(Path::new(path)));
        assert_eq!(mountable, [true, false, false, false, false]);
    }

    #[test]
    fn errors_name_the_location() {
        for (tools, want) in [
            ("{mpc: {}}", "did you mean `mcp`"),
            ("{mcp: {comand: x}}", "did you mean `command`"),
            ("{mcp: {}}", "assistants[0].tools[0].mcp: an MCP server has either"),
            ("{mcp: {command: x, url: 'http://x'}}", "either"),
            ("{mcp: {command: x, headers: {a: b}}}", "`headers` to a `url`"),
            ("{mcp: {url: 'ftp://x'}}", "assistants[0].tools[0].mcp.url"),
            ("{mcp: {url: 'http://x', headers: {a: {evn: B}}}}", "{env: NAME}"),
            ("{http: {name: 'a b', description: d, url: 'http://x'}}", "http.name"),
            ("{http: {name: a, description: d, url: 'http://x', parameters: 7}}", "http.parameters"),
            ("{http: {name: a, url: 'http://x'}}", "description"),
            ("{python: {timeuot: 3s}}", "did you mean `timeout`"),
            ("{python: {timeout: never}}", "python.timeout"),
            ("{python: {memory: lots}}", "512MB"),
            (
                "{metadata: {keys: []}}",
                "assistants[0].tools[0].metadata.keys: the tool `metadata` needs at least one key",
            ),
            ("{metadata: {keys: [hitl_decisions]}}", "`hitl_decisions` is derived"),
            ("{metadata: {kyes: [a]}}", "did you mean `keys`"),
            ("ask_humna", "did you mean `ask_human`"),
            ("{http: {name: a, description: d, url: 'http://x', metadata_field: m}}", "http.metadata_field"),
            (
                "{http: {name: a, description: d, url: 'http://x', metadata: ['*'], metadata_field: q, parameters: {properties: {q: {}}}}}",
                "http.metadata_field",
            ),
        ] {
            let error = Config::parse(&format!("assistants: [{{name: a, tools: [{tools}]}}]")).unwrap_err();
            assert!(format!("{error:#}").contains(want), "{tools}: {error:#}");
        }
        for (python, want) in [
            ("max_processes: 0", "max_processes"),
            ("grace: never", "grace"),
            ("idel: 1s", "`idle`"),
            ("max_depth: 0", "max_depth"),
            ("max_depth: 201", "max_depth"),
            ("disk: 0", "python.disk"),
            ("max_files: 0", "max_files"),
            ("require: most", "full"),
            ("read: [/]", "python.read"),
            ("read: [/session/x]", "python.read"),
        ] {
            let error = Config::parse(&format!("python: {{{python}}}")).unwrap_err().to_string();
            assert!(error.contains(want), "{python}: {error}");
        }
    }

    #[test]
    fn templates_and_conditions_are_checked() {
        for (assistant, want) in [
            ("instructions: 'Hi {{ metadata.name'", "assistants[0].instructions: not a valid template: syntax error"),
            (
                "instructions: '{% for x in y %}{% endfor %}'",
                "assistants[0].instructions: not a valid template: {% for %}",
            ),
            ("review: [{tool: a}, {tool: b, when: 'amount >'}]", "assistants[0].review[1].when: not a valid condition"),
            ("review: [{tool: a, wehn: 'amount > 1'}]", "did you mean `when`"),
            ("memory: {scope: none}, tools: [memory]", "other than `none`"),
        ] {
            let error = Config::parse(&format!("assistants: [{{name: a, {assistant}}}]")).unwrap_err();
            assert!(format!("{error:#}").contains(want), "{assistant}: {error:#}");
        }
        let valid = "instructions: 'Hi {{ metadata.name }}.', review: [{tool: b, when: 'amount > 1'}], tools: [memory, metadata, ask_human]";
        Config::parse(&format!("assistants: [{{name: a, {valid}}}]")).unwrap();
    }

    #[test]
    fn secrets_are_not_printed() {
        let text = "assistants: [{name: a, tools: [python, {mcp: {command: x, env: {A: hush, B: {env: NAME}}}}, {mcp: {url: 'http://me:hush@x', headers: {A: hush}}}, {http: {name: t, description: d, url: 'http://me:hush@x/', headers: {A: hush}}}]}]";
        let config = Config::parse(text).unwrap();
        let shown = config.to_redacted_yaml().unwrap();
        assert!(!shown.contains("hush") && shown.contains("NAME"), "{shown}");
        assert_eq!(Config::parse(&shown).unwrap().assistants[0].tools.len(), 4);
        assert!(!format!("{:?}", config.assistants[0].tools[1]).contains("hush"));
    }
}
