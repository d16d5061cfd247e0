//! URLs in the configuration.

use anyhow::{anyhow, bail};
use tenure::store::redacted;

/// The URL of a web server; `at` is where it is written.
pub fn http_url(at: &str, url: &str) -> anyhow::Result<reqwest::Url> {
    let shown = redacted(url);
    let url = reqwest::Url::parse(url).map_err(|e| anyhow!("{at}: {shown:?} is not a URL: {e}"))?;
    if !["http", "https"].contains(&url.scheme()) {
        bail!("{at}: {shown:?} must begin with http:// or https://");
    }
    Ok(url)
}
