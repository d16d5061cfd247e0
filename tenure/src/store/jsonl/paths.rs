//! File and directory names. Invariant: no name that a client can choose leads out of its tenant's
//! directory.

use crate::store::item::{Namespace, Owner};
use crate::types::blob::BlobId;
use crate::types::file_name::{
    DISCARDED_SUFFIX, decode_file_name, decode_session_file_name, file_name, is_truncated, session_file_name,
};
use crate::types::id::{SessionId, SessionKey, Tenant};
use std::path::{Path, PathBuf};

/// The file that contains the format number.
pub(super) const FORMAT_FILE: &str = "format";
/// The file that is locked while the store is open.
pub(super) const LOCK_FILE: &str = "lock";
/// The suffix of temporary files; leftovers of a crash are removed on opening.
pub(super) const TEMPORARY: &str = ".tmp";

const JSONL_SUFFIX: &str = ".jsonl";

/// The owner of a JSONL file: a session, or the namespaces of a user, group or tenant.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct LogFile {
    pub tenant: Tenant,
    pub owner: Owner,
}

/// The kind of a file in a tenant's directory, by its name.
pub(super) enum NamedFile {
    Session(SessionId),
    /// A session whose name is truncated. Its id is in the last head of the file.
    TruncatedSession,
    /// The discarded messages of the session with this file.
    Discarded {
        session_file: String,
    },
    Temporary,
    Foreign,
}

impl LogFile {
    pub fn session(key: &SessionKey) -> Self {
        Self { tenant: key.tenant.clone(), owner: Owner::Session(key.session.clone()) }
    }

    pub fn of(namespace: &Namespace) -> Self {
        Self { tenant: namespace.tenant.clone(), owner: namespace.owner.clone() }
    }

    /// Returns the session's key, or `None` if the owner is not a session.
    pub fn key(&self) -> Option<SessionKey> {
        match &self.owner {
            Owner::Session(id) => Some(SessionKey { tenant: self.tenant.clone(), session: id.clone() }),
            _ => None,
        }
    }

    /// Returns the directory of the file.
    pub fn dir(&self, root: &Path) -> PathBuf {
        match &self.owner {
            Owner::Session(_) => tenant_dir(root, &self.tenant),
            _ => namespaces_dir(root, &self.tenant),
        }
    }

    /// Returns the path of the file.
    pub fn path(&self, root: &Path) -> PathBuf {
        let name = match &self.owner {
            Owner::Session(id) => session_file_name(id),
            other => file_name(&other.to_string()),
        };
        self.dir(root).join(name + JSONL_SUFFIX)
    }

    /// Returns true if the file's name does not contain the whole id of its session, so that the file has to.
    pub fn needs_head(&self) -> bool {
        matches!(&self.owner, Owner::Session(id) if is_truncated(&session_file_name(id)))
    }
}

pub(super) fn tenant_dir(root: &Path, tenant: &Tenant) -> PathBuf {
    let name = tenant.as_str();
    match name {
        // Escapes a tenant whose name is that of a file of the store itself.
        FORMAT_FILE | LOCK_FILE | "format.tmp" => root.join(format!("%{:02X}{}", name.as_bytes()[0], &name[1..])),
        _ => root.join(file_name(name)),
    }
}

pub(super) fn namespaces_dir(root: &Path, tenant: &Tenant) -> PathBuf {
    tenant_dir(root, tenant).join("namespaces")
}

pub(super) fn blobs_dir(root: &Path, tenant: &Tenant) -> PathBuf {
    tenant_dir(root, tenant).join("blobs")
}

pub(super) fn blob_file(root: &Path, tenant: &Tenant, id: BlobId) -> PathBuf {
    blobs_dir(root, tenant).join(id.to_string())
}

/// Returns the path of the human-readable file with the messages that rewinds discarded.
pub(super) fn discarded_file(root: &Path, key: &SessionKey) -> PathBuf {
    tenant_dir(root, &key.tenant).join(session_file_name(&key.session) + DISCARDED_SUFFIX + JSONL_SUFFIX)
}

/// Parses the name of a tenant's directory.
pub(super) fn parse_tenant(root: &Path, name: &str) -> Option<Tenant> {
    let tenant = [FORMAT_FILE, LOCK_FILE, "format.tmp"].into_iter().filter_map(|t| Tenant::new(t).ok());
    let escaped = tenant.into_iter().find(|tenant| tenant_dir(root, tenant) == root.join(name));
    let tenant = escaped.or_else(|| Tenant::new(decode_file_name(name)?).ok())?;
    (tenant_dir(root, &tenant) == root.join(name)).then_some(tenant)
}

/// Parses the name of a file in a tenant's directory.
pub(super) fn parse_file(name: &str) -> NamedFile {
    if name.ends_with(TEMPORARY) {
        return NamedFile::Temporary;
    }
    let Some(stem) = name.strip_suffix(JSONL_SUFFIX) else { return NamedFile::Foreign };
    if let Some(session) = stem.strip_suffix(DISCARDED_SUFFIX) {
        let is_session = is_truncated(session) || decode_session_file_name(session).is_some();
        let session_file = session.to_owned() + JSONL_SUFFIX;
        return if is_session { NamedFile::Discarded { session_file } } else { NamedFile::Foreign };
    }
    match decode_session_file_name(stem) {
        Some(id) => NamedFile::Session(id),
        None if is_truncated(stem) => NamedFile::TruncatedSession,
        None => NamedFile::Foreign,
    }
}

/// Parses the owner from the name of an item file. `None` also for a truncated name, whose owner is
/// in the first line.
pub(super) fn parse_namespace_file(name: &str) -> Option<Owner> {
    let name = name.strip_suffix(JSONL_SUFFIX)?;
    parse_owner(&decode_file_name(name)?)
}

/// Parses the owner from the first line of an item file.
pub(super) fn parse_owner(text: &str) -> Option<Owner> {
    Owner::parse(text).filter(|owner| !matches!(owner, Owner::Session(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_sessions_are_recognized_and_never_shared() {
        let root = Path::new("/r");
        let tenant = Tenant::default();
        let mut files = std::collections::BTreeSet::new();
        for id in [
            "a",
            "a.discarded",
            "a.discarded.discarded",
            "a.jsonl",
            "a.tmp",
            "discarded",
            "a:b",
            "blobs",
            "x.discarded.jsonl",
            "A",
            "user@example.com",
            "a/b",
            "..",
            "con",
            "%2e",
        ] {
            let key = SessionKey { tenant: tenant.clone(), session: SessionId::new(id).unwrap() };
            let file = LogFile::session(&key).path(root);
            let discarded = discarded_file(root, &key);
            let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
            assert!(matches!(parse_file(&name(&file)), NamedFile::Session(id) if id == key.session), "{id}");
            let of_session =
                |parsed| matches!(parsed, NamedFile::Discarded { session_file } if session_file == name(&file));
            assert!(of_session(parse_file(&name(&discarded))), "{id}");
            assert!(files.insert(file) && files.insert(discarded), "{id} shares a file");
        }
    }

    #[test]
    fn the_file_of_a_long_id_does_not_contain_it() {
        let root = Path::new("/r");
        let of = |id: String| SessionKey { tenant: Tenant::default(), session: SessionId::new(id).unwrap() };
        let key = of("会".repeat(128));
        let file = LogFile::session(&key);
        let name = file.path(root).file_name().unwrap().to_str().unwrap().to_owned();
        assert!(file.needs_head() && matches!(parse_file(&name), NamedFile::TruncatedSession));
        let discarded = discarded_file(root, &key).file_name().unwrap().to_str().unwrap().to_owned();
        assert!(discarded.len() < 255);
        assert!(matches!(parse_file(&discarded), NamedFile::Discarded { session_file } if session_file == name));
        assert!(!LogFile::session(&of("a".repeat(128))).needs_head());
    }

    #[test]
    fn a_tenant_may_have_any_name() {
        let root = Path::new("/r");
        for name in ["default", "lock", "format", "format.tmp", "a..b", "lock.tmp", "Lock", "nul", "a:b"] {
            let tenant = Tenant::new(name).unwrap();
            let dir = tenant_dir(root, &tenant);
            assert!(![root.join(FORMAT_FILE), root.join(LOCK_FILE)].contains(&dir));
            assert_eq!(dir.parent(), Some(root));
            assert_eq!(parse_tenant(root, dir.file_name().unwrap().to_str().unwrap()), Some(tenant));
        }
        assert_eq!(parse_tenant(root, "lost+found"), None);
        assert_eq!(parse_tenant(root, "%2e%2e"), None);
    }

    #[test]
    fn owners_stay_in_their_directory() {
        let root = Path::new("/r");
        let log_file = |owner| LogFile { tenant: Tenant::default(), owner };
        let file = |owner| log_file(owner).path(root).to_str().unwrap().to_owned();
        assert_eq!(file(Owner::Tenant), "/r/default/namespaces/tenant.jsonl");
        assert_eq!(file(Owner::User("../é".try_into().unwrap())), "/r/default/namespaces/user%2F..%2F%C3%A9.jsonl");
        let long = |end: &str| file(Owner::Group("é".repeat(500) + end));
        assert_ne!(long("a"), long("b"));
        assert!(long("a").len() < 255);
        for owner in [Owner::Tenant, Owner::User("a/b".try_into().unwrap()), Owner::Group("g/../h".into())] {
            assert_eq!(parse_owner(&owner.to_string()), Some(owner));
        }
        assert_eq!(parse_owner("session/a"), None);
    }
}
