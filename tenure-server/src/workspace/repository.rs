//! The git repository of a workspace. Commits are on a ref of the session (D-113); the user's HEAD, branches and
//! index stay unchanged.

use super::error::WorkspaceError;
use super::note::CommitNote;
use super::tree;
use git2::{Commit, ErrorCode, Oid, Repository, RepositoryInitOptions, RepositoryOpenFlags, Signature, Time, Tree};
use jiff::Timestamp;
use rustix::fs::{Mode, OFlags};
use std::fs::{File, TryLockError};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tenure::Seq;
use tenure::session::file_name;

/// Number and interval of attempts to lock a workspace, 5 seconds in total.
const LOCK_ATTEMPTS: usize = 100;
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// An open repository. Holds the workspace's lock until it is dropped.
pub struct SessionRepository {
    git: Repository,
    dir: PathBuf,
    files: OwnedFd,
    _lock: File,
}

impl SessionRepository {
    /// Locks a workspace and opens its repository, creating it if necessary. Waits for other lock holders. The lock
    /// file is outside the workspace, where no agent can reach it.
    pub fn open(dir: &Path, lock: &Path) -> Result<Self, WorkspaceError> {
        let lock_file = acquire_lock(lock)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let files = rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| WorkspaceError::at_path(dir, e))?;
        let git_dir = dir.join(".git");
        if git_dir.symlink_metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
            init_repository(&dir.join(tree::UNFINISHED), &git_dir)?;
        }
        check_git_dir(&git_dir)?;
        // Opened as bare, so that no configuration can redirect the working directory.
        let flags = RepositoryOpenFlags::NO_SEARCH | RepositoryOpenFlags::NO_DOTGIT | RepositoryOpenFlags::BARE;
        let git = Repository::open_ext(&git_dir, flags, std::iter::empty::<&str>())?;
        git.set_workdir(dir, false)?;
        Ok(Self { git, dir: dir.to_owned(), files, _lock: lock_file })
    }

    /// Writes the current files as a tree and returns its id. Paths in `include` are included even if they are ignored.
    pub fn read(&self, limits: tree::TreeLimits, include: Option<Oid>) -> Result<Oid, WorkspaceError> {
        let include = include.map(|id| self.git.find_tree(id)).transpose()?;
        tree::read(&self.git, &self.dir, &self.files, limits, include.as_ref())
    }

    /// Updates the files from the tree `current`, which they match now, to the tree `target`.
    pub fn write(&self, current: Oid, target: Oid) -> Result<(), WorkspaceError> {
        let current = self.git.find_tree(current)?;
        let target = self.git.find_tree(target)?;
        tree::write(&self.git, &self.dir, &self.files, Some(&current), Some(&target))
    }

    /// Returns the tree of a commit.
    pub fn tree_of(&self, commit: Oid) -> Result<Oid, WorkspaceError> {
        Ok(self.git.find_commit(commit)?.tree_id())
    }

    /// Commits a tree. Returns `None` if the newest commit of the session already has it.
    pub fn commit(&self, note: &CommitNote, tree: Oid) -> Result<Option<Oid>, WorkspaceError> {
        let name = ref_name(note);
        let tip = self.tip(&name)?;
        // A commit saved before a rewind has no record and cannot be found by one, so it does not replace one that has.
        let is_recorded =
            |c: &Commit<'_>| c.tree_id() == tree && (note.seq.is_none() || recorded_seq(c, note).flatten().is_some());
        if tip.as_ref().is_some_and(is_recorded) {
            return Ok(None);
        }
        let parent = tip.or_else(|| self.git.head().ok()?.peel_to_commit().ok());
        let parents: Vec<&Commit<'_>> = parent.iter().collect();
        let now = Time::new(crate::clock::now().as_second(), 0);
        let signature = Signature::new("tenure", "tenure@localhost", &now)?;
        let mut message =
            format!("{}\n\n{SESSION_TRAILER}{} {}\n", note.subject, note.session, note.session_created_at);
        if let Some(seq) = note.seq {
            message.push_str(&format!("{SEQ_TRAILER}{seq}\n"));
        }
        let tree: Tree<'_> = self.git.find_tree(tree)?;
        Ok(Some(self.git.commit(Some(&name), &signature, &signature, &message, &tree, &parents)?))
    }

    /// Returns the newest commit of the session at or before the record `note.seq` (D-114).
    pub fn find(&self, note: &CommitNote) -> Result<Option<Oid>, WorkspaceError> {
        let mut next = self.tip(&ref_name(note))?;
        while let Some(commit) = next {
            match recorded_seq(&commit, note) {
                Some(Some(seq)) if Some(seq) <= note.seq => return Ok(Some(commit.id())),
                Some(_) => {}
                // The user's own history begins here.
                None if !has_session_trailer(&commit) => break,
                None => {}
            }
            next = commit.parent(0).ok();
        }
        Ok(None)
    }

    fn tip(&self, name: &str) -> Result<Option<Commit<'_>>, WorkspaceError> {
        match self.git.find_reference(name) {
            Ok(reference) if reference.kind() == Some(git2::ReferenceType::Direct) => {
                Ok(Some(reference.peel_to_commit()?))
            }
            Ok(_) => Err(WorkspaceError::at_path(
                &self.dir,
                format!("{name} was replaced by a symbolic ref; delete it to continue"),
            )),
            Err(e) if e.code() == ErrorCode::NotFound => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

const SESSION_TRAILER: &str = "Tenure-Session: ";
const SEQ_TRAILER: &str = "Tenure-Seq: ";

fn trailer<'a>(commit: &'a Commit<'_>, name: &str) -> Option<&'a str> {
    commit.message().ok()?.lines().rev().find_map(|l| l.strip_prefix(name))
}

fn has_session_trailer(commit: &Commit<'_>) -> bool {
    trailer(commit, SESSION_TRAILER).is_some()
}

/// Returns the record that a commit belongs to: `None` if the commit is not of this session, `Some(None)` if it has
/// no record.
fn recorded_seq(commit: &Commit<'_>, note: &CommitNote) -> Option<Option<Seq>> {
    let (session, created_at) = trailer(commit, SESSION_TRAILER)?.rsplit_once(' ')?;
    let matches = session == note.session.as_str() && created_at.parse::<Timestamp>().ok()? == note.session_created_at;
    matches.then(|| trailer(commit, SEQ_TRAILER)?.parse().ok())
}

/// Returns `refs/tenure/SESSION`. The ref is a file: its name is encoded like one, and so are dots, which a ref cannot
/// contain everywhere.
fn ref_name(note: &CommitNote) -> String {
    format!("refs/tenure/{}", file_name(note.session.as_str()).replace('.', "%2E"))
}

/// Creates a repository atomically by renaming a complete one: a partial one would block the workspace permanently.
fn init_repository(unfinished: &Path, git_dir: &Path) -> Result<(), WorkspaceError> {
    let _ = std::fs::remove_file(unfinished);
    let _ = std::fs::remove_dir_all(unfinished);
    let mut options = RepositoryInitOptions::new();
    options.bare(true).no_reinit(true).external_template(false).initial_head("main");
    Repository::init_opts(unfinished, &options)?.config()?.set_bool("core.bare", false)?;
    std::fs::rename(unfinished, git_dir).map_err(|e| WorkspaceError::at_path(git_dir, e))
}

/// Rejects a repository that refers to files outside the workspace. It is untrusted: an agent could have redirected it.
fn check_git_dir(git_dir: &Path) -> Result<(), WorkspaceError> {
    let outside_error = |path: &Path| {
        Err(WorkspaceError::at_path(
            path,
            "refers to files outside the workspace; the repository must be entirely inside it",
        ))
    };
    match git_dir.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return outside_error(git_dir),
        Err(e) => return Err(WorkspaceError::at_path(git_dir, e)),
    }
    for name in ["commondir", "objects/info/alternates"] {
        if git_dir.join(name).symlink_metadata().is_ok() {
            return outside_error(&git_dir.join(name));
        }
    }
    let dirs = [
        "",
        "info",
        "objects",
        "objects/info",
        "objects/pack",
        "refs",
        "refs/tenure",
        "logs",
        "logs/refs",
        "logs/refs/tenure",
    ];
    for dir in dirs.map(|name| git_dir.join(name)) {
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            // A read from a pipe would block forever. Hooks are never read, and sockets cannot be opened.
            let plain =
                path.symlink_metadata().map(|m| m.is_file() || m.is_dir() || m.file_type().is_socket()).unwrap_or(true);
            if !plain && !path.ends_with("hooks") {
                return outside_error(&path);
            }
        }
    }
    Ok(())
}

/// Locks a workspace against other sessions and processes. The lock is released when the process dies.
fn acquire_lock(path: &Path) -> Result<File, WorkspaceError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file =
        rustix::fs::open(path, flags, Mode::from_raw_mode(0o644)).map_err(|e| WorkspaceError::at_path(path, e))?;
    let file = File::from(file);
    for _ in 0..LOCK_ATTEMPTS {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_RETRY_INTERVAL),
            Err(TryLockError::Error(e)) => return Err(WorkspaceError::at_path(path, e)),
        }
    }
    Err(WorkspaceError::Busy)
}
