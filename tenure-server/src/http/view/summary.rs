//! View of a session's summary.

use serde::Serialize;
use tenure::{Seq, session::Summary};
use utoipa::ToSchema;

/// A summary that models are shown in place of the oldest messages. The messages stay.
#[derive(Debug, Serialize, ToSchema)]
pub struct SummaryView {
    /// The text of the summary.
    pub text: String,
    /// The sequence number of the last record it covers.
    pub upto: Seq,
    /// The number of messages it covers.
    pub position: usize,
    /// When it was written.
    #[schema(format = DateTime)]
    pub created_at: String,
}

impl From<&Summary> for SummaryView {
    fn from(s: &Summary) -> Self {
        Self { text: s.text(), upto: s.upto, position: s.position, created_at: s.at.to_string() }
    }
}
