//! The fuzz targets: each takes arbitrary bytes and panics only if an invariant is violated. The server's tests run
//! the corpus through the same functions.

use axum::body::Body;
use axum::http::Request;
use std::sync::OnceLock;
use tenure::{
    Message, Session, SessionId, Tenant, Window, history,
    log::{Entry, Record},
    policy::HistoryMode,
    rules::{IncomingRequest, is_valid, reconcile as plan},
    session::SessionKey,
};
use tenure_server::config::Config;
use tenure_server::{app::App, router::in_process};
use tower::ServiceExt;

/// Routes that take a request body.
const ROUTES: [(&str, &str); 9] = [
    ("POST", "/v1/chat/completions"),
    ("PUT", "/v1/sessions/f"),
    ("POST", "/sessions"),
    ("PATCH", "/sessions/f"),
    ("POST", "/sessions/f/messages"),
    ("POST", "/sessions/f/rewind"),
    ("POST", "/sessions/f/fork"),
    ("POST", "/sessions/import"),
    ("POST", "/assistants"),
];

/// An arbitrary body on any route never causes a panic or a 5xx response.
pub fn request(data: &[u8]) {
    static RUNTIME: OnceLock<(tokio::runtime::Runtime, axum::Router)> = OnceLock::new();
    let (runtime, router) = RUNTIME.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let config = Config { store: "memory:".into(), ..Config::default() };
        let app = runtime.block_on(App::open(config)).unwrap();
        (runtime, in_process(&app))
    });
    for (method, path) in ROUTES {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let request = request.body(Body::from(data.to_vec())).unwrap();
        let response = runtime.block_on(router.clone().oneshot(request)).unwrap();
        assert!(response.status().as_u16() < 500, "{method} {path}: {}", response.status());
    }
}

/// Messages as lines, with `---` between the stored and the sent ones. The reconciliation plan keeps no more
/// messages than are stored, loses no tool turn that it keeps, and the resulting prompt is valid.
pub fn reconcile(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (stored, incoming) = text.split_once("\n---\n").unwrap_or((text, ""));
    let messages = |text: &str| text.lines().filter_map(|l| Message::parse(l).ok()).collect::<Vec<_>>();
    let key = SessionKey { tenant: Tenant::default(), session: SessionId::new("f").unwrap() };
    let entries =
        std::iter::once(Entry::created(Default::default())).chain(messages(stored).into_iter().map(Entry::message));
    let at = "2026-01-01T00:00:00Z".parse().unwrap();
    let records: Vec<Record> = (1..).zip(entries).map(|(seq, entry)| Record { seq, at, entry }).collect();
    let incoming = messages(incoming);
    for history_mode in [HistoryMode::Auto, HistoryMode::Full, HistoryMode::Append] {
        let mut session = Session::replay(&key, records.clone()).unwrap();
        assert!(is_valid(&history(&session, &Window::default())));
        let request = IncomingRequest { messages: &incoming, history: history_mode, ..IncomingRequest::default() };
        let plan = plan(&session, &request);
        assert!(plan.retained <= session.messages.len() && plan.append.len() <= incoming.len());
        session.messages.truncate(plan.retained);
        let first = records.len() as u64 + 1;
        for (seq, message_entry) in (first..).zip(plan.message_entries(first)) {
            session.apply(&Record { seq, at, entry: Entry::Message(message_entry) });
        }
        for max_turns in [None, Some(1)] {
            assert!(is_valid(&plan.overlay.history(&session, &Window { max_turns, max_tokens: None })));
        }
    }
}

/// Arbitrary text as an import of a foreign session.
pub fn foreign(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    for foreign in tenure::import::read(text, None).into_iter().flatten().flatten() {
        // A session that was imported can be exported again.
        if let Ok(exported) = tenure::import::to_mistralrs(&foreign.export) {
            tenure::import::read(exported.get(), None).unwrap();
        }
    }
}

/// Arbitrary bytes as a transcript, and as a session file of the JSONL store.
pub fn jsonl(data: &[u8]) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.jsonl");
    std::fs::write(&file, data).unwrap();
    tenure::session::read_transcript(&file).ok();
    let store = dir.path().join("store");
    std::fs::create_dir_all(store.join("default")).unwrap();
    std::fs::write(store.join("default/f.jsonl"), data).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let Ok(tenure) = tenure::Tenure::open(&format!("jsonl:{}", store.display())).await else { return };
        let principal = tenure::Principal::tenant_wide("default").unwrap();
        tenure.load_any(&principal, &SessionId::new("f").unwrap()).await.ok();
    });
}
