//! The network layer below the routes: admission of connections, the transport below HTTP, request body budgets and
//! response bodies.

pub mod body_budget;
pub mod connections;
pub mod http1;
pub mod responses;
pub mod transport;
