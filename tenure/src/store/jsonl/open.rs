//! Opening a directory: locking it, replaying every file, and recovering from a crash.
//!
//! Invariant: an unfinished commit at the end of a file is truncated; damage anywhere else is
//! reported and left unchanged.

use super::file::{corrupt, io_error, remove_file, sync_dir, write_atomically};
use crate::private_files;
use crate::store::contract::{FORMAT, OpenRepair};
use crate::store::item::{Namespace, Owner};
use crate::store::jsonl::codec::{CommitReader, LogLine, NextCommit, contains_commit};
use crate::store::jsonl::engine::{Damage, JsonlState, SessionLog};
use crate::store::jsonl::paths::{self, FORMAT_FILE, LOCK_FILE, LogFile, NamedFile};
use crate::store::jsonl::recover::{LogTail, Recovered, replay};
use crate::types::blob::BlobId;
use crate::types::error::{Error, Result};
use crate::types::id::{SessionId, SessionKey, Tenant};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

/// Locks a directory for this process and checks its format; a new or empty directory becomes a
/// store. Returns its canonical path and the lock.
pub(super) fn lock_directory(dir: &Path) -> Result<(PathBuf, File)> {
    let io = |e: io::Error| io_error(dir, e);
    private_files::create_dir_all(dir).map_err(io)?;
    let dir = &dir.canonicalize().map_err(io)?;
    let format = dir.join(FORMAT_FILE);
    let is_store_file = |name: &str| [FORMAT_FILE, LOCK_FILE, "format.tmp", "lost+found"].contains(&name);
    if !format.exists() && list(dir)?.iter().any(|(name, _)| !is_store_file(name)) {
        let reason = format!("{} is not empty and contains no store; choose a new or empty directory", dir.display());
        return Err(Error::invalid("store", reason));
    }
    let lock =
        private_files::options().create(true).write(true).truncate(false).open(dir.join(LOCK_FILE)).map_err(io)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(Error::Locked { location: dir.display().to_string() }),
        Err(TryLockError::Error(e)) => return Err(io(e)),
    }
    match fs::read_to_string(&format) {
        Ok(text) => match text.trim().parse::<u32>() {
            Ok(stored) if stored > FORMAT => {
                Err(Error::NewerFormat { location: dir.display().to_string(), version: stored, supported: FORMAT })
            }
            Ok(FORMAT) => Ok((dir.clone(), lock)),
            _ => Err(corrupt(&format, 1, "expected the format number; restore the file from a backup")),
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            write_format(dir, &format).map_err(io)?;
            // The directory itself may be new. Its parent may not be readable, and then a failed
            // fsync cannot be helped.
            dir.parent().map(sync_dir);
            Ok((dir.clone(), lock))
        }
        Err(e) => Err(io_error(&format, e)),
    }
}

fn write_format(dir: &Path, format: &Path) -> io::Result<()> {
    write_atomically(&dir.join("format.tmp"), format, format!("{FORMAT}\n").as_bytes())?;
    sync_dir(dir)
}

/// Returns the format of a directory without changing it. `None` means that it is not a store.
pub(super) fn read_format(dir: &Path) -> Result<Option<u32>> {
    let format = dir.join(FORMAT_FILE);
    match fs::read_to_string(&format) {
        Ok(text) => match text.trim().parse() {
            Ok(stored) => Ok(Some(stored)),
            Err(_) => Err(corrupt(&format, 1, "expected the format number; restore the file from a backup")),
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_error(&format, e)),
    }
}

/// Loads all files of a directory. Leftovers of a crash are removed and reported; damage is
/// reported and left unchanged.
pub(super) fn load(root: &Path) -> Result<(JsonlState, Vec<OpenRepair>)> {
    let mut state = JsonlState::default();
    let mut repairs = Vec::new();
    for (name, path) in list(root)? {
        let Some(tenant) = paths::parse_tenant(root, &name).filter(|_| path.is_dir()) else { continue };
        load_tenant(root, &tenant, &mut state, &mut repairs)?;
    }
    Ok((state, repairs))
}

/// Loads the sessions and items of a tenant, and removes leftovers: temporary files, discarded
/// messages of sessions that do not exist, and unreferenced blobs.
fn load_tenant(root: &Path, tenant: &Tenant, state: &mut JsonlState, repairs: &mut Vec<OpenRepair>) -> Result<()> {
    let key = |session| SessionKey { tenant: tenant.clone(), session };
    let mut discarded = Vec::new();
    for (name, path) in list(&paths::tenant_dir(root, tenant))? {
        match paths::parse_file(&name) {
            NamedFile::Session(id) => load_file(&path, LogFile::session(&key(id)), state, repairs)?,
            NamedFile::TruncatedSession => match read_session_id(&path).map_err(|e| io_error(&path, e))? {
                Some(id) if LogFile::session(&key(id.clone())).path(root) == path => {
                    load_file(&path, LogFile::session(&key(id)), state, repairs)?;
                }
                None if !contains_commit(File::open(&path).map_err(|e| io_error(&path, e))?)
                    .map_err(|e| io_error(&path, e))? =>
                {
                    remove_unfinished(&path, repairs)?;
                }
                _ => repairs.push(not_repaired(&path, "the file does not contain the id of its session")),
            },
            NamedFile::Discarded { session_file } => discarded.push((path.with_file_name(session_file), path)),
            NamedFile::Temporary => remove_file(&path).map_err(|e| io_error(&path, e))?,
            NamedFile::Foreign => {}
        }
    }
    for (session_file, path) in discarded {
        if !session_file.exists() {
            remove_file(&path).map_err(|e| io_error(&path, e))?;
        }
    }
    for (name, path) in list(&paths::namespaces_dir(root, tenant))? {
        let owner = paths::parse_namespace_file(&name).or_else(|| read_owner_line(&path));
        match (paths::parse_file(&name), owner) {
            (NamedFile::Temporary, _) => remove_file(&path).map_err(|e| io_error(&path, e))?,
            (_, Some(owner)) => load_file(&path, LogFile { tenant: tenant.clone(), owner }, state, repairs)?,
            (_, None) => repairs.push(not_repaired(&path, "the owner of this item file is unknown")),
        }
    }
    // A session that cannot be read may reference any of the blobs.
    if !state.damaged.keys().any(|log_file| log_file.tenant == *tenant) {
        remove_unused_blobs(root, tenant, |id| state.index.uses_blob(tenant, id))?;
    }
    Ok(())
}

/// Loads one file: truncates a torn end, removes a file without a complete commit, and registers
/// damage.
fn load_file(path: &Path, log_file: LogFile, state: &mut JsonlState, repairs: &mut Vec<OpenRepair>) -> Result<()> {
    let io = |e: io::Error| io_error(path, e);
    let (contents, end) = replay(path, &log_file).map_err(io)?;
    match end {
        LogTail::Clean if contents.len > 0 => register_file(log_file, contents, state),
        LogTail::Torn { bytes, line } if contents.len > 0 => {
            let file = OpenOptions::new().write(true).open(path).map_err(io)?;
            file.set_len(contents.len).and_then(|()| file.sync_all()).map_err(io)?;
            let description = format!("truncated {bytes} bytes from line {line} on: an incomplete commit");
            repairs.push(OpenRepair { location: path.display().to_string(), description });
            register_file(log_file, contents, state);
        }
        LogTail::Clean | LogTail::Torn { .. } => remove_unfinished(path, repairs)?,
        LogTail::Damaged { line, reason } => {
            let location = format!("{}:{line}", path.display());
            repairs.push(not_repaired(Path::new(&location), &reason));
            let reason = format!("{reason}; restore the file from a backup, or purge the session");
            // The head stays listed, so that the session can be found and purged.
            if let Some(head) = contents.head.filter(|h| Some(h.key()) == log_file.key()) {
                state.index.set(head);
            }
            state.damaged.insert(log_file, Damage { location, reason });
        }
    }
    Ok(())
}

/// Removes a file without a complete commit.
fn remove_unfinished(path: &Path, repairs: &mut Vec<OpenRepair>) -> Result<()> {
    let io = |e: io::Error| io_error(path, e);
    let bytes = path.metadata().map_err(io)?.len();
    remove_file(path).and_then(|()| path.parent().map_or(Ok(()), sync_dir)).map_err(io)?;
    let description = format!("removed the file ({bytes} bytes): its first commit was incomplete");
    repairs.push(OpenRepair { location: path.display().to_string(), description });
    Ok(())
}

/// Adds an intact file to the state.
fn register_file(log_file: LogFile, mut contents: Recovered, state: &mut JsonlState) {
    if let (Some(key), Some(head)) = (log_file.key(), contents.head.take()) {
        state.index.set(head);
        state.index.add_rewinds(&key, &contents.rewinds);
        for (blob, from) in &contents.blobs {
            state.index.use_blobs(&key, [*blob], *from);
        }
    }
    for ((name, _), item) in std::mem::take(&mut contents.items) {
        let namespace = Namespace { tenant: log_file.tenant.clone(), owner: log_file.owner.clone(), name };
        state.index.put(&namespace, item);
    }
    state.logs.insert(log_file, SessionLog::from_recovered(contents));
}

/// Removes the files of blobs that no session references: leftovers of a failed commit or a crash.
pub(super) fn remove_unused_blobs(root: &Path, tenant: &Tenant, is_used: impl Fn(BlobId) -> bool) -> Result<()> {
    let dir = paths::blobs_dir(root, tenant);
    let used = |name: &str| name.parse().is_ok_and(&is_used);
    let unused: Vec<_> = list(&dir)?.into_iter().filter(|(name, _)| !used(name)).collect();
    for (_, path) in &unused {
        remove_file(path).map_err(|e| io_error(path, e))?;
    }
    if unused.is_empty() { Ok(()) } else { sync_dir(&dir).map_err(|e| io_error(&dir, e)) }
}

fn not_repaired(path: &Path, reason: &str) -> OpenRepair {
    OpenRepair {
        location: path.display().to_string(),
        description: format!("NOT repaired: {reason}; restore the file from a backup"),
    }
}

/// Reads the owner from the first line of an item file whose name is truncated.
fn read_owner_line(path: &Path) -> Option<Owner> {
    let mut line = Vec::new();
    BufReader::new(File::open(path).ok()?).read_until(b'\n', &mut line).ok()?;
    paths::parse_owner(&LogLine::parse(&line).ok()?.owner?)
}

/// Reads the id of a session from the last head in its file, whose name is truncated.
fn read_session_id(path: &Path) -> io::Result<Option<SessionId>> {
    let mut commits = CommitReader::new(File::open(path)?);
    let mut id = None;
    while commits.next()? == NextCommit::Valid {
        let heads = commits.lines().filter_map(|line| LogLine::parse(line).ok()?.head);
        id = heads.last().map(|head| head.info.session_id).or(id);
    }
    Ok(id)
}

/// Lists a directory by name. A directory that does not exist is empty.
pub(super) fn list(dir: &Path) -> Result<BTreeSet<(String, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        Err(e) => return Err(io_error(dir, e)),
    };
    let named = entries.map(|entry| entry.map(|e| (e.file_name().to_string_lossy().into_owned(), e.path())));
    named.collect::<io::Result<_>>().map_err(|e| io_error(dir, e))
}
