//! The server and command line of Tenure (binary `tenure`): an OpenAI-compatible endpoint with durable sessions in
//! front of any model server.
//!
//! Sessions are implemented by the library [`tenure`]. This crate adds HTTP, configuration, model clients and the
//! command line.
//!
//! The modules are layers. A module imports only from layers below its own, or from its own directory without a
//! cycle:
//!
//! | layer | modules |
//! |---|---|
//! | 12 | [`cli`] |
//! | 11 | [`serve`], [`signals`], [`startup`] |
//! | 10 | [`router`] |
//! | 9 | [`http`] |
//! | 8 | [`jobs`] |
//! | 7 | [`sessions`] |
//! | 6 | [`app`] |
//! | 5 | [`embed`] |
//! | 4 | [`auth`], [`llm`], [`observability`], [`tools`], [`transcripts`], [`webhooks`], [`workspace`] |
//! | 3 | [`http_client`], [`net`] |
//! | 2 | [`config`], [`headers`] |
//! | 1 | [`clock`], [`error`], [`names`], [`tasks`] |

pub mod app;
pub mod auth;
pub mod cli;
pub mod clock;
pub mod config;
pub mod embed;
pub mod error;
pub mod headers;
pub mod http;
pub mod http_client;
pub mod jobs;
pub mod llm;
pub mod names;
pub mod net;
pub mod observability;
pub mod router;
pub mod serve;
pub mod sessions;
pub mod signals;
pub mod startup;
pub mod tasks;
pub mod tools;
pub mod transcripts;
pub mod webhooks;
pub mod workspace;
