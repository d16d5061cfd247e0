//! Background work on all sessions: expiry, eviction, retention, erasure, checks, repair, backup and
//! restore.
//!
//! ```
//! use tenure::{Principal, Tenure, User};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tenure::Result<()> {
//! let tenure = Tenure::open("memory:").await?;
//! tenure.user("acme", "ada")?.create_session().await?;
//! assert!(tenure.examine(|_| ()).await?.is_empty(), "no damage");
//! let receipt = tenure.erase(&Principal::tenant_wide("acme")?, &User::new("ada")?).await?;
//! assert_eq!(receipt.sessions, 1);
//! # Ok(())
//! # }
//! ```

pub(crate) mod archive;
pub(crate) mod backup;
pub(crate) mod doctor;
pub(crate) mod erase;
pub(crate) mod message_index;
pub(crate) mod restore;
pub(crate) mod sweep;

pub use crate::engine::hooks::EndReason;
pub use crate::engine::quota::Usage;
pub use crate::store::finding::{Finding, Orphan, Remedy};
pub use crate::types::quota::{Quota, QuotaScope};
pub use archive::{BACKUP_FORMAT, BackupSummary};
pub use doctor::RepairReport;
pub use erase::ErasureReceipt;
pub use restore::verify_backup;
pub use sweep::{MAX_CLOCK_JUMP, SweepReport};
