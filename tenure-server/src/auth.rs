//! Authentication and authorization: API keys, the rights they grant, and the principal a request acts as.
//!
//! A key is 256 random bits, stored only as its BLAKE3 hash (D-101). A store that has never had a key serves
//! unauthenticated requests, but only on loopback (D-102).

mod bootstrap;
mod caller;
mod keys;
pub mod rate_limit;

pub use bootstrap::add_bootstrap_key;
pub use caller::{Caller, Credentials, LocalAccess};
pub use keys::{ApiKey, KeyStore, NewKey, Right, SYSTEM_TENANT};
