//! Creates files and directories that only their owner may read and write, because conversations with models
//! are personal data.
//!
//! The modes (0600 for files, 0700 for directories) apply to what is created here; existing files and
//! directories keep their mode. Modes have no effect on Windows.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::path::Path;

/// Returns open options that create files with mode 0600.
pub fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Creates a file with mode 0600 for writing, or truncates an existing one.
pub fn create(path: impl AsRef<Path>) -> io::Result<File> {
    options().write(true).create(true).truncate(true).open(path)
}

fn builder() -> DirBuilder {
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

/// Creates a directory with mode 0700.
pub fn create_dir(path: impl AsRef<Path>) -> io::Result<()> {
    builder().create(path)
}

/// Creates a directory and its missing parents, all with mode 0700.
pub fn create_dir_all(path: impl AsRef<Path>) -> io::Result<()> {
    builder().recursive(true).create(path)
}
