//! This machine's node: started by `paceline up`, queried by other commands.

use std::ffi::OsString;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::builder::NonEmptyStringValueParser;
use paceline_base::{Bytes, BytesError, KernelClass};
use paceline_board::engines::keep_published;
use paceline_board::member::{ApiKeys, facts};
pub(crate) use paceline_board::member::{cluster, host_name};
use paceline_cluster::nodes::agent::{
    self, Agent, Config, DEFAULT_PORT, Discovery, NodeFacts, local,
};
use paceline_cluster::nodes::discovery::listen_address;
use paceline_fleet::memory;
use paceline_node::context_size;
use serde_json::Value;

use crate::output::print_err;
use crate::{home, log, mapreduce, release};

/// Timeout of the node's response or progress. Joining takes up to 11 s.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Options of this machine's node.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct NodeArgs {
    /// Name that other machines know this one by [default: the host's name]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// Port that the cluster's other machines reach this one at; 0 takes a free one [default:
    /// 52416 where it is free]
    #[arg(long, value_name = "PORT")]
    control_port: Option<u16>,
    /// Another machine of the cluster, HOST or HOST:PORT, where multicast does not reach it, such
    /// as over a VPN; may be given several times
    #[arg(long, value_name = "HOST", value_parser = NonEmptyStringValueParser::new())]
    peer: Vec<String>,
    /// Discovery in addition to --peer: beacons and multicast DNS (all), one of them, or neither
    /// (none)
    #[arg(long, value_enum, value_name = "HOW", default_value = "all")]
    discovery: DiscoveryMode,
    /// The same as --discovery none
    #[arg(long, hide = true)]
    no_beacons: bool,
    /// Only interface for data between workers, such as that of a cable for them alone; control
    /// sessions use all
    #[arg(long, value_name = "IF", value_parser = NonEmptyStringValueParser::new())]
    data_interface: Option<String>,
    /// An interface whose network nobody else is on, such as that of a cable between two machines:
    /// data between workers is not encrypted where all of its ways are such; may be given several
    /// times
    #[arg(long, value_name = "IF", value_parser = NonEmptyStringValueParser::new())]
    trusted_interface: Vec<String>,
    /// Ports that workers listen at for each other, such as 52500-52599, which a firewall must let
    /// in [default: any]
    #[arg(long, value_name = "A-B", value_parser = ports)]
    data_ports: Option<PortRange>,
    /// Most bytes on disk for prompts that were read, such as 500M or 4G, so that a node that
    /// starts again need not read them again; `off` for none
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = prefix_cache)]
    prefix_cache: PrefixCacheSize,
    /// Keep weights on disk as the processor computes with them, and read them from there at later
    /// starts. They take as much as the models besides
    #[arg(long)]
    packed: bool,
    /// Most bytes of models on this machine's disk, such as 200G: what would go over it is refused
    /// with what would free how much, and nothing is removed unasked [default: all that is free]
    #[arg(long, value_name = "SIZE", value_parser = mapreduce::memory)]
    disk_budget: Option<u64>,
    /// Keep open answers on disk too, so that their clients get the rest after a power cut of all
    /// machines
    #[arg(long)]
    durable: bool,
    /// Memory that models are placed by, such as 12G: a fifth is left to other programs. Weights of
    /// MODEL that do not fit are read from disk while they are computed with [default: what this
    /// machine has]
    #[arg(long, value_name = "SIZE", value_parser = mapreduce::memory)]
    memory: Option<u64>,
    /// Folder of arrays whose files other machines of the cluster may read, by `paceline mapreduce
    /// --nodes N` there; may be given several times [default: none]
    #[arg(long, value_name = "DIR")]
    arrays: Vec<PathBuf>,
    /// Let users of the cluster's other machines run any program here, with the rights of this
    /// command: `launch --nodes`, `compute`, functions in Python [default: none]
    #[arg(long)]
    allow_programs: bool,
    /// Most private memory of each such program, such as 8G; on Linux [default: no limit]
    #[arg(long, value_name = "SIZE", requires = "allow_programs", value_parser = mapreduce::memory)]
    program_memory: Option<u64>,
}

/// Space for prompts that were read, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixCacheSize(Option<u64>);

/// Parses `off` or a number of bytes.
fn prefix_cache(text: &str) -> Result<PrefixCacheSize, BytesError> {
    match text {
        "off" => Ok(PrefixCacheSize(None)),
        size => mapreduce::memory(size).map(|bytes| PrefixCacheSize(Some(bytes))),
    }
}

/// How other machines are found.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum DiscoveryMode {
    All,
    Beacons,
    Mdns,
    None,
}

/// An inclusive port range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortRange(pub(crate) RangeInclusive<u16>);

/// Parses `A-B`, or one port.
pub(crate) fn ports(text: &str) -> Result<PortRange, String> {
    let bad = || format!("{text:?} is no range of ports such as 52500-52599");
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    let (first, last) = port(first).zip(port(last)).ok_or_else(bad)?;
    match first <= last {
        true => Ok(PortRange(first..=last)),
        false => Err(bad()),
    }
}

/// A node that stops when this is dropped.
#[derive(Debug)]
pub(crate) struct NodeGuard(pub(crate) Agent);

impl Drop for NodeGuard {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl NodeArgs {
    pub(crate) fn start(&self, class: KernelClass) -> anyhow::Result<NodeGuard> {
        let home = home::folder()?;
        // Reports a wrong name before anything starts.
        listen_address(self.data_interface()).context("--data-interface")?;
        for name in &self.trusted_interface {
            listen_address(Some(name)).context("--trusted-interface")?;
            print_err(format_args!(
                "data between workers over {name} is not encrypted"
            ));
        }
        let started = Agent::start(self.config(&home, class, self.control_port)?);
        let agent = match started {
            Err(agent::Error::Port { source, .. })
                if self.control_port.is_none() && source.kind() == io::ErrorKind::AddrInUse =>
            {
                let agent = Agent::start(self.config(&home, class, Some(0))?)?;
                print_err(format_args!(
                    "control port {DEFAULT_PORT} is taken: machines that do not hear this one need \
                     --peer HOST:{}",
                    agent.port()
                ));
                agent
            }
            started => started?,
        };
        list_devices(&agent);
        list_rdma(&agent);
        Ok(NodeGuard(agent))
    }

    fn config(&self, home: &Path, class: KernelClass, port: Option<u16>) -> anyhow::Result<Config> {
        let mut config = Config::new(home, self.facts(class));
        config.port = port.unwrap_or(DEFAULT_PORT);
        config.peers.clone_from(&self.peer);
        config.discovery = match self.discovery {
            _ if self.no_beacons => Discovery::Peers,
            DiscoveryMode::All => Discovery::All,
            DiscoveryMode::Beacons => Discovery::Beacons,
            DiscoveryMode::Mdns => Discovery::Mdns,
            DiscoveryMode::None => Discovery::Peers,
        };
        config.data_interface.clone_from(&self.data_interface);
        let ports = self.data_ports.as_ref();
        config.data_ports = ports.map(|PortRange(ports)| ports.clone());
        config.work = paceline_fleet::ownership::work;
        config.keys = Some(Arc::new(ApiKeys(home::api_keys()?)));
        config.tell = Arc::new(|line| print_err(line));
        Ok(config)
    }

    /// The only interface for data between workers.
    pub(crate) fn data_interface(&self) -> Option<&str> {
        self.data_interface.as_deref()
    }

    /// Most bytes of models on this machine's disk.
    pub(crate) const fn disk_budget(&self) -> Option<u64> {
        self.disk_budget
    }

    /// Memory for the model at `path`, if `--memory` is given and has no room for all of it.
    pub(crate) fn limit_of(&self, path: &Path) -> Option<u64> {
        let room = self.memory? as f64 * memory::USABLE;
        let whole = context_size::bytes_at(path) as f64 * memory::WEIGHTS;
        (whole > room).then_some(room as u64)
    }

    /// Whether weights are kept on disk as the processor computes with them.
    pub(crate) const fn keeps_packed(&self) -> bool {
        self.packed
    }

    /// Whether open answers are kept on disk.
    pub(crate) const fn is_durable(&self) -> bool {
        self.durable
    }

    pub(crate) fn worker_args(&self) -> Vec<OsString> {
        let ports = self.data_ports.as_ref();
        let ports = ports.map(|PortRange(ports)| {
            format!("--data-ports={}-{}", ports.start(), ports.end()).into()
        });
        let PrefixCacheSize(limit) = self.prefix_cache;
        let limit = limit.map(|bytes| format!("--prefix-cache={bytes}").into());
        let packed = self.packed.then(|| OsString::from("--packed"));
        let args = log::worker_args().into_iter();
        args.chain(ports).chain(limit).chain(packed).collect()
    }

    /// Folders that workers of the node may write to; created if possible. A worker without its
    /// folder reports that and continues without.
    pub(crate) fn worker_folders(&self) -> anyhow::Result<Vec<PathBuf>> {
        let PrefixCacheSize(limit) = self.prefix_cache;
        let mut folders = Vec::new();
        if let Some(limit) = limit {
            let cache = home::prefixes(Bytes(limit))?;
            let made = cache.make();
            folders.extend(made.ok().map(|()| cache.folder));
        }
        folders.extend(home::make_packed()?); // a model may be loaded with a limit of memory
        Ok(folders)
    }

    /// Listen options of a rank for another machine's benchmark.
    pub(crate) fn rank_args(&self) -> Vec<OsString> {
        listen_args(self.data_ports.as_ref(), self.data_interface())
    }

    /// Readable folders of a worker for another machine's array job.
    pub(crate) fn array_args(&self) -> anyhow::Result<Vec<OsString>> {
        let mut args = Vec::new();
        for folder in &self.arrays {
            let real = std::fs::canonicalize(folder);
            let real = real.with_context(|| format!("--arrays {}", folder.display()))?;
            args.extend([OsString::from("--folder"), real.into_os_string()]);
        }
        Ok(args)
    }

    /// Arguments of this program where it runs programs for other machines; `None` without consent.
    pub(crate) fn program_args(&self) -> Option<Vec<OsString>> {
        let limit = self.program_memory;
        let limit = limit.map(|bytes| format!("--memory={bytes}").into());
        self.allow_programs.then(|| limit.into_iter().collect())
    }

    fn facts(&self, class: KernelClass) -> NodeFacts {
        let name = self.name.clone().unwrap_or_else(host_name);
        let all = facts(name, class);
        let memory = self.memory.unwrap_or(u64::MAX);
        NodeFacts {
            build: release::version().to_owned(),
            protocol: release::protocol(),
            trusted: self.trusted_interface.clone(),
            memory_bytes: all.memory_bytes.min(memory),
            programs: self.allow_programs,
            ..all
        }
    }
}

/// Keeps this machine's engines published, on its own thread: a driver may take seconds to open.
fn list_devices(agent: &Agent) {
    let agent = agent.clone();
    let run = move || {
        if let Ok(program) = std::env::current_exe() {
            keep_published(&agent, &program);
        }
    };
    let thread = std::thread::Builder::new().name("engines".to_owned());
    if let Err(error) = thread.spawn(run) {
        print_err(format_args!("warning: the node lists no engines: {error}"));
    }
}

/// Keeps this machine's RDMA devices published on a thread of its own.
fn list_rdma(agent: &Agent) {
    let agent = agent.clone();
    let run = move || {
        if let Ok(program) = std::env::current_exe() {
            paceline_board::rdma::keep_published(&agent, &program);
        }
    };
    let thread = std::thread::Builder::new().name("rdma".to_owned());
    if let Err(error) = thread.spawn(run) {
        print_err(format_args!(
            "warning: the node lists no RDMA devices: {error}"
        ));
    }
}

/// Arguments of a rank that listens on these ports and this interface.
pub(crate) fn listen_args(ports: Option<&PortRange>, interface: Option<&str>) -> Vec<OsString> {
    let ports = ports
        .map(|PortRange(ports)| format!("--data-ports={}-{}", ports.start(), ports.end()).into());
    let interface = interface.map(|name| format!("--data-interface={name}").into());
    ports.into_iter().chain(interface).collect()
}

/// The configuration of this home's node with `up`'s defaults, without discovery.
pub(crate) fn at_rest() -> anyhow::Result<Config> {
    let facts = facts(host_name(), KernelClass::default());
    let mut config = Config::new(&home::folder()?, facts);
    config.discovery = Discovery::Peers;
    Ok(config)
}

/// Sends a command to this home's node.
pub(crate) fn ask(command: &str, arguments: Value) -> anyhow::Result<Value> {
    let home = home::folder()?;
    let answer = local::ask(&home, command, arguments, ANSWER_LIMIT, |_| {});
    Ok(answer?)
}

/// As [`ask`], with the timeout `limit`.
pub(crate) fn ask_within(
    command: &str,
    arguments: Value,
    limit: Duration,
) -> anyhow::Result<Value> {
    let home = home::folder()?;
    Ok(local::ask(&home, command, arguments, limit, |_| {})?)
}

/// The response of this home's node; `None` if it does not run.
pub(crate) fn ask_if_up(command: &str, arguments: Value) -> anyhow::Result<Option<Value>> {
    match ask(command, arguments) {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if matches!(error.downcast_ref(), Some(local::Error::NotUp)) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(crate) fn hint(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(local::Error::NotUp) = cause.downcast_ref() {
        return Some("start it in another terminal, or in the background: paceline up".into());
    }
    Some(match cause.downcast_ref::<agent::Error>()? {
        agent::Error::Running { .. } => "`paceline nodes` asks it; another PACELINE_HOME is \
                                         another node"
            .into(),
        agent::Error::Port { source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
            "another program has it, perhaps another `paceline up`: --control-port N takes \
             another one, which the other machines then need as --peer HOST:N"
                .into()
        }
        agent::Error::SocketPath { .. } => "set PACELINE_HOME to a shorter path".into(),
        agent::Error::NobodyInvites { .. } => "a code counts once: `paceline nodes invite` on a \
            machine of the cluster shows a new one; where multicast does not pass, add --peer \
            HOST, or take a token: paceline key cluster show"
            .into(),
        agent::Error::Pairing(_) => {
            "`paceline nodes invite` on a machine of the cluster shows a new code".into()
        }
        agent::Error::NoNode { .. } | agent::Error::Ambiguous { .. } => {
            "`paceline nodes` lists them".into()
        }
        _ => return None,
    })
}
