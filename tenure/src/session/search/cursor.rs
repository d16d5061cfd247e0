//! The position from which a search continues.

use crate::store::query::SessionCursor;
use crate::types::error::{Error, Result};
use crate::types::id::Seq;
use std::fmt;
use std::str::FromStr;

/// A position in a search, opaque to clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchCursor(pub(super) SearchPosition);

/// A position in the results of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SearchPosition {
    /// By time: after this session, or within it.
    Time { session: SessionCursor, scan_position: Option<ScanPosition> },
    /// By relevance: after this many results.
    Rank(usize),
}

/// A position in a session: records up to `upto` have not been searched yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScanPosition {
    pub upto: Seq,
    /// The number of messages up to `upto`. It is valid only if the log still ends at `seq`.
    pub messages: usize,
    pub seq: Seq,
}

impl SearchCursor {
    /// The position after a session, or within it.
    pub(super) fn in_session(session: SessionCursor, scan_position: Option<ScanPosition>) -> Self {
        Self(SearchPosition::Time { session, scan_position })
    }
}

impl fmt::Display for SearchCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            SearchPosition::Time { session, scan_position: None } => write!(f, "{session}"),
            SearchPosition::Time { session, scan_position: Some(ScanPosition { upto, messages, seq }) } => {
                write!(f, "s~{upto}~{messages}~{seq}~{session}")
            }
            SearchPosition::Rank(rank) => write!(f, "r~{rank}"),
        }
    }
}

impl FromStr for SearchCursor {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let invalid = || Error::invalid("cursor", "not a valid cursor; use the one that the previous page returned");
        if let Some(rank) = s.strip_prefix("r~") {
            return Ok(Self(SearchPosition::Rank(rank.parse().map_err(|_| invalid())?)));
        }
        // The position of the session is last, because an id may contain any character.
        let Some(rest) = s.strip_prefix("s~") else { return Ok(Self::in_session(s.parse()?, None)) };
        let mut parts = rest.splitn(4, '~');
        let mut number = || parts.next().and_then(|n| n.parse::<Seq>().ok()).ok_or_else(invalid);
        let upto = number()?;
        let messages = number()? as usize;
        let seq = number()?;
        let session = parts.next().ok_or_else(invalid)?.parse()?;
        Ok(Self::in_session(session, Some(ScanPosition { upto, messages, seq })))
    }
}
