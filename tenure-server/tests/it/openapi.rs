//! The OpenAPI document: any change of it is a change of the API and must be deliberate.

use crate::support::InProcessClient;
use std::path::Path;

/// `TENURE_WRITE_OPENAPI=1 cargo test -p tenure-server openapi` regenerates the file.
#[test]
fn the_document_equals_the_committed_one() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json");
    let now = tenure_server::router::openapi().to_pretty_json().unwrap() + "\n";
    if std::env::var_os("TENURE_WRITE_OPENAPI").is_some() {
        std::fs::write(&file, &now).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    let differs = committed.lines().zip(now.lines()).position(|(a, b)| a != b);
    assert!(
        committed == now,
        "docs/openapi.json is not what the code says (first at line {:?}); \
         look at the change, then write it with TENURE_WRITE_OPENAPI=1",
        differs.map(|i| i + 1)
    );
}

#[test]
fn every_route_documents_its_errors() {
    let document = serde_json::to_value(tenure_server::router::openapi()).unwrap();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            assert!(operation["operationId"].is_string(), "{method} {path}");
            let open = ["/healthz", "/readyz"].contains(&path.as_str());
            for status in ["401", "403", "503"].iter().filter(|_| !open) {
                assert!(operation["responses"][status].is_object(), "{method} {path} can answer {status}");
            }
            let body = operation["requestBody"].is_object();
            for status in ["400", "413", "415"].iter().filter(|_| body) {
                assert!(operation["responses"][status].is_object(), "{method} {path} can answer {status}");
            }
            let lacks_not_found = path.contains('{') && !operation["responses"]["404"].is_object();
            let never = ["delete_session_v1", "erase_user", "thread_session"];
            assert!(!lacks_not_found || never.contains(&operation["operationId"].as_str().unwrap()), "{method} {path}");
        }
    }
}

/// The page shows every operation, chat first, with a form; it loads only files of this server.
#[tokio::test]
async fn the_page_documents_every_operation() {
    let api = InProcessClient::memory().await;
    let page = api.get("/docs").await;
    let policy = page.headers["content-security-policy"].to_str().unwrap();
    for rule in ["default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"] {
        assert!(policy.contains(rule), "{policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    let document = serde_json::to_value(tenure_server::router::openapi()).unwrap();
    let mut count = 0;
    for operation in document["paths"].as_object().unwrap().values().flat_map(|m| m.as_object().unwrap().values()) {
        let id = operation["operationId"].as_str().unwrap();
        assert_eq!(page.text.matches(&format!("<details id=\"{id}\"")).count(), 1, "{id}");
        count += 1;
    }
    assert_eq!(page.text.matches("<form data-method=").count(), count);
    let first = page.text.find("<details").unwrap();
    assert!(page.text[first..].starts_with("<details id=\"chat\" open>"));
    // Request and response fields, an example of each.
    for part in [
        "<code>messages</code> <span class=\"required\">",
        "<code>session.matched</code>",
        "--json &#39;{",
        "&quot;run_id&quot;",
    ] {
        assert!(page.text.contains(part), "{part}");
    }
    // Nothing inline, nothing from elsewhere.
    assert_eq!(page.text.matches("<script").count(), 1);
    for forbidden in ["<style", "style=", " on", "http://", "https://"] {
        let within_tags = page.text.split('<').filter_map(|tag| tag.split('>').next());
        assert!(!within_tags.into_iter().any(|tag| tag.contains(forbidden)), "{forbidden}");
    }
    for (file, kind) in [("/docs/style.css", "text/css"), ("/docs/docs.mjs", "text/javascript")] {
        let file = api.get(file).await;
        assert!(file.status.is_success() && file.headers["content-type"].to_str().unwrap().starts_with(kind));
        assert!(!file.text.contains("http://") && !file.text.contains("https://"));
        assert!(!file.text.contains("localStorage") && !file.text.contains("innerHTML"));
    }
}

/// The examples on the page are valid requests, as far as their field names go.
#[tokio::test]
async fn the_examples_have_only_known_fields() {
    let api = InProcessClient::memory().await;
    let page = api.get("/docs").await.text;
    let document = serde_json::to_value(tenure_server::router::openapi()).unwrap();
    let mut checked = 0;
    for operation in document["paths"].as_object().unwrap().values().flat_map(|m| m.as_object().unwrap().values()) {
        let Some(schema) = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str() else {
            continue;
        };
        let schema = &document["components"]["schemas"][schema.rsplit('/').next().unwrap()];
        let id = operation["operationId"].as_str().unwrap();
        let details = page.split(&format!("<details id=\"{id}\"")).nth(1).unwrap();
        let example = details.split("spellcheck=\"false\">\n").nth(1).unwrap().split("</textarea>").next().unwrap();
        let example: serde_json::Value = serde_json::from_str(&example.replace("&quot;", "\"")).expect(id);
        for name in example.as_object().unwrap().keys() {
            assert!(schema["properties"][name].is_object(), "{id}: {name}");
        }
        checked += 1;
    }
    assert!(checked > 15, "{checked}");
}
