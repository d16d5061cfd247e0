//! Items: key-value pairs with expiry, grouped by owner and namespace.

use crate::types::error::{Error, Result};
use crate::types::id::{SessionId, Tenant, User};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Whose shelf.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// A session's: it goes with the session.
    Session(SessionId),
    /// A user's: it goes when the user is erased.
    User(User),
    /// A group's.
    Group(String),
    /// The tenant's.
    Tenant,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Session(id) => write!(f, "session/{id}"),
            Owner::User(user) => write!(f, "user/{user}"),
            Owner::Group(group) => write!(f, "group/{group}"),
            Owner::Tenant => f.write_str("tenant"),
        }
    }
}

/// A named shelf of items.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shelf {
    /// Whose data.
    pub tenant: Tenant,
    /// Whose shelf.
    pub owner: Owner,
    /// What is on it, such as `cache`.
    pub name: String,
}

/// A keyed value with use and expiry times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// Its key on the shelf.
    pub key: String,
    /// The value, JSON text.
    pub value: String,
    /// What it can be found by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// When it was put there.
    pub created_at: Timestamp,
    /// When it was last used.
    pub used_at: Timestamp,
    /// How often it was used.
    pub uses: u64,
    /// When its time is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
}

impl Item {
    /// Checks what every store relies on: no NUL in it, which PostgreSQL can not keep.
    pub(crate) fn check(&self) -> Result<()> {
        let nul = |s: &str| s.contains('\0');
        match nul(&self.key) || nul(&self.value) || self.text.as_deref().is_some_and(nul) {
            true => Err(Error::invalid("item", "an item's key, value and text must be free of NUL characters")),
            false => Ok(()),
        }
    }
}

/// An item that a search found; a higher score is a better match.
#[derive(Clone, Debug, PartialEq)]
pub struct Hit {
    /// The item.
    pub item: Item,
    /// How good it is, comparable within one answer only.
    pub score: f64,
}
