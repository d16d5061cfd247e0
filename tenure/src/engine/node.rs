//! The name of a node, and whether its process still runs.

use std::fs;

/// The name of a node: where it runs, and what cannot run twice. A node whose process is gone need not be waited for.
pub(crate) fn node_name() -> String {
    let random = uuid::Uuid::now_v7().simple();
    match (place(), start_of(std::process::id())) {
        (Some(place), Some(start)) => format!("{place}/{}/{start}/{random}", std::process::id()),
        _ => random.to_string(),
    }
}

/// Where process ids mean the same: this boot of this machine, and this namespace.
fn place() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    let digits: String = namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    Some(format!("{}-{digits}", boot.trim()))
}

/// When a process began that lives; ids are used again.
fn start_of(process: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in parentheses may hold anything; the 22nd field is the 20th after it.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // One that is dead stays in the list until its parent has looked.
    fields.next().filter(|state| !matches!(*state, "Z" | "X"))?;
    fields.nth(18).map(str::to_owned)
}

/// Whether the process of a node is known to have ended.
pub(crate) fn is_gone(node: &str) -> bool {
    let mut parts = node.split('/');
    let (Some(there), Some(process), Some(start)) = (parts.next(), parts.next(), parts.next()) else { return false };
    let Ok(process) = process.parse() else { return false };
    place().is_some_and(|here| here == there) && start_of(process).is_none_or(|now| now != start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_lives_is_not_gone_and_one_whose_process_ended_is() {
        let node = node_name();
        assert!(!is_gone(&node));
        if let Some(place) = place() {
            assert!(is_gone(&format!("{place}/{}/1/x", std::process::id())), "the id was used again");
            assert!(!is_gone(&format!("elsewhere/{}/1/x", std::process::id())));
        }
        assert!(!is_gone("just-a-name"));
    }

    /// A process that was killed stays in the list until somebody asks how it ended, which may take its time.
    #[test]
    fn a_node_whose_process_is_dead_and_not_buried_is_gone() {
        use std::process::{Command, Stdio};
        let Some(place) = place() else { return };
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let start = start_of(child.id()).unwrap();
        let node = format!("{place}/{}/{start}/x", child.id());
        assert!(!is_gone(&node));
        drop(child.stdin.take());
        let waited = (0..500).find(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            is_gone(&node)
        });
        let listed = fs::exists(format!("/proc/{}/stat", child.id())).unwrap();
        child.wait().unwrap();
        assert!(waited.is_some() && listed, "{waited:?} {listed}");
    }
}
