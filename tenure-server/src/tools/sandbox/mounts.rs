//! The private root file system of the sandbox: the system's programs and libraries, read-only, and one tmpfs of
//! limited size.

use super::plan::{FileLimits, MissingFeature};
use std::path::PathBuf;

/// Files and directories of the host that are readable in the sandbox.
pub const SYSTEM: &[&str] = &[
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/ssl/certs",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
];
/// Devices that are readable and writable in the sandbox.
pub const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];
/// Remedy for the operator if mount namespaces are unavailable.
const REMEDY: &str = "Allow file systems to be mounted in user namespaces (kernel.apparmor_restrict_unprivileged_userns; in a container, \
                      a seccomp and AppArmor profile that permits mount), or accept weaker isolation with python.require: landlock \
                      (docs/tools.md).";

/// Replaces the root file system of this mount namespace by one with [`SYSTEM`], [`DEVICES`] and `read`, all
/// read-only, and an empty [`SESSION_DIRECTORY`](crate::config::tools::SESSION_DIRECTORY), which becomes the
/// working directory. The kernel enforces the limits on bytes and files, and removes everything with the last
/// process of the namespace.
#[cfg(target_os = "linux")]
pub fn enter(read: &[PathBuf], base: &std::path::Path, limits: &FileLimits) -> Result<(), MissingFeature> {
    linux::enter(read, base, limits).map_err(|detail| MissingFeature::new("a private mount namespace", REMEDY, detail))
}

/// Always fails: mount namespaces are a feature of Linux.
#[cfg(not(target_os = "linux"))]
pub fn enter(_: &[PathBuf], _: &std::path::Path, _: &FileLimits) -> Result<(), MissingFeature> {
    Err(MissingFeature::new("a private mount namespace", REMEDY, "this system is not Linux"))
}

#[cfg(target_os = "linux")]
mod linux {
    use super::super::plan::{FileLimits, topmost};
    use super::{DEVICES, SYSTEM};
    use crate::config::tools::SESSION_DIRECTORY;
    use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, open, statx};
    use rustix::mount::{
        MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_change,
        mount_remount, move_mount, open_tree, unmount,
    };
    use rustix::process::{chdir, pivot_root};
    use std::ffi::OsString;
    use std::os::fd::OwnedFd;
    use std::os::unix::ffi::OsStringExt;
    use std::path::{Path, PathBuf};

    /// Mount flags of the tmpfs instances created here.
    const PRIVATE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

    type Outcome<T> = Result<T, String>;

    /// Returns a closure that adds the failed operation and its path to an error.
    fn with_path<E: std::fmt::Display>(action: &str, path: impl AsRef<Path>) -> impl FnOnce(E) -> String {
        let path = path.as_ref().to_owned();
        move |error| format!("{action} {}: {error}", path.display())
    }

    pub fn enter(read: &[PathBuf], base: &Path, limits: &FileLimits) -> Outcome<()> {
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        mount_change("/", private).map_err(with_path("make private", "/"))?;
        let base = base.canonicalize().map_err(with_path("find", base))?;
        // The sources are opened first: `base` may be an ancestor of one of them.
        let trees = open_sources(read)?;
        mount("tmpfs", &base, "tmpfs", PRIVATE, c"mode=0755,size=1m,nr_inodes=4096")
            .map_err(with_path("mount", &base))?;
        // Until the root is replaced, everything can be undone.
        let result = build(&base, &trees, limits);
        if result.is_err() {
            let _ = unmount(&base, UnmountFlags::DETACH);
        }
        result?;
        chdir(&base).map_err(with_path("enter", &base))?;
        // The old root is stacked on the new one, from where it is detached.
        pivot_root(".", ".").map_err(with_path("make the root", &base))?;
        unmount(".", UnmountFlags::DETACH).map_err(with_path("detach the old root of", &base))?;
        chdir(SESSION_DIRECTORY).map_err(with_path("enter", SESSION_DIRECTORY))
    }

    fn build(base: &Path, trees: &[(PathBuf, OwnedFd)], limits: &FileLimits) -> Outcome<()> {
        for (path, tree) in trees {
            attach(base, path, tree)?;
        }
        let session = below(base, Path::new(SESSION_DIRECTORY));
        std::fs::create_dir(&session).map_err(with_path("make", &session))?;
        // POSIX shared memory counts as files of the session.
        let shared = base.join("dev/shm");
        std::os::unix::fs::symlink(SESSION_DIRECTORY, &shared).map_err(with_path("make", &shared))?;
        make_read_only(base)?;
        let data = format!("mode=0700,size={},nr_inodes={}", limits.disk, limits.max_files.saturating_add(1));
        let data = std::ffi::CString::new(data).map_err(|e| e.to_string())?;
        mount("tmpfs", &session, "tmpfs", PRIVATE, data.as_c_str()).map_err(with_path("mount", &session))
    }

    /// Clones the mounts to expose, not attached anywhere yet. [`SYSTEM`] and [`DEVICES`] entries that the host
    /// lacks are skipped; a missing path of `read` is an error.
    fn open_sources(read: &[PathBuf]) -> Outcome<Vec<(PathBuf, OwnedFd)>> {
        let fixed = SYSTEM.iter().chain(DEVICES).map(PathBuf::from).filter(|path| path.exists());
        let mut trees = Vec::new();
        for path in topmost(fixed.chain(read.iter().cloned()).collect()) {
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
            let tree = open_tree(CWD, &path, flags).map_err(with_path("open", &path))?;
            trees.push((path, tree));
        }
        Ok(trees)
    }

    fn attach(base: &Path, path: &Path, tree: &OwnedFd) -> Outcome<()> {
        let target = below(base, path);
        let parent = target.parent().unwrap_or(base);
        std::fs::create_dir_all(parent).map_err(with_path("make", parent))?;
        let stat = rustix::fs::fstat(tree).map_err(with_path("look at", path))?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
            std::fs::create_dir(&target).map_err(with_path("make", &target))?;
        } else {
            open(&target, OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC, Mode::RUSR)
                .map_err(with_path("make", &target))?;
        }
        move_mount(tree, "", CWD, &target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(with_path("show", path))
    }

    /// Remounts the mount at `base` and all of its descendants read-only, including those cloned along with a
    /// directory.
    fn make_read_only(base: &Path) -> Outcome<()> {
        let table = std::fs::read("/proc/self/mountinfo").map_err(with_path("read", "/proc/self/mountinfo"))?;
        let mounts: Vec<Mount> = table.split(|byte| *byte == b'\n').filter_map(Mount::parse).collect();
        let stat = statx(CWD, base, AtFlags::empty(), StatxFlags::MNT_ID).map_err(with_path("look at", base))?;
        for mount in tree_of(&mounts, stat.stx_mnt_id) {
            // The kernel does not permit clearing flags of the host's mount in a user namespace.
            let mut flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID;
            for (option, flag) in [("nodev", MountFlags::NODEV), ("noexec", MountFlags::NOEXEC)] {
                if mount.options.split(',').any(|set| set == option) {
                    flags |= flag;
                }
            }
            mount_remount(&mount.path, flags, c"").map_err(with_path("make read-only", &mount.path))?;
        }
        Ok(())
    }

    /// An entry of `/proc/self/mountinfo`.
    #[derive(Debug, PartialEq)]
    struct Mount {
        id: u64,
        parent: u64,
        path: PathBuf,
        options: String,
    }

    impl Mount {
        fn parse(line: &[u8]) -> Option<Self> {
            let mut fields = line.split(|byte| *byte == b' ');
            let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
            let id = number()?;
            let parent = number()?;
            let mut fields = fields.skip(2);
            let path = PathBuf::from(OsString::from_vec(unescape(fields.next()?)));
            Some(Self { id, parent, path, options: String::from_utf8_lossy(fields.next()?).into_owned() })
        }
    }

    /// Returns a mount and all of its descendants. They are selected by mount id, because a hidden mount may have
    /// the same path.
    fn tree_of(mounts: &[Mount], root: u64) -> Vec<&Mount> {
        let mut tree: Vec<&Mount> = mounts.iter().filter(|mount| mount.id == root).collect();
        let mut next = 0;
        while let Some(id) = tree.get(next).map(|mount| mount.id) {
            tree.extend(mounts.iter().filter(|mount| mount.parent == id && mount.id != id));
            next += 1;
        }
        tree
    }

    /// Decodes the octal escapes of `/proc/self/mountinfo` (space, tab, newline and backslash, each `\` and three
    /// digits).
    fn unescape(text: &[u8]) -> Vec<u8> {
        let mut plain = Vec::with_capacity(text.len());
        let mut rest = text;
        while let Some((first, after)) = rest.split_first() {
            let digits = after.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
            match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
                Some(byte) => {
                    plain.push(byte);
                    rest = &after[3..];
                }
                None => {
                    plain.push(*first);
                    rest = after;
                }
            }
        }
        plain
    }

    fn below(base: &Path, path: &Path) -> PathBuf {
        base.join(path.strip_prefix("/").unwrap_or(path))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn lines_of_mountinfo() {
            let line = br"36 35 98:0 /mnt1 /mnt\0402 rw,noexec master:1 - ext3 /dev/root rw";
            let want = Mount { id: 36, parent: 35, path: "/mnt 2".into(), options: "rw,noexec".into() };
            assert_eq!(Mount::parse(line), Some(want));
            assert_eq!(Mount::parse(b""), None);
            assert_eq!(unescape(br"a\134b\9"), br"a\b\9");
        }

        #[test]
        fn mounts_below_one() {
            let mount = |id, parent| Mount { id, parent, path: "/x".into(), options: String::new() };
            let mounts = [mount(5, 1), mount(1, 1), mount(9, 5), mount(2, 9), mount(3, 1)];
            assert_eq!(tree_of(&mounts, 5).iter().map(|mount| mount.id).collect::<Vec<_>>(), [5, 9, 2]);
        }
    }
}
