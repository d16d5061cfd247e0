//! `tenure doctor`: checks the integrity of a store and reports what to do.

use super::output::{clean, line, note, print, table};
use super::target::{Needs, TargetArgs};
use super::transfer::bar;
use serde_json::json;
use std::process::ExitCode;
use tenure::maintenance::{Finding, RepairReport};

/// Checks the whole store; with `repair`, also repairs what can be repaired safely.
pub async fn run(target: &TargetArgs, repair: bool, as_json: bool) -> anyhow::Result<ExitCode> {
    let app = target.open_store(Needs::Sessions).await?;
    let bar = bar(None, "sessions checked");
    let on_progress = |count: usize| bar.set_position(count as u64);
    let RepairReport { repaired, remaining } = if repair {
        app.tenure.repair_all(on_progress).await?
    } else {
        RepairReport { remaining: app.tenure.examine(on_progress).await?, repaired: Vec::new() }
    };
    let checked = bar.position();
    bar.finish_and_clear();
    let repairs_on_open = app.tenure.repairs();
    if as_json {
        let view = |f: &Finding| json!({"place": f.location, "what": f.description, "cure": f.remedy.to_string(), "mendable": f.is_repairable()});
        let repaired: Vec<_> = repaired.iter().map(view).collect();
        let remaining: Vec<_> = remaining.iter().map(view).collect();
        let repairs_on_open: Vec<_> =
            repairs_on_open.iter().map(|r| json!({"place": r.location, "what": r.description})).collect();
        let report = json!({"sessions": checked, "mended_while_opening": repairs_on_open, "mended": repaired, "findings": remaining});
        line(report.to_string())?;
    } else {
        repairs_on_open
            .iter()
            .try_for_each(|r| line(clean(&format!("on opening: {}: {}", r.location, r.description))))?;
        repaired.iter().try_for_each(|f| line(clean(&format!("repaired: {}: {}", f.location, f.description))))?;
        if !remaining.is_empty() {
            let row = |f: &Finding| [clean(&f.location), clean(&f.description), clean(&f.remedy.to_string())];
            print(table(["where", "what is wrong", "what to do"], remaining.iter().map(row).collect()))?;
        }
        let repairable = remaining.iter().filter(|f| f.is_repairable()).count();
        match remaining.len() {
            0 => line(format!("{checked} sessions checked, no findings"))?,
            n => line(format!("{checked} sessions, {n} findings"))?,
        }
        if repairable > 0 {
            note(format!("`tenure doctor --repair` can repair {repairable} of them; make a backup first"));
        }
    }
    Ok(if remaining.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
