//! A Tenure server in this process, on a socket, in front of a scripted model.

use super::client::{Client, Reply};
use super::model_server::{ScriptedModelServer, model};
use serde_json::Value;
use tenure::testing::{StoreKind, TestStore};
use tenure::{Principal, Session, SessionId};
use tenure_server::app::{App, AppState};
use tenure_server::config::Config;
use tenure_server::serve;

/// A Tenure server in this process, in front of a scripted model.
pub struct TestServer {
    pub app: AppState,
    pub client: Client,
    pub model: ScriptedModelServer,
    pub stream: bool,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    served: Option<tokio::task::JoinHandle<()>>,
    _store: TestStore,
}

impl TestServer {
    /// Returns `None` if the store is not available here.
    pub async fn new(kind: StoreKind, stream: bool) -> Option<Self> {
        Self::with(kind, stream, |_| ()).await
    }

    pub async fn with(kind: StoreKind, stream: bool, change: impl FnOnce(&mut Config)) -> Option<Self> {
        let store = TestStore::new(kind)?;
        let scripted = ScriptedModelServer::default();
        let base_url = scripted.start().await;
        let mut config = Config { listen: "127.0.0.1:0".into(), store: store.url().to_owned(), ..Config::default() };
        config.models = vec![model("default", &base_url)];
        change(&mut config);
        let app = App::open(config).await.unwrap();
        let client = Client::new("");
        let mut server = Self { app, client, model: scripted, stream, stop: None, served: None, _store: store };
        server.serve().await;
        Some(server)
    }

    /// Serves `app` on its own address.
    pub async fn serve(&mut self) {
        let listener = serve::bind(&self.app).await.unwrap();
        self.client = Client::new(&format!("http://{}", listener.local_addr().unwrap()));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let run = serve::run(self.app.clone(), listener, async move { drop(stopped.await) });
        self.served = Some(tokio::spawn(async move { run.await.unwrap() }));
        self.stop = Some(stop);
    }

    /// Stops the server, closes the store, and restarts both.
    pub async fn restart(&mut self) {
        drop(self.stop.take());
        self.served.take().unwrap().await.unwrap();
        let config = self.app.config.clone();
        self.app = App::open(Config { store: "memory:".into(), ..config.clone() }).await.unwrap(); // closes the store
        self.app = App::open(config).await.unwrap();
        self.serve().await;
    }

    /// Sends a chat request, streamed if this server was created so.
    pub async fn chat(&self, body: Value) -> Reply {
        self.client.chat(self.stream, body, &[]).await
    }

    /// The session, whatever its status.
    pub async fn session(&self, id: &str) -> Session {
        self.app.tenure.load_any(&default_principal(), &SessionId::new(id).unwrap()).await.unwrap()
    }

    /// The stored messages.
    pub async fn stored(&self, id: &str) -> Vec<Value> {
        self.session(id).await.messages.iter().map(|m| m.message.to_value()).collect()
    }

    /// The number of sessions.
    pub async fn sessions(&self) -> usize {
        let query =
            tenure::session::SessionQuery::new(tenure::session::OwnerFilter::Tenant(default_principal().tenant), 100);
        self.app.tenure.store().heads(&query).await.unwrap().len()
    }
}

/// The principal of a request without a key.
pub fn default_principal() -> Principal {
    Principal::new("default", "default").unwrap()
}

/// Expands each case to four tests: unary and streamed, on SQLite and on PostgreSQL.
#[macro_export]
macro_rules! in_every_way {
    ($($(#[doc = $doc:literal])* async fn $name:ident($test:ident: &mut TestServer) $body:block)*) => {$(
        $(#[doc = $doc])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;
            use $crate::support::StoreKind;

            async fn case($test: &mut $crate::support::TestServer) $body

            async fn on(kind: StoreKind, stream: bool) {
                if let Some(mut test) = $crate::support::TestServer::new(kind, stream).await {
                    case(&mut test).await;
                }
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn sqlite() { on(StoreKind::Sqlite, false).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn sqlite_streamed() { on(StoreKind::Sqlite, true).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn postgres() { on(StoreKind::Postgres, false).await }
            #[tokio::test(flavor = "multi_thread")]
            async fn postgres_streamed() { on(StoreKind::Postgres, true).await }
        }
    )*};
}
