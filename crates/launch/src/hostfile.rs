//! Hostfiles in MLX's formats: hosts, their addresses and RDMA devices.
//!
//! - *Launcher*, for `mlx.launch` and `paceline launch`: `{"backend": .., "envs": [..], "hosts":
//!   [{"ssh": .., "ips": [..], "rdma": [..]}]}`, or the list of hosts alone.
//! - *Ring*, for a rank, at the path in `MLX_HOSTFILE`: `[["10.0.0.1:5000"], ["10.0.0.2:5000"]]`,
//!   by rank, an address for each connection.
//! - *Devices*, for a rank, at the path in `MLX_IBV_DEVICES`: `[[null, "rdma_en5"], ["rdma_en4",
//!   null]]`, by rank, the devices towards each rank.
//!
//! All are written byte for byte as by MLX. The first two can be read; a host of a ring hostfile is
//! reached at its address. Unknown keys are ignored, as by MLX. Source:
//! `mlx/_distributed_utils/common.py` of MLX 0.32.4.

mod json;

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

/// Longest accepted hostfile: 4096 hosts with a device for each pair have less than this.
pub const FILE_BYTES_MAX: u64 = 64 << 20;

/// Most hosts of a file; a rank each.
pub const HOSTS_MAX: usize = 4096;

/// The contents of a hostfile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Hostfile {
    /// Name of the backend in MLX; empty if unspecified.
    pub backend: String,
    /// Environment of all ranks, each `NAME=VALUE`.
    pub envs: Vec<String>,
    /// The hosts, one a rank.
    pub hosts: Vec<Host>,
}

/// A rank's host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Host {
    pub ssh: String,
    /// Its addresses for data, without ports.
    pub ips: Vec<String>,
    /// Its devices towards each rank, in rank order; empty without RDMA.
    pub rdma: Vec<Devices>,
    /// Addresses with ports from a ring hostfile; empty otherwise. Not a part of the format.
    #[serde(skip)]
    pub addresses: Vec<String>,
}

/// RDMA devices towards another rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Devices {
    /// No cable goes there, or it is the rank itself.
    None,
    One(String),
    /// Several cables, a device each.
    Many(Vec<String>),
}

/// Why a hostfile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read hostfile {}: {source}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("cannot write hostfile {}: {source}", path.display())]
    Write {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("hostfile {} has {bytes} bytes, expected at most {FILE_BYTES_MAX}", path.display())]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("hostfile is not JSON: {reason}")]
    NotJson {
        /// The parser's error, with line and column.
        reason: String,
    },
    /// A part has the wrong type or value.
    #[error("hostfile: {at} is {got}, expected {expected}")]
    Shape {
        at: String,
        got: String,
        expected: &'static str,
    },
    #[error("hostfile names no host")]
    NoHosts,
    #[error("{count} hosts, expected at most {HOSTS_MAX}")]
    TooManyHosts { count: usize },
    /// A host's name that is no argument for `ssh`: empty, with a blank, or with a leading hyphen.
    #[error("host name {name:?} {problem}")]
    Name { name: String, problem: &'static str },
}

impl Hostfile {
    /// Reads a file of either format.
    ///
    /// # Errors
    /// When it cannot be read or is no hostfile.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Read {
            path: path.to_owned(),
            source,
        };
        let bytes = std::fs::metadata(path).map_err(failed)?.len();
        if bytes > FILE_BYTES_MAX {
            let path = path.to_owned();
            return Err(Error::TooLarge { path, bytes });
        }
        Self::parse(&std::fs::read_to_string(path).map_err(failed)?)
    }

    /// Reads the text of a file of either format.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let value: Value = serde_json::from_str(text).map_err(|e| Error::NotJson {
            reason: e.to_string(),
        })?;
        let mut file = Self::default();
        let hosts = match &value {
            Value::Object(fields) => {
                file.backend = optional(fields.get("backend"), "\"backend\"", string)?;
                file.envs = optional(fields.get("envs"), "\"envs\"", strings)?;
                fields.get("hosts").unwrap_or(&Value::Null)
            }
            list => list,
        };
        let hosts = list(hosts, "the list of hosts")?;
        file.hosts = hosts
            .iter()
            .enumerate()
            .map(|(rank, host)| Host::parse(host, rank))
            .collect::<Result<_, _>>()?;
        check(&file.hosts)?;
        Ok(file)
    }

    /// The hosts of a command line, `a,b,c`, each `repeats` times. A literal address is also its
    /// host's data address, and `localhost` has 127.0.0.1; other names have none.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::TooManyHosts`].
    pub fn from_names(names: &str, repeats: usize) -> Result<Self, Error> {
        let host = |name: &str| Host {
            ssh: name.to_owned(),
            ips: literal(name).into_iter().collect(),
            ..Host::default()
        };
        let count = names.split(',').count().saturating_mul(repeats);
        if count > HOSTS_MAX {
            return Err(Error::TooManyHosts { count });
        }
        let each = names.split(',');
        let hosts: Vec<Host> = each
            .flat_map(|name| std::iter::repeat_n(host(name), repeats))
            .collect();
        check(&hosts)?;
        Ok(Self {
            hosts,
            ..Self::default()
        })
    }

    /// The launcher's format, as `mlx.distributed_config` writes it: indented by 4, no newline at
    /// the end.
    pub fn to_json(&self) -> String {
        json::indented(self)
    }

    /// Writes [`Self::to_json`] to a file.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        std::fs::write(path, self.to_json()).map_err(|source| Error::Write {
            path: path.to_owned(),
            source,
        })
    }

    /// The devices' format, for the file that `MLX_IBV_DEVICES` names.
    pub fn devices_json(&self) -> String {
        let devices: Vec<&[Devices]> = self.hosts.iter().map(|host| &host.rdma[..]).collect();
        json::one_line(&devices)
    }
}

/// The ring's format, for the file that `MLX_HOSTFILE` names. `addresses` are by rank.
pub fn ring_json(addresses: &[Vec<String>]) -> String {
    json::one_line(&addresses)
}

/// Whether a host is this machine, which needs no `ssh`.
pub fn is_here(ssh: &str) -> bool {
    matches!(ssh, "127.0.0.1" | "localhost" | "::1")
}

/// The literal address of a host's name, if it is one.
fn literal(name: &str) -> Option<String> {
    if name == "localhost" {
        return Some("127.0.0.1".to_owned());
    }
    let is_address = name.parse::<std::net::IpAddr>().is_ok();
    is_address.then(|| name.to_owned())
}

fn check(hosts: &[Host]) -> Result<(), Error> {
    if hosts.is_empty() {
        return Err(Error::NoHosts);
    }
    let count = hosts.len();
    if count > HOSTS_MAX {
        return Err(Error::TooManyHosts { count });
    }
    hosts.iter().try_for_each(|host| check_name(&host.ssh))
}

/// Names come from a file and are passed to `ssh`, where a leading hyphen makes an option.
fn check_name(name: &str) -> Result<(), Error> {
    let problem = if name.is_empty() {
        "is empty"
    } else if name.starts_with('-') {
        "starts with a hyphen"
    } else if name.contains(|c: char| c.is_whitespace() || c.is_control()) {
        "has a blank in it"
    } else {
        return Ok(());
    };
    let name = name.to_owned();
    Err(Error::Name { name, problem })
}

impl Host {
    fn parse(value: &Value, rank: usize) -> Result<Self, Error> {
        let at = |field: &str| format!("{field} of host {rank}");
        if let Value::Array(_) = value {
            return Self::of_ring(strings(value, &at("the list"))?, rank);
        }
        let fields = value
            .as_object()
            .ok_or_else(|| shape(format!("host {rank}"), value, "an object or a list"))?;
        let ssh = fields.get("ssh").unwrap_or(&Value::Null);
        let rdma = optional(fields.get("rdma"), &at("\"rdma\""), list)?;
        Ok(Self {
            ssh: string(ssh, &at("\"ssh\""))?,
            ips: optional(fields.get("ips"), &at("\"ips\""), strings)?,
            rdma: rdma
                .iter()
                .map(|entry| Devices::parse(entry, &at("an entry in \"rdma\"")))
                .collect::<Result<_, _>>()?,
            addresses: Vec::new(),
        })
    }

    fn of_ring(addresses: Vec<String>, rank: usize) -> Result<Self, Error> {
        let at = || format!("an address of host {rank}");
        let mut ips: Vec<String> = Vec::new();
        for address in &addresses {
            let port = |(_, port): &(&str, &str)| port.parse::<u16>().is_ok();
            let got = || Value::from(address.as_str());
            let (ip, _) = address
                .split_once(':')
                .filter(port)
                .ok_or_else(|| shape(at(), &got(), "ADDRESS:PORT"))?;
            if !ips.iter().any(|known| known == ip) {
                ips.push(ip.to_owned());
            }
        }
        let nothing = Value::Array(Vec::new());
        let first = ips.first();
        let ssh = first.ok_or_else(|| shape(at(), &nothing, "ADDRESS:PORT"))?;
        Ok(Self {
            ssh: ssh.clone(),
            ips,
            rdma: Vec::new(),
            addresses,
        })
    }
}

impl Devices {
    fn parse(value: &Value, at: &str) -> Result<Self, Error> {
        match value {
            Value::Null => Ok(Self::None),
            Value::String(device) => Ok(Self::One(device.clone())),
            Value::Array(_) => strings(value, at).map(Self::Many),
            other => Err(shape(at.to_owned(), other, "null, a device or a list")),
        }
    }

    pub fn is_none(&self) -> bool {
        match self {
            Self::None => true,
            Self::One(_) => false,
            Self::Many(devices) => devices.is_empty(),
        }
    }
}

/// The parsed `value` when it is present and not null, else the default.
fn optional<'a, T: Default>(
    value: Option<&'a Value>,
    at: &str,
    parse: impl FnOnce(&'a Value, &str) -> Result<T, Error>,
) -> Result<T, Error> {
    match value {
        None | Some(Value::Null) => Ok(T::default()),
        Some(value) => parse(value, at),
    }
}

fn string(value: &Value, at: &str) -> Result<String, Error> {
    let text = value.as_str().map(str::to_owned);
    text.ok_or_else(|| shape(at.to_owned(), value, "a string"))
}

fn strings(value: &Value, at: &str) -> Result<Vec<String>, Error> {
    let each = list(value, at)?.iter();
    each.map(|value| string(value, &format!("an entry in {at}")))
        .collect()
}

fn list<'a>(value: &'a Value, at: &str) -> Result<&'a [Value], Error> {
    let list = value.as_array().map(Vec::as_slice);
    list.ok_or_else(|| shape(at.to_owned(), value, "a list"))
}

fn shape(at: String, got: &Value, expected: &'static str) -> Error {
    let got = match got {
        Value::Null => "missing".to_owned(),
        Value::Bool(_) => "a truth value".to_owned(),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) => format!("{:?}", text.chars().take(60).collect::<String>()),
        Value::Array(items) if items.is_empty() => "an empty list".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    };
    Error::Shape { at, got, expected }
}

#[cfg(test)]
mod tests;
