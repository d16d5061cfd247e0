//! Human review of tool calls, and the audit trail of decisions.

pub(crate) mod audit;
pub(crate) mod decide;
