//! What the environment says of wires between ranks: the variables that MLX's launcher, `mpirun`
//! and `paceline launch` set.
//!
//! | variable | meaning |
//! |---|---|
//! | `MLX_RANK` or `JACCL_RANK` | the own rank |
//! | `MLX_HOSTFILE` | file with the addresses of a ring |
//! | `MLX_IBV_DEVICES` or `JACCL_IBV_DEVICES` | file with the RDMA devices from rank to rank |
//! | `MLX_JACCL_COORDINATOR` or `JACCL_COORDINATOR` | where RDMA's ranks meet |
//! | `MLX_JACCL_RING` or `JACCL_RING` | set: go round a ring even where there is a mesh |
//! | `MLX_WORLD_SIZE`, `NCCL_HOST_IP`, `NCCL_PORT` | ranks, and where NCCL's meet |

use std::env;
use std::net::{SocketAddr, ToSocketAddrs};

use anyhow::Context;
use paceline_base::Rank;
use paceline_comm::provider::{Placed, Provider};
use paceline_comm::tcp::JoinError;
use paceline_comm::{Backend, Deadline, Group, InitError, Plaintext, Strict};
use paceline_comm_interop::mpi::{self, StartError};
use paceline_comm_interop::nccl::{self, Libraries};
use paceline_comm_interop::{MlxBackend, MlxError, MlxPlace, init_mlx, mlx_ring};
use paceline_comm_rdma::{
    self as rdma, Cabling, Matrix, RdmaError, Settings, SettingsError, Verbs, settings,
};

use crate::error::Error;

/// Refuses a wire that cannot encrypt and was not asked for by name.
///
/// # Errors
/// [`Error::Plaintext`].
pub(crate) fn asked_for(backend: Backend, plaintext: bool) -> Result<Plaintext, Error> {
    match (backend.is_plaintext(), plaintext) {
        (_, true) => Ok(Plaintext::Allowed),
        (false, false) => Ok(Plaintext::Refused),
        (true, false) => Err(Error::Plaintext { backend }),
    }
}

/// The wire of `backend`, for ranks that meet at addresses of their own; none where memory and
/// sockets are all it takes.
///
/// # Errors
/// When the device file or the library cannot be read.
pub(crate) fn of(
    backend: Backend,
    plaintext: Plaintext,
) -> anyhow::Result<Option<Box<dyn Provider>>> {
    let wire: Box<dyn Provider> = match backend {
        Backend::Any | Backend::Local | Backend::Shm | Backend::Tcp => return Ok(None),
        Backend::Rdma => {
            let cabling = Cabling::new(Verbs::load()?, Matrix::parse(&devices()?)?);
            Box::new(rdma::Wire { cabling, plaintext })
        }
        Backend::MlxRing => Box::new(mlx_ring::Wire { plaintext }),
        Backend::Mpi => Box::new(mpi::Wire { plaintext }),
        Backend::Nccl => {
            let libraries = Libraries::default();
            Box::new(nccl::Wire {
                libraries,
                plaintext,
            })
        }
    };
    Ok(Some(wire))
}

/// Whether a launcher has started this process as a rank of `backend`.
pub(crate) fn is_launched(backend: Backend) -> bool {
    let names: &[&str] = match backend {
        Backend::Mpi => return true, // whoever started it, the library knows
        Backend::Rdma => &settings::RANK,
        Backend::MlxRing | Backend::Nccl => &["MLX_RANK"],
        _ => &[],
    };
    names.iter().any(|name| variable(name).is_some())
}

/// Joins the ranks that the launcher started with this one.
///
/// # Errors
/// What is missing or wrong, and why the ranks did not meet.
pub(crate) fn join(
    backend: Backend,
    plaintext: Plaintext,
    deadline: Deadline,
) -> anyhow::Result<Box<dyn Group>> {
    let (mut hosts, mut jaccl) = (None, None);
    let named = match backend {
        Backend::Rdma => {
            jaccl = Some(Settings::parse(&variable, &devices()?)?);
            MlxBackend::Jaccl
        }
        Backend::Nccl => MlxBackend::Nccl,
        Backend::Mpi => MlxBackend::Mpi,
        _ => {
            hosts = hostfile()?;
            MlxBackend::Ring
        }
    };
    let place = MlxPlace {
        rank: number("MLX_RANK")?.map(Rank),
        hosts: hosts.as_deref(),
        nccl: nccl_place()?,
        jaccl: jaccl.as_ref().map(|settings| settings as &dyn Placed),
        libraries: &Libraries::default(),
        plaintext,
    };
    Ok(init_mlx(named, Strict::Yes, &place, deadline)?)
}

/// The text of the device file.
fn devices() -> anyhow::Result<String> {
    let path = settings::device_file(&variable)?;
    std::fs::read_to_string(&path).with_context(|| format!("cannot read the device file {path}"))
}

fn hostfile() -> anyhow::Result<Option<Vec<Vec<SocketAddr>>>> {
    let Some(path) = variable("MLX_HOSTFILE") else {
        return Ok(None);
    };
    let wrong = || format!("cannot use the hostfile {path}");
    let text = std::fs::read_to_string(&path).with_context(wrong)?;
    // MLX takes an empty file for a group of one.
    let text = if text.trim().is_empty() {
        "[[]]"
    } else {
        &text
    };
    let hosts: Vec<Vec<String>> = serde_json::from_str(text).with_context(wrong)?;
    let hosts = hosts
        .iter()
        .map(|own| own.iter().map(|a| resolve(a)).collect());
    hosts.collect::<anyhow::Result<_>>().map(Some)
}

fn nccl_place() -> anyhow::Result<Option<(u32, SocketAddr)>> {
    let size = number("MLX_WORLD_SIZE")?;
    Ok(
        match (size, variable("NCCL_HOST_IP"), variable("NCCL_PORT")) {
            (Some(size), Some(ip), Some(port)) => Some((size, resolve(&format!("{ip}:{port}"))?)),
            _ => None,
        },
    )
}

fn resolve(text: &str) -> anyhow::Result<SocketAddr> {
    let found = text
        .to_socket_addrs()
        .with_context(|| format!("cannot use address {text}"))?;
    let found = found.into_iter().next();
    found.with_context(|| format!("{text} has no address"))
}

fn number(name: &'static str) -> anyhow::Result<Option<u32>> {
    let parse = |value: String| {
        let parsed = value.trim().parse();
        parsed.with_context(|| format!("{name} is {value:?}, expected a number"))
    };
    variable(name).map(parse).transpose()
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok()
}

/// Hint for a build without MPI.
const BUILD_WITH_MPI: &str = "build paceline with `--features mpi`, which needs mpicc and libclang";

/// What to do about a wire that is not there, or not to be trusted.
pub(crate) fn hint(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    let launched =
        "`paceline launch --backend ring|jaccl|nccl|mpi -- PROGRAM` sets it for its ranks";
    let trusted = "--plaintext allows it, for cables and networks that you trust";
    if let Some(JoinError::Unprotected { .. }) = join_error(cause) {
        return Some(
            "a group key encrypts: give all ranks the same, or addresses of this machine alone"
                .to_owned(),
        );
    }
    let text = match (
        cause.downcast_ref(),
        cause.downcast_ref(),
        cause.downcast_ref(),
    ) {
        (Some(SettingsError::Missing { .. }), ..) => launched,
        (_, Some(InitError::Wire(error)), _)
            if matches!(error.downcast_ref(), Some(StartError::Unavailable)) =>
        {
            BUILD_WITH_MPI
        }
        (_, _, Some(MlxError::Mpi(StartError::Unavailable))) => BUILD_WITH_MPI,
        (_, _, Some(MlxError::Missing { .. })) => launched,
        (_, _, Some(MlxError::Plaintext { .. }))
        | (_, _, Some(MlxError::Ring(mlx_ring::JoinError::Plaintext { .. }))) => trusted,
        (_, _, Some(MlxError::Ring(mlx_ring::JoinError::Strangers { .. }))) => {
            "something else connects to this port: end it, or give the ring other ports \
             (`paceline launch --starting-port`)"
        }
        _ => return None,
    };
    Some(text.to_owned())
}

/// The error of ranks that do not meet, in whatever it is wrapped: transparent errors are no link
/// of a chain.
fn join_error<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a JoinError> {
    let of_rdma = |error: &'a RdmaError| match error {
        RdmaError::Join(error) => Some(error),
        _ => None,
    };
    let of_init = |error: &'a InitError| match error {
        InitError::Join(error) => Some(error),
        InitError::Wire(error) => error.downcast_ref::<RdmaError>().and_then(of_rdma),
        _ => None,
    };
    if let Some(error) = cause.downcast_ref() {
        return of_init(error);
    }
    match (cause.downcast_ref(), cause.downcast_ref()) {
        (Some(paceline_node::Error::Join(error)), _) => of_init(error),
        (_, Some(MlxError::Jaccl(error))) => of_init(error),
        _ => cause.downcast_ref(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unprotected_address_has_advice_in_whatever_wrapping() {
        let error = || JoinError::Unprotected {
            addr: "192.0.2.1:1".parse().unwrap(),
        };
        let wrapped: [Box<dyn std::error::Error>; 5] = [
            Box::new(error()),
            Box::new(InitError::Join(error())),
            Box::new(InitError::wire(RdmaError::Join(error()))),
            Box::new(MlxError::Jaccl(InitError::wire(RdmaError::Join(error())))),
            Box::new(paceline_node::Error::Join(InitError::Join(error()))),
        ];
        for wrapped in &wrapped {
            let hint = hint(&**wrapped).unwrap();
            assert!(hint.starts_with("a group key encrypts"), "{hint}");
        }
        let backend = Backend::Rdma;
        assert_eq!(hint(&InitError::NoProvider { backend }), None);
    }

    #[test]
    fn a_strangers_port_has_advice() {
        let error = MlxError::Ring(mlx_ring::JoinError::Strangers {
            rank: Rank(1),
            addr: "127.0.0.1:1".parse().unwrap(),
            callers: Vec::new(),
        });
        assert!(hint(&error).unwrap().contains("--starting-port"));
    }

    #[test]
    fn plaintext_is_asked_for_by_name() {
        for backend in Backend::ALL {
            assert_eq!(asked_for(backend, true).unwrap(), Plaintext::Allowed);
            let unasked = asked_for(backend, false);
            assert_eq!(unasked.is_err(), backend.is_plaintext(), "{backend}");
        }
        let error = asked_for(Backend::Rdma, false).unwrap_err().to_string();
        assert!(error.starts_with("rdma is plaintext"), "{error}");
    }
}
