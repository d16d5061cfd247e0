//! Sets of error responses that routes share, for the OpenAPI document.

use crate::error::ErrorBody;
use std::collections::BTreeMap;
use utoipa::openapi::{Content, Ref, RefOr, ResponseBuilder};
use utoipa::{IntoResponses, ToSchema};

macro_rules! errors {
    ($($(#[$doc:meta])* $name:ident: $($status:literal)*;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name;

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
                [$($status),*].into_iter().map(|status: u16| (status.to_string(), error(status))).collect()
            }
        }
    )*};
}

errors! {
    /// Error responses of list routes, which name no resource.
    ListErrors: 400 401 403 500 503;
    /// Error responses of routes that look up a resource.
    LookupErrors: 400 401 403 404 500 503;
    /// Error responses of routes that read a live session.
    ReadErrors: 400 401 403 404 410 500 503;
    /// Error responses of routes that create or replace a resource.
    CreateErrors: 400 401 403 404 408 409 410 412 413 415 500 503 507;
    /// Error responses of routes that modify a session and take no body.
    UpdateErrors: 400 401 403 404 409 410 412 500 503 507;
    /// Error responses of routes that modify a live session.
    WriteErrors: 400 401 403 404 408 409 410 412 413 415 500 503 507;
}

fn error(status: u16) -> RefOr<utoipa::openapi::Response> {
    let description = match status {
        400 => "Invalid request; nothing was changed",
        401 => "Missing or unknown API key",
        403 => "The API key lacks the required right",
        404 => "Not found",
        408 => "Timeout while reading the body; nothing was changed",
        409 => "It already exists, is paused, or was changed concurrently",
        410 => "It has expired or was deleted; restore it",
        412 => "The `If-Match` condition failed",
        413 => "A size limit was exceeded",
        415 => "The content type is not JSON",
        500 => "The stored data is corrupt (`corrupt`)",
        503 => "The store is unavailable",
        _ => "The disk is full",
    };
    let body = Content::new(Some(Ref::from_schema_name(<ErrorBody as ToSchema>::name())));
    RefOr::T(ResponseBuilder::new().description(description).content("application/json", body).build())
}
