//! The section `transcripts`: files with the messages of sessions.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

/// One JSONL file per session, one message per line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TranscriptsConfig {
    /// Their directory; none are written if it is empty.
    pub dir: String,
    /// Whether they are updated after each change, not only when a session ends.
    pub live: bool,
}

impl TranscriptsConfig {
    /// Validates the section.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(!self.live || !self.dir.is_empty(), "transcripts.live requires a directory; set transcripts.dir");
        Ok(())
    }
}
