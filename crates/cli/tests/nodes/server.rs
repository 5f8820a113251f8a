//! `paceline up` on a port that is free.

use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::processes::{CommandOutput, RunningCommand, assert_gone};
use super::{TestHome, until};

/// A server, ready for requests.
pub(crate) struct NodeServer {
    pub(crate) running: RunningCommand,
    pub(crate) port: u16,
}

impl NodeServer {
    pub(crate) fn start(world: &TestHome, model: &str, args: &[&str]) -> Self {
        let up = ["up", "--no-beacons", "--model", model, "--port", "0"];
        let args = up.iter().chain(args).copied();
        Self::of(&mut world.paceline(args))
    }

    pub(crate) fn of(command: &mut Command) -> Self {
        let running = RunningCommand::start(command);
        let mut port = None;
        until("the server listens", || {
            let said = running.said();
            let address = said.split("listening on http://127.0.0.1:").nth(1);
            // A whole line, lest digits are missing.
            let line = address.and_then(|rest| rest.split_once('\n'));
            port = line.map(|(port, _)| port.parse().unwrap());
            port.is_some() || said.contains("error")
        });
        let port = port.unwrap_or_else(|| panic!("{}", running.said()));
        Self { running, port }
    }

    /// Ends it as Ctrl-C does; fails unless it ends well and leaves no process.
    pub(crate) fn stop(self, nodes: usize) -> CommandOutput {
        let workers = self.running.workers(nodes);
        self.running.signal(Signal::INT);
        let ended = self.running.end();
        assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
        assert_gone(&workers);
        ended
    }
}

/// A request for a chat's next answer, with the fields of `more`.
pub(crate) fn chat(model: &str, prompt: &str, more: &Value) -> Value {
    let mut body = json!({
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
    });
    let fields = body.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    body
}
