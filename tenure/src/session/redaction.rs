//! Redaction in operations on sessions.

use crate::rules::redaction::Redaction;
use crate::tenure::Tenure;
use std::borrow::Cow;

impl Tenure {
    /// What must not leave the log.
    pub fn redaction(&self) -> &Redaction {
        &self.engine.options().redaction
    }

    /// A text as it may leave the log, and the names of the rules that matched: for whoever writes it anywhere else.
    pub fn redact<'t>(&self, text: &'t str) -> (Cow<'t, str>, Vec<&str>) {
        self.redaction().apply(text)
    }
}
