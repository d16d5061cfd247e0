//! How much a principal may store.

/// How much a caller may have stored. `None`: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Whose sessions count.
    pub scope: QuotaScope,
    /// Sessions that are active or paused.
    pub max_sessions: Option<u64>,
    /// Bytes of messages and media, those of deleted sessions included until they are purged.
    pub max_stored_bytes: Option<u64>,
}

/// Whose sessions count towards a quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QuotaScope {
    /// Those of the caller's user.
    #[default]
    User,
    /// Those of all users of the tenant.
    Tenant,
}
