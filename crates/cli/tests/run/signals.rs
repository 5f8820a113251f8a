//! Ctrl-C and its relatives, wherever they hit.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use paceline_base::testing::Stopwatch;
use rustix::process::{Signal, kill_process, test_kill_process_group};

use super::tiny::ALPHABET;
use super::{TestHome, pid, text, until, wait};
use crate::common::complaints;
use crate::common::terminal::Terminal;

/// A person takes this for "at once".
const AT_ONCE: Duration = Duration::from_millis(200);
/// Tries; one of them must be at once, less what a [`Stopwatch`] sees withheld: a machine that
/// runs other tests too may stall any process.
const TRIES: usize = 3;

/// Sends `signal` and waits for the end, with code 1; returns how long that took.
fn interrupt(child: &mut Child, signal: Signal) -> Duration {
    let start = Stopwatch::start();
    kill_process(pid(child), signal).unwrap();
    let status = wait(child);
    let took = start.elapsed();
    assert_eq!(status.code(), Some(1), "{signal:?}");
    took
}

/// Starts `command` in a process group of its own, until `ready`, and interrupts it. It must end at
/// once and leave neither process nor file, nor a word on stderr.
fn interrupt_when(
    world: &TestHome,
    command: &mut Command,
    signal: Signal,
    ready: impl Fn(&mut Child) -> bool,
) {
    let took = (0..TRIES).map(|_| {
        let mut child = command
            .process_group(0)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        until("the right moment", || ready(&mut child));
        let took = interrupt(&mut child, signal);
        assert!(
            test_kill_process_group(pid(&child)).is_err(),
            "a process was left behind"
        );
        assert_eq!(complaints(&mut child), "");
        world.assert_clean();
        took
    });
    let fastest = took.min().unwrap();
    assert!(fastest < AT_ONCE, "{fastest:?} at best");
}

#[test]
fn signals_end_an_answer_at_once() {
    let world = TestHome::new();
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let mut command = world.paceline(world.endless());
        interrupt_when(&world, command.stdout(Stdio::piped()), signal, |child| {
            let mut start = [0; 100];
            child
                .stdout
                .as_mut()
                .unwrap()
                .read_exact(&mut start)
                .unwrap();
            true
        });
    }
}

/// The signal may not come before the handlers are there; Linux tells when they are.
#[cfg(target_os = "linux")]
mod linux {
    use std::io::Write;

    use super::*;
    use crate::common::smollm2;
    use crate::run::tiny::TinyChatModel;

    fn status(child: &Child, field: &str) -> Option<String> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(field))?;
        Some(line.trim_start_matches(':').trim().to_owned())
    }

    fn handles_signals(child: &Child) -> bool {
        let caught = status(child, "SigCgt").and_then(|mask| u64::from_str_radix(&mask, 16).ok());
        let wanted = [Signal::INT, Signal::TERM].map(|signal| 1 << (signal.as_raw() - 1));
        caught.is_some_and(|caught| wanted.iter().all(|bit| caught & bit != 0))
    }

    #[test]
    fn signals_end_the_wait_for_a_piped_prompt() {
        let world = TestHome::new();
        let model = world.tiny_model(TinyChatModel::default());
        let mut command = world.paceline(["run", &model]);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        interrupt_when(&world, &mut command, Signal::INT, |child| {
            // Asleep in a read of the pipe, or about to be.
            handles_signals(child) && status(child, "State").is_some_and(|s| s.starts_with('S'))
        });
    }

    #[test]
    fn signals_end_loading() {
        let Some(model) = smollm2("signals_end_loading") else {
            return;
        };
        let world = TestHome::new();
        let mut command = world.paceline(["run", &model, "Tell me a long story."]);
        command.stdout(Stdio::null());
        for signal in [Signal::INT, Signal::TERM] {
            interrupt_when(&world, &mut command, signal, |child| {
                let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id()));
                maps.is_ok_and(|maps| maps.contains(".gguf"))
            });
        }
    }

    #[test]
    fn nohup_is_respected() {
        let world = TestHome::new();
        let model = world.tiny_model(TinyChatModel::default());
        let mut command = Command::new("/bin/sh");
        command
            .env_clear()
            .env("PACELINE_HOME", world.path("home"))
            .args(["-c", "trap '' HUP; exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_paceline"))
            .args(["run", &model])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        until("it handles signals", || handles_signals(&child));
        kill_process(pid(&child), Signal::HUP).unwrap();
        child.stdin.take().unwrap().write_all(b"hi").unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(text(&output.stdout), format!("{ALPHABET}\n"));
    }
}

#[test]
fn signals_end_a_chat_and_the_terminal_stays_usable() {
    let world = TestHome::new();
    let mut args = world.endless();
    args.remove(2); // the prompt
    for typed in ["go\n", ""] {
        for signal in [Signal::INT, Signal::TERM] {
            let took = (0..TRIES).map(|_| {
                let mut terminal = Terminal::start(&mut world.paceline(&args));
                terminal.expect("> ");
                terminal.type_keys(typed);
                if !typed.is_empty() {
                    terminal.expect(ALPHABET);
                }
                if !typed.is_empty() && signal == Signal::INT {
                    kill_process(pid(&terminal.child), signal).unwrap(); // ends the answer
                    terminal.expect("; stopped]\n> ");
                }
                let took = interrupt(&mut terminal.child, signal);
                let rest = terminal.rest();
                assert!(rest.ends_with('\n') && !rest.contains("error"), "{rest:?}");
                terminal.assert_usable();
                took
            });
            let fastest = took.min().unwrap();
            assert!(fastest < AT_ONCE, "{fastest:?} at best");
        }
    }
    world.assert_clean();
}
