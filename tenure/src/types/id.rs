//! Identifiers and principals. Names are validated once, when they are parsed; a value of these types is
//! always valid.

use crate::types::excerpt::excerpt;
use crate::types::quota::Quota;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, sync::Arc};

/// The sequence number of a record in its log: 1, 2, 3 … without gaps. A fork continues the numbering of its
/// parent (D-002).
pub type Seq = u64;

/// Maximum length of a tenant, user, label or other name, in bytes (D-020).
pub const MAX_NAME_BYTES: usize = 128;

/// Maximum length of a session id, in characters (D-145).
pub const MAX_SESSION_ID_CHARS: usize = 128;

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

/// Checks a session id: 1 to 128 printable characters, without white space at the beginning or the end (D-145).
fn check_session_id(s: &str) -> Result<(), &'static str> {
    // The number of bytes is compared first, so that a long text is not scanned.
    if s.is_empty() || s.len() > 4 * MAX_SESSION_ID_CHARS || s.chars().count() > MAX_SESSION_ID_CHARS {
        return Err("it must have 1 to 128 characters");
    }
    if s.trim() != s {
        return Err("it must not begin or end with white space");
    }
    if s.chars().any(is_unprintable) {
        return Err("control, line separator and text direction characters are not allowed");
    }
    Ok(())
}

/// Returns true for a character that makes a name unreadable or misleading: control characters, line and paragraph
/// separators, the byte order mark, and overrides of the text direction, which can make an id look like another one.
fn is_unprintable(c: char) -> bool {
    let is_separator = matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}');
    c.is_control()
        || is_separator
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
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
    match review_parts(s) {
        Some((_, session)) if check_session_id(&session).is_ok() => Ok(()),
        _ => check_id(s),
    }
}

/// Splits `rev_SEQ_SESSION` into its sequence number and its session, which is decoded.
fn review_parts(s: &str) -> Option<(Seq, String)> {
    let (seq, session) = s.strip_prefix("rev_")?.split_once('_')?;
    Some((seq.parse().ok()?, decode_review_session(session)?))
}

/// Encodes a session id for a review id: letters, digits and `. _ : -` stay, every other byte becomes `~XX`. The
/// result needs no encoding in a URL, a header or a sentence (D-145).
fn encode_review_session(session: &str) -> String {
    let mut encoded = String::with_capacity(session.len());
    for byte in session.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b':' | b'-' => encoded.push(byte.into()),
            other => encoded.push_str(&format!("~{other:02X}")),
        }
    }
    encoded
}

/// Reverses [`encode_review_session`]. `None` if it is not a result of it.
fn decode_review_session(encoded: &str) -> Option<String> {
    let mut parts = encoded.split('~');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok().filter(|session| encode_review_session(session) == encoded)
}

name! {
    /// The id of a session, chosen by the client or generated: 1 to 128 printable characters of any script, without
    /// white space at the beginning or the end. Two ids are equal if their bytes are. It is never a credential.
    SessionId, "session_id", check_session_id
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
    /// The id of a human review. It contains the record that opened the review, and the session, and consists of
    /// characters that need no encoding in a URL.
    ReviewId, "review_id", check_review
}

impl SessionId {
    /// Generates a unique id that sorts by creation time (UUIDv7).
    pub fn generate() -> Self {
        Self(uuid::Uuid::now_v7().to_string().into())
    }
}

/// The digits of run ids, in ascending order: without `i`, `l`, `o` and `u`, as in Crockford's base 32.
const BASE32: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

impl RunId {
    /// Generates a unique id that sorts by creation time: `run_` and 16 digits of base 32, of which the first 42 bits
    /// are the time in milliseconds and the other 38 bits are random. Four records of a turn contain it (D-170).
    pub fn generate() -> Self {
        let uuid = uuid::Uuid::now_v7().as_u128();
        Self::from_bits((uuid >> 80) << 38 | uuid & ((1 << 38) - 1))
    }

    /// Returns the id of the run that answers a request, derived from the hash of the request.
    pub(crate) fn of_request(hash: &blake3::Hash) -> Self {
        let (bits, _) = hash.as_bytes().split_at(16);
        Self::from_bits(bits.iter().fold(0, |bits, byte| bits << 8 | u128::from(*byte)))
    }

    /// Returns the id with the lowest 80 of these bits.
    fn from_bits(bits: u128) -> Self {
        let digits = (0..16).rev().map(|i| char::from(BASE32[(bits >> (5 * i)) as usize & 31]));
        Self(["run_".to_owned(), digits.collect()].concat().into())
    }
}

impl ReviewId {
    /// Returns the id of the review that record `seq` of a session opens: `rev_12_trip`, or
    /// `rev_12_user~40example.com` for the session `user@example.com`.
    pub fn of(session: &SessionId, seq: Seq) -> Self {
        Self(format!("rev_{seq}_{}", encode_review_session(session.as_str())).into())
    }

    /// Returns the record that opened the review. `None` if the id does not have the form of [`ReviewId::of`].
    pub fn seq(&self) -> Option<Seq> {
        review_parts(self.as_str()).map(|(seq, _)| seq)
    }

    /// Returns the session of the review. `None` if the id does not have the form of [`ReviewId::of`].
    pub fn session(&self) -> Option<SessionId> {
        SessionId::new(review_parts(self.as_str())?.1).ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The bits are those of the number, most significant first, so that ids sort like their times.
    #[test]
    fn run_ids_are_short_unique_and_sort_by_time() {
        assert_eq!(RunId::from_bits(0).as_str(), "run_0000000000000000");
        assert_eq!(RunId::from_bits(u128::MAX).as_str(), "run_zzzzzzzzzzzzzzzz");
        assert_eq!(RunId::from_bits(0b00001_00010).as_str(), "run_0000000000000012");
        let at = |millis: u128, random: u128| RunId::from_bits(millis << 38 | random);
        assert!(at(1_795_000_000_000, (1 << 38) - 1) < at(1_795_000_000_001, 0));
        let ids: std::collections::HashSet<RunId> = (0..10_000).map(|_| RunId::generate()).collect();
        assert_eq!(ids.len(), 10_000);
        assert!(ids.iter().all(|id| RunId::new(id.as_str()).as_ref() == Ok(id)));
        let request = |text: &str| RunId::of_request(&blake3::hash(text.as_bytes()));
        assert_eq!(request("a"), request("a"));
        assert_ne!(request("a"), request("b"));
    }

    #[test]
    fn session_ids_are_printable_text() {
        let long = "会".repeat(128);
        for id in ["a", "!", "user@example.com", "Ünïcødé 会話", "a/b", "..", ".", "%2e", "CON", "a~1~2", "👩‍🚀", &long]
        {
            assert_eq!(SessionId::new(id).unwrap().as_str(), id);
        }
        let too_long = "a".repeat(129);
        for id in [
            "",
            " ",
            " a",
            "a ",
            "a\u{a0}",
            "a\nb",
            "a\0",
            "a\u{85}b",
            "a\u{2028}b",
            "a\u{202e}b",
            "\u{feff}a",
            &too_long,
        ] {
            let error = SessionId::new(id).unwrap_err();
            assert_eq!(error.param, "session_id", "{id:?}");
        }
    }

    #[test]
    fn review_ids_contain_any_session_id() {
        for (id, want) in [
            ("trip:1", "rev_12_trip:1"),
            ("user@example.com", "rev_12_user~40example.com"),
            ("a_b", "rev_12_a_b"),
            ("a~40b", "rev_12_a~7E40b"),
            ("会 話", "rev_12_~E4~BC~9A~20~E8~A9~B1"),
        ] {
            let session = SessionId::new(id).unwrap();
            let review = ReviewId::of(&session, 12);
            assert_eq!(review.as_str(), want);
            let parsed = ReviewId::new(want).unwrap();
            assert_eq!((parsed.seq(), parsed.session()), (Some(12), Some(session)));
        }
        for wrong in ["rev_1_a@b", "rev_1_~4", "rev_1_~zz", "rev_1_~61", "rev_1_~E4", "rev_1_~0A", "rev_x_~40"] {
            assert!(ReviewId::new(wrong).is_err(), "{wrong}");
        }
        assert_eq!(ReviewId::new("legacy").unwrap().session(), None);
    }
}
