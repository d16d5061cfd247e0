//! What an interpreter may reach: its own directory, and the system's programs and libraries to read. With Landlock, where the kernel has it.
//!
//! The rules are made here and put in force by the interpreter's driver, before it runs anything: it has to do some things first that they forbid.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// What may be read.
const SYSTEM: &[&str] = &[
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/ssl/certs",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
];
/// What may be read and written.
const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// What an interpreter may reach.
#[derive(Clone, Debug)]
pub struct Reach {
    /// The directory in which it may do anything.
    pub own: PathBuf,
    /// What it may read besides the system's programs and libraries.
    pub read: Vec<PathBuf>,
}

/// Rules to be put in force.
#[derive(Debug)]
pub struct Rules {
    /// What the kernel knows them by.
    pub rules: OwnedFd,
    /// Whether they refuse TCP.
    pub tcp: bool,
}

/// The rules; `None` if the kernel has none.
#[cfg(target_os = "linux")]
pub fn rules(reach: &Reach) -> Option<Rules> {
    use landlock::{
        ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr,
        RulesetError, Scope, path_beneath_rules,
    };
    // The newest that the library knows; of that, what the kernel has.
    let abi = ABI::V9;
    let look = AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir;
    let change = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
    let make = || -> Result<Option<OwnedFd>, RulesetError> {
        let rules = Ruleset::default()
            .handle_access(AccessFs::from_all(abi))?
            .handle_access(AccessNet::from_all(abi))?
            .scope(Scope::from_all(abi))?
            .create()?
            .add_rules(path_beneath_rules(SYSTEM, look))?
            .add_rules(path_beneath_rules(&reach.read, look))?
            .add_rules(path_beneath_rules(DEVICES, change))?
            .add_rules(path_beneath_rules([&reach.own], AccessFs::from_all(abi)))?;
        Ok(rules.into())
    };
    let tcp =
        Ruleset::default().set_compatibility(CompatLevel::HardRequirement).handle_access(AccessNet::from_all(ABI::V4));
    let tcp = tcp.and_then(Ruleset::create).is_ok();
    match make() {
        Ok(rules) => rules.map(|rules| Rules { rules, tcp }),
        Err(e) => {
            tracing::debug!(error = %e, "Landlock can not be used");
            None
        }
    }
}

/// The rules; `None`, since the kernel has none.
#[cfg(not(target_os = "linux"))]
pub fn rules(_: &Reach) -> Option<Rules> {
    None
}
