//! Parsing and encoding of HTTP header values that contain text.

use crate::error::ApiError;
use axum::http::HeaderMap;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use std::borrow::Cow;

/// Returns a request header as text, or `None` if the header is absent. A header that is not UTF-8, contains
/// control characters or occurs twice is rejected, because ignoring it could widen the scope of a request.
/// Non-ASCII text may be sent as raw UTF-8 or encoded as in RFC 8187 (`UTF-8''j%C3%BCrgen`).
pub fn header_text(headers: &HeaderMap, name: &str) -> Result<Option<String>, ApiError> {
    let invalid = |problem: &str| ApiError::invalid(name, format!("the header {name} {problem}"));
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(invalid("occurs more than once; send it once"));
    }
    let text = std::str::from_utf8(value.as_bytes()).map_err(|_| invalid("is not UTF-8"))?.trim();
    let text = match text.get(..7).filter(|prefix| prefix.eq_ignore_ascii_case("utf-8''")) {
        Some(_) => percent_decoded(&text[7..]).ok_or_else(|| invalid("is not a valid RFC 8187 value"))?,
        None => text.to_owned(),
    };
    if text.chars().any(char::is_control) {
        return Err(invalid("contains control characters"));
    }
    Ok(Some(text))
}

fn percent_decoded(text: &str) -> Option<String> {
    let is_byte = |part: &str| part.len() >= 2 && part.bytes().take(2).all(|digit| digit.is_ascii_hexdigit());
    if !text.split('%').skip(1).all(is_byte) {
        return None;
    }
    percent_decode_str(text).decode_utf8().ok().map(Cow::into_owned)
}

/// Characters that are not percent-encoded in an RFC 8187 value.
const IN_EXTENDED_VALUES: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Encodes a text as a header value: unchanged if it is plain ASCII, otherwise as in RFC 8187.
pub fn header_value(text: &str) -> String {
    let is_plain = |b: u8| b.is_ascii_graphic() || b == b' ';
    if text.bytes().all(is_plain) && !text.get(..7).is_some_and(|p| p.eq_ignore_ascii_case("utf-8''")) {
        return text.to_owned();
    }
    format!("UTF-8''{}", utf8_percent_encode(text, &IN_EXTENDED_VALUES))
}

/// Returns an optional header that only serves as a hint. A value that is not visible ASCII is treated as absent.
pub fn header_hint<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|v| v.to_str().ok()).map(str::trim)
}
