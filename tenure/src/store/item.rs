//! Key-value items with expiry, grouped in namespaces by owner.
//!
//! Invariant: an item's key and value contain no NUL character ([`Item::check`]).

use crate::types::error::{Error, Result};
use crate::types::id::{SessionId, Tenant, User};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The owner of a namespace. It determines when the namespace is removed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// A session. The namespace is purged with the session.
    Session(SessionId),
    /// A user. The namespace is removed when the user is erased.
    User(User),
    /// A named group within the tenant.
    Group(String),
    /// The tenant itself.
    Tenant,
}

impl Owner {
    /// Parses the text form of an owner. `None` means that it is not one.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text.split_once('/') {
            Some(("session", id)) => Some(Owner::Session(SessionId::new(id).ok()?)),
            Some(("user", name)) => Some(Owner::User(User::new(name).ok()?)),
            Some(("group", name)) => Some(Owner::Group(name.to_owned())),
            None if text == "tenant" => Some(Owner::Tenant),
            _ => None,
        }
    }
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

/// A namespace of items: a tenant, an owner and a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace {
    /// The tenant whose data this is.
    pub tenant: Tenant,
    /// The owner within the tenant.
    pub owner: Owner,
    /// The purpose of the namespace, such as `cache`.
    pub name: String,
}

/// A key-value pair with use and expiry times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// The key, unique within the namespace.
    pub key: String,
    /// The value, as JSON text.
    pub value: String,
    /// The time of creation.
    pub created_at: Timestamp,
    /// The time of the last use; the least recently used items are evicted first.
    pub used_at: Timestamp,
    /// The number of uses.
    pub uses: u64,
    /// The expiry time. `None` means that the item does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
}

impl Item {
    /// Creates an item that was not used yet and does not expire.
    pub fn new(key: impl Into<String>, value: impl Into<String>, now: Timestamp) -> Self {
        let key = key.into();
        let value = value.into();
        Self { key, value, created_at: now, used_at: now, uses: 0, expires_at: None }
    }

    /// Counts a use of the item at this time.
    pub(crate) fn record_use(&mut self, at: Timestamp) {
        self.used_at = at;
        self.uses += 1;
    }

    /// Whether the item has expired. It has at its expiry time, in every store and for every kind of item.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|expires_at| expires_at <= now)
    }

    /// Validates that the item contains no NUL character, which PostgreSQL cannot store in text.
    pub(crate) fn check(&self) -> Result<()> {
        let nul = |s: &str| s.contains('\0');
        if nul(&self.key) || nul(&self.value) {
            Err(Error::invalid("item", "an item's key and value must not contain NUL characters"))
        } else {
            Ok(())
        }
    }
}
