//! Headers of requests as text.

use crate::error::ApiError;
use axum::http::HeaderMap;

/// A header as text, or nothing if it is not there. One that is not UTF-8, has control characters, or is there twice is refused:
/// to ignore it could widen what a request may do. Text that is not ASCII may be sent as it is, or as RFC 8187 has it
/// (`UTF-8''j%C3%BCrgen`).
pub fn header_text(headers: &HeaderMap, name: &str) -> Result<Option<String>, ApiError> {
    let wrong = |why: &str| ApiError::invalid(name, format!("the header {name} {why}"));
    let mut all = headers.get_all(name).iter();
    let Some(value) = all.next() else { return Ok(None) };
    if all.next().is_some() {
        return Err(wrong("is there twice; send it once"));
    }
    let text = std::str::from_utf8(value.as_bytes()).map_err(|_| wrong("is not UTF-8"))?.trim();
    let text = match text.get(..7).filter(|prefix| prefix.eq_ignore_ascii_case("utf-8''")) {
        Some(_) => percent_decoded(&text[7..]).ok_or_else(|| wrong("is not a valid RFC 8187 value"))?,
        None => text.to_owned(),
    };
    match text.chars().any(char::is_control) {
        true => Err(wrong("has control characters")),
        false => Ok(Some(text)),
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = match (first, tail) {
            (b'%', [high, low, tail @ ..]) => {
                let digits = [*high, *low];
                bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
                tail
            }
            (b'%', _) => return None,
            (byte, tail) => {
                bytes.push(*byte);
                tail
            }
        };
    }
    String::from_utf8(bytes).ok()
}

/// A text as the value of a header: as it is if it is plain ASCII, else as RFC 8187 has it.
pub fn header_value(text: &str) -> String {
    let is_plain = |b: u8| b.is_ascii_graphic() || b == b' ';
    if text.bytes().all(is_plain) && !text.get(..7).is_some_and(|p| p.eq_ignore_ascii_case("utf-8''")) {
        return text.to_owned();
    }
    let mut value = "UTF-8''".to_owned();
    for byte in text.bytes() {
        match byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            true => value.push(byte.into()),
            false => value.push_str(&format!("%{byte:02X}")),
        }
    }
    value
}

/// A header that only helps: what can not be read of it is as good as none.
pub fn header_hint<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|v| v.to_str().ok()).map(str::trim)
}
