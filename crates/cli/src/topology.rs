//! `paceline topology`: detects the cabling of machines, like `mlx.distributed_config`.

mod error;
mod setup;

use std::path::PathBuf;
use std::time::Duration;

use paceline_board::cables::{self, CablingSetup};
use paceline_launch::hostfile::{Host, Hostfile};
use paceline_launch::launch::Backend;
use paceline_launch::remote::SshClient;
use paceline_launch::topology::{
    Addresses, Graph, ProbeScope, ProbedMachine, choose, ethernet, probe, sorted,
};

pub(crate) use error::hints;

use crate::interrupt::Signals;
use crate::output::{draw, print, print_err, show};

const EXAMPLES: &str = "\
Examples:
  paceline topology --hosts a,b,c --dot --plot cables.svg
  paceline topology --hosts a,b,c --output hosts.json   then: paceline launch --hostfile hosts.json
  paceline topology --hosts a,b --over ethernet --output hosts.json

The commands that the cables need are shown, and run only with --auto-setup. The hostfile goes to
standard output unless --output names a file; everything else goes to standard error.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Names for `ssh`, with commas between
    #[arg(long, value_name = "A,B", default_value = "127.0.0.1")]
    hosts: String,
    /// Hosts from a file in one of MLX's formats
    #[arg(long, value_name = "FILE", conflicts_with = "hosts")]
    hostfile: Option<PathBuf>,
    /// The network that is to be used
    #[arg(long, value_enum, default_value_t)]
    over: NetworkKind,
    /// What the hostfile is for [default: the best that the cables allow]
    #[arg(long, value_name = "NAME",
          value_parser = ["ring", "jaccl", "rdma", "jaccl-ring"])]
    backend: Option<String>,
    /// Put a variable for all ranks into the hostfile; may be given several times
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Write the hostfile here
    #[arg(long, value_name = "FILE", visible_alias = "output-hostfile")]
    output: Option<PathBuf>,
    /// Skip hosts that cannot be reached
    #[arg(long)]
    ignore_unreachable: bool,
    /// Print the cables as a graph for `dot`, and end
    #[arg(long, conflicts_with_all = ["json", "auto_setup", "undo"])]
    dot: bool,
    /// Also write the cables as a picture
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Run the commands on all hosts, after a question
    #[arg(long, overrides_with = "no_auto_setup")]
    auto_setup: bool,
    /// Only show the commands, as without this
    #[arg(long, overrides_with = "auto_setup")]
    no_auto_setup: bool,
    /// With --auto-setup: do not ask
    #[arg(long)]
    yes: bool,
    /// Take the addresses away again: show those commands, or run them with --auto-setup
    #[arg(long)]
    undo: bool,
    /// Print one JSON object with all that was found
    #[arg(long)]
    json: bool,
    /// Tell what is done
    #[arg(long)]
    verbose: bool,
    /// Seconds until all hosts must have answered
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u16).range(1..=3600))]
    timeout: u16,
}

/// The network that is to be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum NetworkKind {
    /// Cables between Macs
    #[default]
    Thunderbolt,
    /// The network that they are on anyway
    Ethernet,
}

struct HostSurvey {
    hosts: Vec<Host>,
    machines: Vec<ProbedMachine>,
}

/// Detects the topology and writes a hostfile.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    signals.orderly(|_| {
        let reach = SshClient::new("ssh", None);
        let found = args.ask(&reach)?;
        match args.over {
            NetworkKind::Ethernet => args.ethernet(&found),
            NetworkKind::Thunderbolt => args.thunderbolt(&reach, &found),
        }
    })
}

impl Args {
    fn ask(&self, reach: &SshClient) -> anyhow::Result<HostSurvey> {
        let named = match &self.hostfile {
            Some(path) => Hostfile::read(path)?.hosts,
            None => Hostfile::from_names(&self.hosts, 1)?.hosts,
        };
        let wanted = match self.over {
            NetworkKind::Thunderbolt => ProbeScope::Thunderbolt,
            NetworkKind::Ethernet => ProbeScope::Ethernet,
        };
        let names: Vec<String> = named.iter().map(|host| host.ssh.clone()).collect();
        if self.verbose {
            print_err(format_args!("asking {}", names.join(", ")));
        }
        let limit = Duration::from_secs(self.timeout.into());
        let answers = probe(reach, &names, wanted, limit);
        let (both, left_out, mut failed) = sorted(named, answers, self.ignore_unreachable);
        for error in left_out {
            print_err(format_args!("warning: left out: {error}"));
        }
        if let Some(last) = failed.pop() {
            failed
                .iter()
                .for_each(|error| print_err(format_args!("error: {error}")));
            return Err(last.into());
        }
        let (hosts, machines): (Vec<_>, Vec<_>) = both.into_iter().unzip();
        if hosts.is_empty() {
            let hint = "`ssh HOST true` must work without a question";
            return Err(crate::error::failed("none of the hosts answers", hint).into());
        }
        Ok(HostSurvey { hosts, machines })
    }

    fn ethernet(&self, found: &HostSurvey) -> anyhow::Result<()> {
        let file = ethernet(&found.machines, &found.hosts, &self.env);
        for host in file.hosts.iter().filter(|host| host.ips.is_empty()) {
            print_err(format_args!("warning: no address found for {}", host.ssh));
        }
        if self.json {
            self.write(&file)?;
            return print(&cables::ethernet(&file).to_string());
        }
        self.save(&file)
    }

    fn thunderbolt(&self, reach: &SshClient, found: &HostSurvey) -> anyhow::Result<()> {
        let names = found.hosts.iter().map(|host| host.ssh.clone()).collect();
        let ports = found
            .machines
            .iter()
            .map(|machine| machine.ports.clone())
            .collect();
        let graph = Graph::new(names, ports)?;
        for cable in &graph.loops {
            let host = &graph.hosts[cable.from.host];
            print_err(format_args!("warning: a cable leads from {host} to itself"));
        }
        draw(self.plot.as_deref(), || cables::picture(&graph))?;
        if self.dot {
            return show(&graph.dot());
        }
        let addresses = Addresses::assign(&graph, &found.machines)?;
        let setup = CablingSetup {
            graph: &graph,
            addresses: &addresses,
            machines: &found.machines,
            undo: self.undo,
        };
        let asked = (self.auto_setup, self.yes);
        if self.undo {
            return setup::carry_out(&setup, reach, asked);
        }
        let wish: Option<Backend> = self.backend.as_deref().map(str::parse).transpose()?;
        let machines = &found.machines;
        let choice = choose(wish, &graph, &addresses, machines, &found.hosts, &self.env)?;
        if self.verbose {
            print_err(format_args!("backend {}", choice.backend));
        }
        setup::carry_out(&setup, reach, asked)?;
        if self.json {
            self.write(&choice.hostfile)?;
            return print(&cables::thunderbolt(&setup, &choice)?.to_string());
        }
        self.save(&choice.hostfile)
    }

    fn write(&self, file: &Hostfile) -> anyhow::Result<()> {
        if let Some(path) = &self.output {
            file.write(path)?;
            print_err(format_args!("wrote {}", path.display()));
        }
        Ok(())
    }

    fn save(&self, file: &Hostfile) -> anyhow::Result<()> {
        self.write(file)?;
        match self.output {
            Some(_) => Ok(()),
            None => print(&file.to_json()),
        }
    }
}
