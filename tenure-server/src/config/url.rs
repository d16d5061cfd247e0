//! Validation of URLs in the configuration.

use anyhow::{anyhow, bail};
use tenure::store::redacted;

/// Parses the URL of an HTTP server. `key_path` is the configuration path for the error.
pub fn http_url(key_path: &str, url: &str) -> anyhow::Result<reqwest::Url> {
    let redacted_url = redacted(url);
    let url = reqwest::Url::parse(url).map_err(|e| anyhow!("{key_path}: {redacted_url:?} is not a URL: {e}"))?;
    if !["http", "https"].contains(&url.scheme()) {
        bail!("{key_path}: {redacted_url:?} must begin with http:// or https://");
    }
    Ok(url)
}
