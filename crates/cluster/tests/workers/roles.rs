//! The roles of this binary when a test starts it again.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_cluster::workers::{WorkerLimits, WorkerSpec, Workers};
use paceline_cluster::{Control, Error};
use rustix::process::{WaitId, WaitIdOptions, getpgid, waitid};
use serde::{Deserialize, Serialize};

use crate::{Ours, PATIENCE, ask, exit, scripts};

/// The variable that gives the role.
pub(crate) const ROLE: &str = "PACELINE_CLUSTER_TEST_ROLE";

/// To a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum RoleCommand {
    Echo(String),
    /// Send this many numbers.
    Count(u64),
    /// Send this many numbers and exit with the code at once.
    CountAndExit(u64, i32),
    Exit(i32),
    Abort,
    /// Write to standard error.
    Say(String),
    /// Compute for ever, after answering.
    Busy,
    /// Never take another message, after answering.
    Deaf,
    Look,
    /// Report whether the memory of a process can be read, as single-copy transfers do.
    Read(u32),
    /// Install a hook that says so, or one that hangs.
    Hook {
        hangs: bool,
    },
}

/// From a worker.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum RoleReply {
    Echo(String),
    Number(u64),
    Done,
    Read(bool),
    Look {
        group: i32,
        /// Open files that are sockets.
        sockets: usize,
        stdin: Vec<u8>,
    },
}

pub(crate) fn spec(role: &str, ranks: usize) -> WorkerSpec {
    let args = ["role", "--exact", "--nocapture", "--test-threads=1"];
    let args = vec![args.map(Into::into).to_vec(); ranks];
    let mut spec = WorkerSpec::new(std::env::current_exe().unwrap(), args);
    spec.env.push((ROLE.into(), role.into()));
    spec
}

/// This binary in a role, its standard error piped.
pub(crate) fn command(role: &str) -> Command {
    let spec = spec(role, 1);
    let mut command = Command::new(spec.program);
    command.args(&spec.args[0]).envs(spec.env);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// Runs a role to its end and fails with what it said.
pub(crate) fn run(role: &str) {
    let output = command(role).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.into_raw(), 0, "{role}: {said}");
}

pub(crate) fn play(role: &str) {
    match role {
        "worker" => worker(),
        "parent" => parent(|_| {}),
        "parent of busy" => parent(|workers| {
            for rank in 0..workers.count() {
                assert_eq!(ask(workers, rank, &RoleCommand::Busy), RoleReply::Done);
            }
        }),
        "parent of deaf" => parent(|workers| {
            for rank in 0..workers.count() {
                assert_eq!(ask(workers, rank, &RoleCommand::Deaf), RoleReply::Done);
                let text = "x".repeat(1000);
                for _ in 0..5000 {
                    if workers
                        .send(Rank(rank), &RoleCommand::Echo(text.clone()))
                        .is_err()
                    {
                        break;
                    }
                }
            }
        }),
        "by hand" => by_hand(),
        "tidy" => tidy(),
        role => panic!("{role}"),
    }
}

/// Makes a worker stop reading, and sends until it and its channel are full.
pub(crate) fn deafen(workers: &Ours, rank: u32) {
    assert_eq!(ask(workers, rank, &RoleCommand::Deaf), RoleReply::Done);
    let order = RoleCommand::Echo("x".repeat(1000));
    let mut sent = 0;
    while workers.send(Rank(rank), &order).is_ok() {
        sent += 1;
    }
    assert!((4096..6000).contains(&sent), "{sent} messages are held");
}

/// Obeys.
fn worker() {
    let control: Control<RoleCommand, RoleReply> = Control::from_stdin().unwrap();
    while let Some(order) = control.recv(Duration::MAX).unwrap() {
        obey(&control, order);
    }
}

fn obey(control: &Control<RoleCommand, RoleReply>, order: RoleCommand) {
    let send = |answer| control.send(&answer).unwrap();
    let count = |count| (0..count).for_each(|i| send(RoleReply::Number(i)));
    match order {
        RoleCommand::Echo(text) => send(RoleReply::Echo(text)),
        RoleCommand::Count(numbers) => count(numbers),
        RoleCommand::CountAndExit(numbers, code) => {
            count(numbers);
            std::process::exit(code);
        }
        RoleCommand::Exit(code) => std::process::exit(code),
        RoleCommand::Abort => std::process::abort(),
        RoleCommand::Say(text) => {
            std::io::stderr().write_all(text.as_bytes()).unwrap();
            send(RoleReply::Done);
        }
        RoleCommand::Busy => {
            send(RoleReply::Done);
            let mut i = 0_u64;
            loop {
                i = std::hint::black_box(i.wrapping_add(1));
            }
        }
        RoleCommand::Deaf => {
            send(RoleReply::Done);
            loop {
                std::thread::park();
            }
        }
        RoleCommand::Look => send(look()),
        RoleCommand::Read(id) => {
            // The kernel checks ptrace access here, as it does for `process_vm_readv`.
            let memory = std::fs::File::open(format!("/proc/{id}/mem"));
            send(RoleReply::Read(memory.is_ok()));
        }
        RoleCommand::Hook { hangs } => {
            control.on_end(move || {
                eprintln!("hook");
                if hangs {
                    std::thread::sleep(Duration::MAX);
                }
            });
            send(RoleReply::Done);
        }
    }
}

fn look() -> RoleReply {
    let mut stdin = Vec::new();
    std::io::Read::read_to_end(&mut std::io::stdin(), &mut stdin).unwrap();
    let files = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    let targets = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    let is_socket = |target: &std::path::PathBuf| target.to_string_lossy().starts_with("socket");
    RoleReply::Look {
        group: getpgid(None).unwrap().as_raw_nonzero().get(),
        sockets: targets.filter(is_socket).count(),
        stdin,
    }
}

/// Starts three workers, says their ids, and reports every event until it is killed.
fn parent(prepare: impl Fn(&Ours)) {
    let mut spec = spec("worker", 3);
    spec.limits = WorkerLimits {
        write: Duration::from_millis(200),
        ..WorkerLimits::default()
    };
    let workers: Ours = Workers::spawn(spec).unwrap();
    for rank in 0..3 {
        assert_eq!(
            ask(&workers, rank, &RoleCommand::Echo("up".into())),
            RoleReply::Echo("up".into())
        );
    }
    prepare(&workers);
    let ids: Vec<String> = workers.ids().iter().map(ToString::to_string).collect();
    eprintln!("ids {}", ids.join(" "));
    loop {
        if let Some(event) = workers.recv(Duration::MAX) {
            eprintln!("event {event}");
        }
    }
}

/// Started by a person.
fn by_hand() {
    let error = Control::<RoleCommand, RoleReply>::from_stdin().unwrap_err();
    assert!(matches!(error, Error::NoControl { .. }), "{error}");
    let (socket, other) = std::os::unix::net::UnixStream::pair().unwrap();
    // Open for the life of the process, which ends when this is closed.
    std::mem::forget(other);
    rustix::stdio::dup2_stdin(&socket).unwrap();
    let _control = Control::<RoleCommand, RoleReply>::from_stdin().unwrap();
    let error = Control::<RoleCommand, RoleReply>::from_stdin().unwrap_err();
    assert!(matches!(error, Error::NoControl { .. }), "{error}");
}

/// Starts and ends workers in all ways, and checks that no files or processes leak.
fn tidy() {
    let files = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let threads = || std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    let before = (files(), threads());
    for i in 0..50 {
        match i % 5 {
            0 => drop(crate::spawn(3)),
            1 => crate::spawn(2).stop(PATIENCE),
            2 => {
                let workers = crate::spawn(2);
                workers.send(Rank(1), &RoleCommand::Exit(i)).unwrap();
                assert_eq!(exit(&workers).0, Rank(1));
            }
            3 => {
                let mut spec = scripts(&["exec sleep 1000", ":"]);
                spec.args[1].push("x".repeat(4 << 20).into());
                let error = Ours::spawn(spec).unwrap_err();
                assert!(
                    matches!(error, Error::Start { rank: Rank(1), .. }),
                    "{error}"
                );
            }
            _ => {
                assert!(Ours::spawn(WorkerSpec::new("/no/such/program", vec![vec![]; 2])).is_err())
            }
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let left = waitid(WaitId::All, options);
        assert!(left.is_err(), "round {i}: a process is left: {left:?}");
    }
    let start = Instant::now();
    while (files(), threads()) != before {
        assert!(
            start.elapsed() < PATIENCE,
            "{before:?}, now {:?}",
            (files(), threads())
        );
        std::thread::yield_now();
    }
}
