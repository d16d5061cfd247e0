//! Maintenance of a store: `tenure sweep` and `tenure migrate`.

use super::output::{clean, line, note};
use super::target::{Needs, TargetArgs};
use anyhow::bail;
use serde_json::json;
use std::process::ExitCode;
use tenure::session::SessionKey;
use tenure::store::{self, FORMAT};

/// Runs one pass of the sweep and prints a summary.
pub async fn sweep(target: &TargetArgs, as_json: bool) -> anyhow::Result<ExitCode> {
    let app = target.open_store(Needs::Hooks).await?;
    let report = app.tenure.sweep().await?;
    let names = |keys: &[SessionKey]| keys.iter().map(ToString::to_string).collect::<Vec<_>>();
    let expired = names(&report.expired);
    let evicted = names(&report.evicted);
    let purged = names(&report.purged);
    let failed: Vec<_> =
        report.failed.iter().map(|(key, reason)| json!({"session": key.to_string(), "why": reason})).collect();
    if as_json {
        let items = report.items;
        let suspended = &report.suspended;
        let more = report.more;
        let summary = json!({"expired": expired, "evicted": evicted, "purged": purged, "items": items, "failed": failed, "suspended": suspended, "more": more});
        line(summary.to_string())?;
    } else {
        for (label, keys) in [("expired", &expired), ("over the cap", &evicted), ("purged", &purged)] {
            keys.iter().try_for_each(|key| line(format!("{label}: {key}")))?;
        }
        let counts = [expired.len(), evicted.len(), purged.len()];
        line(format!("{} expired, {} over the cap, {} purged", counts[0], counts[1], counts[2]))?;
        line(format!("{} cached and other items removed", report.items))?;
        if report.more {
            note("the pass was limited; run it again for the rest");
        }
    }
    if let Some(reason) = report.suspended {
        bail!("nothing was expired or purged: {reason}");
    }
    for (key, reason) in &report.failed {
        note(format!("{key}: {}", clean(reason)));
    }
    match report.failed.len() {
        0 => Ok(ExitCode::SUCCESS),
        n => bail!("{n} sessions could not be swept; the next pass retries them"),
    }
}

/// Opens the store, which migrates it to the newest format, and prints a summary.
pub async fn migrate(target: &TargetArgs, as_json: bool) -> anyhow::Result<()> {
    let url = target.load(&[])?.store;
    let old_format = store::format(&url).await?;
    let app = target.open_store(Needs::Store).await?;
    let repairs: Vec<String> =
        app.tenure.repairs().iter().map(|r| format!("{}: {}", r.location, r.description)).collect();
    if as_json {
        return Ok(line(json!({"from": old_format, "to": FORMAT, "mended": repairs}).to_string())?);
    }
    match old_format {
        None => line(format!("a new store, format {FORMAT}"))?,
        Some(FORMAT) => line(format!("format {FORMAT}, the newest; nothing to do"))?,
        Some(old_format) => line(format!("migrated from format {old_format} to format {FORMAT}"))?,
    }
    Ok(repairs.iter().try_for_each(|m| line(format!("repaired: {}", clean(m))))?)
}
