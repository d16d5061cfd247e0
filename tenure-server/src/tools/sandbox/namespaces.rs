//! Namespaces and capabilities of the sandbox.

use super::plan::MissingFeature;

/// Remedy for the operator if user namespaces are unavailable.
const REMEDY: &str = "Allow unprivileged user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, \
                      kernel.apparmor_restrict_unprivileged_userns; in a container, a seccomp profile that permits unshare and mount), \
                      or accept weaker isolation with python.require: landlock (docs/tools.md).";

/// Enters new user, mount, PID, network, IPC and UTS namespaces. The PID namespace applies to processes that are
/// started afterwards; they keep the capability to mount file systems.
#[cfg(target_os = "linux")]
#[expect(deprecated, reason = "only `UnshareFlags::FILES` makes `unshare` unsafe")]
pub fn enter() -> Result<(), MissingFeature> {
    use rustix::process::{getegid, geteuid};
    use rustix::thread::{
        CapabilitySet, UnshareFlags, capabilities, configure_capability_in_ambient_set, set_capabilities, unshare,
    };
    let missing = |operation: &str, error: &dyn std::fmt::Display| {
        MissingFeature::new("user namespaces", REMEDY, format_args!("{operation}: {error}"))
    };
    let user = geteuid().as_raw();
    let group = getegid().as_raw();
    let flags = UnshareFlags::NEWUSER
        | UnshareFlags::NEWNS
        | UnshareFlags::NEWPID
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS;
    unshare(flags).map_err(|e| missing("unshare", &e))?;
    // Maps the server's user to another, unprivileged id inside, so that `exec` grants no capabilities.
    for (file, text) in [
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/uid_map", format!("{USER} {user} 1")),
        ("/proc/self/gid_map", format!("{USER} {group} 1")),
    ] {
        std::fs::write(file, text).map_err(|e| missing(file, &e))?;
    }
    let mut sets = capabilities(None).map_err(|e| missing("capget", &e))?;
    sets.inheritable |= CapabilitySet::SYS_ADMIN;
    set_capabilities(None, sets).map_err(|e| missing("capset", &e))?;
    configure_capability_in_ambient_set(CapabilitySet::SYS_ADMIN, true).map_err(|e| missing("prctl", &e))
}

/// User and group id inside the user namespace.
#[cfg(target_os = "linux")]
const USER: u32 = 1000;

/// Limits the number of process ids of the PID namespace and hides the host's name.
///
/// `RLIMIT_NPROC` does not apply to root; this limit does, since Linux 6.14. The kernel permits no value below 301.
#[cfg(target_os = "linux")]
pub fn configure(processes: usize) {
    let _ = std::fs::write("/proc/sys/kernel/pid_max", processes.max(301).to_string());
    let _ = rustix::system::sethostname(b"sandbox");
}

/// Makes this process die with its parent, adopt orphaned descendants (subreaper), and not be dumpable.
#[cfg(target_os = "linux")]
pub fn guard() {
    use rustix::process::{
        DumpableBehavior, Signal, getpid, set_child_subreaper, set_dumpable_behavior, set_parent_process_death_signal,
    };
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let _ = set_child_subreaper(Some(getpid()));
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

/// Drops all capabilities of this process and its descendants, and sets `no_new_privs`.
#[cfg(target_os = "linux")]
pub fn drop_capabilities() -> rustix::io::Result<()> {
    use rustix::thread::{
        CapabilitySet, CapabilitySets, clear_ambient_capability_set, set_capabilities, set_no_new_privs,
    };
    let none = CapabilitySet::empty();
    clear_ambient_capability_set()?;
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    set_no_new_privs(true)
}

/// Always fails: namespaces are a feature of Linux.
#[cfg(not(target_os = "linux"))]
pub fn enter() -> Result<(), MissingFeature> {
    Err(MissingFeature::new("user namespaces", REMEDY, "this system is not Linux"))
}

/// Does nothing: there is no namespace on this platform.
#[cfg(not(target_os = "linux"))]
pub fn configure(_: usize) {}

/// Does nothing: on this platform, descendants are tracked only by the process group.
#[cfg(not(target_os = "linux"))]
pub fn guard() {}

/// Does nothing: this platform has no capabilities.
#[cfg(not(target_os = "linux"))]
pub fn drop_capabilities() -> rustix::io::Result<()> {
    Ok(())
}
