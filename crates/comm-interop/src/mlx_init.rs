//! MLX's entry point: `init(strict, backend)` with MLX's names and settings, for programs started
//! by MLX's launcher or ours.
//!
//! Nothing is read from the environment here; the caller reads it and passes MLX's variables:
//!
//! | variable | field |
//! |---|---|
//! | `MLX_RANK` | [`MlxPlace::rank`] |
//! | `MLX_HOSTFILE` | [`MlxPlace::hosts`], parsed |
//! | `MLX_WORLD_SIZE`, `NCCL_HOST_IP` and `NCCL_PORT` | [`MlxPlace::nccl`] |
//! | `MLX_IBV_DEVICES`, `MLX_JACCL_COORDINATOR`, `MLX_JACCL_RING` | [`MlxPlace::jaccl`], parsed |

use std::net::SocketAddr;
use std::str::FromStr;

use paceline_base::Rank;

use paceline_comm::provider::LaunchedProvider;
use paceline_comm::{Deadline, Group, InitError, Plaintext, Strict, local};

use crate::nccl::{self, Libraries};
use crate::{mlx_ring, mpi};

paceline_base::named_enum! {
    /// MLX's backends, by its names.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum MlxBackend {
        /// The first of nccl, ring, mpi and jaccl that is available and configured.
        Any = "any",
        /// [`mlx_ring`].
        Ring = "ring",
        /// [`mpi`].
        Mpi = "mpi",
        /// [`nccl`].
        Nccl = "nccl",
        /// RDMA, with JACCL's configuration.
        Jaccl = "jaccl",
    }
}

/// MLX's order of attempts.
const ORDER: [MlxBackend; 4] = [
    MlxBackend::Nccl,
    MlxBackend::Ring,
    MlxBackend::Mpi,
    MlxBackend::Jaccl,
];

impl FromStr for MlxBackend {
    type Err = MlxError;

    fn from_str(name: &str) -> Result<Self, MlxError> {
        Self::from_name(name).ok_or_else(|| MlxError::Name { name: name.into() })
    }
}

/// The settings in MLX's environment. MPI needs none of them.
#[derive(Clone, Copy, Debug)]
pub struct MlxPlace<'a> {
    pub rank: Option<Rank>,
    /// Every rank's addresses.
    pub hosts: Option<&'a [Vec<SocketAddr>]>,
    /// Number of ranks, and the address where rank 0 distributes NCCL's id.
    pub nccl: Option<(u32, SocketAddr)>,
    /// The provider configured by JACCL's variables.
    pub jaccl: Option<&'a dyn LaunchedProvider>,
    /// Paths of NCCL and CUDA.
    pub libraries: &'a Libraries,
    /// Whether bytes may leave this machine unencrypted.
    pub plaintext: Plaintext,
}

/// Why no group could be joined.
#[derive(Debug, thiserror::Error)]
pub enum MlxError {
    #[error("backend {name:?}, expected any, ring, mpi, nccl or jaccl")]
    Name { name: String },
    #[error("{backend}: {missing} not given")]
    Missing {
        backend: MlxBackend,
        missing: &'static str,
    },
    #[error("{backend} is plaintext: not allowed")]
    Plaintext { backend: MlxBackend },
    #[error("no backend could be started")]
    None,
    #[error(transparent)]
    Ring(#[from] mlx_ring::JoinError),
    #[error(transparent)]
    Mpi(#[from] mpi::StartError),
    #[error(transparent)]
    Nccl(#[from] nccl::NcclJoinError),
    #[error(transparent)]
    Jaccl(#[from] InitError),
}

/// Joins a group as MLX's `init` does. Collective.
///
/// If not strict, a rank that fails continues as a group of one. Like in MLX, MPI with one rank
/// counts as no group under [`MlxBackend::Any`].
///
/// # Errors
/// Any [`MlxError`] if `strict`.
pub fn init_mlx(
    backend: MlxBackend,
    strict: Strict,
    place: &MlxPlace<'_>,
    deadline: Deadline,
) -> Result<Box<dyn Group>, MlxError> {
    match (one(backend, place, deadline), strict) {
        (Err(_), Strict::No) => Ok(alone()),
        (joined, _) => joined,
    }
}

fn alone() -> Box<dyn Group> {
    Box::new(local::ranks(1).remove(0))
}

/// `Some` if plaintext is allowed.
fn allowed(plaintext: Plaintext) -> Option<()> {
    (plaintext == Plaintext::Allowed).then_some(())
}

/// The first backend that is configured and gives more than a group of one.
fn any(place: &MlxPlace<'_>, deadline: Deadline) -> Result<Box<dyn Group>, MlxError> {
    let is_configured = |backend: &MlxBackend| match backend {
        MlxBackend::Nccl => place.nccl.is_some(),
        MlxBackend::Jaccl => place.jaccl.is_some(),
        _ => true,
    };
    let mut groups = ORDER
        .into_iter()
        .filter(is_configured)
        .filter_map(|backend| one(backend, place, deadline).ok());
    groups.find(|group| group.size() > 1).ok_or(MlxError::None)
}

fn one(
    backend: MlxBackend,
    place: &MlxPlace<'_>,
    deadline: Deadline,
) -> Result<Box<dyn Group>, MlxError> {
    let missing = |missing| MlxError::Missing { backend, missing };
    let rank = || place.rank.ok_or(missing("a rank"));
    match backend {
        MlxBackend::Ring => {
            let hosts = place.hosts.ok_or(missing("a list of hosts"))?;
            let ring = mlx_ring::join(rank()?, hosts, place.plaintext, deadline)?;
            Ok(Box::new(ring))
        }
        MlxBackend::Mpi => {
            allowed(place.plaintext).ok_or(MlxError::Plaintext { backend })?;
            Ok(mpi::MpiSession::start()?.world())
        }
        MlxBackend::Nccl => {
            let (size, addr) = place.nccl.ok_or(missing("a size and rank 0's address"))?;
            let (libraries, plaintext) = (place.libraries, place.plaintext);
            let seat = nccl::NcclRank {
                rank: rank()?,
                size,
                addr,
            };
            Ok(Box::new(nccl::join_mlx(
                seat, libraries, plaintext, deadline,
            )?))
        }
        MlxBackend::Jaccl => {
            let cables = place.jaccl.ok_or(missing("devices and a coordinator"))?;
            allowed(place.plaintext).ok_or(MlxError::Plaintext { backend })?;
            Ok(cables.join_placed(deadline)?)
        }
        MlxBackend::Any => any(place, deadline),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use paceline_comm::Reduce;

    const NOTHING: MlxPlace<'static> = MlxPlace {
        rank: None,
        hosts: None,
        nccl: None,
        jaccl: None,
        libraries: &Libraries {
            nccl: None,
            cuda: None,
        },
        plaintext: Plaintext::Refused,
    };

    fn soon() -> Deadline {
        Deadline::at(Instant::now() + Duration::from_secs(60))
    }

    #[test]
    fn names_are_mlxs() {
        for name in ["any", "ring", "mpi", "nccl", "jaccl"] {
            assert_eq!(name.parse::<MlxBackend>().unwrap().to_string(), name);
        }
        let error = "zzz".parse::<MlxBackend>().unwrap_err().to_string();
        assert_eq!(
            error,
            "backend \"zzz\", expected any, ring, mpi, nccl or jaccl"
        );
    }

    #[test]
    fn what_is_missing_is_named_or_a_group_of_one() {
        for (backend, expected) in [
            (MlxBackend::Ring, "ring: a list of hosts not given"),
            (
                MlxBackend::Nccl,
                "nccl: a size and rank 0's address not given",
            ),
            (
                MlxBackend::Jaccl,
                "jaccl: devices and a coordinator not given",
            ),
            (MlxBackend::Any, "no backend could be started"),
            (MlxBackend::Mpi, "mpi is plaintext: not allowed"),
        ] {
            let error = init_mlx(backend, Strict::Yes, &NOTHING, soon()).unwrap_err();
            assert_eq!(error.to_string(), expected);
            let alone = init_mlx(backend, Strict::No, &NOTHING, soon()).unwrap();
            assert_eq!((alone.rank(), alone.size()), (Rank(0), 1));
        }
    }

    #[test]
    fn any_finds_the_ring_that_is_configured() {
        let hosts = [0, 1].map(|_| vec![crate::free::free()]);
        thread::scope(|scope| {
            for rank in [0, 1] {
                let hosts = &hosts;
                scope.spawn(move || {
                    let place = MlxPlace {
                        rank: Some(Rank(rank)),
                        hosts: Some(hosts),
                        ..NOTHING
                    };
                    let group = init_mlx(MlxBackend::Any, Strict::Yes, &place, soon()).unwrap();
                    let mut one = [1_i32; 3];
                    group.all_reduce(&mut one, Reduce::Sum, soon()).unwrap();
                    assert_eq!(one, [2; 3]);
                });
            }
        });
    }
}
