//! Sessions that last, for LLM agents.
//!
//! A model forgets everything between two requests; an agent must not. Tenure keeps what was said, with tool turns and pictures,
//! finds it again by id or by content, and brings a client's view and the stored one together. There are checkpoints, rewind,
//! fork and resume; a cache of tool results; expiry, retention and erasure.
//!
//! > **A session is a log of entries. Everything else is computed from it.**
//!
//! ```
//! use tenure::{Message, New, Point, Principal, Tenure, Window, history};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tenure::Result<()> {
//! let tenure = Tenure::open("memory:").await?; // or jsonl:DIR, sqlite:FILE, postgres://…
//! let ada = Principal::new("acme", "ada")?;
//! let session = tenure.create(&ada, New::default()).await?;
//! let id = session.info.session_id.clone();
//!
//! tenure.append(&ada, &id, vec![Message::user("hello"), Message::assistant("Hello, Ada.")]).await?;
//! let branch = tenure.fork(&ada, &id, Point::Turn(1), None).await?; // nothing is copied
//! tenure.append(&ada, &id, vec![Message::user("and again")]).await?;
//! tenure.rewind(&ada, &id, "turn-1").await?; // what is cut off stays in the log
//!
//! let session = tenure.load(&ada, &id).await?;
//! assert_eq!(history(&session, &Window::default()).len(), 2); // what a model may be shown
//! # assert_eq!(tenure.load(&ada, &branch.info.session_id).await?.messages.len(), 2);
//! # Ok(())
//! # }
//! ```
//!
//! The map, from the inside out:
//!
//! * **words**: [`Message`], [`Entry`] and [`Record`], [`Head`], [`Principal`], [`Policy`], [`Error`];
//! * **rules**, pure and total: [`Session::fold`] says what a log means, [`reconcile()`] brings a client's view and ours together,
//!   [`history()`] says what a model may be shown;
//! * **the contract**: [`store::Store`], kept by four stores and checked by one suite (feature `conformance`);
//! * **verbs**: the methods of [`Tenure`]. Each loads, asks a rule, and commits;
//! * **[`import`]**: other people's sessions become an [`Export`].

mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod engine;
mod executors;
pub mod import;
pub use import as foreign;
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
mod types;

pub use clock::{Clock, Manual, Start};
pub use engine::hooks::Ending;
pub use engine::list::Page;
pub use engine::options::Options;
pub use engine::quota::Usage;
pub use engine::turn_lock::OnBusy;
pub use executors::embedder::Embedder;
pub use executors::model::{First, Model, Pieces, Prompt};
pub use executors::tools::{Call, Tools};
pub use maintenance::doctor::Repaired;
pub use maintenance::erase::Receipt;
pub use maintenance::sweep::{MAX_CLOCK_JUMP, Report};
pub use memory::dream::{Dream, DreamRules, Promoted};
pub use memory::memories::{Mind, Remember};
pub use memory::recall::{Recall, Recalled, Told};
pub use review::audit::{AuditExport, AuditRange, AuditTrail};
pub use review::decide::{ReviewPage, Reviews, Verdict};
pub use rules::answer::Answer;
pub use rules::checkpoint::make_checkpoints;
pub use rules::decision_chain::AuditedDecision;
pub use rules::next::{Doing, Job, Question, Rules, Step, next};
pub use rules::overlay::Overlay;
pub use rules::prompt::{MEDIA_TOKENS, NO_RESULT, history, is_valid, lead, tokens};
pub use rules::reconcile::plan::{Incoming, NewMessage, Plan, ReplyTo};
pub use rules::reconcile::reconcile;
pub use rules::redaction::{MAX_PATTERN_BYTES, MAX_REDACTION_RULES, Redaction, RedactionRule};
pub use rules::session::{Checkpoint, Place, Point, Review, Run, Said, Session, Started, Summary};
pub use rules::summary;
pub use run::begin::{Begun, Turn};
pub use run::compact::Compacted;
pub use run::executors::{Answered, Hands, Heard, Progress, Replay, TurnError};
pub use run::request::{Ask, OnExpired, Spliced};
pub use run::resume::Followed;
pub use run::tool_cache::{Cached, cache_key};
pub use session::append::{Append, Appended, AutoCheckpoint};
pub use session::checkpoint::{Discarded, Rewind};
pub use session::edit::{fork_session, list_checkpoints, resume_session};
pub use session::lifecycle::New;
pub use session::search::{Found, FoundMessage, FoundPage, Search, SearchCursor};
pub use session::transcript::{JsonlTranscript, Problem, iter_transcripts, read_transcript};
pub use session::transfer::export::{EXPORT_FORMAT, Export, ExportedCheckpoint};
pub use store::finding::{Cure, Finding, Orphan};
pub use store::query::{Query, Whose};
pub use tenure::Tenure;
pub use types::assistant::{Assistant, CacheSize, Lifetime, MemorySize, RunLimits, ShortTerm};
pub use types::blob::{Blob, BlobId, Cut};
pub use types::byte_size::Size;
pub use types::decision_chain::DecisionChain;
pub use types::decision_chain::DecisionHash;
pub use types::digest::{MAX_MARK_CALLS, Mark, VisibleHash};
pub use types::entry::{
    Change, Checkpointed, Claim, Created, Decision, Entry, InfoChange, Origin, Outcome, Parent, Post, Record,
    ReviewDecided, ReviewOpened, Rewound, Timeout,
};
pub use types::error::{Error, Result};
pub use types::excerpt::excerpt;
pub use types::head::{Front, Head, Lead, Lease, LogEnd, OpenReview, Reviewing, SessionInfo};
pub use types::human_duration::Period;
pub use types::id::{
    InvalidName, Key, Label, MAX_NAME_BYTES, Principal, Reach, ReviewId, RunId, Seq, SessionId, Tenant, User,
};
pub use types::log_hash::LogHash;
pub use types::media::MIN_BLOB_TEXT;
pub use types::memory::{Memory, Source};
pub use types::message::{MAX_DEPTH, Message, Role, ToolCall};
pub use types::model::{ModelError, Piece};
pub use types::policy::HistoryMode;
pub use types::policy::{
    CachePolicy, Checkpoints, Compact, Limits, MemoryPolicy, OnDisconnect, Policy, ReviewRule, RunPolicy, Scope,
    Window, matches_pattern,
};
pub use types::quota::{Quota, QuotaScope};
pub use types::raw_object::Fields;
pub use types::status::Status;
pub use types::tool::{Output, Tool, ToolError};
pub use types::tool_source::{EnvName, HttpSource, McpSource, PythonSource, Secret, ToolSource};

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct ReadmeExamples;
