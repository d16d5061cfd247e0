//! Converts files to a git tree and back: byte for byte, without git's filters, and descending by directory
//! descriptor so that no symbolic link is followed.

use super::error::WorkspaceError;
use git2::{ObjectType, Oid, Repository, Tree, TreeEntry};
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const DIRECTORY: i32 = 0o040000;
const PLAIN: i32 = 0o100644;
const PROGRAM: i32 = 0o100755;
const LINK: i32 = 0o120000;

/// Maximum depth of nested directories.
const MAX_DEPTH: usize = 100;

/// Name of the file with ignore rules.
const IGNORE: &str = ".gitignore";

/// Name of the temporary file that is renamed when it is complete. A crash may leave one behind.
pub const UNFINISHED: &str = ".tenure-unfinished";

/// Size limits of a workspace.
#[derive(Clone, Copy, Debug)]
pub struct TreeLimits {
    pub max_files: usize,
    pub max_bytes: u64,
}

/// Returns true if a name is reserved for git.
pub fn is_git(name: &[u8]) -> bool {
    name.eq_ignore_ascii_case(b".git")
}

/// Writes the files below a directory as a tree and returns its id. Ignored files are skipped unless they are in
/// `also`.
pub fn read(
    git: &Repository,
    at: &Path,
    dir: &OwnedFd,
    limits: TreeLimits,
    also: Option<&Tree<'_>>,
) -> Result<Oid, WorkspaceError> {
    let mut reader = TreeReader { git, root: at, limits, files: 0, bytes: 0 };
    let found = reader.directory(dir, Path::new(""), 0, also)?;
    found.map_or_else(|| Ok(git.treebuilder(None)?.write()?), Ok)
}

struct TreeReader<'a> {
    git: &'a Repository,
    root: &'a Path,
    limits: TreeLimits,
    files: usize,
    bytes: u64,
}

impl TreeReader<'_> {
    /// Returns the tree of a directory, or `None` if it is empty: git does not represent empty directories.
    fn directory(
        &mut self,
        dir: &OwnedFd,
        at: &Path,
        depth: usize,
        also: Option<&Tree<'_>>,
    ) -> Result<Option<Oid>, WorkspaceError> {
        if depth > MAX_DEPTH {
            return Err(WorkspaceError::TooLarge { limit: "depth", max: MAX_DEPTH as u64 });
        }
        self.check_ignore_file(dir, at)?;
        let mut tree = self.git.treebuilder(None)?;
        for entry in Dir::read_from(dir).map_err(|e| self.failed(at, e))? {
            let entry = entry.map_err(|e| self.failed(at, e))?;
            let bytes = entry.file_name().to_bytes();
            if [&b"."[..], b"..", UNFINISHED.as_bytes()].contains(&bytes) || is_git(bytes) {
                continue;
            }
            let name = OsStr::from_bytes(bytes);
            let path = at.join(name);
            let stat = match fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(self.failed(&path, e)),
            };
            let kind = FileType::from_raw_mode(stat.st_mode);
            let also = also.and_then(|tree| tree.get_name_bytes(bytes));
            if also.is_none() && self.is_ignored(&path, kind)? {
                continue;
            }
            let found = match kind {
                FileType::Directory => self.subdirectory(dir, name, &path, depth, also.as_ref())?,
                FileType::RegularFile => {
                    let mode = if stat.st_mode & 0o100 == 0 { PLAIN } else { PROGRAM };
                    self.file(dir, name, &path)?.map(|id| (id, mode))
                }
                FileType::Symlink => Some(self.link(dir, name, &path)?),
                // Sockets, pipes and devices have no contents to store.
                _ => None,
            };
            if let Some((id, mode)) = found {
                tree.insert(name, id, mode).map_err(|e| self.failed(&path, e.message()))?;
            }
        }
        if tree.is_empty() { Ok(None) } else { Ok(Some(tree.write()?)) }
    }

    /// Rejects a `.gitignore` that is not a regular file: libgit2 reads it, and would block forever on a pipe.
    fn check_ignore_file(&self, dir: &OwnedFd, at: &Path) -> Result<(), WorkspaceError> {
        let plain = |mode| matches!(FileType::from_raw_mode(mode), FileType::RegularFile | FileType::Directory);
        match fs::statat(dir, IGNORE, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if !plain(stat.st_mode) => Err(self.failed(&at.join(IGNORE), "it is not a plain file")),
            _ => Ok(()),
        }
    }

    fn subdirectory(
        &mut self,
        dir: &OwnedFd,
        name: &OsStr,
        path: &Path,
        depth: usize,
        also: Option<&TreeEntry<'_>>,
    ) -> Result<Option<(Oid, i32)>, WorkspaceError> {
        let inner = open_dir(dir, name).map_err(|e| self.failed(path, e))?;
        let also = also.and_then(|entry| entry.to_object(self.git).ok()?.into_tree().ok());
        let id = self.directory(&inner, path, depth + 1, also.as_ref())?;
        Ok(id.map(|id| (id, DIRECTORY)))
    }

    fn link(&mut self, dir: &OwnedFd, name: &OsStr, path: &Path) -> Result<(Oid, i32), WorkspaceError> {
        let target = fs::readlinkat(dir, name, Vec::new()).map_err(|e| self.failed(path, e))?;
        self.count(target.as_bytes().len() as u64)?;
        Ok((self.git.blob(target.as_bytes())?, LINK))
    }

    fn failed(&self, path: &Path, e: impl std::fmt::Display) -> WorkspaceError {
        WorkspaceError::at(&self.root.join(path), e)
    }

    fn is_ignored(&self, path: &Path, kind: FileType) -> Result<bool, WorkspaceError> {
        // A trailing slash marks the path as a directory.
        let path = if kind == FileType::Directory { path.join("") } else { path.to_owned() };
        Ok(self.git.is_path_ignored(path)?)
    }

    /// Stores a file as a blob. Returns `None` if it was removed or is no longer a regular file.
    fn file(&mut self, dir: &OwnedFd, name: &OsStr, path: &Path) -> Result<Option<Oid>, WorkspaceError> {
        let wrong = |e: std::io::Error| WorkspaceError::at(&self.root.join(path), e);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match fs::openat(dir, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(wrong(e.into())),
        };
        if !file.metadata().map_err(wrong)?.is_file() {
            return Ok(None);
        }
        let left = self.limits.max_bytes.saturating_sub(self.bytes);
        let mut content = Vec::new();
        file.take(left.saturating_add(1)).read_to_end(&mut content).map_err(wrong)?;
        self.count(content.len() as u64)?;
        Ok(Some(self.git.blob(&content)?))
    }

    fn count(&mut self, bytes: u64) -> Result<(), WorkspaceError> {
        let TreeLimits { max_files, max_bytes } = self.limits;
        (self.files, self.bytes) = (self.files + 1, self.bytes.saturating_add(bytes));
        if self.files > max_files {
            return Err(WorkspaceError::TooLarge { limit: "max_files", max: max_files as u64 });
        }
        match self.bytes > max_bytes {
            true => Err(WorkspaceError::TooLarge { limit: "max_bytes", max: max_bytes }),
            false => Ok(()),
        }
    }
}

/// Returns true if an entry of a tree is a tree itself.
fn is_tree(kind: Option<ObjectType>) -> bool {
    kind == Some(ObjectType::Tree)
}

fn open_dir(dir: impl AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    fs::openat(dir, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

fn subtree<'a>(git: &'a Repository, entry: Option<&TreeEntry<'_>>) -> Result<Option<Tree<'a>>, WorkspaceError> {
    let entry = entry.filter(|e| is_tree(e.kind()));
    Ok(entry.map(|e| git.find_tree(e.id())).transpose()?)
}

/// Updates a directory from the tree `have`, which it matches now, to the tree `want`. Files in neither are not
/// touched.
pub fn write(
    git: &Repository,
    at: &Path,
    dir: &OwnedFd,
    have: Option<&Tree<'_>>,
    want: Option<&Tree<'_>>,
) -> Result<(), WorkspaceError> {
    for entry in have.iter().flat_map(|tree| tree.iter()) {
        let wanted = want.and_then(|tree| tree.get_name_bytes(entry.name_bytes()));
        if wanted.is_none_or(|w| is_tree(w.kind()) != is_tree(entry.kind())) {
            remove(git, at, dir, &entry)?;
        }
    }
    for entry in want.iter().flat_map(|tree| tree.iter()) {
        let had = have.and_then(|tree| tree.get_name_bytes(entry.name_bytes()));
        write_entry(git, at, dir, had.as_ref(), &entry)?;
    }
    Ok(())
}

/// Removes a file, or a directory with those of its files that are in the tree.
fn remove(git: &Repository, at: &Path, dir: &OwnedFd, entry: &TreeEntry<'_>) -> Result<(), WorkspaceError> {
    let name = OsStr::from_bytes(entry.name_bytes());
    let path = at.join(name);
    let mut flags = AtFlags::empty();
    if is_tree(entry.kind()) {
        let inner = open_dir(dir, name).map_err(|e| WorkspaceError::at(&path, e))?;
        write(git, &path, &inner, subtree(git, Some(entry))?.as_ref(), None)?;
        flags = AtFlags::REMOVEDIR;
    }
    match fs::unlinkat(dir, name, flags) {
        // A directory that still contains ignored files is not removed.
        Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
        Err(e) => Err(WorkspaceError::at(&path, e)),
    }
}

/// Writes a file, a symbolic link, or a directory with its contents, unless it is unchanged.
fn write_entry(
    git: &Repository,
    at: &Path,
    dir: &OwnedFd,
    had: Option<&TreeEntry<'_>>,
    entry: &TreeEntry<'_>,
) -> Result<(), WorkspaceError> {
    let bytes = entry.name_bytes();
    let name = OsStr::from_bytes(bytes);
    let path = at.join(name);
    if bytes.is_empty() || bytes.contains(&b'/') || [&b"."[..], b".."].contains(&bytes) || is_git(bytes) {
        return Err(WorkspaceError::at(&path, "the commit has a name that no file may have"));
    }
    if had.is_some_and(|h| h.id() == entry.id() && h.filemode() == entry.filemode()) {
        return Ok(());
    }
    let Some(tree) = subtree(git, Some(entry))? else {
        let blob = git.find_blob(entry.id()).map_err(|e| WorkspaceError::at(&path, e.message()))?;
        return put(dir, name, blob.content(), entry.filemode()).map_err(|e| WorkspaceError::at(&path, e));
    };
    match fs::mkdirat(dir, name, Mode::from_raw_mode(0o777)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(WorkspaceError::at(&path, e)),
    }
    let inner = open_dir(dir, name).map_err(|e| WorkspaceError::at(&path, e))?;
    write(git, &path, &inner, subtree(git, had)?.as_ref(), Some(&tree))
}

/// Writes a file or symbolic link atomically by renaming a temporary one.
fn put(dir: &OwnedFd, name: &OsStr, content: &[u8], mode: i32) -> std::io::Result<()> {
    match fs::unlinkat(dir, UNFINISHED, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(e) => return Err(e.into()),
    }
    let write = || -> std::io::Result<()> {
        if mode == LINK {
            fs::symlinkat(content, dir, UNFINISHED)?;
        } else {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mode = Mode::from_raw_mode(if mode == PROGRAM { 0o777 } else { 0o666 });
            File::from(fs::openat(dir, UNFINISHED, flags, mode)?).write_all(content)?;
        }
        Ok(fs::renameat(dir, UNFINISHED, dir, name)?)
    };
    let done = write();
    if done.is_err() {
        let _ = fs::unlinkat(dir, UNFINISHED, AtFlags::empty());
    }
    done
}
