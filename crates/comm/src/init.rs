//! One way in for every backend, as MLX's `init`.

use std::fmt;
use std::net::SocketAddr;

use paceline_base::Rank;

use crate::mlx_ring::{self, Plaintext};
use crate::nccl::{self, Libraries};
use crate::rdma::{self, Cabling, RdmaError};
use crate::tcp::{self, Addrs, Config, GroupId, JoinError, Listener};
use crate::{Deadline, Group, local, mpi, shm};

/// How the ranks of a group reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Shared memory if all ranks can map each other's, else TCP. All come to the same.
    Any,
    /// Nobody else: a group of one. Threads of a process make theirs with [`local::ranks`].
    Local,
    /// Shared memory: processes of one machine.
    Shm,
    /// TCP, every rank with every other.
    Tcp,
    /// RDMA devices, TCP where no cable leads. Plaintext.
    Rdma,
    /// MLX's ring, which real MLX ranks may be members of. Plaintext.
    MlxRing,
    /// The MPI library that `mpirun` started this process with. Plaintext.
    Mpi,
    /// NVIDIA's library; the ranks meet by TCP. Plaintext.
    Nccl,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Any,
        Self::Local,
        Self::Shm,
        Self::Tcp,
        Self::Rdma,
        Self::MlxRing,
        Self::Mpi,
        Self::Nccl,
    ];

    /// The name used in options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Local => "local",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
            Self::MlxRing => mlx_ring::NAME,
            Self::Mpi => mpi::NAME,
            Self::Nccl => nccl::NAME,
        }
    }

    /// Whether what leaves this machine is unencrypted by the wire's nature, so that somebody has
    /// to ask for it by name.
    pub const fn is_plaintext(self) -> bool {
        matches!(self, Self::Rdma | Self::MlxRing | Self::Mpi | Self::Nccl)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Not the name of a backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no backend is called {got:?}")]
pub struct UnknownBackend {
    /// The name.
    pub got: String,
}

impl std::str::FromStr for Backend {
    type Err = UnknownBackend;

    fn from_str(text: &str) -> Result<Self, UnknownBackend> {
        let mut all = Self::ALL.into_iter();
        all.find(|backend| backend.name() == text)
            .ok_or_else(|| UnknownBackend {
                got: text.to_owned(),
            })
    }
}

/// What to do if the others do not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strict {
    /// That is an error.
    Yes,
    /// Go on alone, as a group of one.
    No,
}

/// The place of a rank, and where the others are: arguments as for [`tcp::join_with`].
#[derive(Debug)]
pub struct Seat<'a, A = SocketAddr> {
    /// What `addrs[rank]` leads to.
    pub listener: Listener,
    /// This rank.
    pub rank: Rank,
    /// Every rank's addresses.
    pub addrs: &'a [A],
    /// The same on all ranks.
    pub id: GroupId,
    /// The same on all ranks.
    pub config: Config,
}

/// What there is besides memory and sockets, and what may be done with it.
#[derive(Clone, Debug)]
pub struct Wires {
    /// RDMA devices, and whom they lead to.
    pub rdma: Option<Cabling>,
    /// Where NCCL is.
    pub libraries: Libraries,
    /// Whether bytes may leave this machine unencrypted.
    pub plaintext: Plaintext,
}

impl Default for Wires {
    /// Nothing, and nothing may.
    fn default() -> Self {
        Self {
            rdma: None,
            libraries: Libraries::default(),
            plaintext: Plaintext::Refused,
        }
    }
}

/// Why there is no group.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// A wire that nobody has asked for by name.
    #[error("{backend} is plaintext: not allowed")]
    Plaintext {
        /// Which.
        backend: Backend,
    },
    /// [`Wires::rdma`] is not there.
    #[error("rdma: no devices given")]
    NoDevices,
    /// `mpirun` has made this process another rank than it was to be.
    #[error("mpi: this process is {got} of {got_size}, expected {rank} of {size}")]
    OtherRank {
        /// What it was to be.
        rank: Rank,
        /// Of how many.
        size: usize,
        /// What it is.
        got: Rank,
        /// Of how many.
        got_size: u32,
    },
    /// Shared memory or TCP.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// RDMA.
    #[error(transparent)]
    Rdma(#[from] RdmaError),
    /// MLX's ring.
    #[error(transparent)]
    Ring(#[from] mlx_ring::JoinError),
    /// MPI.
    #[error(transparent)]
    Mpi(#[from] mpi::StartError),
    /// NCCL.
    #[error(transparent)]
    Nccl(#[from] nccl::JoinError),
}

/// Joins a group by `backend`. Collective.
///
/// # Errors
/// Any [`InitError`] if `strict`.
pub fn init<A: Clone + Into<Addrs>>(
    backend: Backend,
    strict: Strict,
    seat: Seat<'_, A>,
    wires: &Wires,
    deadline: Deadline,
) -> Result<Box<dyn Group>, InitError> {
    match (join(backend, seat, wires, deadline), strict) {
        (Err(_), Strict::No) => Ok(alone()),
        (joined, _) => joined,
    }
}

fn join<A: Clone + Into<Addrs>>(
    backend: Backend,
    seat: Seat<'_, A>,
    wires: &Wires,
    deadline: Deadline,
) -> Result<Box<dyn Group>, InitError> {
    // A ring looks at its addresses itself: loopback is no wire.
    if backend.is_plaintext() && backend != Backend::MlxRing {
        allowed(wires.plaintext).ok_or(InitError::Plaintext { backend })?;
    }
    let Seat {
        listener,
        rank,
        addrs,
        id,
        config,
    } = seat;
    Ok(match backend {
        Backend::Local => alone(),
        Backend::Any => shm::join_or_tcp(listener, rank, addrs, id, config, deadline)?,
        Backend::Shm => Box::new(shm::join_with(listener, rank, addrs, id, config, deadline)?),
        Backend::Tcp => Box::new(tcp::join_with(listener, rank, addrs, id, config, deadline)?),
        Backend::Rdma => {
            let cabling = wires.rdma.as_ref().ok_or(InitError::NoDevices)?;
            let cabling = cabling.with_tcp(config);
            Box::new(rdma::join(&cabling, listener, rank, addrs, id, deadline)?)
        }
        Backend::MlxRing => {
            let hosts: Vec<Vec<SocketAddr>> =
                addrs.iter().map(|own| own.clone().into().0).collect();
            let listeners = listener.into_sockets();
            let plaintext = wires.plaintext;
            Box::new(mlx_ring::join_with(
                listeners, rank, &hosts, plaintext, deadline,
            )?)
        }
        Backend::Mpi => world(rank, addrs.len())?,
        Backend::Nccl => {
            let meeting = tcp::join_with(listener, rank, addrs, id, config, deadline)?;
            let (libraries, plaintext) = (&wires.libraries, wires.plaintext);
            Box::new(nccl::join(&meeting, libraries, plaintext, deadline)?)
        }
    })
}

/// Whether somebody said so.
pub(crate) fn allowed(plaintext: Plaintext) -> Option<()> {
    (plaintext == Plaintext::Allowed).then_some(())
}

/// All ranks that `mpirun` started, of which this one has to be the one that is meant.
fn world(rank: Rank, size: usize) -> Result<Box<dyn Group>, InitError> {
    let world = mpi::Session::start()?.world();
    let (got, got_size) = (world.rank(), world.size());
    match got == rank && got_size as usize == size {
        true => Ok(world),
        false => Err(InitError::OtherRank {
            rank,
            size,
            got,
            got_size,
        }),
    }
}

pub(crate) fn alone() -> Box<dyn Group> {
    Box::new(local::ranks(1).remove(0))
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    fn listener() -> Listener {
        Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap()
    }

    /// What three ranks get.
    fn three(backend: Backend, wires: &Wires) -> Vec<Result<Box<dyn Group>, InitError>> {
        let listeners: Vec<Listener> = (0..3).map(|_| listener()).collect();
        let addrs: Vec<_> = listeners.iter().map(Listener::addr).collect();
        let id = GroupId::random();
        let by = Deadline::at(Instant::now() + Duration::from_secs(60));
        thread::scope(|scope| {
            let threads = (0..).zip(listeners).map(|(rank, listener)| {
                let addrs = &addrs;
                scope.spawn(move || {
                    let seat = Seat {
                        listener,
                        rank: Rank(rank),
                        addrs,
                        id,
                        config: Config::default(),
                    };
                    init(backend, Strict::Yes, seat, wires, by)
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
        for backend in [Backend::Any, Backend::Shm, Backend::Tcp, Backend::MlxRing] {
            works(backend, &Wires::default());
        }
        let (_fabric, cabling) = rdma::switched_cabling(3);
        let wires = Wires {
            rdma: Some(cabling),
            plaintext: Plaintext::Allowed,
            ..Wires::default()
        };
        works(Backend::Rdma, &wires);
    }

    fn works(backend: Backend, wires: &Wires) {
        let by = Deadline::at(Instant::now() + Duration::from_secs(60));
        let threads = three(backend, wires).into_iter().map(|group| {
            thread::spawn(move || {
                let group = group.unwrap();
                let tuning = group.tuning();
                let mut all = [0_u8; 3];
                let own = [u8::try_from(group.rank().0).unwrap()];
                group.all_gather(&own, &mut all, by).unwrap();
                group.barrier(by).unwrap();
                (all, tuning)
            })
        });
        let threads: Vec<_> = threads.collect();
        let mut got = threads.into_iter().map(|thread| thread.join().unwrap());
        let first = got.next().unwrap();
        assert_eq!(first.0, [0, 1, 2], "{backend:?}");
        assert!(got.all(|own| own == first), "all choose by {:?}", first.1);
        assert_eq!(first.1.wire, backend == Backend::Rdma, "{backend:?}");
    }

    #[test]
    fn a_plaintext_wire_says_so_and_wants_to_be_allowed() {
        for backend in Backend::ALL.into_iter().filter(|b| b.is_plaintext()) {
            if backend == Backend::MlxRing {
                continue; // on loopback, as here, nothing leaves
            }
            for refused in three(backend, &Wires::default()) {
                let expected = format!("{backend} is plaintext: not allowed");
                assert_eq!(refused.unwrap_err().to_string(), expected);
            }
        }
    }

    #[test]
    fn what_a_wire_lacks_is_named() {
        let wires = Wires {
            libraries: Libraries {
                nccl: Some("no-such-nccl.so".into()),
                cuda: Some("no-such-cuda.so".into()),
            },
            plaintext: Plaintext::Allowed,
            ..Wires::default()
        };
        for (backend, expected) in [
            (Backend::Rdma, "rdma: no devices given"),
            (Backend::Nccl, "nccl: open no-such-"),
            #[cfg(not(feature = "mpi"))]
            (Backend::Mpi, "mpi is not in this build"),
        ] {
            for error in three(backend, &wires) {
                let error = error.unwrap_err().to_string();
                assert!(error.starts_with(expected), "{error}");
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
            let seat = Seat {
                rank: Rank(0),
                addrs: &[listener.addr(), other.addr()],
                id: GroupId::random(),
                config: Config::default(),
                listener,
            };
            let by = Deadline::at(Instant::now() + Duration::from_millis(50));
            let group = init(Backend::Any, strict, seat, &Wires::default(), by);
            assert_eq!(group.is_ok_and(|group| group.size() == 1), alone);
        }
    }
}
