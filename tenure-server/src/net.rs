//! What a socket needs: admission of connections, the transport below HTTP, and bodies in both directions.

pub mod bodies;
pub mod connections;
pub mod http1;
pub mod responses;
pub mod transport;
