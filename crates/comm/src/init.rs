//! One way in for every backend, as MLX's `init`.

use paceline_base::Rank;

use crate::tcp::{self, Addrs, Config, GroupId, JoinError, Listener};
use crate::{Deadline, Group, local, shm};

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
}

impl Backend {
    /// The name used in options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Local => "local",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
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
        let mut all = [Self::Any, Self::Local, Self::Shm, Self::Tcp].into_iter();
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

/// Joins a group by `backend`. Collective; arguments as for [`tcp::join_with`].
///
/// # Errors
/// Any [`JoinError`] if `strict`.
#[allow(
    clippy::too_many_arguments,
    reason = "those of join, and two words about how"
)]
pub fn init<A: Clone + Into<Addrs>>(
    backend: Backend,
    strict: Strict,
    listener: Listener,
    rank: Rank,
    addrs: &[A],
    id: GroupId,
    config: Config,
    deadline: Deadline,
) -> Result<Box<dyn Group>, JoinError> {
    let joined: Result<Box<dyn Group>, JoinError> = match backend {
        Backend::Local => return Ok(alone()),
        Backend::Any => shm::join_or_tcp(listener, rank, addrs, id, config, deadline),
        Backend::Shm => shm::join_with(listener, rank, addrs, id, config, deadline)
            .map(|group| Box::new(group) as Box<dyn Group>),
        Backend::Tcp => tcp::join_with(listener, rank, addrs, id, config, deadline)
            .map(|group| Box::new(group) as Box<dyn Group>),
    };
    match (joined, strict) {
        (Err(_), Strict::No) => Ok(alone()),
        (joined, _) => joined,
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

    #[test]
    fn every_backend_makes_a_group_that_works() {
        for backend in [Backend::Any, Backend::Shm, Backend::Tcp] {
            let bind = |_| Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
            let listeners: Vec<Listener> = (0..3).map(bind).collect();
            let addrs: Vec<_> = listeners.iter().map(Listener::addr).collect();
            let (id, by) = (
                GroupId::random(),
                Deadline::at(Instant::now() + Duration::from_secs(20)),
            );
            let threads = (0..).zip(listeners).map(|(rank, listener)| {
                let addrs = addrs.clone();
                thread::spawn(move || {
                    let config = Config::default();
                    let (rank, strict) = (Rank(rank), Strict::Yes);
                    let group = init(backend, strict, listener, rank, &addrs, id, config, by);
                    let group = group.unwrap();
                    let mut all = [0_u8; 3];
                    let own = [u8::try_from(group.rank().0).unwrap()];
                    group.all_gather(&own, &mut all, by).unwrap();
                    group.barrier(by).unwrap();
                    all
                })
            });
            for thread in threads.collect::<Vec<_>>() {
                assert_eq!(thread.join().unwrap(), [0, 1, 2], "{backend:?}");
            }
        }
    }

    #[test]
    fn whoever_is_not_strict_goes_on_alone() {
        let listener = || Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let other = listener();
        for (strict, alone) in [(Strict::Yes, false), (Strict::No, true)] {
            let own = listener();
            let addrs = [own.addr(), other.addr()];
            let by = Deadline::at(Instant::now() + Duration::from_millis(50));
            let (id, config) = (GroupId::random(), Config::default());
            let group = init(Backend::Any, strict, own, Rank(0), &addrs, id, config, by);
            assert_eq!(group.is_ok_and(|group| group.size() == 1), alone);
        }
    }
}
