//! Files and directories that only their owner may read and write: what people say to models is personal data.
//!
//! The modes (0600 and 0700) hold for what is created here; what exists already keeps its own. Without effect on Windows.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::path::Path;

/// Options that create a file with mode 0600.
pub fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Creates a file, or empties the one that is there.
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
