//! Checks the disk usage of a session's files against their limits after each call.
//!
//! In a tmpfs the kernel enforces the limits on bytes and number of files, so only the depth is checked here. In a
//! directory of the host, a call can exceed the limits until it ends.

use super::plan::FileLimits;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, chmodat, fstat, fstatvfs, openat, statat};
use rustix::io::Errno;
use rustix::path::Arg;
use std::path::Path;

/// Which component enforces the limits on bytes and number of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageLimit {
    /// The kernel, continuously: the directory is a separate tmpfs.
    ByKernel,
    /// The check in this module.
    ByScan,
}

/// Returns the exceeded limit, worded for the model, or `None` if no limit is exceeded. A failed check counts as
/// exceeded.
pub fn exceeded(directory: &Path, limits: &FileLimits, enforced: UsageLimit) -> Option<String> {
    check(directory, limits, enforced).unwrap_or_else(|e| Some(format!("could not check the session's files: {e}")))
}

fn check(directory: &Path, limits: &FileLimits, enforced: UsageLimit) -> Result<Option<String>, Errno> {
    let root = open(CWD, directory)?;
    if enforced == UsageLimit::ByKernel {
        let stat = fstatvfs(&root)?;
        let used = stat.f_files.saturating_sub(stat.f_ffree);
        // Too few inodes are in use for directories to be nested that deep.
        if used <= u64::try_from(limits.max_depth).unwrap_or(u64::MAX) {
            return Ok(None);
        }
    }
    scan(root, limits)
}

/// Scans all files, at most `max_files` of them, with at most `max_depth` open directory descriptors.
fn scan(root: OwnedFd, limits: &FileLimits) -> Result<Option<String>, Errno> {
    let device = fstat(&root)?.st_dev;
    let mut files = 0u64;
    let mut bytes = 0u64;
    let mut open_directories = vec![Dir::new(root)?];
    loop {
        let depth = open_directories.len();
        let Some(directory) = open_directories.last_mut() else { return Ok(None) };
        let Some(entry) = directory.read().transpose()? else {
            open_directories.pop();
            continue;
        };
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let parent = directory.fd()?;
        let stat = match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => continue,
            Err(e) => return Err(e),
        };
        files += 1;
        bytes = bytes.saturating_add(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512));
        if files > limits.max_files {
            return Ok(Some(format!(
                "there are more than {} files and directories (python.max_files)",
                limits.max_files
            )));
        }
        if bytes > limits.disk {
            return Ok(Some(format!(
                "the files use more than {} (python.disk)",
                tenure::policy::ByteSize(limits.disk)
            )));
        }
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory || stat.st_dev != device {
            continue;
        }
        if depth > limits.max_depth {
            return Ok(Some(format!("directories are nested more than {} deep (python.max_depth)", limits.max_depth)));
        }
        // Makes an unreadable directory readable again: it could hide any number of files.
        let opened = match open(parent, name) {
            Err(Errno::ACCESS) => chmodat(parent, name, Mode::RWXU, AtFlags::empty()).and_then(|()| open(parent, name)),
            opened => opened,
        };
        match opened {
            Ok(directory) => open_directories.push(Dir::new(directory)?),
            // Removed or replaced concurrently.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
            Err(Errno::ACCESS | Errno::PERM | Errno::NOSYS) => {
                return Ok(Some("a directory is not readable, so its files cannot be counted".to_owned()));
            }
            Err(e) => return Err(e),
        }
    }
}

fn open(directory: impl rustix::fd::AsFd, path: impl Arg) -> Result<OwnedFd, Errno> {
    openat(directory, path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let limits = FileLimits { disk: 1 << 20, max_files: 10, max_depth: 3 };
        let check = || exceeded(directory.path(), &limits, UsageLimit::ByScan);
        std::fs::create_dir_all(directory.path().join("1/2/3")).unwrap();
        std::os::unix::fs::symlink("..", directory.path().join("1/2/3/up")).unwrap();
        std::fs::write(directory.path().join("1/file"), vec![1; 100_000]).unwrap();
        assert_eq!(check(), None);
        std::fs::create_dir(directory.path().join("1/2/3/4")).unwrap();
        assert!(check().unwrap().contains("python.max_depth"));
        std::fs::remove_dir(directory.path().join("1/2/3/4")).unwrap();
        std::fs::write(directory.path().join("big"), vec![1; 1 << 20]).unwrap();
        assert!(check().unwrap().contains("1MB (python.disk)"));
        std::fs::remove_file(directory.path().join("big")).unwrap();
        for i in 0..6 {
            std::fs::write(directory.path().join(format!("file {i}")), "").unwrap();
        }
        assert!(check().unwrap().contains("python.max_files"));
        assert!(exceeded(&directory.path().join("missing"), &limits, UsageLimit::ByScan).is_some());
    }
}
