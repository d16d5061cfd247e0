//! Operations on one file: durable append, atomic replacement, and reading records.
//!
//! Invariant: a failed append leaves the file as it was, or reports that it could not be truncated.

use crate::private_files;
use crate::store::jsonl::codec::{CommitReader, LineBatch, LogLine, NextCommit};
use crate::types::decode_error::DecodeError;
use crate::types::entry::Record;
use crate::types::error::{Error, Result};
use crate::types::id::Seq;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Converts a file system error into an error of the store.
pub(super) fn io_error(path: &Path, error: io::Error) -> Error {
    let path = path.display();
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::full(path).with_source(error),
        _ => Error::unavailable(format!("{path}: {error}")).with_source(error),
    }
}

/// Fsyncs a directory: makes created, renamed and removed entries durable.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Removes a file, if it exists.
pub(super) fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// The state of a file after a failed append.
pub(super) enum AppendFailure {
    /// The file is unchanged: the append was undone.
    Undone(io::Error),
    /// The file may end in part of the append, because truncating it failed as well.
    Partial(io::Error),
}

/// Appends bytes to a file (creates it if `len` is 0) and waits until they are on disk. With `dir`,
/// the file's directory entry is fsynced as well.
pub(super) fn append(path: &Path, len: u64, bytes: &[u8], dir: Option<&Path>) -> Result<(), AppendFailure> {
    let file = match len {
        0 => private_files::options().write(true).create_new(true).open(path),
        _ => OpenOptions::new().write(true).open(path),
    };
    let mut file = file.map_err(AppendFailure::Undone)?;
    let appended = (|| {
        file.seek(SeekFrom::Start(len))?;
        file.write_all(bytes)?;
        file.sync_data()?;
        dir.map_or(Ok(()), sync_dir)
    })();
    let Err(error) = appended else { return Ok(()) };
    let undone = match len {
        0 => fs::remove_file(path),
        _ => file.set_len(len).and_then(|()| file.sync_all()),
    };
    Err(if undone.is_ok() { AppendFailure::Undone(error) } else { AppendFailure::Partial(error) })
}

/// Appends lines to a copy that only people read. Nothing depends on it.
pub(super) fn append_copy<'a>(path: &Path, lines: impl Iterator<Item = &'a str>) -> io::Result<()> {
    let mut file = private_files::options().read(true).append(true).create(true).open(path)?;
    let len = file.metadata()?.len();
    let mut text = String::new();
    if len > 0 {
        let mut last = [0];
        file.seek(SeekFrom::Start(len - 1))?;
        file.read_exact(&mut last)?;
        // After a crash in the middle of a line, start a new line instead of continuing that one.
        text.extend((last != *b"\n").then_some('\n'));
    }
    for line in lines {
        text.push_str(line);
        text.push('\n');
    }
    let appended = file.write_all(text.as_bytes()).and_then(|()| file.sync_data());
    appended.inspect_err(|_| drop(file.set_len(len)))
}

/// Writes a file atomically: it exists completely or not at all. It is durable once its directory
/// is fsynced.
pub(super) fn write_atomically(temporary: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let written = private_files::create(temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(temporary, path)
    });
    written.inspect_err(|_| drop(fs::remove_file(temporary)))
}

/// The records of a file up to `upto`, to be copied.
pub(super) struct FilePart {
    pub path: PathBuf,
    pub len: u64,
    pub upto: Seq,
}

/// Writes a file from the records of other files and a last commit. Commit boundaries are
/// preserved; heads and items are skipped.
pub(super) fn compose(path: &Path, parts: &[FilePart], last: &[u8]) -> Result<()> {
    let io = |e: io::Error| io_error(path, e);
    let mut out = BufWriter::new(private_files::create(path).map_err(io)?);
    for part in parts {
        let from = File::open(&part.path).map_err(|e| io_error(&part.path, e))?;
        let mut commits = CommitReader::new(from.take(part.len));
        let mut seq = 0;
        loop {
            match commits.next().map_err(|e| io_error(&part.path, e))? {
                NextCommit::Valid => {}
                NextCommit::End => break,
                NextCommit::Invalid => return Err(corrupt(&part.path, commits.line, "checksum mismatch in a commit")),
            }
            let mut batch = LineBatch::default();
            let mut blobs = Vec::new();
            for (number, line) in commits.lines().enumerate() {
                let line =
                    LogLine::parse(line).map_err(|e| corrupt(&part.path, commits.line + number, &e).with_source(e))?;
                if let Some((record_seq, at, entry)) = line.record() {
                    seq = record_seq;
                    if seq <= part.upto {
                        batch.record(seq, at, entry);
                    }
                }
                blobs.extend(line.blobs);
            }
            // A commit of which only a part is copied keeps all of its blobs: they are referenced
            // from its first record on.
            if !batch.is_empty() || (!blobs.is_empty() && seq <= part.upto) {
                out.write_all(&batch.finish(None, &blobs).bytes).map_err(io)?;
            }
        }
    }
    out.write_all(last).map_err(io)?;
    let file = out.into_inner().map_err(|e| io(e.into_error()))?;
    file.sync_all().map_err(io)
}

/// The byte range of a record in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteSpan {
    pub seq: Seq,
    pub start: u64,
    /// An upper bound of the end of the record's line.
    pub end: u64,
}

/// Reads records at the given byte ranges, which are in file order.
pub(super) fn read_records(path: &Path, spans: &[ByteSpan]) -> Result<Vec<Record>> {
    let io = |e: io::Error| io_error(path, e);
    let mut file = BufReader::with_capacity(1 << 16, File::open(path).map_err(io)?);
    let mut records = Vec::with_capacity(spans.len());
    let mut line = Vec::new();
    let mut position = 0;
    for span in spans {
        // Skip lines about items between records.
        file.seek_relative(span.start as i64 - position as i64).map_err(io)?;
        line.clear();
        let read = (&mut file).take(span.end - span.start).read_until(b'\n', &mut line).map_err(io)?;
        position = span.start + read as u64;
        match parse_record(&line, span.seq) {
            Ok(record) => records.push(record),
            Err(e) => {
                let line = line_number(path, span.start).map_err(io)?;
                return Err(corrupt(path, line, &e).with_source(e));
            }
        }
    }
    Ok(records)
}

fn parse_record(line: &[u8], want: Seq) -> Result<Record, DecodeError> {
    match LogLine::parse(line)?.decode()? {
        Some(record) if record.seq == want => Ok(record),
        Some(other) => Err(DecodeError::new(format!("expected record {want}, found record {}", other.seq))),
        None => Err(DecodeError::new(format!("expected record {want}, found another line"))),
    }
}

/// Returns the number of the line that begins at an offset, counted from 1.
fn line_number(path: &Path, offset: u64) -> io::Result<usize> {
    let mut before = BufReader::new(File::open(path)?.take(offset));
    let mut breaks = 0;
    loop {
        let bytes = before.fill_buf()?;
        if bytes.is_empty() {
            return Ok(breaks + 1);
        }
        breaks += bytes.iter().filter(|b| **b == b'\n').count();
        let read = bytes.len();
        before.consume(read);
    }
}

/// Creates the error for damage at a line of a file.
pub(super) fn corrupt(path: &Path, line: usize, reason: impl std::fmt::Display) -> Error {
    Error::corrupt(format!("{}:{line}", path.display()), reason)
}
