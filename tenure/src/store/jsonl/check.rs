//! Consistency checks: damaged and foreign files, and blobs without references (D-027).
//!
//! Invariant: files that are not the store's own are reported and never removed.

use super::file::{failed, remove_file, sync_dir};
use super::open::list;
use crate::store::finding::{Finding, MAX_FINDINGS, Orphan};
use crate::store::jsonl::engine::{JsonlEngine, JsonlState};
use crate::store::jsonl::paths::{self, FORMAT_FILE, LOCK_FILE, LogFile, NamedFile};
use crate::store::jsonl::recover::{LogTail, replay};
use crate::types::error::Result;
use crate::types::id::{SessionKey, Tenant};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

const RESTORE: &str = "restore the file from a backup, or purge the session";
const REOPEN: &str = "close the store and open it again";
const STRAY: &str = "move it to another directory: the store does not read it, and never removes what is not its own";

impl JsonlEngine {
    /// Checks the files of the store, except for the contents of session and item files.
    pub(super) fn check(&self) -> Result<Vec<Finding>> {
        let mut found: Vec<Finding> = {
            let state = self.state();
            let damaged = state.damaged.values().map(|d| Finding::new(&d.at, &d.why, RESTORE));
            let what = "half a commit may be at its end, which could not be taken back";
            let broken = state.broken.iter().map(|p| Finding::new(p.file(&self.root).display(), what, REOPEN));
            damaged.chain(broken).collect()
        };
        let known = self.state().files(&self.root);
        let mut stray = Vec::new();
        for (name, path) in list(&self.root)? {
            match paths::parse_tenant(&self.root, &name).filter(|_| path.is_dir()) {
                Some(tenant) => found.extend(self.check_tenant(&tenant, &known, &mut stray)?),
                None if [FORMAT_FILE, LOCK_FILE, "format.tmp", "lost+found"].contains(&&*name) => {}
                None => stray.push(path),
            }
        }
        let stray = stray.iter().take(MAX_FINDINGS);
        found.extend(stray.map(|path| Finding::new(path.display(), "it is not a file of the store", STRAY)));
        Ok(found)
    }

    fn check_tenant(
        &self,
        tenant: &Tenant,
        known: &HashSet<PathBuf>,
        stray: &mut Vec<PathBuf>,
    ) -> Result<Vec<Finding>> {
        let mut found = Vec::new();
        let unknown = |path: &Path| Finding::new(path.display(), "it was put there while the store is open", REOPEN);
        for (name, path) in list(&paths::tenant_dir(&self.root, tenant))? {
            match paths::parse_file(&name) {
                NamedFile::Session(_) if !known.contains(&path) && path.exists() => found.push(unknown(&path)),
                NamedFile::Discarded(session) => {
                    let of = LogFile::session(&SessionKey { tenant: tenant.clone(), session });
                    if !known.contains(&of.file(&self.root)) && path.exists() {
                        found.push(Finding::new(path.display(), "its session does not exist", REOPEN));
                    }
                }
                NamedFile::Foreign if !(path.is_dir() && ["blobs", "shelves"].contains(&&*name)) => stray.push(path),
                _ => {}
            }
        }
        for (name, path) in list(&paths::shelves_dir(&self.root, tenant))? {
            let temporary = matches!(paths::parse_file(&name), NamedFile::Temporary);
            if !known.contains(&path) && !temporary && path.exists() {
                match paths::parse_shelf_file(&name) {
                    Some(_) => found.push(unknown(&path)),
                    None => stray.push(path),
                }
            }
        }
        // A session that cannot be read may reference any of the blobs.
        let damaged = self.state().is_damaged(tenant);
        for (name, path) in list(&paths::blobs_dir(&self.root, tenant))? {
            match name.parse() {
                Ok(id) if damaged || self.state().index.uses_blob(tenant, id) => {}
                Ok(id) if found.len() < MAX_FINDINGS => {
                    let orphan = Orphan::Blob(tenant.clone(), id);
                    found.push(Finding::orphan(path.display(), "no session uses it", orphan));
                }
                Ok(_) => {}
                Err(_) if matches!(paths::parse_file(&name), NamedFile::Temporary) => {}
                Err(_) => stray.push(path),
            }
        }
        Ok(found)
    }

    /// Verifies a file by replaying it completely. The caller holds its lock.
    pub(super) fn check_file(&self, place: &LogFile) -> Result<Option<Finding>> {
        let path = place.file(&self.root);
        let (here, broken) = {
            let state = self.state();
            (state.logs.contains_key(place), state.broken.contains(place))
        };
        if !here || broken {
            return Ok(None);
        }
        Ok(match replay(&path, place) {
            Ok((_, LogTail::Clean)) => None,
            Ok((_, LogTail::Torn { bytes, line })) => {
                let what = format!("{bytes} bytes at its end are not a whole commit");
                Some(Finding::new(format!("{}:{line}", path.display()), what, RESTORE))
            }
            Ok((_, LogTail::Damaged { line, why })) => {
                Some(Finding::new(format!("{}:{line}", path.display()), why, RESTORE))
            }
            Err(e) => Some(Finding::new(path.display(), format!("it can not be read: {e}"), RESTORE)),
        })
    }

    /// Removes those of the given blobs that no session references. Items and blob references are
    /// part of their session's file, so other orphans cannot exist.
    pub(super) fn remove_orphans(&self, orphans: &[Orphan]) -> Result<()> {
        for orphan in orphans {
            let Orphan::Blob(tenant, id) = orphan else { continue };
            let free = {
                let state = self.state();
                !state.is_damaged(tenant) && !state.index.uses_blob(tenant, *id)
            };
            let path = paths::blob_file(&self.root, tenant, *id);
            if free && path.exists() {
                let dir = paths::blobs_dir(&self.root, tenant);
                remove_file(&path).and_then(|()| sync_dir(&dir)).map_err(|e| failed(&path, &e))?;
            }
        }
        Ok(())
    }
}

impl JsonlState {
    /// Returns the paths of all known files.
    fn files(&self, root: &Path) -> HashSet<PathBuf> {
        self.logs.keys().chain(self.damaged.keys()).map(|place| place.file(root)).collect()
    }

    fn is_damaged(&self, tenant: &Tenant) -> bool {
        self.damaged.keys().any(|place| place.tenant == *tenant)
    }
}
