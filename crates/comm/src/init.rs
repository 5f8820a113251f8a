//! `init`: joins a group by any backend, like MLX's `init`. Backends are those of this crate and
//! the [`Provider`]s of crates above it.

use std::net::SocketAddr;

use paceline_base::Rank;

use crate::join::JoinRecord;
use crate::provider::Provider;
use crate::tcp::{self, Addrs, Config, GroupId, JoinError, Listener};
use crate::{Deadline, Group, local, shm, sockets};

paceline_base::named_enum! {
    /// How the ranks of a group reach each other.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Backend {
        /// Shared memory if all ranks can map each other's, else TCP. All ranks choose the same.
        Any = "any",
        /// A group of one. Threads of a process make larger groups with [`local::ranks`].
        Local = "local",
        /// Shared memory: processes of one machine.
        Shm = "shm",
        /// TCP, a full mesh.
        Tcp = "tcp",
        /// RDMA devices, and TCP between ranks without a cable. Plaintext.
        Rdma = "rdma",
        /// MLX's ring, which real MLX ranks can join. Plaintext.
        MlxRing = "mlx-ring",
        /// The MPI library that `mpirun` started this process with. Plaintext.
        Mpi = "mpi",
        /// NVIDIA's NCCL; the ranks meet by TCP. Plaintext.
        Nccl = "nccl",
    }
}

impl Backend {
    /// Whether the backend cannot encrypt, so that it must be requested by name.
    pub const fn is_plaintext(self) -> bool {
        matches!(self, Self::Rdma | Self::MlxRing | Self::Mpi | Self::Nccl)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no backend is called {got:?}")]
pub struct UnknownBackend {
    pub got: String,
}

impl std::str::FromStr for Backend {
    type Err = UnknownBackend;

    fn from_str(text: &str) -> Result<Self, UnknownBackend> {
        let got = || text.to_owned();
        Self::from_name(text).ok_or_else(|| UnknownBackend { got: got() })
    }
}

/// The policy for ranks that do not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strict {
    /// Fail.
    Yes,
    /// Continue alone, as a group of one.
    No,
}

/// This rank and the addresses of the others: arguments as for [`tcp::join_with`].
#[derive(Debug)]
pub struct JoinParams<'a, A = SocketAddr> {
    pub listener: Listener,
    pub rank: Rank,
    /// Every rank's addresses.
    pub addrs: &'a [A],
    /// The same on all ranks.
    pub id: GroupId,
    /// The same on all ranks.
    pub config: Config,
}

/// Whether bytes may leave this machine unencrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plaintext {
    /// Only loopback addresses are used.
    Refused,
    /// The user requested a plaintext backend by name.
    Allowed,
}

/// Why there is no group.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// A plaintext backend that was not requested by name.
    #[error("{backend} is plaintext: not allowed")]
    Plaintext { backend: Backend },
    /// No provider passed to [`init`] joins by this backend.
    #[error("{backend}: no provider of this wire was given")]
    NoProvider { backend: Backend },
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The error of a [`Provider`], of the type that it documents, to be downcast.
    #[error(transparent)]
    Wire(Box<dyn std::error::Error + Send + Sync>),
}

impl InitError {
    /// The error of a provider.
    pub fn wire(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Wire(Box::new(error))
    }
}

/// Joins a group by `backend`, one of this crate or of `providers`. Collective.
///
/// # Errors
/// Any [`InitError`] if `strict`.
pub fn init<A: Clone + Into<Addrs>>(
    backend: Backend,
    strict: Strict,
    seat: JoinParams<'_, A>,
    providers: &[&dyn Provider],
    deadline: Deadline,
) -> Result<Box<dyn Group>, InitError> {
    match (join(backend, seat, providers, deadline), strict) {
        (Err(_), Strict::No) => Ok(alone()),
        (joined, _) => joined,
    }
}

fn join<A: Clone + Into<Addrs>>(
    backend: Backend,
    seat: JoinParams<'_, A>,
    providers: &[&dyn Provider],
    deadline: Deadline,
) -> Result<Box<dyn Group>, InitError> {
    let JoinParams {
        listener,
        rank,
        addrs,
        id,
        config,
    } = seat;
    Ok(match backend {
        Backend::Local => alone(),
        Backend::Any => any(JoinRecord::new(listener, addrs, id, config), rank, deadline)?,
        Backend::Shm => Box::new(shm::join_with(listener, rank, addrs, id, config, deadline)?),
        Backend::Tcp => Box::new(tcp::join_with(listener, rank, addrs, id, config, deadline)?),
        Backend::Rdma | Backend::MlxRing | Backend::Mpi | Backend::Nccl => {
            let mut all = providers.iter();
            let found = all.find(|provider| provider.backend() == backend);
            let provider = found.ok_or(InitError::NoProvider { backend })?;
            let addrs: Vec<Addrs> = addrs.iter().map(|own| own.clone().into()).collect();
            let seat = JoinParams {
                listener,
                rank,
                addrs: &addrs,
                id,
                config,
            };
            provider.join(seat, deadline)?
        }
    })
}

/// Shared memory, or TCP over the same connections if a rank cannot use the memory of another.
fn any(origin: JoinRecord, rank: Rank, deadline: Deadline) -> Result<Box<dyn Group>, JoinError> {
    let linked = sockets::connect(&origin, rank, deadline)?;
    match shm::exchange(&linked, deadline) {
        Ok(met) => Ok(Box::new(shm::share(linked, met, origin, deadline)?)),
        Err(JoinError::Apart { .. }) => Ok(Box::new(tcp::start(linked, origin, deadline)?)),
        Err(error) => Err(error),
    }
}

fn alone() -> Box<dyn Group> {
    Box::new(local::ranks(1).remove(0))
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::testing::on_threads;

    fn listener() -> Listener {
        Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap()
    }

    /// The results of three ranks.
    fn three(
        backend: Backend,
        providers: &[&dyn Provider],
    ) -> Vec<Result<Box<dyn Group>, InitError>> {
        let listeners: Vec<Listener> = (0..3).map(|_| listener()).collect();
        let addrs: Vec<_> = listeners.iter().map(Listener::addr).collect();
        let id = GroupId::random();
        let by = Deadline::at(Instant::now() + Duration::from_secs(60));
        thread::scope(|scope| {
            let threads = (0..).zip(listeners).map(|(rank, listener)| {
                let addrs = &addrs;
                scope.spawn(move || {
                    let seat = JoinParams {
                        listener,
                        rank: Rank(rank),
                        addrs,
                        id,
                        config: Config::default(),
                    };
                    init(backend, Strict::Yes, seat, providers, by)
                })
            });
            let threads: Vec<_> = threads.collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        })
    }

    #[test]
    fn every_backend_makes_a_group_that_works() {
        for backend in [Backend::Any, Backend::Shm, Backend::Tcp] {
            works(backend);
        }
    }

    fn works(backend: Backend) {
        let by = Deadline::at(Instant::now() + Duration::from_secs(60));
        let got = on_threads(three(backend, &[]), move |group| {
            let group = group.unwrap();
            let tuning = group.tuning();
            let mut all = [0_u8; 3];
            let own = [u8::try_from(group.rank().0).unwrap()];
            group.all_gather(&own, &mut all, by).unwrap();
            group.barrier(by).unwrap();
            (all, tuning)
        });
        let mut got = got.into_iter();
        let first = got.next().unwrap();
        assert_eq!(first.0, [0, 1, 2], "{backend:?}");
        assert!(got.all(|own| own == first), "all choose by {:?}", first.1);
        assert!(!first.1.wire, "{backend:?}");
    }

    /// A provider that no call names.
    #[derive(Debug)]
    struct UnlistedProvider;

    impl Provider for UnlistedProvider {
        fn backend(&self) -> Backend {
            Backend::Local
        }

        fn join(&self, _: JoinParams<'_, Addrs>, _: Deadline) -> Result<Box<dyn Group>, InitError> {
            Ok(alone())
        }
    }

    #[test]
    fn a_wire_without_a_provider_is_named() {
        for backend in [Backend::Rdma, Backend::MlxRing, Backend::Mpi, Backend::Nccl] {
            for refused in three(backend, &[&UnlistedProvider]) {
                let expected = format!("{backend}: no provider of this wire was given");
                assert_eq!(refused.unwrap_err().to_string(), expected);
            }
        }
    }

    #[test]
    fn names_are_understood() {
        for backend in Backend::ALL {
            assert_eq!(backend.name().parse(), Ok(backend));
        }
        assert!("jaccl".parse::<Backend>().is_err());
    }

    #[test]
    fn whoever_is_not_strict_goes_on_alone() {
        let other = listener();
        for (strict, alone) in [(Strict::Yes, false), (Strict::No, true)] {
            let listener = listener();
            let seat = JoinParams {
                rank: Rank(0),
                addrs: &[listener.addr(), other.addr()],
                id: GroupId::random(),
                config: Config::default(),
                listener,
            };
            let by = Deadline::at(Instant::now() + Duration::from_millis(50));
            let group = init(Backend::Any, strict, seat, &[], by);
            assert_eq!(group.is_ok_and(|group| group.size() == 1), alone);
        }
    }
}
