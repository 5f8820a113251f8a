//! A person at a terminal: the shell's prompt comes back, and the terminal is as it was.

use std::process::Command;
use std::time::Duration;

use paceline_base::testing::Stopwatch;
use rustix::process::Signal;

use super::processes::{assert_gone, children, signal, wait_gone};
use super::tiny::FAMILIES;
use super::{REPORTED, TestHome, alone, until};
use crate::common::terminal::Terminal;

/// A shell with job control on a terminal of its own, and the ids of a paceline it runs.
struct ShellSession {
    terminal: Terminal,
    world: TestHome,
}

impl ShellSession {
    /// A shell; `None` with a line when this machine has no `setsid` to give it a terminal.
    fn start(test: &str) -> Option<Self> {
        if Command::new("setsid").arg("--version").output().is_err() {
            eprintln!("SKIPPED {test}: there is no setsid");
            return None;
        }
        let world = TestHome::new();
        let model = world.write_model(FAMILIES[0]);
        let mut command = Command::new("setsid");
        command
            .args(["--ctty", "--wait", "/bin/sh", "-i"])
            .env("PS1", "ready$ ")
            .env("PACELINE_HOME", world.path("home"))
            .env("P", env!("CARGO_BIN_EXE_paceline"))
            .env("M", model);
        let mut terminal = Terminal::start(&mut command);
        terminal.expect("ready$ ");
        Some(Self { terminal, world })
    }

    /// Starts an endless answer over three nodes and waits for some of it; the ids of paceline
    /// and its workers.
    fn answer(&mut self, prompt: &str) -> (u32, Vec<u32>) {
        let command = format!(
            "\"$P\" run \"$M\" {prompt} --temperature 0 --context 200000 --nodes 3 --split 3x1\n"
        );
        self.terminal.type_keys(&command);
        self.terminal.expect("rank 2: ");
        if prompt.is_empty() {
            self.terminal.expect("> ");
            self.terminal.type_keys("go\n");
        }
        self.more();
        let mut found = None;
        until("the processes", || {
            found = self.paceline();
            found.is_some()
        });
        found.unwrap()
    }

    fn paceline(&self) -> Option<(u32, Vec<u32>)> {
        let wait = children(self.terminal.child.id());
        let shells = wait.into_iter().chain([self.terminal.child.id()]);
        let all = shells.flat_map(children);
        let with = all.map(|id| (id, children(id)));
        with.into_iter().find(|(_, workers)| workers.len() == 3)
    }

    /// Waits until the answer has gone on: any 200 characters.
    fn more(&mut self) {
        for letter in "etaoetaoetao".chars() {
            self.terminal.expect(&letter.to_string());
        }
    }

    /// The exit code that the shell saw; its prompt is on a line of its own.
    fn code(&mut self) -> String {
        let shown = self.terminal.expect("ready$ ");
        assert!(shown.ends_with("\nready$ "), "{shown:?}");
        self.terminal.type_keys("echo code=$?.\n");
        self.terminal.expect("\ncode=");
        let code = self.terminal.expect(".");
        self.terminal.expect("ready$ ");
        code.trim_end_matches('.').to_owned()
    }

    fn end(mut self) {
        self.terminal
            .type_keys("stty -a | tr ';' '\\n' | grep -c isig; exit\n");
        until("the shell ends", || {
            self.terminal.child.try_wait().unwrap().is_some()
        });
        self.terminal.assert_usable();
        self.world.assert_clean();
    }
}

#[test]
fn an_answer_goes_on_after_ctrl_z_and_fg() {
    let _alone = alone();
    let Some(mut shell) = ShellSession::start("an_answer_goes_on_after_ctrl_z_and_fg") else {
        return;
    };
    let (_, workers) = shell.answer("go");
    shell.terminal.type_keys("\x1a");
    shell.terminal.expect("ready$ ");
    std::thread::sleep(Duration::from_secs(3)); // longer than anything may be silent
    shell.terminal.type_keys("fg\n");
    shell.more();
    std::thread::sleep(Duration::from_secs(2));
    shell.more();
    shell.terminal.type_keys("\x03");
    wait_gone(&workers, Stopwatch::start());
    assert_eq!(shell.code(), "1");
    shell.end();
}

#[test]
fn a_lost_rank_leaves_the_terminal_usable() {
    let _alone = alone();
    let Some(mut shell) = ShellSession::start("a_lost_rank_leaves_the_terminal_usable") else {
        return;
    };
    // `lost` has every signal; here one ends an answer and one a chat.
    for (kind, prompt) in [(Signal::STOP, "go"), (Signal::ABORT, "")] {
        let (_, workers) = shell.answer(prompt);
        signal(workers[1], kind);
        let start = Stopwatch::start();
        shell
            .terminal
            .expect("\nerror: the answer was lost: rank 1 ");
        let took = start.elapsed();
        assert!(took < REPORTED, "{took:?}");
        assert_eq!(shell.code(), "1");
        assert_gone(&workers);
    }
    shell.end();
}
