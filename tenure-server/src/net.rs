//! What a socket needs: admission of connections, the transport below HTTP, and bodies in both directions.

pub mod body_budget;
pub mod connections;
pub mod http1;
pub mod responses;
pub mod transport;
