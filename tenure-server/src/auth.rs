//! Authentication and authorization: API keys, what they permit, and the principal a request acts as.
//!
//! A key is 256 random bits, stored as its BLAKE3 hash. A store that has never had a key answers without one, on loopback only.

mod bootstrap;
mod caller;
mod keys;
pub mod rate_limit;

pub use bootstrap::add_bootstrap_key;
pub use caller::{Caller, Credentials, LocalAccess};
pub use keys::{ApiKey, KeyStore, NewKey, Right, SYSTEM};
