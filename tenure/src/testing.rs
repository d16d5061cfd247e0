//! A test kit for programs that use Tenure (feature `testing`): a scripted model, tools that count
//! their executions, a store that fails on request, a manual clock, temporary stores of every kind,
//! and builders for messages and logs.
//!
//! The tests and benchmarks of Tenure use it too. All functions panic on errors that a test does
//! not expect. A test of a turn with a tool call:
//!
//! ```
//! use tenure::testing::{
//!     CountingTools, ScriptedModel, StoreKind, TestTenure, ToolBehavior, text_answer, tool,
//!     tool_calls_answer,
//! };
//! use tenure::{Message, RunRequest};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let test = TestTenure::new(StoreKind::Memory).await.expect("this store needs no server");
//! let model = ScriptedModel::new([
//!     tool_calls_answer(&[("call-1", "weather", serde_json::json!({"city": "Bern"}))]),
//!     text_answer("It is sunny."),
//! ]);
//! let tools = CountingTools::new([(tool("weather"), ToolBehavior::succeeds("sunny"))]);
//!
//! let session = test.tenure.user("acme", "ada")?.create_session().await?;
//! session.run(RunRequest::new(&model, [Message::user("Weather?")]).tools(&tools)).await?;
//!
//! assert_eq!(tools.calls("weather"), [serde_json::json!({"city": "Bern"})]);
//! assert_eq!(model.call_count(), 2);
//! assert_eq!(model.last_prompt()[2], "sunny");
//! # Ok(())
//! # }
//! ```
//!
//! [`PostgresSchema`] and [`StoreKind::Postgres`] need a server, which the environment variable
//! `TENURE_TEST_POSTGRES` names. Without it they are not available, and a test should return early;
//! if the variable `CI` is set, they panic instead, so that continuous integration skips nothing.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[cfg(all(test, any(feature = "postgres", feature = "sqlite")))]
pub(crate) mod expected_views;
pub(crate) mod failing_store;
pub(crate) mod messages;
pub(crate) mod model;
#[cfg(feature = "postgres")]
pub(crate) mod postgres_schema;
pub(crate) mod records;
pub(crate) mod rng;
pub(crate) mod stores;
pub(crate) mod tools;
pub(crate) mod wait;

pub use crate::clock::{Clock, ManualClock};
pub use failing_store::{FailingStore, FailurePoint};
pub use messages::{image_message, tool_call_message, turn_messages};
pub use model::{ScriptedModel, text_answer, tool_calls_answer};
#[cfg(feature = "postgres")]
pub use postgres_schema::{PostgresSchema, postgres_server};
pub use records::{
    SessionLog, StoreState, append_message, assert_fails, blob, head_of, item, key, namespace, read, read_all,
    read_full_log, session_namespace, state, timestamp,
};
pub use rng::Rng;
pub use stores::{StoreKind, TestStore, TestTenure};
pub use tools::{CountingTools, ToolBehavior, read_only_tool, tool};
pub use wait::wait_until;
