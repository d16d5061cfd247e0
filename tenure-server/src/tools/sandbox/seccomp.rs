//! The seccomp filter of the sandbox.
//!
//! System calls that were reviewed are permitted, except for a deny list (D-111). Newer system calls, and other
//! system call tables of the same processor, fail with `ENOSYS`, so that libraries fall back to older ones.

use super::plan::MissingFeature;

/// Remedy for the operator if seccomp is unavailable.
const REMEDY: &str = "Use a kernel with CONFIG_SECCOMP_FILTER on x86_64, aarch64 or riscv64, or accept weaker isolation with \
                      python.require: landlock (docs/tools.md).";

/// Which files the interpreter can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VisibleFiles {
    /// Files of its private root file system.
    Private,
    /// Files of the host. System calls that Landlock does not cover are then denied: they could change files of the
    /// server.
    Host,
}

/// Applies the filter to this process and all of its descendants.
#[cfg(target_os = "linux")]
pub fn apply(visible: VisibleFiles) -> Result<(), MissingFeature> {
    let missing = |error: &dyn std::fmt::Display| MissingFeature::new("seccomp", REMEDY, error);
    let program = linux::program(visible).map_err(|e| missing(&e))?;
    seccompiler::apply_filter(&program).map_err(|e| missing(&e))
}

/// Always fails: seccomp is a feature of Linux.
#[cfg(not(target_os = "linux"))]
pub fn apply(_: VisibleFiles) -> Result<(), MissingFeature> {
    Err(MissingFeature::new("seccomp", REMEDY, "this system is not Linux"))
}

#[cfg(target_os = "linux")]
mod linux {
    use super::VisibleFiles;
    use seccompiler::{
        BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule, TargetArch,
    };
    use std::collections::BTreeMap;
    use std::ops::RangeInclusive;

    /// The reviewed system calls: those of Linux 6.10. From 424 on, new ones have the same number on all processors.
    const REVIEWED: [RangeInclusive<i64>; 2] = [0..=LAST_OF_PROCESSOR, 424..=462];
    #[cfg(target_arch = "x86_64")]
    const LAST_OF_PROCESSOR: i64 = 334;
    #[cfg(not(target_arch = "x86_64"))]
    const LAST_OF_PROCESSOR: i64 = 294;

    /// System calls that are never permitted.
    const DENIED: &[i64] = &[
        // Namespaces and mounts. `clone3` passes its flags in memory, which a filter cannot read.
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_clone3,
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_pivot_root,
        libc::SYS_chroot,
        libc::SYS_open_tree,
        libc::SYS_move_mount,
        libc::SYS_fsopen,
        libc::SYS_fsconfig,
        libc::SYS_fsmount,
        libc::SYS_fspick,
        libc::SYS_mount_setattr,
        libc::SYS_quotactl,
        libc::SYS_quotactl_fd,
        libc::SYS_swapon,
        libc::SYS_swapoff,
        libc::SYS_name_to_handle_at,
        libc::SYS_open_by_handle_at,
        457, // statmount
        458, // listmount
        // Access to other processes.
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_process_madvise,
        libc::SYS_process_mrelease,
        libc::SYS_pidfd_getfd,
        libc::SYS_kcmp,
        libc::SYS_migrate_pages,
        libc::SYS_move_pages,
        // Events of files that other processes use.
        libc::SYS_inotify_init1,
        libc::SYS_inotify_add_watch,
        libc::SYS_inotify_rm_watch,
        libc::SYS_fanotify_init,
        libc::SYS_fanotify_mark,
        // Memory that no limit on files or processes accounts for.
        libc::SYS_memfd_create,
        libc::SYS_memfd_secret,
        libc::SYS_shmget,
        libc::SYS_shmat,
        libc::SYS_shmctl,
        libc::SYS_shmdt,
        libc::SYS_msgget,
        libc::SYS_msgsnd,
        libc::SYS_msgrcv,
        libc::SYS_msgctl,
        libc::SYS_semget,
        libc::SYS_semop,
        libc::SYS_semctl,
        libc::SYS_semtimedop,
        libc::SYS_mq_open,
        libc::SYS_mq_unlink,
        // Kernel subsystems that are large, rarely needed, and have a history of vulnerabilities.
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_keyctl,
        libc::SYS_lookup_dcookie,
        libc::SYS_personality,
        libc::SYS_vhangup,
        // Administration of the machine.
        libc::SYS_reboot,
        libc::SYS_syslog,
        libc::SYS_acct,
        libc::SYS_settimeofday,
        libc::SYS_clock_settime,
        libc::SYS_clock_adjtime,
        libc::SYS_adjtimex,
        libc::SYS_sethostname,
        libc::SYS_setdomainname,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_delete_module,
        libc::SYS_kexec_load,
        libc::SYS_kexec_file_load,
        libc::SYS_nfsservctl,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_inotify_init,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_iopl,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_ioperm,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_modify_ldt,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_uselib,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_ustat,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_sysfs,
        #[cfg(target_arch = "x86_64")]
        libc::SYS__sysctl,
    ];

    /// System calls that are denied where files of the host can be named: they change a file without opening it for
    /// writing.
    const DENIED_ON_HOST: &[i64] = &[
        libc::SYS_fchmod,
        libc::SYS_fchmodat,
        452, // fchmodat2
        libc::SYS_fchown,
        libc::SYS_fchownat,
        libc::SYS_utimensat,
        libc::SYS_setxattr,
        libc::SYS_lsetxattr,
        libc::SYS_fsetxattr,
        libc::SYS_removexattr,
        libc::SYS_lremovexattr,
        libc::SYS_fremovexattr,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_chmod,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_chown,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_lchown,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_utime,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_utimes,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_futimesat,
    ];

    /// Permitted socket families. Others, such as `AF_VSOCK`, are not confined by a network namespace.
    const SOCKETS: [libc::c_int; 3] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6];
    /// Flags of `clone` that create namespaces.
    const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET;

    pub fn program(visible: VisibleFiles) -> Result<BpfProgram, BackendError> {
        let first_argument = |operator: SeccompCmpOp, value: u64| {
            SeccompRule::new(vec![SeccompCondition::new(0, SeccompCmpArgLen::Dword, operator, value)?])
        };
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
            REVIEWED.into_iter().flatten().map(|number| (number, Vec::new())).collect();
        let on_host: &[i64] = match visible {
            VisibleFiles::Private => &[],
            VisibleFiles::Host => DENIED_ON_HOST,
        };
        for number in DENIED.iter().chain(on_host) {
            rules.remove(number);
        }
        let families = SOCKETS.iter().map(|family| first_argument(SeccompCmpOp::Eq, family.unsigned_abs().into()));
        rules.insert(libc::SYS_socket, families.collect::<Result<_, _>>()?);
        let mask = u64::from(NAMESPACES.cast_unsigned());
        rules.insert(libc::SYS_clone, vec![first_argument(SeccompCmpOp::MaskedEq(mask), 0)?]);
        let refuse = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
        let arch = TargetArch::try_from(std::env::consts::ARCH)?;
        SeccompFilter::new(rules, refuse, SeccompAction::Allow, arch)?.try_into()
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_filter_can_be_compiled() {
            for visible in [VisibleFiles::Private, VisibleFiles::Host] {
                let length = program(visible).unwrap().len();
                assert!((1000..4096).contains(&length), "{length}");
            }
        }
    }
}
