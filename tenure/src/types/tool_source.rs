//! Sources of an assistant's tools: plain data, as written in the configuration file.

use crate::types::byte_size::ByteSize;
use crate::types::error::Error;
use crate::types::head::DECISIONS;
use crate::types::human_duration::HumanDuration;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

const KINDS: &[&str] = &["mcp", "http", "python", "memory", "metadata", "ask_human"];

/// A source of tools: `{mcp: …}`, `{http: …}`, `{python: …}`, `{metadata: …}`, or one of the strings `python`,
/// `memory`, `metadata` and `ask_human`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolSource {
    /// The tools of an MCP server.
    Mcp(McpSource),
    /// One tool that is called by HTTP.
    Http(HttpSource),
    /// A Python interpreter for each session.
    Python(PythonSource),
    /// The built-in tool that stores and recalls memories of the assistant.
    Memory,
    /// The built-in tool that reads and changes permitted keys of the session's metadata.
    Metadata(MetadataSource),
    /// The built-in tool that asks a person and waits for the decision.
    AskHuman,
}

/// The settings of the built-in tool `metadata`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetadataSource {
    /// The keys of the session's metadata that the model can read and change.
    pub keys: Vec<String>,
}

impl Default for MetadataSource {
    fn default() -> Self {
        Self { keys: ["preferences", "resolved_entities", "task_progress"].map(str::to_owned).into() }
    }
}

impl MetadataSource {
    /// Checks that there are keys, and that none of them is derived from the log.
    pub fn check(&self) -> Result<(), Error> {
        if self.keys.is_empty() {
            return Err(Error::invalid("keys", "the tool `metadata` needs at least one key"));
        }
        match self.keys.iter().find(|key| *key == DECISIONS) {
            Some(key) => Err(Error::invalid("keys", format!("`{key}` is derived from the log and cannot be written"))),
            None => Ok(()),
        }
    }
}

/// An MCP server: a program (`command`), or an address (`url`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct McpSource {
    /// The program to start. It is accessed through its standard input and output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The arguments of the program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment variables of the program, in addition to a minimal set such as `PATH` and `HOME` (D-060).
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Secret>,
    /// The URL of the server, if it is accessed by HTTP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Headers of every request.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, Secret>,
    /// A prefix for the name of each tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// Patterns of tools without side effects, overriding what the server declares. `*` matches any
    /// characters; a leading `!` negates. The last matching pattern applies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub read_only: Vec<String>,
    /// Patterns of idempotent tools, with the syntax of `read_only`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub idempotent: Vec<String>,
    /// Patterns of tools whose results may be cached, with the syntax of `read_only`. Results of read-only
    /// tools may be cached by default.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cache: Vec<String>,
    /// Patterns of keys of the session's metadata that the server receives with each call, with the syntax of
    /// `read_only`, as `_meta` of the request.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub metadata: Vec<String>,
    /// Maximum duration of a call. `None` means one minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<HumanDuration>,
}

/// One tool that is called by HTTP. The arguments are sent as the JSON body of a POST request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpSource {
    /// The name by which the model calls the tool.
    pub name: String,
    /// A description for the model.
    pub description: String,
    /// The URL of the POST request.
    pub url: String,
    /// The parameters, as a JSON schema.
    #[serde(default = "no_parameters")]
    pub parameters: Value,
    /// Headers of every request.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, Secret>,
    /// Whether calls have no side effects.
    #[serde(default)]
    pub read_only: bool,
    /// Whether calls are idempotent.
    #[serde(default)]
    pub idempotent: bool,
    /// Whether results may be cached. `None` means that they may if the tool is read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<bool>,
    /// Patterns of keys of the session's metadata that the tool receives with each call. `*` matches any
    /// characters; a leading `!` negates. The last matching pattern applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub metadata: Vec<String>,
    /// The field of the JSON body that contains the metadata. `None` means the header `X-Tenure-Metadata`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata_field: Option<String>,
    /// Maximum duration of a call. `None` means one minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<HumanDuration>,
}

/// Overrides of the server's settings of the Python tool. `None` in a field means the server's setting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PythonSource {
    /// Maximum duration of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<HumanDuration>,
    /// Maximum memory of a process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
}

fn no_parameters() -> Value {
    let mut schema = Map::new();
    schema.insert("type".into(), "object".into());
    schema.insert("properties".into(), Map::new().into());
    Value::Object(schema)
}

/// Implemented by hand, because there is a short form, and because an error must contain its position.
impl<'de> Deserialize<'de> for ToolSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Source;
        impl<'de> Visitor<'de> for Source {
            type Value = ToolSource;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "`python`, `memory`, `metadata`, `ask_human`, or an object with one of the keys `mcp`, `http`, \
                     `python` and `metadata`",
                )
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<ToolSource, E> {
                match word {
                    "python" => Ok(ToolSource::Python(PythonSource::default())),
                    "memory" => Ok(ToolSource::Memory),
                    "metadata" => Ok(ToolSource::Metadata(MetadataSource::default())),
                    "ask_human" => Ok(ToolSource::AskHuman),
                    _ => Err(E::unknown_field(word, KINDS)),
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ToolSource, A::Error> {
                let kind: String = map.next_key()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
                let source = match kind.as_str() {
                    "mcp" => ToolSource::Mcp(map.next_value()?),
                    "http" => ToolSource::Http(map.next_value()?),
                    "python" => ToolSource::Python(map.next_value::<Option<_>>()?.unwrap_or_default()),
                    "memory" => map.next_value::<Option<()>>().map(|_| ToolSource::Memory)?,
                    "metadata" => ToolSource::Metadata(map.next_value::<Option<_>>()?.unwrap_or_default()),
                    "ask_human" => map.next_value::<Option<()>>().map(|_| ToolSource::AskHuman)?,
                    other => return Err(de::Error::unknown_field(other, KINDS)),
                };
                match map.next_key::<String>()? {
                    None => Ok(source),
                    Some(extra) => Err(de::Error::custom(format!(
                        "`{extra}` next to `{kind}`: write each source as a separate list item"
                    ))),
                }
            }
        }
        deserializer.deserialize_any(Source)
    }
}

/// A value that may be secret: the text itself, or `{env: NAME}`, the environment variable that holds it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a text, or {env: NAME}")]
pub enum Secret {
    /// The text itself.
    Text(String),
    /// The environment variable that holds the text.
    Env(EnvName),
}

/// The name of an environment variable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvName {
    /// The name of the variable.
    pub env: String,
}

/// Redacts the text, so that secrets do not appear in logs.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Secret::Text(_) => f.write_str("***"),
            Secret::Env(name) => name.fmt(f),
        }
    }
}

impl McpSource {
    /// Returns the maximum duration of a call.
    pub fn effective_timeout(&self) -> Duration {
        effective_timeout(self.timeout)
    }
}

impl HttpSource {
    /// Returns the maximum duration of a call.
    pub fn effective_timeout(&self) -> Duration {
        effective_timeout(self.timeout)
    }
}

/// Returns the effective timeout: one minute by default, and one day for `never`.
fn effective_timeout(timeout: Option<HumanDuration>) -> Duration {
    timeout.map_or(Duration::from_secs(60), |t| t.duration().unwrap_or(Duration::from_secs(24 * 60 * 60)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes) in [("512MB", 512 << 20), ("64KB", 64 << 10), ("2GB", 2 << 30), ("7B", 7), ("0B", 0)] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!((size.0, size.to_string().as_str()), (bytes, text));
        }
        assert_eq!(serde_json::from_str::<ByteSize>("1536").unwrap(), ByteSize(1536));
        for invalid in ["", "MB", "12MiB", "-1KB", "99999999999GB"] {
            assert!(invalid.parse::<ByteSize>().is_err(), "{invalid}");
        }
    }

    #[test]
    fn sources_are_read() {
        let text = r#"["python", {"python": null}, {"python": {"memory": "1GB"}}, {"mcp": {"command": "x", "env": {"A": "b", "C": {"env": "D"}}}},
            "memory", "ask_human", "metadata", {"metadata": {"keys": ["a"]}}]"#;
        let sources: Vec<ToolSource> = serde_json::from_str(text).unwrap();
        let python = ToolSource::Python(PythonSource::default());
        assert_eq!(sources[..2], [python.clone(), python]);
        let reparsed: Vec<ToolSource> = serde_json::from_str(&serde_json::to_string(&sources).unwrap()).unwrap();
        assert_eq!(reparsed, sources);
        let debug = format!("{:?}", sources[3]);
        assert!(debug.contains("***") && debug.contains("\"D\"") && !debug.contains("\"b\""), "{debug}");
        for invalid in [r#""pyton""#, r#"{"htp": {}}"#, r#"{"python": {}, "mcp": {}}"#, "{}", "7"] {
            assert!(serde_json::from_str::<ToolSource>(invalid).is_err(), "{invalid}");
        }
    }
}
