//! Human review of tool calls, and the audit trail of decisions.
//!
//! A run that reaches a tool call under review pauses; [`Tenure::decide`](crate::Tenure::decide) records the decision
//! in the session's log, where decisions form a hash chain, and the run can be resumed.
//!
//! ```
//! use tenure::review::ReviewFilter;
//! use tenure::{Principal, Tenure};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tenure::Result<()> {
//! let tenure = Tenure::open("memory:").await?;
//! let reviewer = Principal::tenant_wide("acme")?;
//! let open = tenure.reviews(&reviewer, &ReviewFilter::Open(None), None, 20).await?;
//! assert!(open.reviews.is_empty());
//! # Ok(())
//! # }
//! ```

pub(crate) mod audit;
pub(crate) mod decide;

pub use crate::rules::decision_chain::AuditedDecision;
pub use crate::rules::session::Review;
pub use crate::types::decision_chain::{DecisionChain, DecisionHash};
pub use crate::types::entry::{Decision, ReviewDecided, ReviewOpened, ReviewTimeout};
pub use crate::types::head::ReviewIndexLabel;
pub use crate::types::id::ReviewId;
pub use audit::{AuditExport, AuditRange, AuditTrail};
pub use decide::{ReviewFilter, ReviewInput, ReviewPage};
