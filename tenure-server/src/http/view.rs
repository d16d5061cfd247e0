//! Sessions and their parts as clients see them. Messages are put into the answer as the text they are: nothing is parsed or written anew.

mod checkpoint;
mod errors;
mod json;
mod message;
mod response;
mod run;
mod session;
mod summary;

pub use checkpoint::{CheckpointList, CheckpointView, CheckpointWhole, PendingCall, PlaceBody, state};
pub use errors::{Asking, Ending, Finding, Making, Reading, Writing};
pub use json::{list, text, with};
pub use message::{DiscardedList, DiscardedView, MessageList, MessageView, discarded, messages};
pub use response::{json, session, shared};
pub use run::{CachedView, RunView};
pub use session::{ParentView, SessionList, SessionView, SessionWhole, whole};
pub use summary::SummaryView;
