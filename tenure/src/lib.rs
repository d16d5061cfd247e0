//! Durable sessions for LLM agents.
//!
//! Models are stateless; agents are not. Tenure persists message history with tool calls and media, finds a session by id or by
//! content, and merges a client's request with the stored messages. It provides checkpoints, rewind and fork; runs that resume after a
//! crash; human review with an audit trail; a tool-result cache; long-term memory; expiry, retention and erasure.
//!
//! > **A session is a log of entries. Everything else is computed from it.**
//!
//! ```
//! use tenure::{Message, Point, Tenure};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tenure::Result<()> {
//! let tenure = Tenure::open("memory:").await?; // or jsonl:DIR, sqlite:FILE, postgres://…
//! let session = tenure.user("acme", "ada")?.create_session().await?;
//!
//! session.append([Message::user("hello"), Message::assistant("Hello, Ada.")]).await?;
//! let branch = session.fork(Point::Turn(1)).await?; // nothing is copied
//! session.append([Message::user("and again")]).await?;
//! session.rewind("turn-1").await?; // discarded messages stay in the log
//!
//! assert_eq!(session.history().await?.len(), 2); // what a model is sent
//! # assert_eq!(branch.load().await?.messages.len(), 2);
//! # Ok(())
//! # }
//! ```
//!
//! Where to look:
//!
//! * the handles [`UserHandle`] and [`SessionHandle`]: first contact, as above;
//! * [`session`]: creating, appending, checkpoints, forks, search, export;
//! * [`run`]: executing turns with your own [`Model`] and [`Tools`], resuming them after a crash;
//! * [`review`]: human decisions about tool calls; [`memory`]: long-term memory and recall;
//! * [`policy`]: limits, time to live, assistants; [`maintenance`]: expiry, erasure, repair;
//! * [`store`]: the four stores, and how to write another one; [`import`]: sessions of other programs;
//! * [`log`] and [`rules`]: the entries of a log and the pure functions over them;
//! * `testing` (feature `testing`): a scripted model, counting tools, a failing store, for tests.
//!
//! Handles fix the principal and the session of a call. The methods of [`Tenure`] are the same operations with
//! both as parameters, for servers that act on behalf of many users.

mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod engine;
mod executors;
mod handle;
mod home;
pub mod import;
pub mod maintenance;
pub mod memory;
mod open;
pub mod private_files;
pub mod review;
pub mod rules;
pub mod run;
pub mod session;
pub mod store;
mod tenure;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod types;

pub use clock::Clock;
pub use engine::options::Options;
pub use executors::embedder::Embedder;
pub use executors::model::Model;
pub use executors::tools::Tools;
pub use handle::{SessionHandle, UserHandle};
pub use rules::prompt::history;
pub use rules::session::{Checkpoint, Point, Session};
pub use run::executors::{Executors, RunEvent, TurnOutcome};
pub use run::request::RunRequest;
pub use session::append::Append;
pub use session::checkpoint::{Fork, Rewind};
pub use session::lifecycle::NewSession;
pub use tenure::Tenure;
pub use types::assistant::Assistant;
pub use types::entry::SessionPatch;
pub use types::error::{Error, Result};
pub use types::error_source::{BoxError, ErrorSource};
pub use types::id::{Principal, Seq, SessionId, Tenant, User};
pub use types::message::{Message, Role};
pub use types::model::ModelError;
pub use types::policy::{Limits, Policy, Window};
pub use types::tool::{Tool, ToolError, ToolOutput};

/// Policies: time to live, retention, prompt window, tool cache, checkpoints, review rules; and the configuration
/// of assistants, which override them.
///
/// ```
/// use std::time::Duration;
/// use tenure::{Assistant, Options, Tenure, Window};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> tenure::Result<()> {
/// let mut options = Options::default();
/// options.policy.ttl = Some(Duration::from_hours(24));
/// options.policy.window = Window { max_turns: Some(20), max_tokens: None };
/// let tenure = Tenure::open_with("memory:", options).await?;
/// tenure.declare(Assistant { name: "support".into(), instructions: Some("Be brief.".into()), ..Assistant::default() });
/// # Ok(())
/// # }
/// ```
pub mod policy {
    pub use crate::rules::redaction::{MAX_PATTERN_BYTES, MAX_REDACTION_RULES, Redaction, RedactionRule};
    pub use crate::types::assistant::{
        Assistant, CacheConfig, MemoryConfig, RateLimitConfig, RunConfig, SessionConfig, WindowConfig,
    };
    pub use crate::types::byte_size::ByteSize;
    pub use crate::types::human_duration::HumanDuration;
    pub use crate::types::policy::{
        CachePolicy, CheckpointPolicy, CompactionPolicy, HistoryMode, Limits, MemoryPolicy, MemoryScope, OnDisconnect,
        Policy, ReviewRule, RunPolicy, Window, matches_pattern,
    };
    pub use crate::types::tool_source::{
        EnvName, HttpSource, McpSource, MetadataSource, PythonSource, Secret, ToolSource,
    };
}

/// The log of a session: its records and entries, and its head, the index row that is derived from them.
///
/// ```
/// use tenure::log::{Entry, Record};
/// use tenure::{Message, Tenure};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> tenure::Result<()> {
/// let tenure = Tenure::open("memory:").await?;
/// let session = tenure.user("acme", "ada")?.create_session().await?;
/// session.append([Message::user("hi")]).await?;
/// let log: Vec<Record> = session.export().await?.log;
/// assert!(matches!(log[0].entry, Entry::Created(_)));
/// assert!(matches!(log[1].entry, Entry::Message(_)));
/// # Ok(())
/// # }
/// ```
pub mod log {
    pub use crate::types::blob::{Blob, BlobId, BlobRef};
    pub use crate::types::decode_error::DecodeError;
    pub use crate::types::digest::{LogDigest, MAX_DIGEST_CALLS, VisibleHash};
    pub use crate::types::entry::{
        CheckpointEntry, Entry, LeaseClaim, MessageEntry, Origin, Parent, Record, RewindEntry, SessionCreated,
    };
    pub use crate::types::head::{Head, InstructionSpan, Lease, LogEnd, OpenReview, PromptPrefix};
    pub use crate::types::log_hash::LogHash;
    pub use crate::types::media::MIN_BLOB_TEXT;
}

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct ReadmeExamples;
