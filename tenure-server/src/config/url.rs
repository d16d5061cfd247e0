//! Validation of URLs in the configuration.

use anyhow::{anyhow, bail};
use tenure::store::redacted;

/// Parses the URL of an HTTP server. `at` is the configuration path for the error.
pub fn http_url(at: &str, url: &str) -> anyhow::Result<reqwest::Url> {
    let shown = redacted(url);
    let url = reqwest::Url::parse(url).map_err(|e| anyhow!("{at}: {shown:?} is not a URL: {e}"))?;
    if !["http", "https"].contains(&url.scheme()) {
        bail!("{at}: {shown:?} must begin with http:// or https://");
    }
    Ok(url)
}
