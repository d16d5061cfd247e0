//! Pure functions over the types: folding a log, building a prompt, choosing the next step of a run. No
//! clock, no store, no `async`.
//!
//! ```
//! use tenure::rules::{IncomingRequest, reconcile};
//! use tenure::policy::HistoryMode;
//! use tenure::{Message, Tenure};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tenure::Result<()> {
//! let tenure = Tenure::open("memory:").await?;
//! let session = tenure.user("acme", "ada")?.create_session().await?;
//! session.append([Message::user("hi"), Message::assistant("hello")]).await?;
//!
//! // A client sends its whole history again, with one new message.
//! let messages = [Message::user("hi"), Message::assistant("hello"), Message::user("and now?")];
//! let incoming =
//!     IncomingRequest { messages: &messages, history: HistoryMode::Auto, is_retry: false, has_waited: false };
//! let plan = reconcile(&session.load().await?, &incoming);
//! assert_eq!((plan.matched, plan.append.len()), (2, 1));
//! # Ok(())
//! # }
//! ```

pub(crate) mod answer;
pub(crate) mod checkpoint;
pub(crate) mod decided_calls;
pub(crate) mod decision_chain;
pub(crate) mod digest;
pub(crate) mod head_fold;
pub(crate) mod human_question;
pub(crate) mod matcher;
pub(crate) mod message_words;
pub(crate) mod metadata;
pub(crate) mod next;
pub(crate) mod overlay;
pub(crate) mod partial;
pub(crate) mod prompt;
pub(crate) mod reconcile;
pub(crate) mod redaction;
pub(crate) mod review_notice;
pub(crate) mod run_entries;
pub(crate) mod session;
pub(crate) mod stop_words;
pub mod summary;
pub(crate) mod supersede;
pub(crate) mod terms;
pub(crate) mod text;
pub(crate) mod tool_call_filter;
pub(crate) mod turns;
pub(crate) mod vector_set;

pub use self::next::{CallAction, NextStep, PendingCall, ReviewRequest, RunRules, next};
pub use self::reconcile::plan::{IncomingRequest, NewMessage, ReconcilePlan, ReplyTo};
pub use self::reconcile::reconcile;
pub use crate::types::excerpt::excerpt;
pub use overlay::Overlay;
pub use prompt::{MEDIA_TOKENS, NO_RESULT, active_instructions, history, is_valid, tokens};
