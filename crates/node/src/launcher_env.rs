//! Transports between ranks from a launcher's environment: the variables that MLX's launcher,
//! `mpirun` and `paceline launch` set. The caller passes their values.
//!
//! | variable | meaning |
//! |---|---|
//! | `MLX_RANK` or `JACCL_RANK` | the own rank |
//! | `MLX_HOSTFILE` | file with the addresses of a ring |
//! | `MLX_IBV_DEVICES` or `JACCL_IBV_DEVICES` | file with the RDMA devices from rank to rank |
//! | `MLX_JACCL_COORDINATOR` or `JACCL_COORDINATOR` | where RDMA's ranks meet |
//! | `MLX_JACCL_RING` or `JACCL_RING` | set: go round a ring even where there is a mesh |
//! | `MLX_WORLD_SIZE`, `NCCL_HOST_IP`, `NCCL_PORT` | ranks, and where NCCL's meet |

use std::net::SocketAddr;
use std::{io, num};

use paceline_base::Rank;
use paceline_comm::provider::{LaunchedProvider, Provider};
use paceline_comm::{Backend, Deadline, Group, Plaintext, Strict};
use paceline_comm_interop::nccl::{self, Libraries};
use paceline_comm_interop::{MlxBackend, MlxError, MlxPlace, init_mlx, mlx_ring, mpi};
use paceline_comm_rdma::settings::Lookup;
use paceline_comm_rdma::{
    self as rdma, Cabling, JacclSettings, Matrix, MatrixError, RdmaError, SettingsError, Verbs,
    settings,
};

/// Why the environment names no transport, or its ranks do not connect.
#[derive(Debug, thiserror::Error)]
pub enum LauncherError {
    #[error("{0}")]
    Settings(#[from] SettingsError),
    #[error("{0}")]
    Matrix(#[from] MatrixError),
    #[error("{0}")]
    Rdma(#[from] RdmaError),
    #[error("{0}")]
    Mlx(#[from] MlxError),
    #[error("cannot read the device file {path}")]
    DeviceFile { path: String, source: io::Error },
    #[error("cannot use the hostfile {path}")]
    Hostfile {
        path: String,
        /// Report of the system, or what is wrong with the JSON.
        source: io::Error,
    },
    #[error("cannot use address {text}")]
    Address { text: String, source: io::Error },
    #[error("{name} is {value:?}, expected a number")]
    Number {
        name: &'static str,
        /// The value of the variable.
        value: String,
        source: num::ParseIntError,
    },
}

/// The transport provider of `backend`, for ranks that connect at their own addresses; `None` if
/// the backend needs only memory and sockets.
///
/// # Errors
/// When the device file or the library cannot be read.
pub fn of(
    backend: Backend,
    plaintext: Plaintext,
    lookup: Lookup<'_>,
) -> Result<Option<Box<dyn Provider>>, LauncherError> {
    let wire: Box<dyn Provider> = match backend {
        Backend::Any | Backend::Local | Backend::Shm | Backend::Tcp => return Ok(None),
        Backend::Rdma => {
            let cabling = Cabling::new(Verbs::load()?, Matrix::parse(&devices(lookup)?)?);
            Box::new(rdma::RdmaProvider { cabling, plaintext })
        }
        Backend::MlxRing => Box::new(mlx_ring::MlxRingProvider { plaintext }),
        Backend::Mpi => Box::new(mpi::MpiProvider { plaintext }),
        Backend::Nccl => {
            let libraries = Libraries::default();
            Box::new(nccl::NcclProvider {
                libraries,
                plaintext,
            })
        }
    };
    Ok(Some(wire))
}

/// Whether a launcher has started this process as a rank of `backend`.
pub fn is_launched(backend: Backend, lookup: Lookup<'_>) -> bool {
    let names: &[&str] = match backend {
        Backend::Mpi => return true, // the library finds its launcher
        Backend::Rdma => &settings::RANK,
        Backend::MlxRing | Backend::Nccl => &["MLX_RANK"],
        _ => &[],
    };
    names.iter().any(|name| lookup(name).is_some())
}

/// Joins the ranks that the launcher started with this one.
///
/// # Errors
/// A variable is missing or invalid, or the ranks did not connect.
pub fn join(
    backend: Backend,
    plaintext: Plaintext,
    lookup: Lookup<'_>,
    deadline: Deadline,
) -> Result<Box<dyn Group>, LauncherError> {
    let (mut hosts, mut jaccl) = (None, None);
    let named = match backend {
        Backend::Rdma => {
            jaccl = Some(JacclSettings::parse(lookup, &devices(lookup)?)?);
            MlxBackend::Jaccl
        }
        Backend::Nccl => MlxBackend::Nccl,
        Backend::Mpi => MlxBackend::Mpi,
        _ => {
            hosts = hostfile(lookup)?;
            MlxBackend::Ring
        }
    };
    let place = MlxPlace {
        rank: number("MLX_RANK", lookup)?.map(Rank),
        hosts: hosts.as_deref(),
        nccl: nccl_place(lookup)?,
        jaccl: jaccl
            .as_ref()
            .map(|settings| settings as &dyn LaunchedProvider),
        libraries: &Libraries::default(),
        plaintext,
    };
    Ok(init_mlx(named, Strict::Yes, &place, deadline)?)
}

/// The text of the device file.
fn devices(lookup: Lookup<'_>) -> Result<String, LauncherError> {
    let path = settings::device_file(lookup)?;
    std::fs::read_to_string(&path).map_err(|source| LauncherError::DeviceFile { path, source })
}

fn hostfile(lookup: Lookup<'_>) -> Result<Option<Vec<Vec<SocketAddr>>>, LauncherError> {
    let Some(path) = lookup("MLX_HOSTFILE") else {
        return Ok(None);
    };
    let wrong = |source: io::Error| LauncherError::Hostfile {
        path: path.clone(),
        source,
    };
    let text = std::fs::read_to_string(&path).map_err(wrong)?;
    // MLX takes an empty file for a group of one.
    let text = if text.trim().is_empty() {
        "[[]]"
    } else {
        &text
    };
    let hosts: Vec<Vec<String>> =
        serde_json::from_str(text).map_err(|source| wrong(source.into()))?;
    let hosts = hosts
        .iter()
        .map(|own| own.iter().map(|a| resolve(a)).collect());
    hosts.collect::<Result<_, LauncherError>>().map(Some)
}

fn nccl_place(lookup: Lookup<'_>) -> Result<Option<(u32, SocketAddr)>, LauncherError> {
    let size = number("MLX_WORLD_SIZE", lookup)?;
    Ok(match (size, lookup("NCCL_HOST_IP"), lookup("NCCL_PORT")) {
        (Some(size), Some(ip), Some(port)) => Some((size, resolve(&format!("{ip}:{port}"))?)),
        _ => None,
    })
}

fn resolve(text: &str) -> Result<SocketAddr, LauncherError> {
    paceline_comm::resolve(text).map_err(|source| LauncherError::Address {
        text: text.to_owned(),
        source,
    })
}

fn number(name: &'static str, lookup: Lookup<'_>) -> Result<Option<u32>, LauncherError> {
    let parse = |value: String| {
        let parsed = value.trim().parse::<u32>();
        parsed.map_err(|source| LauncherError::Number {
            name,
            value: value.clone(),
            source,
        })
    };
    lookup(name).map(parse).transpose()
}
