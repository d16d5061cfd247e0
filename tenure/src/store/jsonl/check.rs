//! Consistency checks: damaged and foreign files, and blobs without references (D-027).
//!
//! Invariant: files that are not the store's own are reported and never removed.

use super::file::{io_error, remove_file, sync_dir};
use super::open::list;
use crate::store::finding::{Finding, MAX_FINDINGS, Orphan};
use crate::store::jsonl::engine::{JsonlEngine, JsonlState};
use crate::store::jsonl::paths::{self, FORMAT_FILE, LOCK_FILE, LogFile, NamedFile};
use crate::store::jsonl::recover::{LogTail, replay};
use crate::types::error::Result;
use crate::types::id::Tenant;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

const RESTORE: &str = "restore the file from a backup, or purge the session";
const REOPEN: &str = "close the store and open it again";
const STRAY: &str = "move it to another directory: the store does not read it, and never removes foreign files";

impl JsonlEngine {
    /// Checks the files of the store, except for the contents of session and item files.
    pub(super) fn check(&self) -> Result<Vec<Finding>> {
        let mut findings: Vec<Finding> = {
            let state = self.state();
            let damaged = state.damaged.values().map(|d| Finding::new(&d.location, &d.reason, RESTORE));
            let torn = "it may end in an incomplete commit that could not be truncated";
            let broken = state.broken.iter().map(|p| Finding::new(p.path(&self.root).display(), torn, REOPEN));
            damaged.chain(broken).collect()
        };
        let known = self.state().files(&self.root);
        let mut stray = Vec::new();
        for (name, path) in list(&self.root)? {
            match paths::parse_tenant(&self.root, &name).filter(|_| path.is_dir()) {
                Some(tenant) => findings.extend(self.check_tenant(&tenant, &known, &mut stray)?),
                None if [FORMAT_FILE, LOCK_FILE, "format.tmp", "lost+found"].contains(&&*name) => {}
                None => stray.push(path),
            }
        }
        let stray = stray.iter().take(MAX_FINDINGS);
        findings.extend(stray.map(|path| Finding::new(path.display(), "not a file of the store", STRAY)));
        Ok(findings)
    }

    fn check_tenant(
        &self,
        tenant: &Tenant,
        known: &HashSet<PathBuf>,
        stray: &mut Vec<PathBuf>,
    ) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let unknown = |path: &Path| {
            Finding::new(path.display(), "the file was created by another program while the store is open", REOPEN)
        };
        for (name, path) in list(&paths::tenant_dir(&self.root, tenant))? {
            match paths::parse_file(&name) {
                NamedFile::Session(_) | NamedFile::TruncatedSession if !known.contains(&path) && path.exists() => {
                    findings.push(unknown(&path))
                }
                NamedFile::Discarded { session_file }
                    if !known.contains(&path.with_file_name(&session_file)) && path.exists() =>
                {
                    findings.push(Finding::new(path.display(), "its session does not exist", REOPEN));
                }
                NamedFile::Foreign if !(path.is_dir() && ["blobs", "namespaces"].contains(&&*name)) => stray.push(path),
                _ => {}
            }
        }
        for (name, path) in list(&paths::namespaces_dir(&self.root, tenant))? {
            let temporary = matches!(paths::parse_file(&name), NamedFile::Temporary);
            if !known.contains(&path) && !temporary && path.exists() {
                match paths::parse_namespace_file(&name) {
                    Some(_) => findings.push(unknown(&path)),
                    None => stray.push(path),
                }
            }
        }
        // A session that cannot be read may reference any of the blobs.
        let damaged = self.state().is_damaged(tenant);
        for (name, path) in list(&paths::blobs_dir(&self.root, tenant))? {
            match name.parse() {
                Ok(id) if damaged || self.state().index.uses_blob(tenant, id) => {}
                Ok(id) if findings.len() < MAX_FINDINGS => {
                    let orphan = Orphan::Blob(tenant.clone(), id);
                    findings.push(Finding::orphan(path.display(), "no session references it", orphan));
                }
                Ok(_) => {}
                Err(_) if matches!(paths::parse_file(&name), NamedFile::Temporary) => {}
                Err(_) => stray.push(path),
            }
        }
        Ok(findings)
    }

    /// Verifies a file by replaying it completely. The caller holds its lock.
    pub(super) fn check_file(&self, log_file: &LogFile) -> Result<Option<Finding>> {
        let path = log_file.path(&self.root);
        let (exists, broken) = {
            let state = self.state();
            (state.logs.contains_key(log_file), state.broken.contains(log_file))
        };
        if !exists || broken {
            return Ok(None);
        }
        Ok(match replay(&path, log_file) {
            Ok((_, LogTail::Clean)) => None,
            Ok((_, LogTail::Torn { bytes, line })) => {
                let description = format!("the last {bytes} bytes are not a complete commit");
                Some(Finding::new(format!("{}:{line}", path.display()), description, RESTORE))
            }
            Ok((_, LogTail::Damaged { line, reason })) => {
                Some(Finding::new(format!("{}:{line}", path.display()), reason, RESTORE))
            }
            Err(e) => Some(Finding::new(path.display(), format!("the file cannot be read: {e}"), RESTORE)),
        })
    }

    /// Removes those of the given blobs that no session references. Items and blob references are
    /// part of their session's file, so other orphans cannot exist.
    pub(super) fn remove_orphans(&self, orphans: &[Orphan]) -> Result<()> {
        for orphan in orphans {
            let Orphan::Blob(tenant, id) = orphan else { continue };
            let unreferenced = {
                let state = self.state();
                !state.is_damaged(tenant) && !state.index.uses_blob(tenant, *id)
            };
            let path = paths::blob_file(&self.root, tenant, *id);
            if unreferenced && path.exists() {
                let dir = paths::blobs_dir(&self.root, tenant);
                remove_file(&path).and_then(|()| sync_dir(&dir)).map_err(|e| io_error(&path, e))?;
            }
        }
        Ok(())
    }
}

impl JsonlState {
    /// Returns the paths of all known files.
    fn files(&self, root: &Path) -> HashSet<PathBuf> {
        self.logs.keys().chain(self.damaged.keys()).map(|log_file| log_file.path(root)).collect()
    }

    fn is_damaged(&self, tenant: &Tenant) -> bool {
        self.damaged.keys().any(|log_file| log_file.tenant == *tenant)
    }
}
