//! A rank whose links a heartbeat thread monitors: the part that all transports between processes
//! share. `control` has the thread.

mod control;
mod starvation;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use paceline_base::Rank;

use self::control::run_heartbeats;
pub use self::control::{Controls, MonitoredLinks};
pub use self::starvation::Starvation;
use crate::join::{JoinError, JoinRecord};
use crate::locks::lock;
use crate::transport_group::TransportGroup;
use crate::{
    Algorithm, Collective, Data, DataMut, Deadline, ElementCounts, Error, Tuning, deadline,
};

/// Calls of each size that measure the links; the median counts.
const SMALL_CALLS: usize = 11;
const LARGE_CALLS: usize = 3;

/// Bytes of a large call: long against the latency of [`SMALL_CALLS`], about 1 ms for 8 ranks on 2
/// cores.
const LARGE_BYTES: usize = 128 << 10;

/// A rank of a group of processes: its links, and its heartbeat thread.
#[derive(derive_more::Debug)]
#[debug("{:?}", self.linked)]
pub struct MonitoredGroup<T: MonitoredLinks> {
    pub(crate) linked: Arc<TransportGroup<T>>,
    keeper: Mutex<Option<JoinHandle<()>>>,
    pub(crate) origin: JoinRecord,
    pub(crate) splits: AtomicU64,
}

impl<T: MonitoredLinks> MonitoredGroup<T> {
    /// Starts the heartbeat thread and measures the links for the choice of algorithms. Collective.
    ///
    /// # Errors
    /// [`JoinError::System`] without a thread; errors of the first calls of the group.
    pub fn start(
        linked: TransportGroup<T>,
        origin: JoinRecord,
        deadline: Deadline,
    ) -> Result<Self, JoinError> {
        let linked = Arc::new(linked);
        let (kept, silence) = (Arc::clone(&linked), origin.config.silence);
        let keeper = std::thread::Builder::new()
            .name(format!("keeper of {}", linked.rank()))
            .spawn(move || run_heartbeats(&kept, silence))
            .map_err(|source| JoinError::System {
                what: "start a thread",
                source,
            })?;
        let force = origin.config.force;
        let keeping = Self {
            linked,
            keeper: Mutex::new(Some(keeper)),
            origin,
            splits: AtomicU64::new(0),
        };
        let tuning = measure(&keeping.linked, force, deadline);
        keeping.linked.agree(tuning.map_err(JoinError::of_call)?);
        keeping.linked.reset_traffic();
        Ok(keeping)
    }

    pub fn linked(&self) -> &TransportGroup<T> {
        &self.linked
    }
}

impl<T: MonitoredLinks> Drop for MonitoredGroup<T> {
    fn drop(&mut self) {
        self.linked.leave();
        self.linked.transport().controls().stop();
        let mut keeper = lock(&self.keeper);
        if let Some(keeper) = keeper.take() {
            // A thread that panicked has nothing left to send.
            let _ = keeper.join();
        }
        self.linked.transport().close();
    }
}

/// α and β of the slowest rank, rank 0's forced algorithm, and whether any rank has a link off its
/// machine. The same on all ranks.
fn measure<T: MonitoredLinks>(
    linked: &TransportGroup<T>,
    force: Option<Algorithm>,
    deadline: Deadline,
) -> Result<Tuning, Error> {
    let others = (linked.size() - 1) as usize;
    if others == 0 {
        return Ok(Tuning {
            force,
            ..Tuning::default()
        });
    }
    let small = typical(linked, 8, SMALL_CALLS, deadline)?;
    let large = typical(linked, LARGE_BYTES, LARGE_CALLS, deadline)?;
    let beta_ns = (large - small).max(0.0) * 1e9 / (LARGE_BYTES * others) as f64;
    let code = force.map_or(-1.0, |algorithm| f64::from(algorithm.code()));
    let wire = f64::from(u8::from(linked.transport().has_wire()));
    let own = [small * 1e6, beta_ns, code, wire];
    let mut all = vec![0.0; own.len() * (others + 1)];
    gather(linked, &own, &mut all, deadline)?;
    let each = |at: usize| all.iter().skip(at).step_by(own.len()).copied();
    let most = |at: usize| each(at).fold(0.0, f64::max);
    let forced = Algorithm::ALL
        .into_iter()
        .find(|a| f64::from(a.code()) == all[2]);
    Ok(Tuning {
        alpha_us: most(0),
        beta_ns: most(1),
        force: forced,
        wire: most(3) > 0.0,
    })
}

/// Median time in seconds of `collectives` gathers of `bytes` from each rank.
fn typical<T: MonitoredLinks>(
    linked: &TransportGroup<T>,
    bytes: usize,
    calls: usize,
    deadline: Deadline,
) -> Result<f64, Error> {
    let input = vec![0_u8; bytes];
    let mut output = vec![0_u8; bytes * linked.size() as usize];
    let mut times = Vec::with_capacity(calls);
    for _ in 0..calls {
        let start = deadline::now();
        gather(linked, &input, &mut output, deadline)?;
        let took = deadline::now().saturating_duration_since(start);
        times.push(took.as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[calls / 2])
}

/// Gathers `input` of every rank, in rank order, before the group is returned to the caller.
/// Collective.
///
/// # Errors
/// Any [`Error`], for [`JoinError::of_call`].
pub fn gather<T: MonitoredLinks, E: crate::Element>(
    linked: &TransportGroup<T>,
    input: &[E],
    output: &mut [E],
    deadline: Deadline,
) -> Result<(), Error> {
    let counts = ElementCounts::Even(input.len());
    linked.rehearse(
        Collective::AllGather {
            input: Some(Data::new(input)),
            output: DataMut::new(output),
            counts,
        },
        deadline,
    )
}

/// The methods of [`Group`] that a [`TransportGroup`] has too, for a type that has one at this path
/// behind `self`.
#[doc(hidden)]
#[macro_export]
macro_rules! group_methods {
    ($($linked:tt)+) => {
        fn rank(&self) -> ::paceline_base::Rank {
            self.$($linked)+.rank()
        }

        fn size(&self) -> u32 {
            self.$($linked)+.size()
        }

        fn run_at(
            &self,
            site: $crate::Site,
            collective: $crate::Collective<'_>,
            deadline: $crate::Deadline,
        ) -> Result<(), $crate::Error> {
            self.$($linked)+.run_at(site, collective, deadline)
        }

        fn run(
            &self,
            collective: $crate::Collective<'_>,
            deadline: $crate::Deadline,
        ) -> Result<(), $crate::Error> {
            self.$($linked)+.run(collective, deadline)
        }

        fn mark(&self, number: u64) {
            self.$($linked)+.mark(number);
        }

        fn send_data(
            &self,
            message: $crate::Data<'_>,
            to: ::paceline_base::Rank,
            tag: u32,
            deadline: $crate::Deadline,
        ) -> Result<(), $crate::Error> {
            self.$($linked)+.send(message, to, tag, deadline)
        }

        fn recv_data(
            &self,
            into: $crate::DataMut<'_>,
            from: ::paceline_base::Rank,
            tag: u32,
            deadline: $crate::Deadline,
        ) -> Result<(), $crate::Error> {
            self.$($linked)+.recv(into, from, tag, deadline)
        }

        fn traffic(&self) -> $crate::Traffic {
            self.$($linked)+.traffic()
        }

        fn sent_to(&self) -> Vec<::paceline_base::Bytes> {
            self.$($linked)+.sent_to()
        }

        fn tuning(&self) -> $crate::Tuning {
            self.$($linked)+.tuning()
        }
    };
}

/// The trait `Group` for a public type around [`MonitoredGroup`].
macro_rules! keeping_group {
    ($type:ident, $join:path) => {
        impl Group for $type {
            $crate::group_methods!(0.linked);

            fn copies(&self) -> $crate::CopyStats {
                self.0.linked.copies()
            }

            fn register_pages(
                &self,
                pages: &std::sync::Arc<$crate::Pages>,
            ) -> Option<$crate::MemoryRegistration> {
                self.0.linked.register_pages(pages)
            }

            fn split(
                &self,
                color: u32,
                key: u32,
                deadline: Deadline,
            ) -> Result<Box<dyn Group>, Error> {
                let SplitMember { call, rank, ranks } = members(self, color, key, deadline)?;
                let origin = self.0.part(color, &ranks);
                match $join(origin, rank, deadline) {
                    Ok(group) => Ok(Box::new(group)),
                    Err(error) => Err(error.of_split(call, rank, &ranks)),
                }
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", self.0)
            }
        }
    };
}
pub(crate) use keeping_group;

impl<T: MonitoredLinks> MonitoredGroup<T> {
    /// The join record of a group of `ranks` that is split off this one.
    pub fn part(&self, color: u32, ranks: &[Rank]) -> JoinRecord {
        use std::sync::atomic::Ordering;
        let number = self.splits.fetch_add(1, Ordering::Relaxed) + 1;
        let addr = |rank: &Rank| self.origin.addrs[rank.0 as usize].clone();
        JoinRecord {
            addrs: ranks.iter().map(addr).collect(),
            id: self.origin.id.derive(number, color),
            ..self.origin.clone()
        }
    }
}
