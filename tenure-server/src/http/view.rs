//! Views: sessions and their parts in the shape of the API. Messages are copied into the response as stored
//! JSON text, without being parsed or serialized again.

mod checkpoint;
mod errors;
mod json;
mod message;
mod response;
mod run;
mod session;
mod summary;
mod title;

pub use checkpoint::{CheckpointList, CheckpointView, CheckpointWhole, PendingCall, PlaceBody, checkpoint_state};
pub use errors::{CreateErrors, ListErrors, LookupErrors, ReadErrors, UpdateErrors, WriteErrors};
pub use json::{list, to_json, with_fields};
pub use message::{DiscardedList, DiscardedView, MessageList, MessageView, discarded, messages};
pub use response::{json, session, shared_body};
pub use run::{CachedView, RunView};
pub use session::{ParentView, SessionList, SessionView, SessionWhole, full_session};
pub use summary::SummaryView;
pub use title::{SCANNED_MESSAGES, display_title};
