//! What is put before a text, so that a model that was trained with such prefixes knows whether it is a question or
//! a stored text.

use super::modules::read_json;
use crate::config::embeddings::Embeddings;
use serde::Deserialize;
use std::collections::HashMap;
use std::path::Path;
use tenure::memory::EmbeddingInput;

/// The prefixes of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prefixes {
    /// Before a question.
    pub query: String,
    /// Before a stored text.
    pub passage: String,
}

const BGE_QUERY: &str = "Represent this sentence for searching relevant passages: ";
const BGE_QUERY_ZH: &str = "为这个句子生成表示以用于检索相关文章：";
const E5_TASK: &str = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ";

/// Families of models: words that their names contain, in the order in which they are tried, with the prefixes of
/// a question and of a stored text, as their authors publish them.
const FAMILIES: [(&[&str], &str, &str); 12] = [
    (&["e5", "instruct"], E5_TASK, ""),
    (&["e5", "mistral"], E5_TASK, ""),
    (&["e5"], "query: ", "passage: "),
    (&["bge", "m3"], "", ""),
    (&["bge", "multilingual"], "", ""),
    (&["bge", "zh"], BGE_QUERY_ZH, ""),
    (&["bge"], BGE_QUERY, ""),
    (&["arctic", "v2"], "query: ", ""),
    (&["arctic", "embed2"], "query: ", ""),
    (&["arctic"], BGE_QUERY, ""),
    (&["mxbai"], BGE_QUERY, ""),
    (&["nomic", "embed"], "search_query: ", "search_document: "),
];

/// The deserialized fields of `config_sentence_transformers.json`.
#[derive(Default, Deserialize)]
struct PromptConfig {
    #[serde(default)]
    prompts: HashMap<String, String>,
    default_prompt_name: Option<String>,
}

/// The deserialized fields of `config.json`.
#[derive(Deserialize)]
struct NameConfig {
    #[serde(rename = "_name_or_path")]
    name: Option<String>,
}

impl Prefixes {
    /// The prefixes of a family of models, by a model's name. None for an unknown family.
    pub fn of_family(name: &str) -> Self {
        let name = name.to_lowercase();
        let words: Vec<&str> = name.split(|c: char| !c.is_alphanumeric()).collect();
        let family = FAMILIES.iter().find(|(family, _, _)| family.iter().all(|word| words.contains(word)));
        family.map_or_else(Self::default, |(_, query, passage)| Self {
            query: (*query).to_owned(),
            passage: (*passage).to_owned(),
        })
    }

    /// The prefixes of a local model: those in its `config_sentence_transformers.json`, else those of its family by
    /// the name of its directory, or by the name in its `config.json`.
    pub fn of_local_model(dir: &Path, config: &[u8]) -> anyhow::Result<Self> {
        let PromptConfig { prompts, default_prompt_name } =
            read_json(dir, "config_sentence_transformers.json")?.unwrap_or_default();
        let prompt = |names: &[&str]| {
            let names = names.iter().copied().chain(default_prompt_name.as_deref());
            names.filter_map(|name| prompts.get(name)).next().cloned().unwrap_or_default()
        };
        let own = Self { query: prompt(&["query"]), passage: prompt(&["document", "passage", "corpus"]) };
        let by_directory = dir.file_name().map(|name| Self::of_family(&name.to_string_lossy()));
        let by_config = || {
            let config: Option<NameConfig> = serde_json::from_slice(config).ok();
            Self::of_family(&config.and_then(|c| c.name).unwrap_or_default())
        };
        let known = [Some(own), by_directory].into_iter().flatten().find(|p| *p != Self::default());
        Ok(known.unwrap_or_else(by_config))
    }

    /// Returns the prefixes with those that are configured in their place.
    #[must_use]
    pub fn or_configured(self, config: &Embeddings) -> Self {
        Self {
            query: config.query_prefix.clone().unwrap_or(self.query),
            passage: config.passage_prefix.clone().unwrap_or(self.passage),
        }
    }

    /// Returns the name of the vectors that the model computes with these prefixes: another prefix gives vectors
    /// that cannot be compared (D-080).
    pub fn named(&self, model: &str) -> String {
        if *self == Self::default() {
            return model.to_owned();
        }
        let mut hasher = blake3::Hasher::new();
        for prefix in [&self.query, &self.passage] {
            hasher.update(&(prefix.len() as u64).to_le_bytes()).update(prefix.as_bytes());
        }
        format!("{model}+{}", &hasher.finalize().to_hex()[..8])
    }

    /// Returns the texts with their prefix.
    pub fn apply(&self, texts: Vec<String>, input: EmbeddingInput) -> Vec<String> {
        let prefix = match input {
            EmbeddingInput::Query => &self.query,
            EmbeddingInput::Passage => &self.passage,
        };
        if prefix.is_empty() { texts } else { texts.into_iter().map(|text| format!("{prefix}{text}")).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_known_by_their_names() {
        let e5 = ("query: ", "passage: ");
        for (name, (query, passage)) in [
            ("intfloat/multilingual-e5-small", e5),
            ("e5-large-v2", e5),
            ("models/E5-base", e5),
            ("intfloat/multilingual-e5-large-instruct", (E5_TASK, "")),
            ("BAAI/bge-small-en-v1.5", (BGE_QUERY, "")),
            ("bge-large-zh-v1.5", (BGE_QUERY_ZH, "")),
            ("bge-m3", ("", "")),
            ("thenlper/gte-base", ("", "")),
            ("snowflake-arctic-embed-m-v2.0", ("query: ", "")),
            ("snowflake-arctic-embed:22m", (BGE_QUERY, "")),
            ("mxbai-embed-large", (BGE_QUERY, "")),
            ("nomic-embed-text", ("search_query: ", "search_document: ")),
            ("text-embedding-3-small", ("", "")),
            ("all-minilm-l6-v2", ("", "")),
            ("node5-base5", ("", "")),
        ] {
            let want = Prefixes { query: query.into(), passage: passage.into() };
            assert_eq!(Prefixes::of_family(name), want, "{name}");
        }
    }

    #[test]
    fn another_prefix_is_another_name() {
        let named = |query: &str, passage: &str| Prefixes { query: query.into(), passage: passage.into() }.named("m");
        assert_eq!(named("", ""), "m");
        let names = [named("a", ""), named("", "a"), named("a", "b"), named("ab", ""), named("b", "a")];
        let distinct: std::collections::HashSet<_> = names.iter().collect();
        assert!(distinct.len() == names.len() && names.iter().all(|name| name.starts_with("m+")), "{names:?}");
    }
}
