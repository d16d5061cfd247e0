//! Types of the callbacks that an application registers: before a session expires or is evicted,
//! and when a session moves to another id.

use crate::rules::session::Session;
use crate::types::error::Result;
use crate::types::error_source::BoxError;
use crate::types::head::Head;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// The reason why a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndReason {
    /// The session was idle for longer than its time to live.
    Expired,
    /// There were more than `max_sessions` live sessions, and this one was idle the longest (D-017).
    Evicted,
}

/// The function type of [`SessionEndHook`].
pub(crate) type SessionEndFn =
    dyn Fn(Arc<Session>, EndReason) -> Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>> + Send + Sync;

/// A callback that is called with a session before it expires or is evicted.
#[derive(Clone)]
pub(crate) struct SessionEndHook(pub Arc<SessionEndFn>);

impl fmt::Debug for SessionEndHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionEndHook")
    }
}

/// The function type of [`ArchiveHook`]: it gets the head of the expired session and the head under
/// the new id.
pub(crate) type ArchiveFn =
    dyn Fn(Head, Head) -> Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>> + Send + Sync;

/// A callback that is called when a session moves to another id.
#[derive(Clone)]
pub(crate) struct ArchiveHook(pub Arc<ArchiveFn>);

impl fmt::Debug for ArchiveHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ArchiveHook")
    }
}
