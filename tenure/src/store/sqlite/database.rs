//! The database file: opening, migrating and scrubbing it, the reader pool, and the conversion of
//! SQLite errors.
//!
//! Invariant: every connection of an open store is in WAL mode with `secure_delete`, and has
//! `synchronous = FULL` except for transactions that may be lost.

use crate::home::expand_home;
use crate::private_files;
use crate::store::contract::FORMAT;
use crate::store::sqlite::fault::{StoreFault, StoreResult};
use crate::store::sqlite::messages;
use crate::types::error::{Error, Result};
use crate::types::error_source::ErrorSource;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior, ffi};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fmt, thread};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Schema migrations. Each is applied once, in its own transaction; the file's `user_version` is
/// the number applied (D-118).
const MIGRATIONS: [&str; FORMAT as usize] = [include_str!("../../../migrations/sqlite/0001_init.sql")];

/// Maximum time to wait for the write lock of another process.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Attempts to truncate the write-ahead log while readers still need old pages, and the time to
/// wait for readers in each attempt.
const SCRUB_ATTEMPTS: u32 = 5;
const SCRUB_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum time to wait for readers when the work can be retried later.
const TRUNCATE_TIMEOUT: Duration = Duration::from_millis(100);

/// Size of the reserve file in bytes. Purging on a full disk must first write to the write-ahead
/// log, so a purge that finds no space deletes this file, and writes it again afterwards (D-034).
const RESERVE_BYTES: usize = 8 << 20;

/// Maximum number of concurrent readers.
pub(super) const MAX_READERS: usize = 8;

/// Connection settings: a checkpoint every 4000 pages (16 MB), and a write-ahead log that is
/// truncated to 64 MB.
const SETTINGS: &str = "
    PRAGMA synchronous = FULL;
    PRAGMA foreign_keys = OFF;
    PRAGMA secure_delete = ON;
    PRAGMA temp_store = MEMORY;
    PRAGMA cache_size = -16384;
    PRAGMA wal_autocheckpoint = 4000;
    PRAGMA journal_size_limit = 67108864;
";

/// The path of the database file.
#[derive(Clone)]
pub(super) struct Database(Arc<str>);

impl fmt::Display for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sqlite {}", self.0)
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl Database {
    pub fn new(file: &str) -> Result<Self> {
        if file.is_empty() || file == ":memory:" || file.contains('\0') {
            return Err(Error::invalid(
                "store",
                "sqlite: needs the name of a file; without one, use the store `memory:`",
            ));
        }
        // The path of a home directory that is not UTF-8 cannot be used; then the path stays as it is.
        let expanded = expand_home(file);
        let file = expanded.to_str().unwrap_or(file);
        let directory = Path::new(file).parent().filter(|d| !d.as_os_str().is_empty());
        if let Some(directory) = directory.filter(|d| !d.is_dir()) {
            let message = format!("there is no directory {directory:?} for the SQLite file; create it first");
            return Err(Error::invalid("store", message));
        }
        Ok(Self(file.into()))
    }

    /// Opens a read-write connection, and creates the file if it does not exist.
    pub fn open(&self) -> Result<Connection> {
        self.connect().map_err(|e| self.error(e))
    }

    /// Opens a connection with the settings of the store, in WAL mode.
    fn connect(&self) -> rusqlite::Result<Connection> {
        use OpenFlags as Flags;
        // No URI parsing: a path is taken literally.
        let flags = Flags::SQLITE_OPEN_READ_WRITE | Flags::SQLITE_OPEN_CREATE | Flags::SQLITE_OPEN_NO_MUTEX;
        // SQLite would create the file world-readable. Its write-ahead log and shared-memory files
        // inherit its mode.
        let _ = private_files::options().append(true).create(true).open(&*self.0);
        let conn = Connection::open_with_flags(&*self.0, flags)?;
        conn.busy_timeout(BUSY_TIMEOUT)?;
        conn.set_prepared_statement_cache_capacity(64);
        // The busy timeout does not cover a concurrent switch of the journal mode, so retry.
        let mut attempts = 0;
        while let Err(e) = conn.pragma_update(None, "journal_mode", "WAL") {
            attempts += 1;
            if attempts == 100 || e.sqlite_error_code() != Some(ErrorCode::DatabaseBusy) {
                return Err(e);
            }
            thread::sleep(BUSY_TIMEOUT / 100);
        }
        conn.execute_batch(SETTINGS)?;
        Ok(conn)
    }

    /// Migrates the file to the newest format. Safe to run concurrently in several processes.
    pub fn migrate(&self, conn: &Connection) -> Result<()> {
        while self.format(conn)? < MIGRATIONS.len() {
            self.apply_next_migration(conn).map_err(|fault| self.fault_to_error(fault))?;
        }
        Ok(())
    }

    /// Reads the format of an open file; a newer one is [`Error::NewerFormat`].
    fn format(&self, conn: &Connection) -> Result<usize> {
        let found = conn.pragma_query_value(None, "user_version", |r| r.get(0)).map_err(|e| self.error(e))?;
        let known = MIGRATIONS.len() as u32;
        if found > known {
            return Err(Error::NewerFormat { location: self.to_string(), version: found, supported: known });
        }
        Ok(found as usize)
    }

    /// Returns the format of the file without changing it. `None` means that there is no file, or
    /// an empty one.
    pub fn existing_format(&self) -> Result<Option<u32>> {
        if !Path::new(&*self.0).exists() {
            return Ok(None);
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(&*self.0, flags).map_err(|e| self.error(e))?;
        conn.busy_timeout(BUSY_TIMEOUT).map_err(|e| self.error(e))?;
        let version = conn.pragma_query_value(None, "user_version", |r| r.get(0)).map_err(|e| self.error(e))?;
        Ok((version > 0).then_some(version))
    }

    /// Applies one migration, unless a concurrent process has applied it. Rejects the database of
    /// another program.
    fn apply_next_migration(&self, conn: &Connection) -> StoreResult<()> {
        let transaction = rusqlite::Transaction::new_unchecked(conn, TransactionBehavior::Immediate)?;
        let version = self.format(conn)?;
        let Some(migration) = MIGRATIONS.get(version) else { return Ok(()) };
        let tables = conn.query_row("SELECT count(*) FROM sqlite_schema", [], |r| r.get::<_, u32>(0))?;
        if version == 0 && tables > 0 {
            let message = format!("{self} is the database of another program; use another file");
            return Err(Error::invalid("store", message).into());
        }
        conn.execute_batch(migration)?;
        conn.pragma_update(None, "user_version", version as u32 + 1)?;
        Ok(transaction.commit()?)
    }

    /// Creates the reserve file unless it exists. Without space for it the store still works, but
    /// cannot purge on a full disk.
    pub fn ensure_reserve(&self) {
        let path = self.reserve_path();
        if fs::metadata(&path).is_ok_and(|m| m.len() == RESERVE_BYTES as u64) {
            return;
        }
        // Write the zeros instead of extending the file: a sparse file reserves no space.
        let zeros = vec![0; 1 << 16];
        let written = private_files::create(&path)
            .and_then(|mut file| (0..RESERVE_BYTES / zeros.len()).try_for_each(|_| file.write_all(&zeros)));
        if let Err(e) = written {
            tracing::warn!(path, error = %e, "could not create the reserve file: purging will fail if the disk becomes full");
            let _ = fs::remove_file(&path);
        }
    }

    /// Deletes the reserve file. Returns whether it existed.
    pub fn release_reserve(&self) -> bool {
        fs::remove_file(self.reserve_path()).is_ok()
    }

    /// Creates the reserve file again, after truncating the write-ahead log to make room for it.
    pub fn restore_reserve(&self, conn: &Connection) {
        if let Err(e) = self.truncate_wal(conn) {
            tracing::warn!(error = %e, "could not truncate SQLite's write-ahead log");
        }
        self.ensure_reserve();
    }

    fn reserve_path(&self) -> String {
        format!("{}-reserve", self.0)
    }

    /// Truncates the write-ahead log, which contains pages from before a deletion; the main file is
    /// zeroed already (`secure_delete`). If a reader is active, this is left to the next call
    /// (D-073).
    pub fn truncate_wal(&self, conn: &Connection) -> Result<()> {
        conn.busy_timeout(TRUNCATE_TIMEOUT).map_err(|e| self.error(e))?;
        let outcome = conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
        conn.busy_timeout(BUSY_TIMEOUT).map_err(|e| self.error(e))?;
        outcome.map_err(|e| self.error(e))
    }

    /// Removes all bytes of deleted data from the file and its write-ahead log (D-033). Fails if
    /// readers prevent this.
    pub fn scrub(&self, conn: &Connection) -> Result<()> {
        self.rewrite(conn).map_err(|e| self.error(e))?;
        conn.busy_timeout(SCRUB_TIMEOUT).map_err(|e| self.error(e))?;
        let checkpoint = || conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |r| r.get::<_, bool>(0));
        let mut is_busy = Ok(true);
        for _ in 0..SCRUB_ATTEMPTS {
            is_busy = checkpoint();
            if !matches!(is_busy, Ok(true)) {
                break;
            }
        }
        conn.busy_timeout(BUSY_TIMEOUT).map_err(|e| self.error(e))?;
        match is_busy {
            Ok(false) => Ok(()),
            Ok(true) => {
                let reason = "a reader still uses deleted data, so its bytes remain in the write-ahead log";
                Err(Error::unavailable(format!("{self}: {reason}; end long reads and retry the erasure")))
            }
            Err(e) => Err(self.error(e)),
        }
    }

    /// Rewrites the whole file, because SQLite leaves traces that no other statement reaches.
    /// `secure_delete` zeroes deleted rows in place, but not the copies that remain in the unused
    /// part of a page when rows move to balance a tree; and FTS5's `secure-delete` keeps words that
    /// separate two pages of its index.
    fn rewrite(&self, conn: &Connection) -> rusqlite::Result<()> {
        conn.execute_batch("INSERT INTO item_text (item_text) VALUES ('rebuild')")?;
        messages::compact_all(conn)?;
        // The copy that VACUUM makes contains none of the traces, but may not fit into memory.
        let outcome = conn.execute_batch("PRAGMA temp_store = FILE; VACUUM;");
        outcome.and(conn.execute_batch("PRAGMA temp_store = MEMORY;"))
    }

    /// Converts a fault into the error that callers receive.
    pub fn fault_to_error(&self, fault: StoreFault) -> Error {
        match fault {
            StoreFault::Rejected(e) => e,
            StoreFault::Sql(e) => self.error(e),
        }
    }

    /// Converts an error of SQLite into the error that callers receive.
    pub fn error(&self, e: rusqlite::Error) -> Error {
        self.shared_error(&Arc::new(e))
    }

    /// Converts an error of SQLite that affects several callers.
    pub fn shared_error(&self, e: &Arc<rusqlite::Error>) -> Error {
        self.classify(e).with_source(ErrorSource::shared(e.clone()))
    }

    /// Returns true if there is a write-ahead log with contents beside the file.
    fn has_wal(&self) -> bool {
        fs::metadata(format!("{}-wal", self.0)).is_ok_and(|m| m.len() > 0)
    }

    fn classify(&self, e: &rusqlite::Error) -> Error {
        let Some(code) = e.sqlite_error() else { return Error::corrupt(self, e) };
        match code.code {
            _ if is_disk_full(e) => Error::full(self),
            // Every constraint is checked before the write, so only rows that should not exist can
            // violate one.
            ErrorCode::DatabaseCorrupt if self.has_wal() => {
                let file = &self.0;
                let advice = format!(
                    "if {file} was restored or copied, {file}-wal may belong to another database: \
                     remove {file}-wal and {file}-shm, and restore the file again"
                );
                Error::corrupt(self, format!("{e}; {advice}"))
            }
            ErrorCode::DatabaseCorrupt | ErrorCode::ConstraintViolation => Error::corrupt(self, e),
            ErrorCode::NotADatabase => Error::corrupt(self, "not a SQLite database"),
            ErrorCode::TooBig => {
                Error::TooLarge { subject: "a value".to_owned(), limit: "sqlite_length", max: 1_000_000_000 }
            }
            _ => Error::unavailable(format!("{self}: {e}")),
        }
    }
}

/// Returns true if a write failed for lack of space.
pub(super) fn is_disk_full(e: &rusqlite::Error) -> bool {
    let out_of_space = |code: &ffi::Error| {
        // `SHMSIZE`: the shared-memory file (the index of the write-ahead log) could not grow.
        code.code == ErrorCode::DiskFull || code.extended_code == ffi::SQLITE_IOERR_SHMSIZE
    };
    e.sqlite_error().is_some_and(out_of_space)
}

/// A pool of read-only connections.
pub(super) struct Pool {
    pub file: Database,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
}

impl Pool {
    pub fn new(file: Database) -> Self {
        Self { file, permits: Arc::new(Semaphore::new(MAX_READERS)), idle: Mutex::default() }
    }

    /// Waits for a permit: at most [`MAX_READERS`] are held at a time.
    pub async fn permit(&self) -> Result<OwnedSemaphorePermit> {
        self.permits.clone().acquire_owned().await.map_err(Error::unavailable_from)
    }

    /// Runs a read on an exclusively held connection, which returns to the pool afterwards.
    pub fn with<T>(&self, work: impl FnOnce(&Connection, &Database) -> StoreResult<T>) -> Result<T> {
        let idle_connection = self.idle().pop();
        let conn = match idle_connection {
            Some(conn) => conn,
            None => self.open().map_err(|e| self.file.error(e))?,
        };
        let outcome = work(&conn, &self.file).map_err(|fault| self.file.fault_to_error(fault));
        self.idle().push(conn);
        outcome
    }

    /// Runs a read without blocking, on an idle connection. Returns `None` if no connection is
    /// idle, or if the file is locked.
    pub fn try_with<T>(&self, work: impl FnOnce(&Connection, &Database) -> StoreResult<T>) -> Option<Result<T>> {
        let _permit = self.permits.try_acquire().ok()?;
        let conn = self.idle().pop()?;
        let outcome =
            conn.busy_timeout(Duration::ZERO).map_err(StoreFault::from).and_then(|()| work(&conn, &self.file));
        // A connection whose busy timeout could not be restored is not reused.
        let restored = conn.busy_timeout(BUSY_TIMEOUT);
        if restored.is_ok() {
            self.idle().push(conn);
        }
        match outcome {
            Err(StoreFault::Sql(e)) if e.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => None,
            outcome => Some(outcome.map_err(|fault| self.file.fault_to_error(fault))),
        }
    }

    /// Opens a read-only connection that is not part of the pool.
    pub fn connect(&self) -> Result<Connection> {
        self.open().map_err(|e| self.file.error(e))
    }

    /// Runs a read on a new connection, whose caches are empty.
    pub fn with_new_connection<T>(&self, work: impl FnOnce(&Connection, &Database) -> StoreResult<T>) -> Result<T> {
        let conn = self.open().map_err(|e| self.file.error(e))?;
        work(&conn, &self.file).map_err(|fault| self.file.fault_to_error(fault))
    }

    /// Opens a read-only connection.
    fn open(&self) -> rusqlite::Result<Connection> {
        let conn = self.file.connect()?;
        conn.execute_batch("PRAGMA query_only = ON; PRAGMA cache_size = -4096;")?;
        Ok(conn)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().expect("no code panics while holding this lock")
    }
}
