//! Identifiers and principals. Names are validated once, when they are parsed; a value of these types is
//! always valid.

use crate::types::excerpt::excerpt;
use crate::types::quota::Quota;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, sync::Arc};

/// The sequence number of a record in its log: 1, 2, 3 … without gaps. A fork continues the numbering of its
/// parent (D-002).
pub type Seq = u64;

/// Maximum length of a session id, tenant, user, label or other name, in bytes (D-020).
pub const MAX_NAME_BYTES: usize = 128;

/// An invalid id, user, tenant or label. Converts into [`Error::Invalid`](crate::Error::Invalid).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidName {
    /// The name of the invalid parameter.
    pub param: &'static str,
    /// A description of what is wrong.
    pub message: String,
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $param:literal, $check:path) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Validates a name.
            pub fn new(name: impl AsRef<str>) -> Result<Self, InvalidName> {
                let name = name.as_ref();
                match $check(name) {
                    Ok(()) => Ok(Self(name.into())),
                    Err(reason) => {
                        let message = format!("{name} is not a valid {}: {reason}", $param, name = excerpt(name));
                        Err(InvalidName { param: $param, message })
                    }
                }
            }

            /// Returns the name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }

        impl FromStr for $name {
            type Err = InvalidName;
            fn from_str(s: &str) -> Result<Self, InvalidName> {
                Self::new(s)
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidName;
            fn try_from(s: String) -> Result<Self, InvalidName> {
                Self::new(s)
            }
        }

        impl TryFrom<&str> for $name {
            type Error = InvalidName;
            fn try_from(s: &str) -> Result<Self, InvalidName> {
                Self::new(s)
            }
        }

        impl From<$name> for String {
            fn from(n: $name) -> String {
                n.as_str().to_owned()
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

/// Checks an identifier: 1 to 128 bytes of `A-Z a-z 0-9 . _ : -`, not starting with a dot (D-020).
fn check_id(s: &str) -> Result<(), &'static str> {
    if s.is_empty() || s.len() > MAX_NAME_BYTES {
        return Err("it must have 1 to 128 characters");
    }
    if s.starts_with('.') {
        return Err("it must not start with a dot");
    }
    if !s.bytes().all(|b| b.is_ascii_alphanumeric() || b"._:-".contains(&b)) {
        return Err("only A-Z a-z 0-9 . _ : - are allowed");
    }
    Ok(())
}

/// Checks a name: 1 to 128 bytes without control characters.
pub(crate) fn check_text(s: &str) -> Result<(), &'static str> {
    if s.is_empty() || s.len() > MAX_NAME_BYTES {
        return Err("it must have 1 to 128 bytes");
    }
    if s.chars().any(char::is_control) {
        return Err("control characters are not allowed");
    }
    Ok(())
}

/// Checks a checkpoint label: a name that does not consist of digits only.
fn check_label(s: &str) -> Result<(), &'static str> {
    check_text(s)?;
    if s.bytes().all(|b| b.is_ascii_digit()) {
        return Err("digits alone denote a position; add a letter");
    }
    Ok(())
}

/// Accepts `rev_12_SESSION` regardless of its length, because the session id alone may have the maximum
/// length; or any valid id, because older logs contain such review ids.
fn check_review(s: &str) -> Result<(), &'static str> {
    let parts = s.strip_prefix("rev_").and_then(|s| s.split_once('_'));
    match parts {
        Some((seq, session)) if seq.parse::<Seq>().is_ok() && check_id(session).is_ok() => Ok(()),
        _ => check_id(s),
    }
}

name! {
    /// The id of a session, chosen by the client or generated. It is never a credential.
    SessionId, "session_id", check_id
}
name! {
    /// A tenant: the unit of isolation. Every key in every store starts with it.
    Tenant, "tenant", check_id
}
name! {
    /// A person or program within a tenant. Any text without control characters.
    User, "user", check_text
}
name! {
    /// The name of a checkpoint. It must not consist of digits only, because digits denote a position.
    CheckpointLabel, "label", check_label
}
name! {
    /// The id of a run.
    RunId, "run_id", check_id
}
name! {
    /// The id of a human review. It contains the record that opened the review, and the session.
    ReviewId, "review_id", check_review
}

impl SessionId {
    /// Generates a unique id that sorts by creation time (UUIDv7).
    pub fn generate() -> Self {
        Self(uuid::Uuid::now_v7().to_string().into())
    }
}

impl RunId {
    /// Generates a unique id that sorts by creation time (`run_` and a UUIDv7).
    pub fn generate() -> Self {
        Self(format!("run_{}", uuid::Uuid::now_v7().simple()).into())
    }
}

impl ReviewId {
    /// Returns the id of the review that record `seq` of a session opens.
    pub fn of(session: &SessionId, seq: Seq) -> Self {
        Self(format!("rev_{seq}_{session}").into())
    }

    /// Splits `rev_SEQ_SESSION` into its sequence number and its session.
    fn parts(&self) -> Option<(&str, &str)> {
        self.as_str().strip_prefix("rev_")?.split_once('_')
    }

    /// Returns the record that opened the review. `None` if the id does not have the form of [`ReviewId::of`].
    pub fn seq(&self) -> Option<Seq> {
        self.parts()?.0.parse().ok()
    }

    /// Returns the session of the review. `None` if the id does not have the form of [`ReviewId::of`].
    pub fn session(&self) -> Option<SessionId> {
        SessionId::new(self.parts()?.1).ok()
    }
}

impl Default for Tenant {
    fn default() -> Self {
        Self("default".into())
    }
}

impl Default for User {
    fn default() -> Self {
        Self("default".into())
    }
}

/// The sessions that a principal has access to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessScope {
    /// Only the sessions of its own user. Those of other users are reported as not found.
    #[default]
    Own,
    /// All sessions of its tenant.
    Tenant,
}

/// The caller of an operation: a tenant, a user in it, and the scope of its access.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Principal {
    /// The tenant.
    pub tenant: Tenant,
    /// The acting user, who becomes the owner of new sessions. A fork belongs to the owner of its source.
    pub user: User,
    /// Whether the principal has access to other users' sessions too.
    pub scope: AccessScope,
    /// The storage quota. `None` means unlimited.
    pub quota: Option<Quota>,
}

impl Principal {
    /// Creates a principal with access to its own sessions only.
    pub fn new(tenant: &str, user: &str) -> Result<Self, InvalidName> {
        Ok(Self { tenant: Tenant::new(tenant)?, user: User::new(user)?, scope: AccessScope::Own, quota: None })
    }

    /// Creates an administrator of a tenant, who has access to every session in it and acts as the user
    /// `default`.
    pub fn tenant_wide(tenant: &str) -> Result<Self, InvalidName> {
        Ok(Self { tenant: Tenant::new(tenant)?, user: User::default(), scope: AccessScope::Tenant, quota: None })
    }

    /// Returns the key of a session in this principal's tenant.
    pub fn key(&self, session: &SessionId) -> SessionKey {
        SessionKey { tenant: self.tenant.clone(), session: session.clone() }
    }
}

/// The key of a session in a store: its tenant and its id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionKey {
    /// The tenant.
    pub tenant: Tenant,
    /// The id of the session.
    pub session: SessionId,
}

impl fmt::Display for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tenant, self.session)
    }
}
