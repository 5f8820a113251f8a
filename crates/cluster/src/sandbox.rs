//! Sandbox: rights that child processes drop for good. Landlock and seccomp on Linux, nothing
//! elsewhere.
//!
//! ```text
//!                      files                            system calls
//! Sandbox::Worker      read but for most of /dev;       none that manage the machine
//!                      written below /tmp and /dev/shm,
//!                      to devices for computing, and
//!                      below folders that are named
//! Sandbox::Template    none but /dev/null               besides: no programs, no sockets
//! ```
//! Both set `no_new_privs`: programs that they start get no more rights than they have. As root
//! they drop all capabilities but two: reading any file, and locking memory, which RDMA needs. A
//! kernel without Landlock or seccomp enforces what it can; [`Enforced`] reports it.
//!
//! **Workers share one domain.** A process in a Landlock domain cannot look into a process outside
//! of it or in another one. So ranks in separate domains could not open each other's shared memory
//! or use single-copy transfers (`process_vm_readv`). A domain belongs to a thread and is
//! inherited. The monitor thread of [`Workers`](crate::workers::Workers) enters it once, before it
//! starts children. They all share it, and the parent's other threads keep their rights.

use std::path::PathBuf;

/// Rights that a process keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sandbox {
    /// A rank of a model: reads files, computes, communicates with other ranks over memory, sockets
    /// and devices.
    Worker,
    /// The interpreter of a template: reads and writes only already open files.
    Template,
}

/// How much of a [`Sandbox`] the system enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enforced {
    pub files: SandboxLevel,
    /// Which system calls may be made.
    pub calls: bool,
}

/// How much of a rule is enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxLevel {
    Full,
    /// As much as an older kernel knows.
    Part,
    Nothing,
}

impl Sandbox {
    /// Drops the rights, for this thread and everything that it starts from now on.
    pub fn enter(self) -> Enforced {
        self.enter_with(&[])
    }

    /// As [`enter`](Self::enter); a worker may also write below the folders `writable` that exist.
    pub fn enter_with(self, writable: &[PathBuf]) -> Enforced {
        system::enter(self, writable)
    }

    /// Dry run: the rules that [`enter`](Self::enter) would enforce here, tested on a temporary
    /// thread.
    pub fn tried(self) -> Enforced {
        let thread = std::thread::Builder::new().spawn(move || self.enter());
        thread
            .ok()
            .and_then(|thread| thread.join().ok())
            .unwrap_or(NOTHING)
    }
}

const NOTHING: Enforced = Enforced {
    files: SandboxLevel::Nothing,
    calls: false,
};

#[cfg(not(target_os = "linux"))]
mod system {
    pub(super) fn enter(_: super::Sandbox, _: &[std::path::PathBuf]) -> super::Enforced {
        super::NOTHING
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::PathBuf;

    use landlock::{
        ABI, Access, AccessFs, AccessNet, RestrictionStatus, Ruleset, RulesetAttr,
        RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
    };
    use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

    use super::{Enforced, Sandbox, SandboxLevel};

    /// The newest rules that this code uses (Linux 6.12); an older kernel applies those it
    /// supports.
    const RULES: ABI = ABI::V6;

    /// Folders where workers may write: shared memory, and sockets and caches of GPU drivers.
    const WRITABLE: [&str; 2] = ["/dev/shm", "/tmp"];

    /// Beginnings of names below `/dev` that workers open: endless files, RDMA, and graphics
    /// processors of NVIDIA, WSL, the kernel's own interface, and AMD. Not disks.
    const DEVICES: [&str; 10] = [
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "nvidia",
        "dxg",
        "dri",
        "kfd",
        "infiniband",
    ];

    pub(super) fn enter(sandbox: Sandbox, writable: &[PathBuf]) -> Enforced {
        drop_capabilities(sandbox);
        let files = match sandbox {
            Sandbox::Worker => few_writes(writable),
            Sandbox::Template => no_files(),
        };
        Enforced {
            files: files.map_or(SandboxLevel::Nothing, |status| level(status.ruleset)),
            calls: forbid(&forbidden(sandbox)).is_some(),
        }
    }

    fn level(status: RulesetStatus) -> SandboxLevel {
        match status {
            RulesetStatus::FullyEnforced => SandboxLevel::Full,
            RulesetStatus::PartiallyEnforced => SandboxLevel::Part,
            RulesetStatus::NotEnforced => SandboxLevel::Nothing,
        }
    }

    /// Drops what root may do beyond others. Lowering capabilities never fails.
    fn drop_capabilities(sandbox: Sandbox) {
        let kept = match sandbox {
            Sandbox::Worker => CapabilitySet::DAC_READ_SEARCH | CapabilitySet::IPC_LOCK,
            Sandbox::Template => CapabilitySet::empty(),
        };
        let Ok(own) = capabilities(None) else { return };
        let _ = set_capabilities(
            None,
            CapabilitySets {
                effective: own.effective & kept,
                permitted: own.permitted & kept,
                inheritable: CapabilitySet::empty(),
            },
        );
    }

    fn entries(folder: &str) -> impl Iterator<Item = fs::DirEntry> {
        fs::read_dir(folder).into_iter().flatten().flatten()
    }

    /// All at the root but devices.
    fn no_devices() -> Vec<PathBuf> {
        let all = entries("/").map(|entry| entry.path());
        all.filter(|path| !path.ends_with("dev")).collect()
    }

    /// The devices of this machine that workers open.
    fn devices() -> Vec<PathBuf> {
        let all = entries("/dev");
        let is_one = |entry: &fs::DirEntry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            DEVICES.iter().any(|device| name.starts_with(device))
        };
        all.filter(is_one).map(|entry| entry.path()).collect()
    }

    fn few_writes(more: &[PathBuf]) -> Result<RestrictionStatus, RulesetError> {
        let writes = AccessFs::from_write(RULES);
        let both = writes | AccessFs::ReadFile;
        Ruleset::default()
            .handle_access(both)?
            .create()?
            .add_rules(path_beneath_rules(no_devices(), AccessFs::ReadFile))?
            .add_rules(path_beneath_rules(WRITABLE, both))?
            .add_rules(path_beneath_rules(devices(), both))?
            .add_rules(path_beneath_rules(more, both))?
            .restrict_self()
    }

    fn no_files() -> Result<RestrictionStatus, RulesetError> {
        Ruleset::default()
            .handle_access(AccessFs::from_all(RULES))?
            .handle_access(AccessNet::from_all(RULES))?
            .scope(Scope::from_all(RULES))?
            .create()?
            // Standard input is `/dev/null` after the control channel was taken from it.
            .add_rules(path_beneath_rules(["/dev/null"], AccessFs::ReadFile))?
            .restrict_self()
    }

    /// Calls that manage the machine, or inspect processes as a debugger does.
    const MANAGING: [libc::c_long; 22] = [
        libc::SYS_acct,
        libc::SYS_add_key,
        libc::SYS_bpf,
        libc::SYS_chroot,
        libc::SYS_clock_settime,
        libc::SYS_delete_module,
        libc::SYS_finit_module,
        libc::SYS_init_module,
        libc::SYS_kexec_load,
        libc::SYS_keyctl,
        libc::SYS_mount,
        libc::SYS_pivot_root,
        libc::SYS_ptrace,
        libc::SYS_reboot,
        libc::SYS_request_key,
        libc::SYS_setns,
        libc::SYS_settimeofday,
        libc::SYS_swapoff,
        libc::SYS_swapon,
        libc::SYS_umount2,
        libc::SYS_unshare,
        libc::SYS_userfaultfd,
    ];

    /// Calls by which a program starts, inspects or communicates with others.
    const REACHING: [libc::c_long; 13] = [
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_bind,
        libc::SYS_connect,
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_io_uring_setup,
        libc::SYS_listen,
        libc::SYS_memfd_create,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_socket,
        libc::SYS_socketpair,
    ];

    fn forbidden(sandbox: Sandbox) -> Vec<libc::c_long> {
        let more: &[_] = match sandbox {
            Sandbox::Worker => &[],
            Sandbox::Template => &REACHING,
        };
        MANAGING.iter().chain(more).copied().collect()
    }

    /// Makes `calls` fail with EPERM; `None` if the kernel does not support it.
    fn forbid(calls: &[libc::c_long]) -> Option<()> {
        let rules: BTreeMap<i64, _> = calls.iter().map(|call| (*call, Vec::new())).collect();
        let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        let arch = std::env::consts::ARCH.try_into().ok()?;
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).ok()?;
        let program = BpfProgram::try_from(filter).ok()?;
        apply_filter(&program).ok()
    }

    #[cfg(test)]
    mod tests {
        use std::fs;
        use std::os::unix::net::UnixStream;
        use std::thread;

        use super::*;

        /// Runs `run` on a temporary thread; returns its result after the thread has ended.
        fn apart<T: Send>(run: impl FnOnce() -> T + Send) -> T {
            thread::scope(|scope| scope.spawn(run).join().unwrap())
        }

        /// Whether this kernel has both; tests of missing features are skipped by name.
        fn can(test: &str) -> bool {
            let enforced = Sandbox::Template.tried();
            let can = enforced.files != SandboxLevel::Nothing && enforced.calls;
            if !can {
                eprintln!("SKIPPED {test}: this kernel enforces {enforced:?} only");
            }
            can
        }

        #[test]
        fn a_worker_reads_and_does_not_write() {
            if !can("a_worker_reads_and_does_not_write") {
                return;
            }
            // Not below /tmp, where workers may write, and where this tree may lie.
            let own = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
            let is_open = own.starts_with("/tmp");
            let place = if is_open { "/var/tmp".as_ref() } else { own };
            let folder = tempfile::tempdir_in(place).unwrap();
            let file = folder.path().join("file");
            fs::write(&file, "before").unwrap();
            let (read, written, made) = apart(|| {
                Sandbox::Worker.enter();
                (
                    fs::read_to_string(&file),
                    fs::write(&file, "after"),
                    fs::create_dir(folder.path().join("folder")),
                )
            });
            assert_eq!(read.unwrap(), "before");
            assert!(written.is_err() && made.is_err());
            assert_eq!(fs::read_to_string(&file).unwrap(), "before");
            let named = folder.path().join("named");
            fs::create_dir(&named).unwrap();
            let (inside, beside) = apart(|| {
                Sandbox::Worker.enter_with(&[named.clone(), folder.path().join("missing")]);
                (
                    fs::write(named.join("part"), "whole")
                        .and_then(|()| fs::rename(named.join("part"), named.join("file"))),
                    fs::write(&file, "after"),
                )
            });
            assert!(inside.is_ok(), "{inside:?}");
            assert!(beside.is_err());
            let kept = apart(|| {
                Sandbox::Worker.enter();
                tempfile::tempdir_in("/tmp").is_ok() && UnixStream::pair().is_ok()
            });
            assert!(kept);
        }

        /// Root could write to the raw disk of every file, and mount another.
        #[test]
        fn a_worker_of_root_opens_no_other_device_and_has_few_capabilities() {
            if !can("a_worker_of_root_opens_no_other_device_and_has_few_capabilities") {
                return;
            }
            let write = |path: &str| fs::OpenOptions::new().write(true).open(path);
            let read = |path: &str| fs::File::open(path);
            let others = [
                "/dev/kmsg",
                "/dev/loop-control",
                "/dev/fuse",
                "/dev/mem",
                "/dev/vda",
            ];
            let others: Vec<&str> = others.into_iter().filter(|it| read(it).is_ok()).collect();
            let (denied, status, kept) = apart(|| {
                Sandbox::Worker.enter();
                (
                    others
                        .iter()
                        .all(|it| write(it).is_err() && read(it).is_err()),
                    fs::read_to_string("/proc/thread-self/status").unwrap(),
                    write("/dev/null").is_ok()
                        && read("/dev/urandom").is_ok()
                        && tempfile::tempfile_in("/dev/shm").is_ok(),
                )
            });
            assert!(denied && kept, "{others:?}");
            let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
            let effective = u64::from_str_radix(effective.unwrap().trim(), 16).unwrap();
            let few = CapabilitySet::DAC_READ_SEARCH | CapabilitySet::IPC_LOCK;
            assert_eq!(effective & !few.bits(), 0, "{effective:#x}");
        }

        #[test]
        fn a_template_opens_and_starts_nothing() {
            if !can("a_template_opens_and_starts_nothing") {
                return;
            }
            let own = std::env::current_exe().unwrap();
            let denied = apart(|| {
                Sandbox::Template.enter();
                [
                    fs::read(&own).is_err(),
                    fs::read_dir("/").is_err(),
                    fs::write("/tmp/paceline-sandbox", "").is_err(),
                    std::net::TcpListener::bind("127.0.0.1:0").is_err(),
                    UnixStream::pair().is_err(),
                    std::process::Command::new("/bin/true").status().is_err(),
                ]
            });
            assert_eq!(denied, [true; 6]);
            assert!(apart(|| {
                Sandbox::Template.enter();
                fs::File::open("/dev/null").is_ok()
            }));
        }
    }
}
