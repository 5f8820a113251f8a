//! Ranks on machines of the cluster, one each.
//!
//! ```text
//! this program == pipes ===================> a rank on this machine
//!              == own node == other node ==> a rank on another machine
//!
//! setup   ->  what the rank is to do, as JSON
//! place   <-  where it listens
//! places  ->  group, key, and where all ranks listen as this one reaches them best
//! report  <-  of rank 0, as JSON
//! ```
//! Ranks reach each other over the ways that workers of an instance would use, always encrypted.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::num::NonZeroU8;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use paceline_base::Rank;
use paceline_cluster::nodes::discovery::listen_address;
use paceline_comm::tcp;
use paceline_node::tunnel;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Args, Force, PATIENCE, Report, Transport, hex, take_part};
use crate::member::{self, Ports};
use crate::{home, process};

/// For nodes to measure the ways between machines that have just met.
const WAYS_LIMIT: Duration = Duration::from_secs(30);

/// Between two looks at the ways.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Most ranks: a longer line of places is none of ours.
const RANKS_MAX: usize = 64;

/// Longest line that a rank reads or says: the report of all sizes is far below.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Setup of a rank, its first message.
#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    rank: u32,
    max_bytes: usize,
    streams: NonZeroU8,
    algorithm: Option<Force>,
    explain: bool,
}

/// A machine that has a rank.
#[derive(Debug)]
struct Machine {
    id: String,
    name: String,
    is_own: bool,
    /// Its measured ways to the others, as its node tells them.
    paths: Vec<Value>,
}

/// A rank's program. It ends when this is dropped.
struct Seat {
    to: Option<Box<dyn Write>>,
    from: BufReader<Box<dyn Read>>,
    child: Option<Child>,
}

/// Starts a rank for another machine's measurement; `more` says where it listens.
///
/// # Errors
/// The system's error.
pub(crate) fn start_rank(program: &Path, more: &[OsString]) -> std::io::Result<Child> {
    let mut command = Command::new(program);
    command.args(["bench", "comm", "--elsewhere"]).args(more);
    command.env_clear().envs(process::worker_env());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::null()).spawn()
}

/// A rank that [`start_rank`] started.
///
/// # Errors
/// The step that failed.
pub(super) fn rank(args: &Args) -> anyhow::Result<()> {
    let mut line = String::new();
    let mut input = std::io::stdin().lock();
    Read::take(&mut input, LINE_BYTES_MAX).read_line(&mut line)?;
    drop(input);
    let setup: Setup = serde_json::from_str(&line).context("no setup of a rank")?;
    let ports = args.data_ports.as_ref();
    let listener = listen(args.data_interface.as_deref(), ports)?;
    let own = Args {
        transport: Transport::Tcp,
        algorithm: setup.algorithm,
        max_bytes: setup.max_bytes,
        streams: setup.streams,
        explain: setup.explain,
        ..args.quick()
    };
    take_part(&own, Rank(setup.rank), listener)
}

/// Listens at a free port, or at the first free one of `ports`.
fn listen(interface: Option<&str>, ports: Option<&Ports>) -> anyhow::Result<tcp::Listener> {
    let place = listen_address(interface)?;
    let Some(Ports(ports)) = ports else {
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

/// Measures over the machines that `args` names.
///
/// # Errors
/// A machine that is not there, is no way from another one, or fails.
pub(super) fn measure(args: &Args) -> anyhow::Result<Report> {
    let names = names(args)?;
    let machines = machines(&names)?;
    let own = member::listen_args(args.data_ports.as_ref(), args.data_interface.as_deref());
    let mut seats = Vec::new();
    for (rank, machine) in (0..).zip(&machines) {
        let mut seat = Seat::of(machine, &own)?;
        let setup = Setup {
            rank,
            max_bytes: args.max_bytes,
            streams: args.streams,
            algorithm: args.algorithm,
            explain: args.explain,
        };
        seat.tell(&serde_json::to_string(&setup)?)?;
        seats.push(seat);
    }
    let mut places = Vec::new();
    for (seat, machine) in seats.iter_mut().zip(&machines) {
        let said = seat.hear().with_context(|| machine.name.clone())?;
        places.push(said.trim().parse::<SocketAddr>()?);
    }
    let id = hex(&tcp::GroupId::random().0);
    let key = hex(tcp::GroupKey::random()?.bytes());
    for (rank, seat) in seats.iter_mut().enumerate() {
        let seen = seen_by(rank, &machines, &places)?;
        let seen: Vec<String> = seen.iter().map(SocketAddr::to_string).collect();
        seat.tell(&format!("{id} {key} {}", seen.join(" ")))?;
    }
    let line = seats[0].hear().context("rank 0 reported no figures")?;
    let mut report: Report = serde_json::from_str(&line)?;
    report.nodes = machines.into_iter().map(|machine| machine.name).collect();
    seats.iter_mut().for_each(Seat::close); // all before the first is waited for
    Ok(report)
}

/// Which machines are asked for: their names, or how many.
enum Names {
    Count(usize),
    These(Vec<String>),
}

fn names(args: &Args) -> anyhow::Result<Names> {
    if let Some(model) = &args.instance {
        let all = member::ask("ps", json!({}))?;
        let all = all.as_array().map_or(&[][..], Vec::as_slice);
        let found = all.iter().find(|it| it["model"] == model.as_str());
        let found = found.with_context(|| format!("{model} is not loaded over the cluster"))?;
        let nodes = found["nodes"].as_array().into_iter().flatten();
        let mut names: Vec<String> = Vec::new();
        for name in nodes.filter_map(Value::as_str) {
            // A machine may have several of its parts.
            if names.iter().all(|known| known != name) {
                names.push(name.to_owned());
            }
        }
        return Ok(Names::These(names));
    }
    let text = args.nodes.as_deref().unwrap_or_default();
    Ok(match text.parse() {
        Ok(count) => Names::Count(count),
        Err(_) => Names::These(text.split(',').map(str::to_owned).collect()),
    })
}

/// The machines, once the ways between all of them are known.
fn machines(names: &Names) -> anyhow::Result<Vec<Machine>> {
    let begun = Instant::now();
    loop {
        let machines = choose(&member::ask("nodes", json!({}))?["nodes"], names)?;
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

/// Living machines of this version: the own one and the next by name, or those that are named.
fn choose(nodes: &Value, names: &Names) -> anyhow::Result<Vec<Machine>> {
    let nodes = nodes.as_array().map_or(&[][..], Vec::as_slice);
    let own = nodes.iter().find(|node| node["found_by"] == "self");
    let build = own.map_or(&Value::Null, |own| &own["build"]);
    let able = nodes.iter();
    let able = able.filter(|node| node["state"] == "alive" && node["build"] == *build);
    let mut able: Vec<Machine> = able.map(Machine::of).collect();
    able.sort_by(|one, two| (!one.is_own, &one.name).cmp(&(!two.is_own, &two.name)));
    let chosen = match names {
        Names::Count(count) => {
            let there = able.len();
            ensure!(
                *count <= there,
                "{count} machines asked for, {there} of this version are alive"
            );
            able.truncate(*count);
            able
        }
        Names::These(names) => {
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

impl Machine {
    fn of(node: &Value) -> Self {
        let text = |key: &str| node[key].as_str().unwrap_or_default().to_owned();
        Self {
            id: text("id"),
            name: text("name"),
            is_own: node["found_by"] == "self",
            paths: node["paths"].as_array().cloned().unwrap_or_default(),
        }
    }

    /// Where it best reaches another machine, at any port.
    fn route(&self, to: &Self) -> Option<SocketAddr> {
        let is_used = |path: &&Value| path["preferred"] == true && path["up"] != false;
        let leads = |path: &&Value| path["to"] == to.id.as_str() && is_used(path);
        let path = self.paths.iter().find(leads)?;
        path["remote"].as_str()?.parse().ok()
    }
}

/// The first two machines between which no way is known.
fn lacking(machines: &[Machine]) -> Option<(&str, &str)> {
    for from in machines {
        let is_lacking = |to: &&Machine| from.id != to.id && from.route(to).is_none();
        if let Some(to) = machines.iter().find(is_lacking) {
            return Some((from.name.as_str(), to.name.as_str()));
        }
    }
    None
}

/// Where all ranks listen as rank `from` reaches them; one that listens at one address is reached
/// there.
fn seen_by(
    from: usize,
    machines: &[Machine],
    places: &[SocketAddr],
) -> anyhow::Result<Vec<SocketAddr>> {
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

impl Seat {
    /// Starts it; on this machine it listens as `own` says.
    fn of(machine: &Machine, own: &[OsString]) -> anyhow::Result<Self> {
        if machine.is_own {
            let mut child =
                start_rank(&process::own_program()?, own).context("cannot start a rank")?;
            let (to, from) = (child.stdin.take(), child.stdout.take());
            return Ok(Self {
                to: Some(Box::new(to.context("a rank without input")?)),
                from: BufReader::new(Box::new(from.context("a rank without output")?)),
                child: Some(child),
            });
        }
        let stream = tunnel::line(&home::folder()?, &machine.id, tunnel::BENCH);
        let stream = stream.with_context(|| format!("cannot reach {}", machine.name))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self {
            to: Some(Box::new(stream.try_clone()?)),
            from: BufReader::new(Box::new(stream)),
            child: None,
        })
    }

    fn tell(&mut self, text: &str) -> anyhow::Result<()> {
        let to = self.to.as_mut().context("the rank was ended")?;
        writeln!(to, "{text}")?;
        Ok(to.flush()?)
    }

    fn hear(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        Read::take(&mut self.from, LINE_BYTES_MAX).read_line(&mut line)?;
        ensure!(!line.is_empty(), "a rank ended too early");
        Ok(line)
    }

    /// Lets it end.
    fn close(&mut self) {
        drop(self.to.take());
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.close();
        if let Some(child) = &mut self.child {
            let _ = child.kill(); // what it had to say was heard
            let _ = child.wait();
        }
    }
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

    fn chosen(names: &Names) -> Result<Vec<String>, String> {
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
        let these = |names: &[&str]| Names::These(names.iter().map(|it| (*it).into()).collect());
        assert_eq!(chosen(&Names::Count(2)).unwrap(), ["b", "a"]);
        assert_eq!(chosen(&these(&["d", "b"])).unwrap(), ["d", "b"]);
        let said = chosen(&Names::Count(4)).unwrap_err();
        assert!(said.contains("3 of this version"), "{said}");
        let said = chosen(&these(&["b", "c"])).unwrap_err();
        assert!(said.contains("\"c\""), "{said}");
        assert!(chosen(&these(&["b", "b"])).is_err(), "one rank each");
        assert!(chosen(&Names::Count(0)).is_err());
    }

    #[test]
    fn ranks_are_reached_by_the_way_that_their_machine_prefers() {
        let nodes = [
            node("a", "alive", &[("b", "10.0.0.2:52416")]),
            node("b", "alive", &[("a", "[fd00::1]:52416")]),
        ];
        let machines: Vec<Machine> = nodes.iter().map(Machine::of).collect();
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
            Machine::of(&nodes[0]),
            Machine::of(&node("b", "alive", &[])),
        ];
        assert_eq!(lacking(&cut), Some(("b", "a")));
    }
}
