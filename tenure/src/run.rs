//! Runs: model calls and tool calls, executed step by step. Every step is committed, so that a run
//! can be resumed after a crash.
//!
//! # A model of your own
//!
//! A [`Model`] answers a [`Prompt`] with a stream of chunks in the format of OpenAI's chat completions;
//! [`model_answer`] makes one of a message. [`Tools`] has an example of tools.
//!
//! ```
//! use async_trait::async_trait;
//! use tenure::run::{ModelStream, Prompt, model_answer};
//! use tenure::{Message, Model, ModelError, RunRequest, Tenure};
//!
//! struct Parrot;
//!
//! #[async_trait]
//! impl Model for Parrot {
//!     async fn ask(&self, prompt: Prompt) -> Result<ModelStream, ModelError> {
//!         let last = prompt.messages.last().map(|m| m.text()).unwrap_or_default();
//!         Ok(model_answer(Message::assistant(&last)))
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let tenure = Tenure::open("memory:").await?;
//! let session = tenure.user("acme", "ada")?.create_session().await?;
//! let outcome = session.run(RunRequest::new(&Parrot, [Message::user("hello")])).await?;
//! assert_eq!(outcome.answer.message().unwrap().text(), "hello");
//! # Ok(())
//! # }
//! ```
//!
//! # Crashes
//!
//! The user's message is durable before the model is asked, an answer before its tool calls start, and a result
//! before the next request. If the process dies, [`SessionHandle::resume`](crate::SessionHandle::resume)
//! continues the run in another one. The example `agent` shows it.

pub(crate) mod begin;
pub(crate) mod built_in_tools;
pub(crate) mod compact;
pub(crate) mod execute;
pub(crate) mod executors;
pub(crate) mod idempotency;
pub(crate) mod instructions;
pub(crate) mod lease;
pub(crate) mod metadata_tool;
pub(crate) mod open_run;
pub(crate) mod reconcile_report;
pub(crate) mod request;
pub(crate) mod resume;
pub(crate) mod tool_cache;
pub(crate) mod turn;
pub(crate) mod turn_plan;

pub use self::executors::{Executors, OnRateLimit, RunEvent, StoredAnswer, ToolProgress, TurnError, TurnOutcome};
pub use crate::engine::turn_lock::{OnBusy, TurnLoad};
pub use crate::executors::model::{EagerModelCall, Model, ModelStream, Prompt, model_answer};
pub use crate::executors::tools::{ToolContext, ToolInvocation, Tools};
pub use crate::rules::answer::ModelAnswer;
pub use crate::rules::session::{Run, ToolCallStart};
pub use crate::types::entry::RunOutcome;
pub use crate::types::id::RunId;
pub use crate::types::model::{ModelChunk, ModelError, RetryHint};
pub use crate::types::resumable::Resumable;
pub use crate::types::tool::{Tool, ToolError, ToolOutput};
pub use begin::TurnStart;
pub use compact::CompactionResult;
pub use open_run::OpenRun;
pub use reconcile_report::ReconcileReport;
pub use request::{OnExpired, RunRequest, TurnRequest};
pub use resume::RunEvents;
pub use tool_cache::{CachedToolResult, cache_key};
