//! Showing the commands that machines need, and running them when that is wanted.

use std::io::{self, BufRead, IsTerminal};
use std::time::Duration;

use paceline_cluster::remote::Reach;
use paceline_cluster::topology::{Addresses, Graph, Machine, setup};

use super::Error;
use crate::output::tell;

/// For a dozen commands that each end at once.
const LIMIT: Duration = Duration::from_secs(60);

/// What is to be set up, where.
pub(super) struct Setup<'a> {
    pub(super) reach: &'a Reach,
    pub(super) graph: &'a Graph,
    pub(super) addresses: &'a Addresses,
    pub(super) machines: &'a [Machine],
    /// Whether it is to be undone instead.
    pub(super) undo: bool,
}

impl Setup<'_> {
    /// The commands of each host.
    pub(super) fn commands(&self) -> Vec<Vec<String>> {
        let of = |host| match self.undo {
            false => setup::commands(self.graph, self.addresses, host),
            true => setup::undo(self.graph, self.addresses, host),
        };
        (0..self.graph.hosts.len()).map(of).collect()
    }

    /// Shows the commands; with `auto`, asks, and runs them on all hosts.
    pub(super) fn carry_out(&self, auto: bool, yes: bool) -> anyhow::Result<()> {
        let commands = self.commands();
        for (host, commands) in self.graph.hosts.iter().zip(&commands) {
            let title = format!("Setup for {host}");
            tell(format_args!("{title}\n{}", "=".repeat(title.len())));
            tell(format_args!("{}\n", commands.join("\n")));
        }
        if !auto || !self.may_run(yes)? {
            return Ok(());
        }
        for (host, commands) in self.graph.hosts.iter().zip(&commands) {
            tell(format_args!("Running the setup for {host}"));
            let answer = self.reach.ask(host, &setup::script(commands), LIMIT)?;
            let said = [answer.stdout, answer.stderr].concat();
            String::from_utf8_lossy(&said)
                .lines()
                .for_each(|line| tell(format_args!("  {line}")));
            if !answer.ending.is_success() {
                let (host, ending) = (host.clone(), answer.ending);
                return Err(Error::Setup { host, ending }.into());
            }
        }
        Ok(())
    }

    /// Whether the commands can be run and a person wants them to be.
    fn may_run(&self, yes: bool) -> Result<bool, Error> {
        let all = self.graph.hosts.iter().zip(self.machines);
        let without = all.filter(|(_, machine)| !machine.can_sudo);
        let hosts: Vec<String> = without.map(|(host, _)| host.clone()).collect();
        if !hosts.is_empty() {
            return Err(Error::NoSudo { hosts });
        }
        if yes {
            return Ok(true);
        }
        if !io::stdin().is_terminal() {
            return Err(Error::NobodyToAsk);
        }
        tell("Run these commands on all hosts? [y/N]");
        let mut answer = String::new();
        let _ = io::stdin().lock().read_line(&mut answer);
        let agreed = matches!(answer.trim(), "y" | "Y" | "yes");
        if !agreed {
            tell("nothing was changed");
        }
        Ok(agreed)
    }
}
