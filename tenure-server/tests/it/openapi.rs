//! The OpenAPI document: any change of it is a change of the API and must be deliberate.

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
