//! Test environments: a `Tenure` on each store, with a manual clock.

use jiff::{SignedDuration, Timestamp};
use tenure::{log::*, maintenance::*, memory::*, policy::*, review::*, rules::*, run::*, session::*, *};

/// A `Tenure` on one store, and the means to reopen it.
pub struct Home {
    pub tenure: Tenure,
    pub clock: Clock,
    pub url: String,
    pub dir: Option<tempfile::TempDir>,
}

impl Home {
    /// A fresh environment. `None` means that the store is not available here.
    pub async fn new(kind: &str) -> Option<Self> {
        let dir = matches!(kind, "jsonl" | "sqlite").then(|| tempfile::tempdir().unwrap());
        let path = |name: &str| dir.as_ref().unwrap().path().join(name).display().to_string();
        let url = match kind {
            "memory" => "memory:".to_owned(),
            "jsonl" => format!("jsonl:{}", path("sessions")),
            "sqlite" => format!("sqlite:{}", path("tenure.db")),
            "postgres" => postgres_url()?,
            other => panic!("{other}"),
        };
        let clock = Clock::manual("2026-01-01T00:00:00Z".parse().unwrap());
        let options = Options { clock: clock.clone(), ..Options::default() };
        let tenure = Tenure::open_with(&url, options).await.unwrap();
        Some(Self { tenure, clock, url, dir })
    }

    /// Reopens the store with other options. The in-memory store is reused, because it has nothing
    /// to reopen.
    pub async fn reopen_with(&mut self, change: impl FnOnce(&mut Options)) {
        let mut options = Options { clock: self.clock.clone(), ..Options::default() };
        change(&mut options);
        if self.url == "memory:" {
            self.tenure = Tenure::with_store(self.tenure.store().clone(), options);
        } else {
            self.tenure = Tenure::open("memory:").await.unwrap(); // closes the store
            self.tenure = Tenure::open_with(&self.url, options).await.unwrap();
        }
    }

    pub async fn reopen(&mut self) {
        self.reopen_with(|_| ()).await;
    }

    /// A second `Tenure` with its own cache on the same store, like another process.
    pub fn beside(&self) -> Tenure {
        Tenure::with_store(self.tenure.store().clone(), Options { clock: self.clock.clone(), ..Options::default() })
    }

    pub fn pass(&self, time: SignedDuration) {
        self.clock.advance(time);
    }

    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }
}

/// The URL of a new schema on the PostgreSQL server that `make test` starts. Without a server,
/// tests are skipped, but never in CI.
pub fn postgres_url() -> Option<String> {
    let Ok(url) = std::env::var("TENURE_TEST_POSTGRES") else {
        assert!(std::env::var("CI").is_err(), "TENURE_TEST_POSTGRES must be set in CI");
        eprintln!("skipped: TENURE_TEST_POSTGRES is not set (`make test` sets it)");
        return None;
    };
    let schema = format!("t_{}", SessionId::generate().as_str().replace('-', ""));
    Some(format!("{url}{}schema={schema}", if url.contains('?') { '&' } else { '?' }))
}

/// Expands each case into one test per store.
#[macro_export]
macro_rules! on_every_store {
    ($($(#[doc = $doc:literal])* async fn $name:ident($home:ident: &mut Home) $body:block)*) => {$(
        $(#[doc = $doc])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            async fn case($home: &mut $crate::places::Home) $body

            async fn on(kind: &str) {
                if let Some(mut home) = $crate::places::Home::new(kind).await {
                    case(&mut home).await;
                }
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn memory() { on("memory").await }
            #[tokio::test(flavor = "multi_thread")]
            async fn jsonl() { on("jsonl").await }
            #[tokio::test(flavor = "multi_thread")]
            async fn sqlite() { on("sqlite").await }
            #[tokio::test(flavor = "multi_thread")]
            async fn postgres() { on("postgres").await }
        }
    )*};
}

pub fn ada() -> Principal {
    Principal::new("acme", "ada").unwrap()
}

pub fn admin() -> Principal {
    Principal::tenant_wide("acme").unwrap()
}

pub fn id(s: &str) -> SessionId {
    SessionId::new(s).unwrap()
}

pub fn named(s: &str) -> NewSession {
    NewSession { id: Some(id(s)), ..NewSession::default() }
}

pub fn call(call_id: &str, tool: &str) -> Message {
    let call = serde_json::json!({"id": call_id, "type": "function", "function": {"name": tool, "arguments": "{}"}});
    Message::from_value(&serde_json::json!({"role": "assistant", "content": null, "tool_calls": [call]})).unwrap()
}

/// A turn with a tool call: four messages.
pub fn turn(n: usize) -> Vec<Message> {
    let c = format!("c{n}");
    vec![
        Message::user(&format!("question {n}")),
        call(&c, "search"),
        Message::tool(&c, &format!("result {n}")),
        Message::assistant(&format!("answer {n}")),
    ]
}

/// A message with an image large enough to be stored as a blob.
pub fn picture(text: &str, fill: &str) -> Message {
    use base64::Engine;
    let data = base64::engine::general_purpose::STANDARD.encode(fill.repeat(3000));
    let url = format!("data:image/png;base64,{data}");
    let image = serde_json::json!({"type": "image_url", "image_url": {"url": url}});
    Message::from_value(&serde_json::json!({"role": "user", "content": [{"type": "text", "text": text}, image]}))
        .unwrap()
}

pub fn texts(session: &Session) -> Vec<String> {
    session.messages.iter().map(|m| m.message.as_str().to_owned()).collect()
}

pub fn raw(messages: &[Message]) -> Vec<String> {
    messages.iter().map(|m| m.as_str().to_owned()).collect()
}

pub fn labels(session: &Session) -> Vec<(String, usize)> {
    session.checkpoints.iter().map(|c| (c.label.to_string(), c.position)).collect()
}
