//! `tenure doctor`: checks the integrity of a store and reports what to do.

use super::output::{clean, line, note, print, table};
use super::target::{Needs, TargetArgs};
use super::transfer::bar;
use serde_json::json;
use std::process::ExitCode;
use tenure::{Finding, RepairReport};

/// Checks the whole store; with `repair`, also repairs what can be repaired safely.
pub async fn run(at: &TargetArgs, repair: bool, as_json: bool) -> anyhow::Result<ExitCode> {
    let app = at.house(Needs::Sessions).await?;
    let bar = bar(None, "looked at");
    let look = |count: usize| bar.set_position(count as u64);
    let RepairReport { mended, left } = match repair {
        true => app.tenure.repair_all(look).await?,
        false => RepairReport { left: app.tenure.examine(look).await?, mended: Vec::new() },
    };
    let looked_at = bar.position();
    bar.finish_and_clear();
    let opened = app.tenure.repairs();
    if as_json {
        let view = |f: &Finding| json!({"place": f.place, "what": f.what, "cure": f.cure.to_string(), "mendable": f.is_mendable()});
        let (mended, left): (Vec<_>, Vec<_>) = (mended.iter().map(view).collect(), left.iter().map(view).collect());
        let opened: Vec<_> = opened.iter().map(|r| json!({"place": r.place, "what": r.what})).collect();
        let told = json!({"sessions": looked_at, "mended_while_opening": opened, "mended": mended, "findings": left});
        line(told.to_string())?;
    } else {
        opened.iter().try_for_each(|r| line(clean(&format!("on opening: {}: {}", r.place, r.what))))?;
        mended.iter().try_for_each(|f| line(clean(&format!("mended: {}: {}", f.place, f.what))))?;
        if !left.is_empty() {
            let row = |f: &Finding| [clean(&f.place), clean(&f.what), clean(&f.cure.to_string())];
            print(table(["where", "what is wrong", "what to do"], left.iter().map(row).collect()))?;
        }
        let mendable = left.iter().filter(|f| f.is_mendable()).count();
        match left.len() {
            0 => line(format!("{looked_at} sessions, and nothing wrong"))?,
            n => line(format!("{looked_at} sessions, {n} findings"))?,
        }
        if mendable > 0 {
            note(format!("{mendable} of them `tenure doctor --repair` can mend; make a backup first"));
        }
    }
    Ok(if left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
