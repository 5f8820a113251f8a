//! Shows the setup commands of machines, and runs them on request.

use std::io::{self, BufRead, IsTerminal};
use std::time::Duration;

use paceline_board::cables::CablingSetup;
use paceline_launch::remote::SshClient;
use paceline_launch::topology::setup::script;

use crate::error::{Error, failed, misused};
use crate::output::print_err;

/// Timeout of a host's dozen quick commands.
const LIMIT: Duration = Duration::from_secs(60);

/// Shows the commands; with `auto`, asks and runs them on all hosts.
pub(super) fn carry_out(
    setup: &CablingSetup<'_>,
    reach: &SshClient,
    (auto, yes): (bool, bool),
) -> anyhow::Result<()> {
    let commands = setup.commands();
    for (host, commands) in setup.graph.hosts.iter().zip(&commands) {
        let title = format!("Setup for {host}");
        print_err(format_args!("{title}\n{}", "=".repeat(title.len())));
        print_err(format_args!("{}\n", commands.join("\n")));
    }
    if !auto || !may_run(setup, yes)? {
        return Ok(());
    }
    for (host, commands) in setup.graph.hosts.iter().zip(&commands) {
        print_err(format_args!("Running the setup for {host}"));
        let answer = reach.run_script(host, &script(commands), LIMIT)?;
        let said = [answer.stdout, answer.stderr].concat();
        String::from_utf8_lossy(&said)
            .lines()
            .for_each(|line| print_err(format_args!("  {line}")));
        if !answer.ending.is_success() {
            let text = format!("the setup of {host} failed: it {}", answer.ending);
            let hint = "the lines above say why; `paceline topology --undo` shows the way back";
            return Err(failed(text, hint).into());
        }
    }
    Ok(())
}

/// Whether the commands can run and the user agrees.
fn may_run(setup: &CablingSetup<'_>, yes: bool) -> Result<bool, Error> {
    let hosts = setup.without_sudo();
    if !hosts.is_empty() {
        return Err(failed(
            format!("sudo wants a password on {}", hosts.join(", ")),
            "run the commands shown above by hand, without --auto-setup; or let sudo run them \
             without a password",
        ));
    }
    if yes {
        return Ok(true);
    }
    if !io::stdin().is_terminal() {
        return Err(misused(
            "--auto-setup asks before it changes machines, but standard input is no terminal",
            "add --yes to have the commands above run",
        ));
    }
    print_err("Run these commands on all hosts? [y/N]");
    let mut answer = String::new();
    let _ = io::stdin().lock().read_line(&mut answer);
    let agreed = matches!(answer.trim(), "y" | "Y" | "yes");
    if !agreed {
        print_err("nothing was changed");
    }
    Ok(agreed)
}
