//! The source of an error: the original error of a database, the operating system or a callback.

use std::error::Error;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// An error of a callback: any error, or a text (`"out of memory".into()`).
pub type BoxError = Box<dyn Error + Send + Sync>;

/// The error that caused another one. Cheap to clone, because one failure may affect several operations, such as
/// all writes of a transaction.
///
/// Dereferences to the original error, which can be downcast. `Debug` omits its contents, which may quote stored
/// data.
#[derive(Clone)]
pub struct ErrorSource(Arc<dyn Error + Send + Sync>);

impl ErrorSource {
    /// Wraps an error that a callback returned.
    pub fn boxed(error: BoxError) -> Self {
        Self(error.into())
    }

    /// Wraps an error that is shared already.
    pub fn shared<E: Error + Send + Sync + 'static>(error: Arc<E>) -> Self {
        Self(error)
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for ErrorSource {
    fn from(error: E) -> Self {
        Self(Arc::new(error))
    }
}

impl Deref for ErrorSource {
    type Target = dyn Error + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for ErrorSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ErrorSource")
    }
}

impl fmt::Display for ErrorSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
