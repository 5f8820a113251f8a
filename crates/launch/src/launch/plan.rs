//! The plan for each rank: the environment and files that MLX's backends read.
//!
//! | backend | variables besides `MLX_RANK` | when verbose |
//! |---|---|---|
//! | ring | `MLX_HOSTFILE` (file; empty for one rank) | `MLX_RING_VERBOSE=1` |
//! | jaccl | `MLX_JACCL_COORDINATOR`, `MLX_IBV_DEVICES` (file) | |
//! | jaccl-ring | those, and `MLX_JACCL_RING=1` | |
//! | nccl | `NCCL_HOST_IP`, `NCCL_PORT`, `MLX_WORLD_SIZE` | `NCCL_DEBUG=INFO` |
//! | | and `CUDA_VISIBLE_DEVICES` | |
//!
//! `mpirun` starts the ranks of `mpi`: see [`mpi`](super::mpi). Source: `launch.py` of MLX 0.32.4,
//! whose results are the same for the same hosts. The exception is hosts that are refused here,
//! with an error that names the reason ([`PlanError`]).

use std::str::FromStr;

use crate::hostfile::{Host, Hostfile, ring_json};

paceline_base::named_enum! {
    /// How the ranks communicate.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Backend {
        /// MLX's TCP ring.
        Ring = "ring",
        /// Open MPI's `mpirun` starts the ranks.
        Mpi = "mpi",
        /// NVIDIA's NCCL.
        Nccl = "nccl",
        /// RDMA, a cable for each pair.
        Jaccl = "jaccl",
        /// RDMA, cables to two neighbours.
        JacclRing = "jaccl-ring",
    }
}

impl Backend {
    /// All accepted names; `rdma` is an alias of `jaccl`.
    pub const NAMES: [&str; 6] = ["ring", "mpi", "nccl", "jaccl", "rdma", "jaccl-ring"];
}

impl FromStr for Backend {
    type Err = PlanError;

    fn from_str(name: &str) -> Result<Self, PlanError> {
        match name {
            "rdma" => Ok(Self::Jaccl),
            _ => Self::from_name(name).ok_or_else(|| PlanError::Backend {
                name: name.to_owned(),
            }),
        }
    }
}

/// Environment and files for a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankPlan {
    /// Name of its host for `ssh`.
    pub host: String,
    /// Variables and their values, in the order in which they are set.
    pub env: Vec<(String, String)>,
    /// Variables that name files, and the files' text without its last newline.
    pub files: Vec<(String, String)>,
}

/// Settings other than the hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Environment of all ranks, each `NAME=VALUE`; later ones override earlier ones.
    pub env: Vec<String>,
    /// TCP connections for each address of a ring.
    pub connections_per_ip: u16,
    /// First port of a ring, which uses one more for each connection; the coordinator's port of
    /// jaccl.
    pub starting_port: u16,
    /// Port where NCCL's ranks meet.
    pub nccl_port: u16,
    /// Ranks of each host, which share its GPUs.
    pub repeats: usize,
    /// Whether backends log their actions.
    pub verbose: bool,
}

impl Default for Options {
    /// The defaults of `mlx.launch`.
    fn default() -> Self {
        Self {
            env: Vec::new(),
            connections_per_ip: 1,
            starting_port: 32323,
            nccl_port: 12345,
            repeats: 1,
            verbose: false,
        }
    }
}

/// Hosts and settings that do not fit the backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("backend is {name:?}, expected one of {}", Backend::NAMES.join(", "))]
    Backend { name: String },
    #[error("host {host} has no address, and backend ring needs one of each host")]
    NoAddress { host: String },
    #[error("host {host} has no address, and backend {backend} needs one of rank 0")]
    NoCoordinator { host: String, backend: Backend },
    /// MLX's ring splits addresses at the first colon.
    #[error("host {host} has the address {ip}, but backend ring takes IPv4 only")]
    Ipv6 { host: String, ip: String },
    #[error("{count} connections from port {first} on go beyond port 65535")]
    Ports { first: u16, count: usize },
    /// A text is no `NAME=VALUE`.
    #[error("environment variable {text:?}: the name is not letters, digits and underscores")]
    Env { text: String },
    #[error("host {host} lists devices for {got} ranks, expected {expected}")]
    RdmaCount {
        host: String,
        got: usize,
        expected: usize,
    },
    /// A device that leads from a rank to itself.
    #[error("host {host} lists a device for its own rank {rank}, expected null")]
    RdmaSelf { host: String, rank: usize },
    #[error("no RDMA device is listed for {}", join(pairs))]
    RdmaMissing { pairs: Vec<(String, String)> },
}

fn join(pairs: &[(String, String)]) -> String {
    let each = pairs.iter().map(|(from, to)| format!("{from} to {to}"));
    each.collect::<Vec<_>>().join(", ")
}

/// The environment and files of each rank, by rank; for `mpi` only the environment.
///
/// # Errors
/// When hosts or settings do not fit the backend.
pub fn plan(
    backend: Backend,
    file: &Hostfile,
    options: &Options,
) -> Result<Vec<RankPlan>, PlanError> {
    let texts = file.envs.iter().chain(&options.env);
    let mut env: Vec<_> = texts.map(|text| variable(text)).collect::<Result<_, _>>()?;
    let mut files = Vec::new();
    let set = |name: &str, value: String| (name.to_owned(), value);
    match backend {
        Backend::Ring => {
            files.push(set("MLX_HOSTFILE", ring(&file.hosts, options)?));
            env.extend(options.verbose.then(|| set("MLX_RING_VERBOSE", "1".into())));
        }
        Backend::Nccl => {
            let address = coordinator(backend, &file.hosts)?;
            env.extend(options.verbose.then(|| set("NCCL_DEBUG", "INFO".into())));
            env.push(set("NCCL_HOST_IP", address.to_owned()));
            env.push(set("NCCL_PORT", options.nccl_port.to_string()));
            env.push(set("MLX_WORLD_SIZE", file.hosts.len().to_string()));
        }
        Backend::Jaccl | Backend::JacclRing => {
            let address = coordinator(backend, &file.hosts)?;
            check_devices(&file.hosts, backend == Backend::JacclRing)?;
            let address = format!("{address}:{}", options.starting_port);
            env.push(set("MLX_JACCL_COORDINATOR", address));
            env.extend((backend == Backend::JacclRing).then(|| set("MLX_JACCL_RING", "1".into())));
            files.push(set("MLX_IBV_DEVICES", file.devices_json()));
        }
        Backend::Mpi => {}
    }
    let rank = |(rank, host): (usize, &Host)| {
        let mut plan = RankPlan {
            host: host.ssh.clone(),
            env: env.clone(),
            files: files.clone(),
        };
        if backend == Backend::Nccl {
            let device = rank % options.repeats.max(1);
            plan.env
                .push(set("CUDA_VISIBLE_DEVICES", device.to_string()));
        }
        plan
    };
    Ok(file.hosts.iter().enumerate().map(rank).collect())
}

/// Name and value of `NAME=VALUE`; a lone `NAME` has an empty value, as in MLX.
fn variable(text: &str) -> Result<(String, String), PlanError> {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = name.starts_with(|c: char| fits(c) && !c.is_ascii_digit());
    if !starts || !name.chars().all(fits) || value.contains('\0') {
        let text = text.to_owned();
        return Err(PlanError::Env { text });
    }
    Ok((name.to_owned(), value.to_owned()))
}

/// Text of `MLX_HOSTFILE`: a port for each connection, counted across all ranks.
fn ring(hosts: &[Host], options: &Options) -> Result<String, PlanError> {
    let mut port = usize::from(options.starting_port);
    let mut ranks = Vec::new();
    for host in hosts {
        check_ring_host(host)?;
        if !host.addresses.is_empty() {
            ranks.push(host.addresses.clone());
            continue;
        }
        let mut addresses = Vec::new();
        for ip in &host.ips {
            for _ in 0..options.connections_per_ip {
                addresses.push(format!("{ip}:{port}"));
                port += 1;
            }
        }
        ranks.push(addresses);
    }
    let first = options.starting_port;
    let count = port - usize::from(first);
    if port > usize::from(u16::MAX) + 1 {
        return Err(PlanError::Ports { first, count });
    }
    // MLX takes an empty file for a group of one.
    Ok(if hosts.len() > 1 {
        ring_json(&ranks)
    } else {
        String::new()
    })
}

fn check_ring_host(host: &Host) -> Result<(), PlanError> {
    let name = || host.ssh.clone();
    if host.ips.is_empty() {
        return Err(PlanError::NoAddress { host: name() });
    }
    match host.ips.iter().find(|ip| ip.contains(':')) {
        Some(ip) => Err(PlanError::Ipv6 {
            host: name(),
            ip: ip.clone(),
        }),
        None => Ok(()),
    }
}

fn coordinator(backend: Backend, hosts: &[Host]) -> Result<&str, PlanError> {
    let host = &hosts[0];
    let first = host.ips.first().map(String::as_str);
    first.ok_or_else(|| PlanError::NoCoordinator {
        host: host.ssh.clone(),
        backend,
    })
}

/// Checks that every rank has devices towards the ranks that it needs, and none to itself.
fn check_devices(hosts: &[Host], is_ring: bool) -> Result<(), PlanError> {
    let count = hosts.len();
    for (rank, host) in hosts.iter().enumerate() {
        let name = host.ssh.clone();
        if host.rdma.len() != count {
            let (got, expected) = (host.rdma.len(), count);
            let host = name;
            return Err(PlanError::RdmaCount {
                host,
                got,
                expected,
            });
        }
        if !host.rdma[rank].is_none() {
            return Err(PlanError::RdmaSelf { host: name, rank });
        }
    }
    let mut pairs = Vec::new();
    for (from, host) in hosts.iter().enumerate() {
        let needs = |to: &usize| {
            let is_neighbour = *to == (from + 1) % count || *to == (from + count - 1) % count;
            *to != from && (!is_ring || is_neighbour) && host.rdma[*to].is_none()
        };
        let missing = (0..count).filter(needs);
        pairs.extend(missing.map(|to| (host.ssh.clone(), hosts[to].ssh.clone())));
    }
    if pairs.is_empty() {
        Ok(())
    } else {
        Err(PlanError::RdmaMissing { pairs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &str, repeats: usize) -> Hostfile {
        Hostfile::from_names(names, repeats).unwrap()
    }

    fn set(plan: &RankPlan) -> String {
        let all = plan.env.iter().chain(&plan.files);
        let each = all.map(|(name, value)| format!("{name}={value}"));
        each.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_ring_counts_its_ports_through() {
        let mut options = Options {
            connections_per_ip: 2,
            ..Options::default()
        };
        let mut file = names("10.0.0.1,10.0.0.2", 1);
        file.hosts[1].ips.push("10.0.1.2".to_owned());
        let ranks = plan(Backend::Ring, &file, &options).unwrap();
        let expected = r#"MLX_HOSTFILE=[["10.0.0.1:32323", "10.0.0.1:32324"], ["10.0.0.2:32325", "10.0.0.2:32326", "10.0.1.2:32327", "10.0.1.2:32328"]]"#;
        assert_eq!(set(&ranks[0]), expected);
        assert_eq!(ranks[0].files, ranks[1].files);
        options.starting_port = 65530;
        plan(Backend::Ring, &file, &options).unwrap();
        options.starting_port = 65531;
        let error = plan(Backend::Ring, &file, &options).unwrap_err();
        let text = "6 connections from port 65531 on go beyond port 65535";
        assert_eq!(error.to_string(), text);
        let one = plan(Backend::Ring, &names("127.0.0.1", 1), &Options::default()).unwrap();
        assert_eq!(set(&one[0]), "MLX_HOSTFILE=");
    }

    #[test]
    fn a_ring_hostfile_keeps_its_ports() {
        let text = r#"[["10.0.0.1:5000"], ["10.0.0.2:6000"]]"#;
        let file = Hostfile::parse(text).unwrap();
        let ranks = plan(Backend::Ring, &file, &Options::default()).unwrap();
        assert_eq!(set(&ranks[1]), format!("MLX_HOSTFILE={text}"));
    }

    #[test]
    fn nccl_shares_the_gpus_of_a_host() {
        let options = Options {
            repeats: 2,
            verbose: true,
            env: vec!["A=b c".into(), "EMPTY".into()],
            ..Options::default()
        };
        let ranks = plan(Backend::Nccl, &names("10.0.0.1,10.0.0.2", 2), &options).unwrap();
        let common = "A=b c EMPTY= NCCL_DEBUG=INFO NCCL_HOST_IP=10.0.0.1 NCCL_PORT=12345 \
                      MLX_WORLD_SIZE=4 CUDA_VISIBLE_DEVICES=";
        for (rank, device) in [0, 1, 0, 1].into_iter().enumerate() {
            assert_eq!(set(&ranks[rank]), format!("{common}{device}"));
        }
    }

    #[test]
    fn jaccl_wants_every_cable() {
        let text = r#"[{"ssh": "a", "ips": ["10.0.0.1"], "rdma": [null, "x", null]},
            {"ssh": "b", "rdma": ["x", null, ["y", "z"]]}, {"ssh": "c", "rdma": ["x", "y", null]}]"#;
        let mut file = Hostfile::parse(text).unwrap();
        let error = |file: &Hostfile, backend| {
            let failed = plan(backend, file, &Options::default());
            failed.unwrap_err().to_string()
        };
        assert_eq!(
            error(&file, Backend::Jaccl),
            "no RDMA device is listed for a to c"
        );
        file.hosts[0].rdma[2] = crate::hostfile::Devices::One("w".into());
        let ranks = plan(Backend::JacclRing, &file, &Options::default()).unwrap();
        let devices = r#"[[null, "x", "w"], ["x", null, ["y", "z"]], ["x", "y", null]]"#;
        let expected = "MLX_JACCL_COORDINATOR=10.0.0.1:32323 MLX_JACCL_RING=1 MLX_IBV_DEVICES=";
        assert_eq!(set(&ranks[2]), format!("{expected}{devices}"));
        file.hosts[1].rdma[1] = crate::hostfile::Devices::One("w".into());
        let text = "host b lists a device for its own rank 1, expected null";
        assert_eq!(error(&file, Backend::Jaccl), text);
        file.hosts[1].rdma.pop();
        let text = "host b lists devices for 2 ranks, expected 3";
        assert_eq!(error(&file, Backend::Jaccl), text);
        file.hosts[0].ips.clear();
        let text = "host a has no address, and backend jaccl needs one of rank 0";
        assert_eq!(error(&file, Backend::Jaccl), text);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let ring = |hosts: &str, env: &str| {
            let options = Options {
                env: vec![env.to_owned()],
                ..Options::default()
            };
            plan(Backend::Ring, &names(hosts, 1), &options).unwrap_err()
        };
        let host = "studio".to_owned();
        assert_eq!(
            ring("10.0.0.1,studio", "A=1"),
            PlanError::NoAddress { host }
        );
        assert!(matches!(ring("fe80::1", "A=1"), PlanError::Ipv6 { .. }));
        for text in [
            "", "=x", "A B=1", "A-B=1", "1A=x", "\u{e9}=1", "A;rm=1", "A=\0",
        ] {
            assert!(
                matches!(ring("10.0.0.1", text), PlanError::Env { .. }),
                "{text:?}"
            );
        }
        let error = "gloo".parse::<Backend>().unwrap_err().to_string();
        let expected =
            "backend is \"gloo\", expected one of ring, mpi, nccl, jaccl, rdma, jaccl-ring";
        assert_eq!(error, expected);
        for name in Backend::NAMES {
            let backend: Backend = name.parse().unwrap();
            let shown = backend.to_string();
            assert!(shown == name || (shown, name) == ("jaccl".into(), "rdma"));
        }
    }
}
