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

const MODE_DIRECTORY: i32 = 0o040000;
const MODE_FILE: i32 = 0o100644;
const MODE_EXECUTABLE: i32 = 0o100755;
const MODE_SYMLINK: i32 = 0o120000;

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
/// `include`.
pub fn read(
    git: &Repository,
    root: &Path,
    dir: &OwnedFd,
    limits: TreeLimits,
    include: Option<&Tree<'_>>,
) -> Result<Oid, WorkspaceError> {
    let mut reader = TreeReader { git, root, limits, files: 0, bytes: 0 };
    let tree_id = reader.directory(dir, Path::new(""), 0, include)?;
    tree_id.map_or_else(|| Ok(git.treebuilder(None)?.write()?), Ok)
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
        parent: &Path,
        depth: usize,
        include: Option<&Tree<'_>>,
    ) -> Result<Option<Oid>, WorkspaceError> {
        if depth > MAX_DEPTH {
            return Err(WorkspaceError::TooLarge { limit: "depth", max: MAX_DEPTH as u64 });
        }
        self.check_ignore_file(dir, parent)?;
        let mut tree = self.git.treebuilder(None)?;
        for entry in Dir::read_from(dir).map_err(|e| self.failed(parent, e))? {
            let entry = entry.map_err(|e| self.failed(parent, e))?;
            let bytes = entry.file_name().to_bytes();
            if [&b"."[..], b"..", UNFINISHED.as_bytes()].contains(&bytes) || is_git(bytes) {
                continue;
            }
            let name = OsStr::from_bytes(bytes);
            let path = parent.join(name);
            let stat = match fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(self.failed(&path, e)),
            };
            let kind = FileType::from_raw_mode(stat.st_mode);
            let include = include.and_then(|tree| tree.get_name_bytes(bytes));
            if include.is_none() && self.is_ignored(&path, kind)? {
                continue;
            }
            let written = match kind {
                FileType::Directory => self.subdirectory(dir, name, &path, depth, include.as_ref())?,
                FileType::RegularFile => {
                    let mode = if stat.st_mode & 0o100 == 0 { MODE_FILE } else { MODE_EXECUTABLE };
                    self.file(dir, name, &path)?.map(|id| (id, mode))
                }
                FileType::Symlink => Some(self.link(dir, name, &path)?),
                // Sockets, pipes and devices have no contents to store.
                _ => None,
            };
            if let Some((id, mode)) = written {
                tree.insert(name, id, mode).map_err(|e| self.failed(&path, e.message()))?;
            }
        }
        if tree.is_empty() { Ok(None) } else { Ok(Some(tree.write()?)) }
    }

    /// Rejects a `.gitignore` that is not a regular file: libgit2 reads it, and would block forever on a pipe.
    fn check_ignore_file(&self, dir: &OwnedFd, parent: &Path) -> Result<(), WorkspaceError> {
        let plain = |mode| matches!(FileType::from_raw_mode(mode), FileType::RegularFile | FileType::Directory);
        match fs::statat(dir, IGNORE, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if !plain(stat.st_mode) => Err(self.failed(&parent.join(IGNORE), "not a regular file")),
            _ => Ok(()),
        }
    }

    fn subdirectory(
        &mut self,
        dir: &OwnedFd,
        name: &OsStr,
        path: &Path,
        depth: usize,
        include: Option<&TreeEntry<'_>>,
    ) -> Result<Option<(Oid, i32)>, WorkspaceError> {
        let inner = open_dir(dir, name).map_err(|e| self.failed(path, e))?;
        let include = include.and_then(|entry| entry.to_object(self.git).ok()?.into_tree().ok());
        let id = self.directory(&inner, path, depth + 1, include.as_ref())?;
        Ok(id.map(|id| (id, MODE_DIRECTORY)))
    }

    fn link(&mut self, dir: &OwnedFd, name: &OsStr, path: &Path) -> Result<(Oid, i32), WorkspaceError> {
        let target = fs::readlinkat(dir, name, Vec::new()).map_err(|e| self.failed(path, e))?;
        self.count(target.as_bytes().len() as u64)?;
        Ok((self.git.blob(target.as_bytes())?, MODE_SYMLINK))
    }

    fn failed(&self, path: &Path, e: impl std::fmt::Display) -> WorkspaceError {
        WorkspaceError::at_path(&self.root.join(path), e)
    }

    fn is_ignored(&self, path: &Path, kind: FileType) -> Result<bool, WorkspaceError> {
        // A trailing slash marks the path as a directory.
        let path = if kind == FileType::Directory { path.join("") } else { path.to_owned() };
        Ok(self.git.is_path_ignored(path)?)
    }

    /// Stores a file as a blob. Returns `None` if it was removed or is no longer a regular file.
    fn file(&mut self, dir: &OwnedFd, name: &OsStr, path: &Path) -> Result<Option<Oid>, WorkspaceError> {
        let read_error = |e: std::io::Error| WorkspaceError::at_path(&self.root.join(path), e);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match fs::openat(dir, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(read_error(e.into())),
        };
        if !file.metadata().map_err(read_error)?.is_file() {
            return Ok(None);
        }
        let remaining = self.limits.max_bytes.saturating_sub(self.bytes);
        let mut content = Vec::new();
        file.take(remaining.saturating_add(1)).read_to_end(&mut content).map_err(read_error)?;
        self.count(content.len() as u64)?;
        Ok(Some(self.git.blob(&content)?))
    }

    fn count(&mut self, bytes: u64) -> Result<(), WorkspaceError> {
        let TreeLimits { max_files, max_bytes } = self.limits;
        self.files += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        if self.files > max_files {
            return Err(WorkspaceError::TooLarge { limit: "max_files", max: max_files as u64 });
        }
        if self.bytes > max_bytes {
            Err(WorkspaceError::TooLarge { limit: "max_bytes", max: max_bytes })
        } else {
            Ok(())
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

/// Updates a directory from the tree `current`, which it matches now, to the tree `target`. Files in neither are not
/// touched.
pub fn write(
    git: &Repository,
    parent: &Path,
    dir: &OwnedFd,
    current: Option<&Tree<'_>>,
    target: Option<&Tree<'_>>,
) -> Result<(), WorkspaceError> {
    for entry in current.iter().flat_map(|tree| tree.iter()) {
        let wanted = target.and_then(|tree| tree.get_name_bytes(entry.name_bytes()));
        if wanted.is_none_or(|w| is_tree(w.kind()) != is_tree(entry.kind())) {
            remove(git, parent, dir, &entry)?;
        }
    }
    for entry in target.iter().flat_map(|tree| tree.iter()) {
        let existing = current.and_then(|tree| tree.get_name_bytes(entry.name_bytes()));
        write_entry(git, parent, dir, existing.as_ref(), &entry)?;
    }
    Ok(())
}

/// Removes a file, or a directory with those of its files that are in the tree.
fn remove(git: &Repository, parent: &Path, dir: &OwnedFd, entry: &TreeEntry<'_>) -> Result<(), WorkspaceError> {
    let name = OsStr::from_bytes(entry.name_bytes());
    let path = parent.join(name);
    let mut flags = AtFlags::empty();
    if is_tree(entry.kind()) {
        let inner = open_dir(dir, name).map_err(|e| WorkspaceError::at_path(&path, e))?;
        write(git, &path, &inner, subtree(git, Some(entry))?.as_ref(), None)?;
        flags = AtFlags::REMOVEDIR;
    }
    match fs::unlinkat(dir, name, flags) {
        // A directory that still contains ignored files is not removed.
        Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
        Err(e) => Err(WorkspaceError::at_path(&path, e)),
    }
}

/// Writes a file, a symbolic link, or a directory with its contents, unless it is unchanged.
fn write_entry(
    git: &Repository,
    parent: &Path,
    dir: &OwnedFd,
    existing: Option<&TreeEntry<'_>>,
    entry: &TreeEntry<'_>,
) -> Result<(), WorkspaceError> {
    let bytes = entry.name_bytes();
    let name = OsStr::from_bytes(bytes);
    let path = parent.join(name);
    if bytes.is_empty() || bytes.contains(&b'/') || [&b"."[..], b".."].contains(&bytes) || is_git(bytes) {
        return Err(WorkspaceError::at_path(&path, "the commit contains an invalid file name"));
    }
    if existing.is_some_and(|h| h.id() == entry.id() && h.filemode() == entry.filemode()) {
        return Ok(());
    }
    let Some(tree) = subtree(git, Some(entry))? else {
        let blob = git.find_blob(entry.id()).map_err(|e| WorkspaceError::at_path(&path, e.message()))?;
        return put(dir, name, blob.content(), entry.filemode()).map_err(|e| WorkspaceError::at_path(&path, e));
    };
    match fs::mkdirat(dir, name, Mode::from_raw_mode(0o777)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(WorkspaceError::at_path(&path, e)),
    }
    let inner = open_dir(dir, name).map_err(|e| WorkspaceError::at_path(&path, e))?;
    write(git, &path, &inner, subtree(git, existing)?.as_ref(), Some(&tree))
}

/// Writes a file or symbolic link atomically by renaming a temporary one.
fn put(dir: &OwnedFd, name: &OsStr, content: &[u8], mode: i32) -> std::io::Result<()> {
    match fs::unlinkat(dir, UNFINISHED, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(e) => return Err(e.into()),
    }
    let write = || -> std::io::Result<()> {
        if mode == MODE_SYMLINK {
            fs::symlinkat(content, dir, UNFINISHED)?;
        } else {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mode = Mode::from_raw_mode(if mode == MODE_EXECUTABLE { 0o777 } else { 0o666 });
            File::from(fs::openat(dir, UNFINISHED, flags, mode)?).write_all(content)?;
        }
        Ok(fs::renameat(dir, UNFINISHED, dir, name)?)
    };
    let result = write();
    if result.is_err() {
        let _ = fs::unlinkat(dir, UNFINISHED, AtFlags::empty());
    }
    result
}
