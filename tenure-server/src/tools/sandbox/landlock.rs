//! Landlock rules: the files that the interpreter may access, and a ban on TCP.
//!
//! They complement the private root file system, and are the only file restriction without one.

use super::plan::MissingFeature;
use std::path::{Path, PathBuf};

/// Remedy for the operator if Landlock is unavailable.
const REMEDY: &str = "Use Linux 5.13 or later with Landlock enabled (CONFIG_SECURITY_LANDLOCK, `lsm=landlock,…` on the kernel command \
                      line), or run without isolation of files with python.require: none (docs/tools.md).";

/// Restricts this process and all of its descendants to `writable` (full access), the system paths and `read` (read and
/// execute), and the permitted devices (read and write). Returns true if TCP is blocked as well.
#[cfg(target_os = "linux")]
pub fn restrict(writable: &Path, read: &[PathBuf]) -> Result<bool, MissingFeature> {
    use super::mounts::{DEVICES, SYSTEM};
    use landlock::{
        ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr,
        RulesetError, RulesetStatus, Scope, path_beneath_rules,
    };
    // The newest ABI that the crate knows, applied as far as the kernel supports it (best effort).
    let abi = ABI::V9;
    let read_access = AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir;
    let device_access = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
    let restrict = || -> Result<RulesetStatus, RulesetError> {
        let status = Ruleset::default()
            .handle_access(AccessFs::from_all(abi))?
            .handle_access(AccessNet::from_all(abi))?
            .scope(Scope::from_all(abi))?
            .create()?
            .add_rules(path_beneath_rules(SYSTEM, read_access))?
            .add_rules(path_beneath_rules(read, read_access))?
            .add_rules(path_beneath_rules(DEVICES, device_access))?
            .add_rules(path_beneath_rules([writable], AccessFs::from_all(abi)))?
            .restrict_self()?;
        Ok(status.ruleset)
    };
    let tcp =
        Ruleset::default().set_compatibility(CompatLevel::HardRequirement).handle_access(AccessNet::from_all(ABI::V4));
    let tcp = tcp.and_then(Ruleset::create).is_ok();
    match restrict() {
        Ok(RulesetStatus::NotEnforced) => {
            Err(MissingFeature::new("Landlock", REMEDY, "the kernel does not support it"))
        }
        Ok(RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced) => Ok(tcp),
        Err(e) => Err(MissingFeature::new("Landlock", REMEDY, e)),
    }
}

/// Always fails: Landlock is a feature of Linux.
#[cfg(not(target_os = "linux"))]
pub fn restrict(_: &Path, _: &[PathBuf]) -> Result<bool, MissingFeature> {
    Err(MissingFeature::new("Landlock", REMEDY, "this system is not Linux"))
}
