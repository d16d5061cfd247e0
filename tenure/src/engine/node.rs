//! Node names, and whether the process of a node is still alive.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of nodes that this process has started.
static NODES: AtomicU32 = AtomicU32::new(0);

/// Generates the name of this node: the machine and process namespace, the process id and its start
/// time, and the number of the node in the process. With it, another node on the same machine can
/// detect that the process has ended and take over its runs without waiting for their leases
/// (D-042). Short, because the start of every run contains it (D-170).
pub(crate) fn node_name() -> String {
    let number = NODES.fetch_add(1, Ordering::Relaxed);
    match (pid_scope(), process_start_time(std::process::id())) {
        (Some(scope), Some(start)) => format!("{scope}/{}/{start}/{number}", std::process::id()),
        _ => uuid::Uuid::now_v7().simple().to_string(),
    }
}

/// Identifies the scope in which process ids are unique: this boot of this machine, and this PID
/// namespace. 48 bits of their hash.
fn pid_scope() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    let hash = blake3::hash(format!("{} {}", boot.trim(), namespace.display()).as_bytes());
    Some(hash.to_hex()[..12].to_owned())
}

/// The start time of a live process. Together with the process id it identifies a process, because
/// ids are reused.
fn process_start_time(process: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The command name in parentheses may contain any characters. The start time is field 22, the
    // 20th after it.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // A dead process stays in the process table as a zombie until its parent has reaped it.
    fields.next().filter(|state| !matches!(*state, "Z" | "X"))?;
    fields.nth(18).map(str::to_owned)
}

/// Returns true if the process of a node is known to have ended. Returns false if that cannot be determined.
pub(crate) fn is_gone(node: &str) -> bool {
    let mut parts = node.split('/');
    let (Some(there), Some(process), Some(start)) = (parts.next(), parts.next(), parts.next()) else { return false };
    let Ok(process) = process.parse() else { return false };
    pid_scope().is_some_and(|here| here == there) && process_start_time(process).is_none_or(|now| now != start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_live_node_is_not_gone_and_one_whose_process_ended_is() {
        let node = node_name();
        assert!(!is_gone(&node));
        assert_ne!(node, node_name(), "each store that the process opens is a node");
        if let Some(scope) = pid_scope() {
            assert!(is_gone(&format!("{scope}/{}/1/x", std::process::id())), "the id was used again");
            assert!(!is_gone(&format!("elsewhere/{}/1/x", std::process::id())));
        }
        assert!(!is_gone("just-a-name"));
    }

    /// A killed process stays in the process table until its parent reaps it, which may take some time.
    #[test]
    fn a_node_whose_process_is_a_zombie_is_gone() {
        use std::process::{Command, Stdio};
        let Some(scope) = pid_scope() else { return };
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let start = process_start_time(child.id()).unwrap();
        let node = format!("{scope}/{}/{start}/x", child.id());
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
