//! Every store passes the conformance suite.

use std::sync::Arc;
use tenure::conformance;
use tenure::conformance::Fixture;
use tenure::store::{Store, open};
use tenure::testing::PostgresSchema;

async fn opened(url: String) -> Arc<dyn Store> {
    let (store, repairs) = open(&url).await.unwrap();
    assert_eq!(repairs, [], "nothing was broken");
    store
}

conformance!(memory, || async { Fixture::new(opened("memory:".to_owned()).await) });
conformance!(jsonl, || Fixture::in_directory(|dir| opened(format!("jsonl:{}", dir.display()))));
conformance!(sqlite, || Fixture::in_directory(|dir| opened(format!("sqlite:{}", dir.join("tenure.db").display()))));
conformance!(postgres, in_search_path);

/// A store in the first schema of the search path. (Other tests name the schema in the URL.)
async fn in_search_path() -> Option<Fixture> {
    let schema = PostgresSchema::new()?;
    schema.execute(&format!("CREATE SCHEMA {}", schema.name())).await;
    let separator = if schema.server().contains('?') { '&' } else { '?' };
    let url = format!("{}{separator}options=-csearch_path%3D{}", schema.server(), schema.name());
    Some(Fixture::open(move || opened(url.clone())).await.with_resource(schema))
}
