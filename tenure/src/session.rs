//! Operations on sessions: lifecycle, append, checkpoints, forks, search, transfer and expiry.
//!
//! ```
//! use tenure::session::{SessionQuery, OwnerFilter};
//! use tenure::{Message, NewSession, Tenure};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tenure::Result<()> {
//! let tenure = Tenure::open("memory:").await?;
//! let ada = tenure.user("acme", "ada")?;
//! let new = NewSession { title: Some("Weather".into()), tags: vec!["demo".into()], ..NewSession::default() };
//! let session = ada.create_session_with(new).await?;
//! session.append([Message::user("Is it warm?"), Message::assistant("Yes.")]).await?;
//!
//! let owner = OwnerFilter::User(ada.principal().tenant.clone(), ada.principal().user.clone());
//! let page = ada.sessions(SessionQuery { tags: vec!["demo".into()], ..SessionQuery::new(owner, 10) }).await?;
//! assert_eq!(page.heads[0].info.title.as_deref(), Some("Weather"));
//! # Ok(())
//! # }
//! ```

pub(crate) mod append;
pub(crate) mod archive;
pub(crate) mod assistants;
pub(crate) mod checkpoint;
pub(crate) mod edit;
pub(crate) mod evict;
pub(crate) mod expire;
pub(crate) mod find;
pub(crate) mod lifecycle;
pub(crate) mod merge;
pub(crate) mod search;
pub(crate) mod session_store;
pub(crate) mod transcript;
pub(crate) mod transfer;
pub(crate) mod view;

pub use crate::clock::{ClockOrigin, ManualClock};
pub use crate::engine::list::SessionPage;
pub use crate::home::expand_home;
pub use crate::rules::checkpoint::make_checkpoints;
pub use crate::rules::session::{Checkpoint, Point, ResolvedPoint, Session, StoredMessage, Summary};
pub use crate::store::query::{OwnerFilter, SessionQuery};
pub use crate::types::entry::{Patch, SessionPatch};
pub use crate::types::file_name::{file_name, session_file_name};
pub use crate::types::head::SessionInfo;
pub use crate::types::id::{
    AccessScope, CheckpointLabel, InvalidName, MAX_NAME_BYTES, MAX_SESSION_ID_CHARS, Principal, SessionId, SessionKey,
    Tenant, User,
};
pub use crate::types::message::{MAX_DEPTH, Message, Role, ToolCall};
pub use crate::types::raw_object::RawObject;
pub use crate::types::status::Status;
pub use append::{Append, AppendResult, AutoCheckpoint};
pub use checkpoint::{DiscardedMessages, Fork, NewCheckpoint, Rewind, RewindResult};
pub use edit::fork_session;
pub use lifecycle::{NewSession, SessionUpdate};
pub use search::cursor::SearchCursor;
pub use search::request::{MessageHit, SearchHit, SearchPage, SearchRequest, SearchSort};
pub use session_store::{SessionStore, resume_session};
pub use transcript::{JsonlTranscript, TranscriptProblem, iter_transcripts, read_transcript};
pub use transfer::export::{EXPORT_FORMAT, Export, ExportedCheckpoint};
