//! Ranks on machines of the cluster, one each.
//!
//! ```text
//! this program == pipes ===================> a rank on this machine
//!              == own node == other node ==> a rank on another machine
//!
//! setup   ->  the measurement, as JSON
//! place   <-  its listening address
//! places  ->  group, key, and the best address of every rank from here
//! report  <-  of rank 0, as JSON
//! ```
//! Ranks use the network paths that workers of an instance would use, always encrypted.

use std::ffi::OsString;
use std::io::{BufRead, Read};
use std::net::SocketAddr;
use std::num::NonZeroU8;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use paceline_base::{Rank, hex};
use paceline_cluster::nodes::agent::local;
use paceline_cluster::nodes::discovery::listen_address;
use paceline_comm::{Backend, tcp};
use paceline_comm_rdma::settings::Lookup;
use paceline_node::tunnel;
use paceline_process::{MESSAGE_BYTES_MAX, Program};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Cores, Force, PATIENCE, RankSettings, RankStreams, Report, take_part};

/// Time limit of a node's reply.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Time limit for nodes to measure the paths between machines that have just met.
const WAYS_LIMIT: Duration = Duration::from_secs(30);

/// Polling interval for the paths.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Most ranks: a longer list of addresses is invalid.
const RANKS_MAX: usize = 64;

/// Setup of a rank, its first message.
#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    rank: u32,
    max_bytes: usize,
    streams: NonZeroU8,
    algorithm: Option<Force>,
    explain: bool,
}

#[derive(Debug)]
struct RankMachine {
    id: String,
    name: String,
    is_own: bool,
    /// Its measured paths to the others, as reported by its node.
    paths: Vec<Value>,
}

/// This machine's node, through which the nodes of other machines start ranks too.
#[derive(Clone, Copy, Debug)]
pub struct LocalNode<'a> {
    /// The folder of this machine's node.
    pub home: &'a Path,
    /// Arguments of a rank on this machine: its listening address.
    pub listen: &'a [OsString],
    pub env: &'a [(OsString, OsString)],
}

impl LocalNode<'_> {
    fn request(&self, command: &str) -> Result<Value> {
        Ok(local::ask(
            self.home,
            command,
            json!({}),
            ANSWER_LIMIT,
            |_| {},
        )?)
    }
}

/// The listening address of a rank of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Listen<'a> {
    /// The only interface to use.
    pub interface: Option<&'a str>,
    /// Permitted ports; any if `None`.
    pub ports: Option<&'a RangeInclusive<u16>>,
}

/// Runs a rank for another machine's measurement; its setup overrides some of `args`.
pub fn rank(
    args: &RankSettings,
    at: Listen<'_>,
    lookup: Lookup<'_>,
    lines: &mut RankStreams<'_>,
) -> Result<()> {
    let mut line = String::new();
    Read::take(&mut *lines.input, MESSAGE_BYTES_MAX).read_line(&mut line)?;
    let setup: Setup = serde_json::from_str(&line).context("no setup of a rank")?;
    let listener = listen(at)?;
    let own = RankSettings {
        backend: Backend::Tcp,
        algorithm: setup.algorithm,
        max_bytes: setup.max_bytes,
        streams: setup.streams,
        explain: setup.explain,
        ..args.quick()
    };
    let seat = (Rank(setup.rank), Cores::All);
    take_part(&own, seat, listener, (lookup, lines))
}

/// Listens at any free port, or at the first free one of `ports`.
fn listen(at: Listen<'_>) -> Result<tcp::Listener> {
    let place = listen_address(at.interface)?;
    let Some(ports) = at.ports else {
        return Ok(tcp::Listener::bind(place)?);
    };
    let mut free = ports.clone().map(|port| {
        let place = SocketAddr::new(place.ip(), port);
        tcp::Listener::bind(place)
    });
    let free = free.find_map(Result::ok);
    free.with_context(|| {
        format!(
            "all ports from {} to {} are taken",
            ports.start(),
            ports.end()
        )
    })
}

/// Measures over the selected machines of the cluster.
///
/// # Errors
/// A machine that is missing, unreachable from another one, or fails.
pub fn measure(args: &RankSettings, names: &NodeSelection, here: LocalNode<'_>) -> Result<Report> {
    let machines = machines(names, here)?;
    let mut seats = Vec::new();
    for (rank, machine) in (0..).zip(&machines) {
        let mut seat = start(machine, &args.program, here)?;
        let setup = Setup {
            rank,
            max_bytes: args.max_bytes,
            streams: args.streams,
            algorithm: args.algorithm,
            explain: args.explain,
        };
        seat.send_line(&serde_json::to_string(&setup)?)?;
        seats.push(seat);
    }
    let mut places = Vec::new();
    for (seat, machine) in seats.iter_mut().zip(&machines) {
        let said = receive(seat).with_context(|| machine.name.clone())?;
        places.push(said.trim().parse::<SocketAddr>()?);
    }
    let id = hex(&tcp::GroupId::random().0);
    let key = hex(tcp::GroupKey::random()?.bytes());
    for (rank, seat) in seats.iter_mut().enumerate() {
        let seen = seen_by(rank, &machines, &places)?;
        let seen: Vec<String> = seen.iter().map(SocketAddr::to_string).collect();
        seat.send_line(&format!("{id} {key} {}", seen.join(" ")))?;
    }
    let line = receive(&mut seats[0]).context("rank 0 reported no figures")?;
    let mut report: Report = serde_json::from_str(&line)?;
    report.nodes = machines.into_iter().map(|machine| machine.name).collect();
    seats.iter_mut().for_each(Program::close_input); // all before the first is waited for
    Ok(report)
}

/// Selection of machines: by name, or a number of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeSelection {
    /// This many machines.
    Count(usize),
    /// The machines with these names.
    These(Vec<String>),
}

impl NodeSelection {
    /// Parses a number, or names separated by commas.
    pub fn parse(text: &str) -> Self {
        match text.parse() {
            Ok(count) => Self::Count(count),
            Err(_) => Self::These(text.split(',').map(str::to_owned).collect()),
        }
    }

    /// The machines that compute a loaded model.
    ///
    /// # Errors
    /// A node that does not run, or has no such instance.
    pub fn of_instance(model: &str, here: LocalNode<'_>) -> Result<Self> {
        let all = here.request("ps")?;
        let all = all.as_array().map_or(&[][..], Vec::as_slice);
        let found = all.iter().find(|it| it["model"] == model);
        let found = found.with_context(|| format!("{model} is not loaded over the cluster"))?;
        let nodes = found["nodes"].as_array().into_iter().flatten();
        let mut names: Vec<String> = Vec::new();
        for name in nodes.filter_map(Value::as_str) {
            // A machine may compute several parts.
            if names.iter().all(|known| known != name) {
                names.push(name.to_owned());
            }
        }
        Ok(Self::These(names))
    }
}

/// The machines, once the paths between all of them are measured.
fn machines(names: &NodeSelection, here: LocalNode<'_>) -> Result<Vec<RankMachine>> {
    let begun = Instant::now();
    loop {
        let machines = choose(&here.request("nodes")?["nodes"], names)?;
        let lacking = lacking(&machines);
        match lacking {
            None => return Ok(machines),
            Some((from, to)) => ensure!(
                begun.elapsed() < WAYS_LIMIT,
                "no way from {from} to {to} is known: `paceline doctor --peer {to}` says why"
            ),
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Living machines of this version: this one and the next by name, or the named ones.
fn choose(nodes: &Value, names: &NodeSelection) -> Result<Vec<RankMachine>> {
    let nodes = nodes.as_array().map_or(&[][..], Vec::as_slice);
    let own = nodes.iter().find(|node| node["found_by"] == "self");
    let build = own.map_or(&Value::Null, |own| &own["build"]);
    let able = nodes.iter();
    let able = able.filter(|node| node["state"] == "alive" && node["build"] == *build);
    let mut able: Vec<RankMachine> = able.map(RankMachine::of).collect();
    able.sort_by(|one, two| (!one.is_own, &one.name).cmp(&(!two.is_own, &two.name)));
    let chosen = match names {
        NodeSelection::Count(count) => {
            let there = able.len();
            ensure!(
                *count <= there,
                "{count} machines asked for, {there} of this version are alive"
            );
            able.truncate(*count);
            able
        }
        NodeSelection::These(names) => {
            let mut chosen = Vec::new();
            for name in names {
                let at = able.iter().position(|machine| machine.name == *name);
                let at = at.with_context(|| {
                    format!(
                        "{name:?} is no machine of the cluster that is alive and of this version"
                    )
                })?;
                chosen.push(able.swap_remove(at));
            }
            chosen
        }
    };
    ensure!(
        (1..=RANKS_MAX).contains(&chosen.len()),
        "{} machines, expected 1 to {RANKS_MAX}",
        chosen.len()
    );
    Ok(chosen)
}

impl RankMachine {
    fn of(node: &Value) -> Self {
        let text = |key: &str| node[key].as_str().unwrap_or_default().to_owned();
        Self {
            id: text("id"),
            name: text("name"),
            is_own: node["found_by"] == "self",
            paths: node["paths"].as_array().cloned().unwrap_or_default(),
        }
    }

    /// The best address of another machine from here, without a port.
    fn route(&self, to: &Self) -> Option<SocketAddr> {
        let is_used = |path: &&Value| path["preferred"] == true && path["up"] != false;
        let leads = |path: &&Value| path["to"] == to.id.as_str() && is_used(path);
        let path = self.paths.iter().find(leads)?;
        path["remote"].as_str()?.parse().ok()
    }
}

/// The first two machines without a measured path.
fn lacking(machines: &[RankMachine]) -> Option<(&str, &str)> {
    for from in machines {
        let is_lacking = |to: &&RankMachine| from.id != to.id && from.route(to).is_none();
        if let Some(to) = machines.iter().find(is_lacking) {
            return Some((from.name.as_str(), to.name.as_str()));
        }
    }
    None
}

/// Addresses of all ranks as reached by rank `from`. A rank that listens at one address is reached
/// there.
fn seen_by(
    from: usize,
    machines: &[RankMachine],
    places: &[SocketAddr],
) -> Result<Vec<SocketAddr>> {
    let seen = |(to, place): (usize, &SocketAddr)| {
        if to == from || !place.ip().is_unspecified() {
            return Ok(*place);
        }
        let route = machines[from].route(&machines[to]);
        let mut route = route.with_context(|| format!("no way to {}", machines[to].name))?;
        route.set_port(place.port());
        Ok(route)
    };
    places.iter().enumerate().map(seen).collect()
}

fn start(machine: &RankMachine, program: &Path, here: LocalNode<'_>) -> Result<Program> {
    if machine.is_own {
        let mut command = Command::new(program);
        let rank = ["bench", "comm", "--elsewhere"];
        command.args(rank).args(here.listen).env_clear();
        command.envs(here.env.iter().cloned()).stderr(Stdio::null());
        return Program::start(&mut command).context("cannot start a rank");
    }
    let stream = tunnel::line(here.home, &machine.id, tunnel::BENCH);
    let stream = stream.with_context(|| format!("cannot reach {}", machine.name))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(Program::connected(stream)?)
}

/// The next line of a rank.
fn receive(rank: &mut Program) -> Result<String> {
    let line = rank.receive_line()?;
    ensure!(!line.is_empty(), "a rank ended too early");
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, state: &str, ways: &[(&str, &str)]) -> Value {
        let found_by = if name == "b" { "self" } else { "beacon" };
        let ways = ways.iter().map(
            |(to, remote)| json!({"to": format!("id-{to}"), "remote": remote, "preferred": true}),
        );
        json!({"name": name, "id": format!("id-{name}"), "state": state, "build": "1",
               "found_by": found_by, "paths": ways.collect::<Vec<_>>()})
    }

    fn chosen(names: &NodeSelection) -> Result<Vec<String>, String> {
        let nodes = json!([
            node("a", "alive", &[]),
            node("b", "alive", &[]),
            node("c", "dead", &[]),
            node("d", "alive", &[])
        ]);
        let chosen = choose(&nodes, names).map_err(|error| error.to_string())?;
        Ok(chosen.into_iter().map(|machine| machine.name).collect())
    }

    #[test]
    fn the_own_machine_comes_first_and_the_dead_do_not_come() {
        let these =
            |names: &[&str]| NodeSelection::These(names.iter().map(|it| (*it).into()).collect());
        assert_eq!(chosen(&NodeSelection::Count(2)).unwrap(), ["b", "a"]);
        assert_eq!(chosen(&these(&["d", "b"])).unwrap(), ["d", "b"]);
        let said = chosen(&NodeSelection::Count(4)).unwrap_err();
        assert!(said.contains("3 of this version"), "{said}");
        let said = chosen(&these(&["b", "c"])).unwrap_err();
        assert!(said.contains("\"c\""), "{said}");
        assert!(chosen(&these(&["b", "b"])).is_err(), "one rank each");
        assert!(chosen(&NodeSelection::Count(0)).is_err());
    }

    #[test]
    fn ranks_are_reached_by_the_way_that_their_machine_prefers() {
        let nodes = [
            node("a", "alive", &[("b", "10.0.0.2:52416")]),
            node("b", "alive", &[("a", "[fd00::1]:52416")]),
        ];
        let machines: Vec<RankMachine> = nodes.iter().map(RankMachine::of).collect();
        assert_eq!(lacking(&machines), None);
        let places = ["[::]:7", "10.9.9.9:8"].map(|it| it.parse::<SocketAddr>().unwrap());
        let seen = |rank| seen_by(rank, &machines, &places).unwrap();
        let text = |rank| {
            seen(rank)
                .iter()
                .map(SocketAddr::to_string)
                .collect::<Vec<_>>()
        };
        assert_eq!(text(0), ["[::]:7", "10.9.9.9:8"], "it listens there alone");
        assert_eq!(text(1), ["[fd00::1]:7", "10.9.9.9:8"]);
        let cut = [
            RankMachine::of(&nodes[0]),
            RankMachine::of(&node("b", "alive", &[])),
        ];
        assert_eq!(lacking(&cut), Some(("b", "a")));
    }
}
