//! Directories of the host for sandboxes without a private root file system: created by the supervisor, removed by
//! a separate process.
//!
//! `TMPDIR/tenure-sandbox-*` is locked with `flock` while its supervisor lives, and holds the session's files in
//! `files`. A directory whose lock is free is abandoned: its interpreter has exited, or all its processes were
//! killed.

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, chmodat, flock, fstat, mkdirat, openat, renameat,
    statat, unlinkat,
};
use rustix::io::Errno;
use rustix::path::Arg;
use std::ffi::CString;
use std::path::{Path, PathBuf};

/// Name prefix of these directories.
const PREFIX: &str = "tenure-sandbox-";
/// Subdirectory for the session's files. Code in the sandbox can change everything in it and nothing beside it.
const FILES: &str = "files";
/// Maximum number of names held in memory at once.
const BATCH: usize = 1024;

/// A directory of the host for one sandbox, locked until this is dropped.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    _lock: OwnedFd,
}

impl Directory {
    /// Creates and locks a new directory.
    pub fn create(scratch: &Path) -> std::io::Result<Self> {
        loop {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
            let path = tempfile::Builder::new().prefix(PREFIX).permissions(mode).tempdir_in(scratch)?.keep();
            let lock = open(CWD, &path)?;
            flock(&lock, FlockOperation::LockExclusive)?;
            // Between creation and lock, `clean` may have removed it as abandoned: try again with a new one.
            match mkdirat(&lock, FILES, Mode::RWXU) {
                Ok(()) => return Ok(Self { path, _lock: lock }),
                Err(Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Returns the path of the session's files.
    pub fn files(&self) -> PathBuf {
        self.path.join(FILES)
    }
}

/// Removes every directory of this user that is not locked by a supervisor.
pub fn clean(scratch: &Path) -> std::io::Result<()> {
    let scratch = openat(CWD, scratch, OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY, Mode::empty())?;
    let user = rustix::process::geteuid().as_raw();
    let mut failed = None;
    for entry in Dir::read_from(&scratch)? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_bytes().starts_with(PREFIX.as_bytes()) {
            continue;
        }
        let stat = match statat(&scratch, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if stat.st_uid == user && FileType::from_raw_mode(stat.st_mode).is_dir() => stat,
            _ => continue,
        };
        // One directory that fails does not block the others; the last error is returned at the end.
        if let Err(e) = remove_unlocked(&scratch, name, stat.st_ino)
            && e != Errno::WOULDBLOCK
            && e != Errno::NOENT
        {
            failed = Some(e);
        }
    }
    failed.map_or(Ok(()), |e| Err(e.into()))
}

fn remove_unlocked(scratch: &OwnedFd, name: &std::ffi::CStr, inode: u64) -> Result<(), Errno> {
    let directory = open(scratch, name)?;
    if fstat(&directory)?.st_ino != inode {
        return Ok(());
    }
    flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
    remove_contents(&directory)?;
    unlinkat(scratch, name, AtFlags::REMOVEDIR)
}

/// Removes everything in a directory, however deeply nested, with two descriptors and without recursion: nested
/// directories are first moved up to `top`.
fn remove_contents(top: &OwnedFd) -> Result<(), Errno> {
    let mut moved = 0u64;
    loop {
        let names = names(top, BATCH)?;
        if names.is_empty() {
            return Ok(());
        }
        let mut removed = 0;
        for name in names {
            if !is_directory(top, &name)? {
                unlinkat(top, &name, AtFlags::empty())?;
                removed += 1;
                continue;
            }
            // Nothing can be removed from an unreadable directory.
            chmodat(top, &name, Mode::RWXU, AtFlags::empty())?;
            let directory = open(top, &name)?;
            for entry in Dir::read_from(&directory)? {
                let entry = entry?;
                let inner = entry.file_name();
                if inner == c"." || inner == c".." {
                    continue;
                }
                if is_directory(&directory, inner)? {
                    // Moving a directory rewrites its `..` entry, which requires write permission on it.
                    chmodat(&directory, inner, Mode::RWXU, AtFlags::empty())?;
                    renameat(&directory, inner, top, format!("moved-{moved}"))?;
                    moved += 1;
                } else {
                    unlinkat(&directory, inner, AtFlags::empty())?;
                }
                removed += 1;
            }
            match unlinkat(top, &name, AtFlags::REMOVEDIR) {
                Ok(()) => removed += 1,
                // The scan may skip entries while others are being removed: the next round finds them.
                Err(Errno::NOTEMPTY | Errno::EXIST) => {}
                Err(e) => return Err(e),
            }
        }
        if removed == 0 {
            return Err(Errno::NOTEMPTY);
        }
    }
}

fn names(directory: &OwnedFd, max: usize) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_owned();
        if name.as_c_str() != c"." && name.as_c_str() != c".." {
            names.push(name);
        }
        if names.len() == max {
            break;
        }
    }
    Ok(names)
}

fn is_directory(directory: &OwnedFd, name: &std::ffi::CStr) -> Result<bool, Errno> {
    Ok(FileType::from_raw_mode(statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode).is_dir())
}

fn open(directory: impl AsFd, path: impl Arg) -> Result<OwnedFd, Errno> {
    openat(directory, path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the entries of a directory.
    fn entry_count(scratch: &Path) -> usize {
        std::fs::read_dir(scratch).unwrap().count()
    }

    /// Creates directories nested `depth` deep in `root`, each through a descriptor, because the path would be too
    /// long.
    fn nest(root: &Path, depth: usize, mode: Mode) {
        let mut current = open(CWD, root).unwrap();
        let mut path = Vec::new();
        for _ in 0..depth {
            mkdirat(&current, "d", Mode::RWXU).unwrap();
            let inner = open(&current, "d").unwrap();
            openat(&inner, "file", OFlags::CREATE | OFlags::CLOEXEC, Mode::empty()).unwrap();
            path.push(std::mem::replace(&mut current, inner));
            if path.len() > 100 {
                path.remove(0);
            }
        }
        for directory in path.iter().rev() {
            chmodat(directory, "d", mode, AtFlags::empty()).unwrap();
        }
    }

    #[test]
    fn orphaned_directories_are_removed() {
        let memory = Some(Path::new("/dev/shm")).filter(|path| path.is_dir());
        let scratch = memory.map_or_else(tempfile::tempdir, tempfile::tempdir_in).unwrap();
        let held = Directory::create(scratch.path()).unwrap();
        std::fs::write(held.files().join("kept"), "x").unwrap();
        let deep = Directory::create(scratch.path()).unwrap();
        nest(&deep.files(), 20_000, Mode::RWXU);
        let unreadable = Directory::create(scratch.path()).unwrap();
        nest(&unreadable.files(), 50, Mode::empty());
        chmodat(CWD, unreadable.files(), Mode::empty(), AtFlags::empty()).unwrap();
        let wide = Directory::create(scratch.path()).unwrap();
        for i in 0..3000 {
            std::fs::create_dir(wide.files().join(format!("moved-{i}"))).unwrap();
        }
        std::os::unix::fs::symlink(held.files(), wide.files().join("link")).unwrap();
        std::fs::write(scratch.path().join("tenure-sandbox-file"), "not a directory").unwrap();
        std::fs::create_dir(scratch.path().join("other")).unwrap();
        drop((deep, unreadable, wide));
        clean(scratch.path()).unwrap();
        assert_eq!(entry_count(scratch.path()), 3, "the one in use, the file and the other directory");
        assert_eq!(std::fs::read_to_string(held.files().join("kept")).unwrap(), "x");
        drop(held);
        clean(scratch.path()).unwrap();
        assert_eq!(entry_count(scratch.path()), 2);
    }
}
