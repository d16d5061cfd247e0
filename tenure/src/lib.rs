//! Durable sessions for LLM agents.
//!
//! Models are stateless; agents are not. Tenure persists message history with tool calls and media, finds a session by id or by
//! content, and merges a client's request with the stored messages. It provides checkpoints, rewind and fork; runs that resume after a
//! crash; human review with an audit trail; a tool-result cache; long-term memory; expiry, retention and erasure.
//!
//! > **A session is a log of entries. Everything else is computed from it.**
//!
//! ```
//! use tenure::{Message, NewSession, Point, Principal, Tenure, Window, history};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tenure::Result<()> {
//! let tenure = Tenure::open("memory:").await?; // or jsonl:DIR, sqlite:FILE, postgres://…
//! let ada = Principal::new("acme", "ada")?;
//! let session = tenure.create(&ada, NewSession::default()).await?;
//! let id = session.info.session_id.clone();
//!
//! tenure.append(&ada, &id, vec![Message::user("hello"), Message::assistant("Hello, Ada.")]).await?;
//! let branch = tenure.fork(&ada, &id, Point::Turn(1), None).await?; // nothing is copied
//! tenure.append(&ada, &id, vec![Message::user("and again")]).await?;
//! tenure.rewind(&ada, &id, "turn-1").await?; // discarded messages stay in the log
//!
//! let session = tenure.load(&ada, &id).await?;
//! assert_eq!(history(&session, &Window::default()).len(), 2); // what a model is sent
//! # assert_eq!(tenure.load(&ada, &branch.info.session_id).await?.messages.len(), 2);
//! # Ok(())
//! # }
//! ```
//!
//! Where to look:
//!
//! * **types**: [`Message`], [`Entry`] and [`Record`], [`Head`], [`Principal`], [`Policy`], [`Error`];
//! * **rules**, pure functions: [`Session::fold`] computes a session from its log, [`reconcile()`] merges a client's request with it,
//!   [`history()`] is what a model is sent;
//! * **the store contract**: [`store::Store`], with four implementations and one test suite (feature `conformance`);
//! * **operations**: the methods of [`Tenure`]. Each loads, asks a rule, and commits;
//! * **[`import`]**: sessions of other programs, as an [`Export`];
//! * **`testing`** (feature `testing`): a scripted model, counting tools, a failing store, temporary stores, for tests.

mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod engine;
mod executors;
pub mod import;
mod maintenance;
mod memory;
mod open;
pub mod private_files;
mod review;
mod rules;
mod run;
mod session;
pub mod store;
mod tenure;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod types;

pub use clock::{Clock, ClockOrigin, ManualClock};
pub use engine::hooks::EndReason;
pub use engine::list::SessionPage;
pub use engine::options::Options;
pub use engine::quota::Usage;
pub use engine::turn_lock::OnBusy;
pub use executors::embedder::Embedder;
pub use executors::model::{EagerModelCall, Model, ModelStream, Prompt};
pub use executors::tools::{ToolInvocation, Tools};
pub use maintenance::doctor::RepairReport;
pub use maintenance::erase::ErasureReceipt;
pub use maintenance::sweep::{MAX_CLOCK_JUMP, SweepReport};
pub use memory::dream::{Dream, DreamRules, PromotedMemory};
pub use memory::memories::{MemoryTarget, NewMemory};
pub use memory::recall::{InjectedMemory, RecallHit, RecallResult};
pub use review::audit::{AuditExport, AuditRange, AuditTrail};
pub use review::decide::{ReviewFilter, ReviewInput, ReviewPage};
pub use rules::answer::ModelAnswer;
pub use rules::checkpoint::make_checkpoints;
pub use rules::decision_chain::AuditedDecision;
pub use rules::next::{CallAction, NextStep, PendingCall, ReviewRequest, RunRules, next};
pub use rules::overlay::Overlay;
pub use rules::prompt::{MEDIA_TOKENS, NO_RESULT, active_instructions, history, is_valid, tokens};
pub use rules::reconcile::plan::{IncomingRequest, NewMessage, ReconcilePlan, ReplyTo};
pub use rules::reconcile::reconcile;
pub use rules::redaction::{MAX_PATTERN_BYTES, MAX_REDACTION_RULES, Redaction, RedactionRule};
pub use rules::session::{
    Checkpoint, Point, ResolvedPoint, Review, Run, Session, StoredMessage, Summary, ToolCallStart,
};
pub use rules::summary;
pub use run::begin::{OpenRun, TurnStart};
pub use run::compact::CompactionResult;
pub use run::executors::{Executors, RunEvent, StoredAnswer, ToolProgress, TurnError, TurnOutcome};
pub use run::request::{OnExpired, ReconcileReport, TurnRequest};
pub use run::resume::RunEvents;
pub use run::tool_cache::{CachedToolResult, cache_key};
pub use session::append::{Append, AppendResult, AutoCheckpoint};
pub use session::checkpoint::{DiscardedMessages, RewindResult};
pub use session::edit::{fork_session, list_checkpoints, resume_session};
pub use session::lifecycle::NewSession;
pub use session::search::{MessageHit, SearchCursor, SearchHit, SearchPage, SearchRequest};
pub use session::transcript::{JsonlTranscript, TranscriptProblem, iter_transcripts, read_transcript};
pub use session::transfer::export::{EXPORT_FORMAT, Export, ExportedCheckpoint};
pub use store::finding::{Finding, Orphan, Remedy};
pub use store::query::{OwnerFilter, SessionQuery};
pub use tenure::Tenure;
pub use types::assistant::{Assistant, CacheConfig, MemoryConfig, RunConfig, SessionConfig, WindowConfig};
pub use types::blob::{Blob, BlobId, BlobRef};
pub use types::byte_size::ByteSize;
pub use types::decision_chain::DecisionChain;
pub use types::decision_chain::DecisionHash;
pub use types::digest::{LogDigest, MAX_DIGEST_CALLS, VisibleHash};
pub use types::entry::{
    CheckpointEntry, Decision, Entry, LeaseClaim, MessageEntry, Origin, Parent, Patch, Record, ReviewDecided,
    ReviewOpened, ReviewTimeout, RewindEntry, RunOutcome, SessionCreated, SessionPatch,
};
pub use types::error::{Error, Result};
pub use types::excerpt::excerpt;
pub use types::head::{Head, InstructionSpan, Lease, LogEnd, OpenReview, PromptPrefix, ReviewIndexLabel, SessionInfo};
pub use types::human_duration::HumanDuration;
pub use types::id::{
    AccessScope, CheckpointLabel, InvalidName, MAX_NAME_BYTES, Principal, ReviewId, RunId, Seq, SessionId, SessionKey,
    Tenant, User,
};
pub use types::log_hash::LogHash;
pub use types::media::MIN_BLOB_TEXT;
pub use types::memory::{Memory, MemorySource};
pub use types::message::{MAX_DEPTH, Message, Role, ToolCall};
pub use types::model::{ModelChunk, ModelError};
pub use types::policy::HistoryMode;
pub use types::policy::{
    CachePolicy, CheckpointPolicy, CompactionPolicy, Limits, MemoryPolicy, MemoryScope, OnDisconnect, Policy,
    ReviewRule, RunPolicy, Window, matches_pattern,
};
pub use types::quota::{Quota, QuotaScope};
pub use types::raw_object::RawObject;
pub use types::status::Status;
pub use types::tool::{Tool, ToolError, ToolOutput};
pub use types::tool_source::{EnvName, HttpSource, McpSource, PythonSource, Secret, ToolSource};

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct ReadmeExamples;
