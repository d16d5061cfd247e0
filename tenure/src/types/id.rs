//! Names: who is asking, and which session is meant. Parsed once at the edge, valid ever after.

use crate::types::excerpt::excerpt;
use crate::types::quota::Quota;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, sync::Arc};

/// The place of a record in its log: 1, 2, 3 … without holes. A fork goes on counting where it left its parent.
pub type Seq = u64;

/// Longest session id, tenant, user, label and other name, in bytes.
pub const MAX_NAME_BYTES: usize = 128;

/// An id, user, tenant or label that is not valid. Converts into [`Error::Invalid`](crate::Error::Invalid).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidName {
    /// The parameter that is wrong.
    pub param: &'static str,
    /// What is wrong with it.
    pub message: String,
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $what:literal, $check:path) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks and takes a name.
            pub fn new(name: impl AsRef<str>) -> Result<Self, InvalidName> {
                let name = name.as_ref();
                match $check(name) {
                    Ok(()) => Ok(Self(name.into())),
                    Err(why) => {
                        let message = format!("{name} is not a valid {}: {why}", $what, name = excerpt(name));
                        Err(InvalidName { param: $what, message })
                    }
                }
            }

            /// The name as text.
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

pub(crate) fn check_text(s: &str) -> Result<(), &'static str> {
    if s.is_empty() || s.len() > MAX_NAME_BYTES {
        return Err("it must have 1 to 128 bytes");
    }
    if s.chars().any(char::is_control) {
        return Err("control characters are not allowed");
    }
    Ok(())
}

fn check_label(s: &str) -> Result<(), &'static str> {
    check_text(s)?;
    if s.bytes().all(|b| b.is_ascii_digit()) {
        return Err("digits alone mean a position; add a letter");
    }
    Ok(())
}

/// `rev_12_SESSION`, whatever the length of that; in old logs any id.
fn check_review(s: &str) -> Result<(), &'static str> {
    let parts = s.strip_prefix("rev_").and_then(|s| s.split_once('_'));
    match parts {
        Some((seq, session)) if seq.parse::<Seq>().is_ok() && check_id(session).is_ok() => Ok(()),
        _ => check_id(s),
    }
}

name! {
    /// A session's id, chosen by the client or generated. Never a credential.
    SessionId, "session_id", check_id
}
name! {
    /// Whose data it is. Every key in every store starts with it.
    Tenant, "tenant", check_id
}
name! {
    /// A person or program within a tenant; any text without control characters.
    User, "user", check_text
}
name! {
    /// The name of a checkpoint. Digits alone are a position, not a label.
    Label, "label", check_label
}
name! {
    /// The id of a run.
    RunId, "run_id", check_id
}
name! {
    /// The id of a human review: the record that opened it, and its session.
    ReviewId, "review_id", check_review
}

impl SessionId {
    /// A fresh, unique id that sorts by its time (UUIDv7).
    pub fn generate() -> Self {
        Self(uuid::Uuid::now_v7().to_string().into())
    }
}

impl RunId {
    /// A fresh, unique id that sorts by its time.
    pub fn generate() -> Self {
        Self(format!("run_{}", uuid::Uuid::now_v7().simple()).into())
    }
}

impl ReviewId {
    /// The review that a record opens.
    pub fn of(session: &SessionId, seq: Seq) -> Self {
        Self(format!("rev_{seq}_{session}").into())
    }

    fn parts(&self) -> Option<(&str, &str)> {
        self.as_str().strip_prefix("rev_")?.split_once('_')
    }

    /// The record that opened it.
    pub fn seq(&self) -> Option<Seq> {
        self.parts()?.0.parse().ok()
    }

    /// Its session.
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

/// How far a principal sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Only the sessions of its own user; those of others do not exist for it.
    #[default]
    Own,
    /// All sessions of its tenant.
    Tenant,
}

/// Who is asking: a tenant and a user in it, and how far it sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Principal {
    /// Whose data.
    pub tenant: Tenant,
    /// Who acts; the owner of what it creates (a fork belongs to its source's owner).
    pub user: User,
    /// Whether it sees other users' sessions too.
    pub reach: Reach,
    /// How much it may have stored; `None`: unlimited.
    pub quota: Option<Quota>,
}

impl Principal {
    /// A user who sees only what is their own.
    pub fn new(tenant: &str, user: &str) -> Result<Self, InvalidName> {
        Ok(Self { tenant: Tenant::new(tenant)?, user: User::new(user)?, reach: Reach::Own, quota: None })
    }

    /// An administrator of a tenant: sees every session in it, and acts as the user `default`.
    pub fn tenant_wide(tenant: &str) -> Result<Self, InvalidName> {
        Ok(Self { tenant: Tenant::new(tenant)?, user: User::default(), reach: Reach::Tenant, quota: None })
    }

    /// The key of a session in this principal's tenant.
    pub fn key(&self, session: &SessionId) -> Key {
        Key { tenant: self.tenant.clone(), session: session.clone() }
    }
}

/// Where a session is: its tenant and its id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// Whose data.
    pub tenant: Tenant,
    /// Which session.
    pub session: SessionId,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tenant, self.session)
    }
}
