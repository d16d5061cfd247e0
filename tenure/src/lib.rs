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
//! * **[`foreign`]**: other people's sessions become an [`Export`].

mod answer;
mod append;
mod archive;
mod assistant;
mod audit;
mod batch;
mod busy;
mod cache;
mod checkpoint;
mod clock;
mod compact;
#[cfg(feature = "conformance")]
pub mod conformance;
mod doctor;
mod dream;
mod edit;
mod embed;
mod entry;
mod error;
mod fields;
pub mod foreign;
mod hands;
mod head;
mod history;
mod hot;
mod id;
mod idempotency;
mod lease;
mod list;
mod load;
mod log_hash;
mod look;
mod mark;
mod matching;
mod media;
mod memory;
mod memory_tool;
mod message;
mod metadata;
mod model;
mod needle;
mod next;
mod policy;
pub mod private_files;
mod quota;
mod recall;
mod reconcile;
mod redact;
mod review;
mod reviewed;
mod run;
mod runs;
mod schedule;
mod search;
mod session;
mod sift;
mod splice;
pub mod store;
pub mod summary;
mod sweep;
mod tail;
mod tenure;
mod tool_source;
mod tools;
mod transcript;
mod transfer;
mod vectors;
mod work;

pub use answer::Answer;
pub use append::{Append, Appended, AutoCheckpoint};
pub use assistant::{Assistant, CacheSize, Lifetime, MemorySize, RunLimits, ShortTerm};
pub use audit::{AuditExport, AuditRange, AuditTrail, AuditedDecision, DecisionChain, DecisionHash};
pub use busy::OnBusy;
pub use cache::{Cached, cache_key};
pub use checkpoint::{Discarded, Rewind, make_checkpoints};
pub use clock::{Clock, Manual, Start};
pub use compact::Compacted;
pub use doctor::Repaired;
pub use dream::{Dream, DreamRules, Promoted};
pub use edit::{fork_session, list_checkpoints, resume_session};
pub use embed::Embedder;
pub use entry::{
    Change, Checkpointed, Claim, Created, Decision, Entry, InfoChange, Origin, Outcome, Parent, Post, Record,
    ReviewDecided, ReviewOpened, Rewound, Timeout,
};
pub use error::{Error, Result, excerpt};
pub use fields::Fields;
pub use hands::{Answered, Hands, Heard, Progress, Replay, TurnError};
pub use head::{
    Front, Head, Lead, Lease, LogEnd, MAX_MARK_CALLS, Mark, OpenReview, Reviewing, SessionInfo, Status, VisibleHash,
};
pub use history::{MEDIA_TOKENS, NO_RESULT, history, is_valid, lead, tokens};
pub use id::{Key, Label, MAX_NAME_BYTES, Principal, Reach, ReviewId, RunId, Seq, SessionId, Tenant, User};
pub use list::Page;
pub use log_hash::LogHash;
pub use media::{Blob, BlobId, Cut, MIN_BLOB_TEXT};
pub use memory::{Memory, Mind, Remember, Source};
pub use message::{MAX_DEPTH, Message, Role, ToolCall};
pub use model::{First, Model, ModelError, Piece, Pieces, Prompt};
pub use next::{Doing, Job, Question, Rules, Step, next};
pub use policy::{
    CachePolicy, Checkpoints, Compact, Limits, MemoryPolicy, OnDisconnect, Period, Policy, Quota, QuotaScope,
    ReviewRule, RunPolicy, Scope, Window, matches_pattern,
};
pub use quota::Usage;
pub use recall::{Recall, Recalled, Told};
pub use reconcile::{HistoryMode, Incoming, NewMessage, Overlay, Plan, ReplyTo, reconcile};
pub use redact::{MAX_PATTERN_BYTES, MAX_REDACTION_RULES, Redaction, RedactionRule};
pub use review::{ReviewPage, Reviews, Verdict};
pub use run::{Ask, Begun, OnExpired, Spliced, Turn};
pub use runs::Followed;
pub use search::{Found, FoundMessage, FoundPage, Search, SearchCursor};
pub use session::{Checkpoint, Place, Point, Review, Run, Said, Session, Started, Summary};
pub use store::{Cure, Finding, Orphan, Query, Whose};
pub use sweep::{Ending, MAX_CLOCK_JUMP, Receipt, Report};
pub use tenure::{New, Options, Tenure};
pub use tool_source::{EnvName, HttpSource, McpSource, PythonSource, Secret, Size, ToolSource};
pub use tools::{Call, Output, Tool, ToolError, Tools};
pub use transcript::{JsonlTranscript, Problem, iter_transcripts, read_transcript};
pub use transfer::{EXPORT_FORMAT, Export, ExportedCheckpoint};

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct ReadmeExamples;
