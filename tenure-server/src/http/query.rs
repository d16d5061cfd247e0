//! Strict parsing of query parameters, one by one: a parameter that is invalid, repeated or unknown is rejected
//! by name.

use crate::error::{ApiError, ApiResult};
use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use jiff::Timestamp;
use serde_json::Value;
use std::str::FromStr;
use tenure::rules::excerpt;
use tenure::store::SessionCursor;
use tenure::{
    Principal, User,
    session::{AccessScope, OwnerFilter, Status},
};

/// Page size if no `limit` is given.
const DEFAULT_LIMIT: usize = 20;

/// Query parameters that have not been consumed yet.
#[derive(Debug, Default)]
pub struct StrictQuery(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for StrictQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        match Query::<Vec<(String, String)>>::try_from_uri(&parts.uri) {
            Ok(Query(pairs)) => Ok(Self(pairs)),
            Err(_) => Err(ApiError::invalid("query", "not a valid query: write NAME=VALUE&NAME=VALUE")),
        }
    }
}

impl StrictQuery {
    /// Consumes all values of a repeatable parameter.
    pub fn all(&mut self, name: &str) -> Vec<String> {
        let mut values = Vec::new();
        self.0.retain_mut(|(n, v)| {
            let matches = n == name;
            if matches {
                values.push(std::mem::take(v));
            }
            !matches
        });
        values
    }

    /// Consumes a parameter that may be given at most once.
    pub fn one(&mut self, name: &str) -> ApiResult<Option<String>> {
        let mut values = self.all(name);
        match values.len() {
            0 | 1 => Ok(values.pop()),
            _ => Err(ApiError::invalid(name, format!("`{name}` is given more than once"))),
        }
    }

    /// Consumes and parses a parameter that may be given at most once. `expected` describes valid values, for the
    /// error message.
    pub fn parse<T: FromStr>(&mut self, name: &str, expected: &str) -> ApiResult<Option<T>> {
        let Some(text) = self.one(name)? else { return Ok(None) };
        let invalid =
            |_| ApiError::invalid(name, format!("`{name}` must be {expected}, not {text}", text = excerpt(&text)));
        text.parse().map(Some).map_err(invalid)
    }

    /// Consumes a time: RFC 3339, or a date, which means midnight UTC at its beginning.
    pub fn time(&mut self, name: &str) -> ApiResult<Option<Timestamp>> {
        let Some(text) = self.one(name)? else { return Ok(None) };
        if let Some(time) = text.parse::<Timestamp>().ok().or_else(|| midnight(&text)) {
            return Ok(Some(time));
        }
        let expected = "an RFC 3339 time such as 2026-01-31T12:00:00Z, or a date such as 2026-01-31 (midnight UTC)";
        Err(ApiError::invalid(name, format!("`{name}` must be {expected}, not {}", excerpt(&text))))
    }

    /// Consumes a name: 1 to 128 bytes, without control characters.
    pub fn name(&mut self, name: &str) -> ApiResult<Option<String>> {
        let Some(text) = self.one(name)? else { return Ok(None) };
        check_name(name, &text)?;
        Ok(Some(text))
    }

    /// Consumes a count between 1 and `max`, which is the limit `max_page`.
    pub fn count(&mut self, name: &str, max: usize) -> ApiResult<Option<usize>> {
        let count: Option<usize> = self.parse(name, &format!("a number from 1 to {max}"))?;
        match count {
            Some(n) if n > max => {
                let message =
                    format!("`{name}` is larger than `max_page` ({max}); request less and follow `next_cursor`");
                Err(ApiError::invalid(name, message))
            }
            Some(0) => Err(ApiError::invalid(name, format!("`{name}` must be a number from 1 to {max}"))),
            count => Ok(count),
        }
    }

    /// Consumes `limit`, the page size; the default is 20 or `max`, whichever is smaller.
    pub fn limit(&mut self, max: usize) -> ApiResult<usize> {
        Ok(self.count("limit", max)?.unwrap_or(DEFAULT_LIMIT.min(max)))
    }

    /// Rejects the first parameter that was not consumed. Call it after all others.
    pub fn reject_unknown(self) -> ApiResult<()> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::invalid(
                name.chars().take(128).collect::<String>(),
                format!("{name} is not a parameter of this route; GET /docs lists them", name = excerpt(name)),
            )),
        }
    }

    /// Consumes the parameters that select sessions, and rejects unknown ones. Only principals with access to
    /// the whole tenant may select another user's sessions.
    pub fn into_session_query(mut self, principal: &Principal, max: usize) -> ApiResult<tenure::session::SessionQuery> {
        let mut query =
            tenure::session::SessionQuery::new(OwnerFilter::Tenant(principal.tenant.clone()), self.limit(max)?);
        query.cursor = match self.one("cursor")? {
            Some(cursor) => Some(cursor.parse::<SessionCursor>()?),
            None => None,
        };
        // `u32` exceeds any practical offset, and every store can count that far.
        let offset: Option<u32> = self.parse("offset", "the number of sessions to skip")?;
        if offset.is_some() && query.cursor.is_some() {
            return Err(ApiError::invalid("offset", "use `cursor` or `offset`, not both"));
        }
        query.offset = offset.unwrap_or(0) as usize;
        query.assistant = self.name("assistant_id")?;
        query.thread = self.name("thread_id")?;
        if let Some(user) = self.one("user")? {
            let user = User::new(user)?;
            if principal.scope != AccessScope::Tenant && user != principal.user {
                let message =
                    "listing another user's sessions requires a key with the right `admin` that is not bound to a user";
                return Err(ApiError::new(axum::http::StatusCode::FORBIDDEN, "forbidden", message));
            }
            query.owner = OwnerFilter::User(principal.tenant.clone(), user);
        }
        for words in self.all("status") {
            for word in words.split(',') {
                query.status.push(parse_status(word)?);
            }
        }
        query.created_after = self.time("created_after")?;
        query.created_before = self.time("created_before")?;
        query.tags = self.all("tag");
        query.title = self.one("title")?;
        let mut fields = Vec::new();
        self.0.retain(|(name, value)| match name.strip_prefix("metadata.") {
            Some(key) => {
                fields.push((key.to_owned(), value.clone()));
                false
            }
            None => true,
        });
        for (key, text) in fields {
            let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
            if value.is_object() || value.is_array() {
                let message = "metadata filters must be scalar: a string, a number, true, false or null";
                return Err(ApiError::invalid(format!("metadata.{key}"), message));
            }
            query.metadata.push((key, value));
        }
        self.reject_unknown()?;
        Ok(query)
    }
}

/// The beginning of a day in UTC, if the text is a date of the form 2026-01-31. jiff's parser accepts further forms,
/// such as times, whose time it ignores.
fn midnight(text: &str) -> Option<Timestamp> {
    let is_date = text.len() == 10 && text.bytes().all(|b| b.is_ascii_digit() || b == b'-');
    let date = text.parse::<jiff::civil::Date>().ok().filter(|_| is_date)?;
    Some(date.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())
}

fn parse_status(word: &str) -> ApiResult<Status> {
    let all = [Status::Active, Status::Paused, Status::Expired, Status::Deleted];
    all.into_iter().find(|s| s.as_str() == word).ok_or_else(|| {
        ApiError::invalid("status", format!("{word} is not active, paused, expired or deleted", word = excerpt(word)))
    })
}

/// Checks that a text is a valid name: 1 to 128 bytes, without control characters (D-020).
pub fn check_name(param: &str, text: &str) -> ApiResult<()> {
    let is_valid =
        !text.is_empty() && text.len() <= tenure::session::MAX_NAME_BYTES && !text.chars().any(char::is_control);
    if !is_valid {
        return Err(ApiError::invalid(param, format!("`{param}` must have 1 to 128 bytes and no control characters")));
    }
    Ok(())
}
