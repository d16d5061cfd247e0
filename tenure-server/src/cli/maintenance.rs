//! Maintenance of a store: `tenure sweep` and `tenure migrate`.

use super::output::{clean, line, note};
use super::target::{Needs, TargetArgs};
use anyhow::bail;
use serde_json::json;
use std::process::ExitCode;
use tenure::SessionKey;
use tenure::store::{self, FORMAT};

/// Runs one pass of the sweep and prints a summary.
pub async fn sweep(at: &TargetArgs, as_json: bool) -> anyhow::Result<ExitCode> {
    let app = at.house(Needs::Hooks).await?;
    let report = app.tenure.sweep().await?;
    let names = |keys: &[SessionKey]| keys.iter().map(ToString::to_string).collect::<Vec<_>>();
    let (expired, evicted, purged) = (names(&report.expired), names(&report.evicted), names(&report.purged));
    let failed: Vec<_> =
        report.failed.iter().map(|(key, why)| json!({"session": key.to_string(), "why": why})).collect();
    if as_json {
        let (items, suspended, more) = (report.items, &report.suspended, report.more);
        let told = json!({"expired": expired, "evicted": evicted, "purged": purged, "items": items, "failed": failed, "suspended": suspended, "more": more});
        line(told.to_string())?;
    } else {
        for (what, keys) in [("expired", &expired), ("over the cap", &evicted), ("purged", &purged)] {
            keys.iter().try_for_each(|key| line(format!("{what}: {key}")))?;
        }
        let counts = [expired.len(), evicted.len(), purged.len()];
        line(format!("{} expired, {} over the cap, {} purged", counts[0], counts[1], counts[2]))?;
        line(format!("{} cached and other items removed", report.items))?;
        if report.more {
            note("there is more to do: run it again");
        }
    }
    if let Some(why) = report.suspended {
        bail!("nothing was expired or purged: {why}");
    }
    for (key, why) in &report.failed {
        note(format!("{key}: {}", clean(why)));
    }
    match report.failed.len() {
        0 => Ok(ExitCode::SUCCESS),
        n => bail!("{n} sessions could not be swept; the next pass tries again"),
    }
}

/// Opens the store, which migrates it to the newest format, and prints a summary.
pub async fn migrate(at: &TargetArgs, as_json: bool) -> anyhow::Result<()> {
    let url = at.load(&[])?.store;
    let before = store::format(&url).await?;
    let app = at.house(Needs::Store).await?;
    let mended: Vec<String> = app.tenure.repairs().iter().map(|r| format!("{}: {}", r.place, r.what)).collect();
    if as_json {
        return Ok(line(json!({"from": before, "to": FORMAT, "mended": mended}).to_string())?);
    }
    match before {
        None => line(format!("a new store, format {FORMAT}"))?,
        Some(FORMAT) => line(format!("format {FORMAT}, the newest; nothing to do"))?,
        Some(before) => line(format!("format {before} became format {FORMAT}"))?,
    }
    Ok(mended.iter().try_for_each(|m| line(format!("mended: {}", clean(m))))?)
}
