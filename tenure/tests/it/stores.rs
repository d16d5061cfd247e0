//! Every store passes the conformance suite.

use std::sync::Arc;
use tenure::conformance;
use tenure::conformance::Fixture;
use tenure::store::{Store, open};

async fn opened(url: String) -> Arc<dyn Store> {
    let (store, repairs) = open(&url).await.unwrap();
    assert_eq!(repairs, [], "nothing was broken");
    store
}

conformance!(memory, || async { Fixture::new(opened("memory:".to_owned()).await) });
conformance!(jsonl, || Fixture::in_directory(|dir| opened(format!("jsonl:{}", dir.display()))));
#[cfg(feature = "sqlite")]
conformance!(sqlite, || Fixture::in_directory(|dir| opened(format!("sqlite:{}", dir.join("tenure.db").display()))));
#[cfg(feature = "postgres")]
conformance!(postgres, postgres_schema::fixture);

/// A separate schema for each case, on the server named by TENURE_TEST_POSTGRES.
#[cfg(feature = "postgres")]
mod postgres_schema {
    use super::{Fixture, opened};
    use tenure::SessionId;
    use tokio::task::JoinSet;

    pub async fn fixture() -> Option<Fixture> {
        let Ok(server) = std::env::var("TENURE_TEST_POSTGRES") else {
            assert!(std::env::var_os("CI").is_none(), "CI tests every store: set TENURE_TEST_POSTGRES");
            eprintln!("SKIPPED: TENURE_TEST_POSTGRES does not name a server; see scripts/with-postgres.sh");
            return None;
        };
        let name = format!("tenure_{}", SessionId::generate().as_str().replace('-', "_"));
        execute(&server, &format!("create schema {name}")).await;
        let separator = if server.contains('?') { '&' } else { '?' };
        let url = format!("{server}{separator}options=-csearch_path%3D{name}");
        Some(Fixture::open(move || opened(url.clone())).await.with_resource(Schema { server, name }))
    }

    async fn execute(server: &str, sql: &str) {
        let (client, connection) = tokio_postgres::connect(server, tokio_postgres::NoTls).await.unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(connection);
        client.batch_execute(sql).await.unwrap();
    }

    struct Schema {
        server: String,
        name: String,
    }

    impl Drop for Schema {
        fn drop(&mut self) {
            // Keep the schema of a failed case for inspection.
            if std::thread::panicking() {
                return eprintln!("the schema {} was not dropped, for inspection", self.name);
            }
            let server = self.server.clone();
            let sql = format!("drop schema {} cascade", self.name);
            let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            // Use a separate thread: a runtime cannot block inside another.
            let dropping = std::thread::spawn(move || runtime().block_on(execute(&server, &sql)));
            dropping.join().unwrap();
        }
    }
}
