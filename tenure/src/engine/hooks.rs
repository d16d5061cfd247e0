//! Callbacks that an application registers: before a session ends, after a checkpoint, when a session moves to another id.

use crate::rules::session::Session;
use crate::types::error::Result;
use crate::types::head::Head;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// Why a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It was idle for longer than its time to live.
    Expired,
    /// There were too many, and it was idle the longest.
    Evicted,
}

pub(crate) type HookFn =
    dyn Fn(Arc<Session>, Ending) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send + Sync;

/// What is called with a session before it goes.
#[derive(Clone)]
pub(crate) struct Hook(pub Arc<HookFn>);

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

pub(crate) type ArchiveFn =
    dyn Fn(Head, Head) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send + Sync;

/// A callback for sessions that move to another id.
#[derive(Clone)]
pub(crate) struct ArchiveHook(pub Arc<ArchiveFn>);

impl fmt::Debug for ArchiveHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ArchiveHook")
    }
}
