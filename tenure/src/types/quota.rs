//! Storage quotas of principals.

/// A storage quota. `None` in a field means unlimited. Usage is the sum over the heads of the sessions in
/// scope (D-105).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Which sessions count towards the quota.
    pub scope: QuotaScope,
    /// Maximum number of active or paused sessions.
    pub max_sessions: Option<u64>,
    /// Maximum number of bytes of messages and media. Deleted sessions count until they are purged.
    pub max_stored_bytes: Option<u64>,
}

/// Which sessions count towards a quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuotaScope {
    /// The sessions of the caller's user.
    #[default]
    User,
    /// The sessions of all users of the tenant.
    Tenant,
}
