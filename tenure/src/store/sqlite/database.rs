//! The file: opening, migrating and scrubbing it, the connections to it, and its errors in words.

use crate::private_files;
use crate::store::contract::FORMAT;
use crate::store::sqlite::fault::{Done, Fault};
use crate::types::error::{Error, Result};
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior, ffi};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fmt, thread};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Each is applied once, in its own transaction; the number of those that were is the file's `user_version`.
const MIGRATIONS: [&str; FORMAT as usize] = [
    include_str!("../../../migrations/sqlite/0001_init.sql"),
    include_str!("../../../migrations/sqlite/0002_match.sql"),
    include_str!("../../../migrations/sqlite/0003_log_hash.sql"),
    include_str!("../../../migrations/sqlite/0004_labels.sql"),
];

/// How long to wait for another process that writes.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// How often, and how long each time, to wait for readers that keep old bytes alive.
const SCRUB_TRIES: u32 = 5;
const SCRUB_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to wait for readers before something that can be done later.
const WIPE_TIMEOUT: Duration = Duration::from_millis(100);

/// Bytes of disk that are kept for the day when it is full: what is purged then must be written to the log first. The file of this
/// size is removed when a purge finds no room, and written again after it.
const RESERVE_BYTES: usize = 8 << 20;

/// At most so many read at once.
pub(super) const MAX_READERS: usize = 8;

/// A checkpoint each 16 MB, and a log that is cut back to 64 MB.
const SETTINGS: &str = "
    PRAGMA synchronous = FULL;
    PRAGMA foreign_keys = OFF;
    PRAGMA secure_delete = ON;
    PRAGMA temp_store = MEMORY;
    PRAGMA cache_size = -16384;
    PRAGMA wal_autocheckpoint = 4000;
    PRAGMA journal_size_limit = 67108864;
";

/// Where the database is.
#[derive(Clone)]
pub(super) struct File(Arc<str>);

impl fmt::Display for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sqlite {}", self.0)
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl File {
    pub fn new(file: &str) -> Result<Self> {
        if file.is_empty() || file == ":memory:" || file.contains('\0') {
            return Err(Error::invalid(
                "store",
                "sqlite: needs the name of a file; without one, use the store `memory:`",
            ));
        }
        let directory = Path::new(file).parent().filter(|d| !d.as_os_str().is_empty());
        if let Some(directory) = directory.filter(|d| !d.is_dir()) {
            let message = format!("there is no directory {directory:?} for the SQLite file; create it first");
            return Err(Error::invalid("store", message));
        }
        Ok(Self(file.into()))
    }

    /// A connection that can write.
    pub fn open(&self) -> Result<Connection> {
        self.connect().map_err(|e| self.error(&e))
    }

    fn connect(&self) -> rusqlite::Result<Connection> {
        use OpenFlags as Flags;
        // Without URIs: a file name is a file name.
        let flags = Flags::SQLITE_OPEN_READ_WRITE | Flags::SQLITE_OPEN_CREATE | Flags::SQLITE_OPEN_NO_MUTEX;
        // SQLite would create it readable by everybody; its log and index files take their mode from it.
        let _ = private_files::options().append(true).create(true).open(&*self.0);
        let conn = Connection::open_with_flags(&*self.0, flags)?;
        conn.busy_timeout(BUSY_TIMEOUT)?;
        conn.set_prepared_statement_cache_capacity(64);
        // SQLite does not wait for another connection that switches the journal at the same moment.
        let mut tries = 0;
        while let Err(e) = conn.pragma_update(None, "journal_mode", "WAL") {
            tries += 1;
            if tries == 100 || e.sqlite_error_code() != Some(ErrorCode::DatabaseBusy) {
                return Err(e);
            }
            thread::sleep(BUSY_TIMEOUT / 100);
        }
        conn.execute_batch(SETTINGS)?;
        Ok(conn)
    }

    /// Brings the file to the newest format. Several processes may try at once.
    pub fn migrate(&self, conn: &Connection) -> Result<()> {
        while self.format(conn)? < MIGRATIONS.len() {
            self.step(conn).map_err(|fault| self.told(fault))?;
        }
        Ok(())
    }

    fn format(&self, conn: &Connection) -> Result<usize> {
        let found = conn.pragma_query_value(None, "user_version", |r| r.get(0)).map_err(|e| self.error(&e))?;
        let known = MIGRATIONS.len() as u32;
        if found > known {
            return Err(Error::NewerFormat { place: self.to_string(), found, known });
        }
        Ok(found as usize)
    }

    /// The format of the file as it is.
    pub fn found(&self) -> Result<Option<u32>> {
        if !Path::new(&*self.0).exists() {
            return Ok(None);
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(&*self.0, flags).map_err(|e| self.error(&e))?;
        conn.busy_timeout(BUSY_TIMEOUT).map_err(|e| self.error(&e))?;
        let found = conn.pragma_query_value(None, "user_version", |r| r.get(0)).map_err(|e| self.error(&e))?;
        Ok((found > 0).then_some(found))
    }

    fn step(&self, conn: &Connection) -> Done<()> {
        let transaction = rusqlite::Transaction::new_unchecked(conn, TransactionBehavior::Immediate)?;
        let done = self.format(conn)?;
        let Some(migration) = MIGRATIONS.get(done) else { return Ok(()) };
        let tables = conn.query_row("SELECT count(*) FROM sqlite_schema", [], |r| r.get::<_, u32>(0))?;
        if done == 0 && tables > 0 {
            let message = format!("{self} is the database of another program; use another file");
            return Err(Error::invalid("store", message).into());
        }
        conn.execute_batch(migration)?;
        conn.pragma_update(None, "user_version", done as u32 + 1)?;
        Ok(transaction.commit()?)
    }

    /// Writes the reserve, unless it is there. Without room for it the store works as well, but can not purge on a full disk.
    pub fn keep_reserve(&self) {
        let path = self.reserve();
        if fs::metadata(&path).is_ok_and(|m| m.len() == RESERVE_BYTES as u64) {
            return;
        }
        // Written and not only made as long: a hole takes no room.
        let zeros = vec![0; 1 << 16];
        let written = private_files::create(&path)
            .and_then(|mut file| (0..RESERVE_BYTES / zeros.len()).try_for_each(|_| file.write_all(&zeros)));
        if let Err(e) = written {
            tracing::warn!(path, error = %e, "no disk space is kept in reserve: on a full disk nothing can be purged");
            let _ = fs::remove_file(&path);
        }
    }

    /// Gives the reserve up; whether it was there.
    pub fn release_reserve(&self) -> bool {
        fs::remove_file(self.reserve()).is_ok()
    }

    /// Writes the reserve again, with the room that the log has taken since.
    pub fn regain_reserve(&self, conn: &Connection) {
        if let Err(e) = self.wipe(conn) {
            tracing::warn!(error = %e, "the log of the SQLite file can not be emptied");
        }
        self.keep_reserve();
    }

    fn reserve(&self) -> String {
        format!("{}-reserve", self.0)
    }

    /// Empties the log, which has pages as they were before something was deleted; in the file itself that is zeroed already
    /// (`secure_delete`). If somebody reads just now, it is left for the next time.
    pub fn wipe(&self, conn: &Connection) -> Result<()> {
        conn.busy_timeout(WIPE_TIMEOUT).map_err(|e| self.error(&e))?;
        let done = conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
        conn.busy_timeout(BUSY_TIMEOUT).map_err(|e| self.error(&e))?;
        done.map_err(|e| self.error(&e))
    }

    /// Sees to it that no byte of what was deleted is left in the file or its log.
    pub fn scrub(&self, conn: &Connection) -> Result<()> {
        self.rewrite(conn).map_err(|e| self.error(&e))?;
        conn.busy_timeout(SCRUB_TIMEOUT).map_err(|e| self.error(&e))?;
        let checkpoint = || conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |r| r.get::<_, bool>(0));
        let mut busy = Ok(true);
        for _ in 0..SCRUB_TRIES {
            busy = checkpoint();
            if !matches!(busy, Ok(true)) {
                break;
            }
        }
        conn.busy_timeout(BUSY_TIMEOUT).map_err(|e| self.error(&e))?;
        match busy {
            Ok(false) => Ok(()),
            Ok(true) => {
                let why = "somebody is reading what was deleted, so its bytes are still in the log";
                Err(Error::unavailable(format!("{self}: {why}; end long reads and clear again")))
            }
            Err(e) => Err(self.error(&e)),
        }
    }

    /// Writes everything anew, for SQLite leaves traces that no other statement reaches. `secure_delete` zeroes deleted rows
    /// where they are, but not the copies that stay in the unused part of a page when rows move to balance a tree; and
    /// FTS5's `secure-delete` keeps words that separate two pages of its index.
    fn rewrite(&self, conn: &Connection) -> rusqlite::Result<()> {
        conn.execute_batch("INSERT INTO item_text (item_text) VALUES ('rebuild')")?;
        // What VACUUM copies has none of the traces, but may not fit into memory.
        let done = conn.execute_batch("PRAGMA temp_store = FILE; VACUUM;");
        done.and(conn.execute_batch("PRAGMA temp_store = MEMORY;"))
    }

    /// A fault as callers see it.
    pub fn told(&self, fault: Fault) -> Error {
        match fault {
            Fault::Told(e) => e,
            Fault::Sql(e) => self.error(&e),
        }
    }

    /// What SQLite said, as callers see it.
    pub fn error(&self, e: &rusqlite::Error) -> Error {
        let Some(code) = e.sqlite_error() else { return Error::corrupt(self, e) };
        match code.code {
            ErrorCode::DiskFull => Error::Full { place: self.to_string() },
            // The index of the log could not grow.
            _ if code.extended_code == ffi::SQLITE_IOERR_SHMSIZE => Error::Full { place: self.to_string() },
            // Every rule of the tables is checked before: only rows that should not be there can break one.
            ErrorCode::DatabaseCorrupt | ErrorCode::ConstraintViolation => Error::corrupt(self, e),
            ErrorCode::NotADatabase => Error::corrupt(self, "it is not a SQLite database"),
            ErrorCode::TooBig => {
                Error::TooLarge { what: "a value".to_owned(), limit: "sqlite_length", max: 1_000_000_000 }
            }
            _ => Error::unavailable(format!("{self}: {e}")),
        }
    }
}

/// Connections for readers.
pub(super) struct Pool {
    pub file: File,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
}

impl Pool {
    pub fn new(file: File) -> Self {
        Self { file, permits: Arc::new(Semaphore::new(MAX_READERS)), idle: Mutex::default() }
    }

    /// Waits until there are fewer than [`MAX_READERS`].
    pub async fn permit(&self) -> Result<OwnedSemaphorePermit> {
        self.permits.clone().acquire_owned().await.map_err(Error::unavailable)
    }

    /// Reads on a connection that nobody else uses meanwhile.
    pub fn with<T>(&self, work: impl FnOnce(&Connection, &File) -> Done<T>) -> Result<T> {
        let idle = self.idle().pop();
        let conn = match idle {
            Some(conn) => conn,
            None => self.open().map_err(|e| self.file.error(&e))?,
        };
        let done = work(&conn, &self.file).map_err(|fault| self.file.told(fault));
        self.idle().push(conn);
        done
    }

    /// Reads on a connection that is idle now, or not at all: nobody waits here, neither for a connection nor for a lock on the file.
    pub fn glance<T>(&self, look: impl FnOnce(&Connection, &File) -> Done<T>) -> Option<Result<T>> {
        let _permit = self.permits.try_acquire().ok()?;
        let conn = self.idle().pop()?;
        let done = conn.busy_timeout(Duration::ZERO).map_err(Fault::from).and_then(|()| look(&conn, &self.file));
        // A connection without its patience is of no use to others.
        let patient = conn.busy_timeout(BUSY_TIMEOUT);
        if patient.is_ok() {
            self.idle().push(conn);
        }
        match done {
            Err(Fault::Sql(e)) if e.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => None,
            done => Some(done.map_err(|fault| self.file.told(fault))),
        }
    }

    /// Reads on a new connection, which remembers nothing.
    pub fn afresh<T>(&self, work: impl FnOnce(&Connection, &File) -> Done<T>) -> Result<T> {
        let conn = self.open().map_err(|e| self.file.error(&e))?;
        work(&conn, &self.file).map_err(|fault| self.file.told(fault))
    }

    fn open(&self) -> rusqlite::Result<Connection> {
        let conn = self.file.connect()?;
        conn.execute_batch("PRAGMA query_only = ON; PRAGMA cache_size = -4096;")?;
        Ok(conn)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().expect("nothing panics while it holds the connections")
    }
}
