//! The route table, and the middleware that every request passes: origin and header checks, CORS, rate limit
//! headers, metrics and request logs.

use crate::app::AppState;
use crate::auth::rate_limit::{self, ResponseHeaders};
use crate::error::ApiError;
use crate::headers::{header_hint, header_text};
use crate::http::{
    assistants, audit, backup, cache, chat, checkpoints, compact, docs, keys, memories, messages, models, operations,
    reviews, runs, schedules, search, sessions, sessions_v1, threads, transfer, users,
};
use crate::observability::telemetry;
use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use tracing::Instrument;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The parts of the OpenAPI document that do not come from the routes: title, error schema and security scheme.
#[derive(OpenApi)]
#[openapi(
    info(title = "Tenure", description = "Durable sessions for LLM agents: an OpenAI-compatible endpoint with persistent memory, and an agent server."),
    components(schemas(crate::error::ErrorBody)),
    modifiers(&SecurityScheme)
)]
struct OpenApiDocument;

struct SecurityScheme;

impl utoipa::Modify for SecurityScheme {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
        let bearer = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
        document.components.get_or_insert_default().add_security_scheme("key", bearer);
    }
}

fn route_table() -> OpenApiRouter<AppState> {
    OpenApiRouter::with_openapi(OpenApiDocument::openapi())
        // OpenAI-compatible endpoints
        .routes(routes!(chat::complete))
        .routes(routes!(models::list))
        .routes(routes!(models::embeddings))
        .routes(routes!(sessions_v1::list))
        .routes(routes!(sessions_v1::get, sessions_v1::put, sessions_v1::delete))
        .routes(routes!(sessions_v1::fork))
        // assistants
        .routes(routes!(assistants::list, assistants::create))
        .routes(routes!(assistants::get, assistants::put, assistants::delete))
        // sessions
        .routes(routes!(sessions::list, sessions::create))
        .routes(routes!(sessions::get, sessions::patch, sessions::delete))
        .routes(routes!(sessions::restore))
        .routes(routes!(messages::list, messages::append))
        .routes(routes!(messages::discarded))
        .routes(routes!(cache::get, cache::put))
        .routes(routes!(checkpoints::list, checkpoints::create))
        .routes(routes!(checkpoints::get))
        .routes(routes!(checkpoints::rewind))
        .routes(routes!(checkpoints::fork))
        .routes(routes!(search::find))
        .routes(routes!(compact::compact))
        .routes(routes!(compact::uncompact))
        .routes(routes!(transfer::export))
        .routes(routes!(transfer::import))
        .routes(routes!(threads::session))
        .routes(routes!(users::erase))
        // keys
        .routes(routes!(keys::list, keys::create))
        .routes(routes!(keys::revoke))
        .routes(routes!(keys::rotate))
        // runs and reviews
        .routes(routes!(runs::list, runs::create))
        .routes(routes!(runs::get))
        .routes(routes!(runs::follow))
        .routes(routes!(runs::cancel))
        .routes(routes!(runs::resume))
        .routes(routes!(schedules::list))
        .routes(routes!(reviews::list))
        .routes(routes!(reviews::get))
        .routes(routes!(reviews::claim))
        .routes(routes!(reviews::release))
        .routes(routes!(reviews::decide))
        .routes(routes!(audit::session))
        .routes(routes!(audit::export))
        // memory
        .routes(routes!(memories::list, memories::create))
        .routes(routes!(memories::search))
        .routes(routes!(memories::get, memories::delete))
        .routes(routes!(memories::dreams, memories::dream))
        .routes(routes!(memories::undo))
        // operations
        .routes(routes!(operations::healthz))
        .routes(routes!(operations::readyz))
        .routes(routes!(operations::metrics))
        .routes(routes!(backup::download))
}

/// The OpenAPI document, generated from the route table.
pub fn openapi() -> utoipa::openapi::OpenApi {
    with_optional_bodies(route_table().split_for_parts().1)
}

/// Marks request bodies as optional whose fields are all optional: a request without one counts as `{}`.
fn with_optional_bodies(mut document: utoipa::openapi::OpenApi) -> utoipa::openapi::OpenApi {
    use utoipa::openapi::{RefOr, Required, Schema};
    let schemas = document.components.as_ref().map(|c| c.schemas.clone()).unwrap_or_default();
    let has_no_required_field = |location: &str| {
        let name = location.rsplit('/').next().unwrap_or_default();
        matches!(schemas.get(name), Some(RefOr::T(Schema::Object(object))) if object.required.is_empty())
    };
    for item in document.paths.paths.values_mut() {
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.patch, &mut item.delete];
        for operation in operations.into_iter().flatten() {
            let Some(RefOr::T(body)) = &mut operation.request_body else { continue };
            if let Some(RefOr::T(content)) = body.content.get("application/json")
                && let Some(RefOr::Ref(reference)) = &content.schema
                && has_no_required_field(&reference.ref_location)
            {
                body.required = Some(Required::False);
            }
        }
    }
    document
}

/// Builds the HTTP service: all routes with their middleware.
pub fn router(app: AppState) -> Router {
    let (router, document) = route_table().split_for_parts();
    let router = router
        .merge(docs::pages(with_optional_bodies(document)))
        .fallback(|| async { ApiError::not_found("no such route; GET /openapi.json lists all routes") })
        .method_not_allowed_fallback(|| async {
            ApiError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "this route does not support that method",
            )
        });
    with_middleware(router, app)
}

/// Adds the middleware that every request passes. `observe` is outermost, so that rejected and CORS requests are
/// logged and counted as well.
pub fn with_middleware(routes: Router<AppState>, app: AppState) -> Router {
    let mut router = routes.layer(middleware::from_fn_with_state(app.clone(), guard));
    if let Some(cors) = cors(&app.config.cors.origins) {
        router = router.layer(cors);
    }
    router.layer(middleware::from_fn(observe)).with_state(app)
}

fn cors(origins: &[String]) -> Option<CorsLayer> {
    let origins: Vec<HeaderValue> = origins.iter().filter_map(|o| o.parse().ok()).collect();
    let methods = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
    let own_headers = ["x-session-id", "x-run-id", "x-request-id", "x-should-retry"];
    let own_headers = own_headers.into_iter().chain([transfer::SKIPPED_HEADER, chat::WARNING_HEADER]);
    let exposed = own_headers.chain(rate_limit::HEADERS).map(HeaderName::from_static);
    (!origins.is_empty()).then(|| {
        CorsLayer::new()
            .allow_origin(AllowOrigin::list(origins))
            .allow_methods(methods)
            // SDKs send custom headers, so every header that a configured origin requests is allowed.
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(exposed.chain([header::ETAG, header::RETRY_AFTER]).collect::<Vec<_>>())
    })
}

/// Middleware that rejects requests by origin, host and header size, and adds the rate limit headers to the
/// response. Requests that may come from another machine are rejected unless API keys are required (D-102).
async fn guard(State(app): State<AppState>, mut request: Request, next: Next) -> Response {
    let headers = ResponseHeaders::default();
    request.extensions_mut().insert(headers.clone());
    let mut response = match admit(&app, &request) {
        Err(e) => e.into_response(),
        Ok(RequestOrigin::Local) => next.run(request).await,
        Ok(RequestOrigin::Remote(refusal)) => match app.keys.are_required().await {
            Ok(true) => next.run(request).await,
            Ok(false) => refusal.into_response(),
            Err(e) => ApiError::from(e).into_response(),
        },
    };
    response.headers_mut().extend(headers.drain());
    response
}

/// Headers that reverse proxies add. Their presence means that the client may be on another machine.
const PROXY_HEADERS: [&str; 3] = ["forwarded", "x-forwarded-for", "x-real-ip"];

/// The origin of a request, as far as its headers reveal it.
enum RequestOrigin {
    /// Addressed to a loopback host name, without proxy headers.
    Local,
    /// Possibly from another machine. If no API keys are required, the request is rejected with this error.
    Remote(ApiError),
}

/// Classifies a request by its `Host` and proxy headers, after checking header size and `Origin`. Without API
/// keys only requests to a loopback host name that did not pass a proxy are served: otherwise a website could
/// reach the server through the user's browser (DNS rebinding), and any client through the proxy (D-102).
fn admit(app: &AppState, request: &Request) -> Result<RequestOrigin, ApiError> {
    check_header_size(app, request)?;
    check_origin(app, request)?;
    let host = header_text(request.headers(), "host")?;
    let host = host.or_else(|| request.uri().host().map(str::to_owned)).unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let is_loopback = name.is_empty()
        || name == "localhost"
        || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback());
    let forwarded = PROXY_HEADERS.iter().find(|name| request.headers().contains_key(**name));
    let message = match forwarded {
        None if is_loopback => return Ok(RequestOrigin::Local),
        Some(name) if is_loopback => {
            format!(
                "the request came through a proxy (it has the header {name}), which requires an API key; create one with `tenure keys add`"
            )
        }
        _ => {
            let host = tenure::rules::excerpt(&host);
            format!(
                "the host {host} is not a loopback name, which requires an API key; create one with `tenure keys add`"
            )
        }
    };
    Ok(RequestOrigin::Remote(ApiError::new(StatusCode::FORBIDDEN, "host_not_allowed", message)))
}

/// Rejects a request whose target and headers together exceed `max_header_bytes`. The limit is the same for
/// HTTP/1 and HTTP/2.
fn check_header_size(app: &AppState, request: &Request) -> Result<(), ApiError> {
    let max = app.config.limits.max_header_bytes;
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let headers: usize = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    let rejected = |status, subject: &str| {
        let message = format!("{subject} larger than `max_header_bytes` ({max}); send less, or raise the limit");
        Err(ApiError::new(status, "too_large", message).with_param("max_header_bytes"))
    };
    if target > max {
        rejected(StatusCode::URI_TOO_LONG, "the request target is")
    } else if target + headers > max {
        rejected(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are")
    } else {
        Ok(())
    }
}

/// Rejects state-changing requests that a browser sends for another site (cross-site request forgery), based on
/// `Origin` and `Sec-Fetch-Site`. Same-origin requests and the origins in `cors.origins` pass; so do clients
/// that send neither header.
fn check_origin(app: &AppState, request: &Request) -> Result<(), ApiError> {
    if [Method::GET, Method::HEAD, Method::OPTIONS].contains(request.method()) {
        return Ok(());
    }
    let headers = request.headers();
    let refused = |source: &str| {
        let message =
            format!("cross-site request from {source} rejected; add its origin to `cors.origins` to allow it");
        Err(ApiError::new(StatusCode::FORBIDDEN, "foreign_origin", message))
    };
    match header_text(headers, "origin")? {
        Some(origin) if app.config.cors.origins.contains(&origin) => Ok(()),
        Some(origin) => {
            let host = header_text(headers, "host")?.or_else(|| request.uri().authority().map(ToString::to_string));
            let origin_host = origin.split_once("://").map(|(_, host)| host.to_owned());
            if origin_host.is_some() && origin_host == host {
                Ok(())
            } else {
                refused(&origin.chars().take(100).collect::<String>())
            }
        }
        None if header_text(headers, "sec-fetch-site")?.as_deref() == Some("cross-site") => refused("another site"),
        None => Ok(()),
    }
}

/// Routes that are called every few seconds. They are logged at `debug`, unless they report a failure.
const PROBES: [&str; 3] = ["/healthz", "/readyz", "/metrics"];

/// Middleware that assigns a request id, and records metrics, a trace span and one log line per request.
/// Request and response contents are never logged.
async fn observe(mut request: Request, next: Next) -> Response {
    let stopwatch = crate::clock::Stopwatch::start();
    let sent_id = header_hint(request.headers(), "x-request-id").filter(|id| id.len() <= 128).map(str::to_owned);
    let id = sent_id.unwrap_or_else(|| uuid::Uuid::now_v7().simple().to_string());
    if let Ok(value) = HeaderValue::from_str(&id) {
        request.headers_mut().insert("x-request-id", value);
    }
    let route = request.extensions().get::<MatchedPath>().map_or("none", |p| p.as_str()).to_owned();
    let method = request.method().clone();
    // The path says which route a client expected; of a known route it may contain ids, which have their own fields.
    let path = (route == "none").then(|| request.uri().path().chars().take(200).collect::<String>());
    let trace = telemetry::request_trace(&id, method.as_str(), &route);
    crate::http_client::set_trace_parent(&trace, request.headers());
    let span = trace.in_scope(|| telemetry::request_span(&id));
    let mut response = next.run(request).instrument(span.clone()).instrument(trace.clone()).await;
    let status = response.status().as_u16();
    let duration = stopwatch.elapsed();
    trace.record("http.response.status_code", status);
    crate::observability::metrics::request(&method, &route, status, duration);
    let ms = duration.as_micros() as f64 / 1000.0;
    let is_probe = PROBES.contains(&route.as_str()) && status < 400;
    span.in_scope(|| {
        if is_probe {
            tracing::debug!(status, ms, "{method} {route}");
        } else {
            tracing::info!(status, ms, path, "{method} {route}");
        }
    });
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert("x-request-id", value);
    }
    response
}

/// The HTTP service without a socket, for the command line and for tests.
pub fn in_process(app: &AppState) -> Router {
    router(app.clone())
}
