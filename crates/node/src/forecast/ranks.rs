//! Measures the mutual cost of ranks on this machine, with threads that compute and exchange as
//! ranks do. Other programs use the cores here as they will during a run.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::{KernelClass, Rank};
use paceline_comm::tcp::{self, GroupId};
use paceline_comm::{Backend, Deadline, Group, JoinParams, Strict, init};
use paceline_model::{Config, Split, SplitKind};
use paceline_tensor::Kernels;
use serde::{Deserialize, Serialize};

use super::layers::ProbeWeights;
use super::probe::{ENOUGH, PASSES, mean, timed};
use super::products::{ProductBuffers, ProductTime};
use super::{Result, Setting};
use crate::Error;

/// Numbers in a large message: 512 KiB, half of the logits of the largest vocabulary at hand.
const LARGE: usize = 1 << 17;

/// Delay of a rank before it sends: the time of a stage of a small model. Waiting ranks sleep after
/// some 100 microseconds.
const HOLD: Duration = Duration::from_millis(1);

/// Messages between two ranks on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct LinkCost {
    /// Bytes a second of large ones.
    pub(super) bytes_per_s: f64,
    /// Seconds until a sleeping rank has read a small one.
    pub(super) wake: f64,
}

/// Seconds of tensor-parallel ranks, each with a part of every matrix.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct GroupCost {
    /// A layer's products on one rank, while the others compute theirs.
    pub(super) free: f64,
    /// The same with the two exchanges of a tensor split, which wait for the slowest rank.
    pub(super) synced: f64,
    /// The ranks' parts of the head, and the gather of their logits.
    pub(super) head: f64,
    /// A whole layer's products on one rank while the others wait for their turn. Pipeline ranks
    /// run like this; other programs use their cores and caches meanwhile.
    pub(super) turns: f64,
    /// From the end of a rank's turn to the next one's start.
    pub(super) hop: f64,
}

impl GroupCost {
    /// Seconds of an exchange.
    pub(super) fn exchange(&self) -> f64 {
        ((self.synced - self.free) / 2.0).max(1e-7)
    }
}

/// Ranks with their parts of a model's layers, for repeated measurements.
pub(super) struct Team<'a> {
    config: &'a Config,
    class: KernelClass,
    backend: Backend,
    members: Vec<TeamRank>,
}

/// A rank with its part of every layer, and with layers of its own.
struct TeamRank {
    kernels: Arc<Kernels>,
    tensor: ProbeWeights,
    stage: ProbeWeights,
}

/// The splits that a team of a number of ranks measures.
pub(super) struct Splits {
    pub(super) tensor: Split,
    pub(super) pipeline: Split,
}

impl Splits {
    /// Splits over two and more ranks, as far as heads and layers can be divided. More ranks count
    /// as the largest measured number.
    pub(super) fn up_to(nodes: u32, config: &Config) -> impl Iterator<Item = Self> {
        let split = |kind, ranks| Split::plan(config, kind, ranks, &[]).ok();
        (2..=nodes).map_while(move |ranks| {
            Some(Self {
                tensor: split(SplitKind::Tensor, ranks)?,
                pipeline: split(SplitKind::Pipeline, ranks)?,
            })
        })
    }

    pub(super) fn ranks(&self) -> u32 {
        self.tensor.ranks()
    }
}

impl<'a> Team<'a> {
    /// Creates the ranks of `splits`, each with its own `kernels`.
    ///
    /// # Errors
    /// The file is invalid, or memory or threads cannot be allocated.
    pub(super) fn new(
        setting: Setting<'a>,
        splits: &Splits,
        kernels: impl Fn() -> Result<Arc<Kernels>>,
    ) -> Result<Self> {
        let member = |rank| {
            let kernels = kernels()?;
            let held = |split: &Split| {
                let shard = split.shard(setting.config, Rank(rank));
                ProbeWeights::pack(setting, &kernels, &shard)
            };
            let (tensor, stage) = (held(&splits.tensor)?, held(&splits.pipeline)?);
            Ok::<_, Error>(TeamRank {
                kernels,
                tensor,
                stage,
            })
        };
        Ok(Self {
            config: setting.config,
            class: setting.class,
            backend: setting.backend,
            members: (0..splits.ranks()).map(member).collect::<Result<_, _>>()?,
        })
    }

    /// Takes all measurements.
    pub(super) fn measure(&self) -> Result<GroupCost> {
        let logits = self.members.iter().map(|m| m.tensor.head_rows());
        let logits = logits.min().unwrap_or(0);
        let each = joined(self.members.len(), self.backend, |group| {
            let member = &self.members[group.rank().0 as usize];
            let step =
                |weights| ProductBuffers::new(self.config, self.class, &member.kernels, weights);
            let steps = [step(&member.tensor), step(&member.stage)];
            passes(group, member, steps, logits)
        })?;
        let [free, synced, turns, turn] = [0, 1, 3, 4].map(|i| mean(each.iter().map(|r| r[i])));
        Ok(GroupCost {
            free,
            synced,
            // The first rank leads: sampling starts when it has the logits.
            head: each[0][2] * self.members[0].tensor.head_share,
            turns,
            hop: (each[0][5] / each.len() as f64 - turn).max(1e-7),
        })
    }
}

/// Measures passes until the first rank ends them. Returns the seconds of a layer without
/// exchanges, of a layer with them, and of the head with the gather of its logits. Then, for turns:
/// seconds of one of this rank's own layers, of its turn, and of all turns.
fn passes(
    group: &dyn Group,
    member: &TeamRank,
    [mut step, mut alone]: [ProductBuffers<'_>; 2],
    logits: usize,
) -> Result<[f64; 6]> {
    let (weights, stage) = (&member.tensor, &member.stage.layers);
    let mut passes = Vec::new();
    let mut began = Instant::now();
    let mut counts = Vec::new();
    for pass in 0.. {
        // All ranks end at the same exchange: an earlier exit would fail the calls of the others.
        let enough = pass > PASSES || (pass > 1 && began.elapsed() >= ENOUGH);
        if meet(group, enough)? {
            break;
        }
        let free = step.products(&weights.layers, 1, |_, _| {}).all();
        step.head(weights);
        meet(group, false)?;
        let mut result = Ok(());
        let synced = step.products(&weights.layers, 1, |cut, sum| {
            if result.is_ok() {
                result = cut.complete(group, sum, &mut counts, soon());
            }
        });
        result?;
        let head = timed(|| {
            step.head(weights);
            result = gather(group, step.logits(logits));
        });
        result?;
        meet(group, false)?;
        let mut turns = ProductTime::default();
        let [turn, all] = in_turn(group, || {
            turns = alone.products(stage, 1, |_, _| {});
        })?;
        step.head(weights);
        if pass == 0 {
            began = Instant::now(); // it warmed up
        } else {
            passes.push([free, synced.all(), head, turns.all(), turn, all]);
        }
    }
    Ok([0, 1, 2, 3, 4, 5].map(|i| mean(passes.iter().map(|pass| pass[i]))))
}

/// Gathers every rank's logits on the first one, as the model's leader does.
fn gather(group: &dyn Group, logits: &mut [f32]) -> Result<(), paceline_comm::Error> {
    if group.rank() != Rank(0) {
        return group.send(logits, Rank(0), 0, soon());
    }
    let mut others = (1..group.size()).map(Rank);
    others.try_for_each(|rank| group.recv(logits, rank, 0, soon()))
}

/// Runs `work` on each rank after the previous one. Returns the seconds of this rank's work, and
/// until all were done.
fn in_turn(group: &dyn Group, work: impl FnOnce()) -> Result<[f64; 2]> {
    let (rank, ranks) = (group.rank().0, group.size());
    let (next, before) = (Rank((rank + 1) % ranks), Rank((rank + ranks - 1) % ranks));
    let (begun, mut baton) = (Instant::now(), [0.0f32]);
    if rank > 0 {
        group.recv(&mut baton, before, 0, soon())?;
    }
    let turn = timed(work);
    group.send(&baton, next, 0, soon())?;
    if rank == 0 {
        group.recv(&mut baton, before, 0, soon())?;
    }
    Ok([turn, begun.elapsed().as_secs_f64()])
}

/// A barrier that also returns whether the first rank ends the measurement. Uses a gather, which
/// every backend has.
fn meet(group: &dyn Group, end: bool) -> Result<bool, paceline_comm::Error> {
    let mut all = vec![0; group.size() as usize];
    group.all_gather(&[u8::from(end)], &mut all, soon())?;
    Ok(all[0] > 0)
}

/// Measures messages between two ranks, joined by `backend`.
pub(super) fn wire(backend: Backend) -> Result<LinkCost> {
    let rounds = joined(2, backend, |group| {
        let small = round(group, 1, Duration::ZERO)?;
        let large = round(group, LARGE, Duration::ZERO)?;
        let late = round(group, 1, HOLD)?;
        // An early exit would fail the other's last call.
        meet(group, true)?;
        Ok([small, large, late])
    })?;
    let [small, large, late] = rounds[0];
    Ok(LinkCost {
        bytes_per_s: 4.0 * LARGE as f64 / (large - small).max(1e-6),
        wake: (late / 2.0 - HOLD.as_secs_f64()).max(1e-7),
    })
}

/// Mean seconds for `n` numbers to the other rank and one back, each sent after `hold`.
fn round(group: &dyn Group, n: usize, hold: Duration) -> Result<f64> {
    const TIMES: usize = 64;
    let (there, back) = (vec![1.0f32; n], [1.0f32]);
    let (mut at_second, mut at_first) = (vec![0.0f32; n], [0.0f32]);
    let busy = || {
        let until = Instant::now() + hold;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    };
    let first = group.rank() == Rank(0);
    let mut begun = Instant::now();
    for time in 0..=TIMES {
        if first {
            busy();
            group.send(&there, Rank(1), 0, soon())?;
            group.recv(&mut at_first, Rank(1), 0, soon())?;
        } else {
            group.recv(&mut at_second, Rank(0), 0, soon())?;
            busy();
            group.send(&back, Rank(0), 0, soon())?;
        }
        if time == 0 {
            begun = Instant::now(); // it warmed up
        }
    }
    Ok(begun.elapsed().as_secs_f64() / TIMES as f64)
}

fn soon() -> Deadline {
    Deadline::at(Instant::now() + Duration::from_secs(60))
}

/// Runs `run` on each of a number of ranks, as threads of this process; returns their results.
fn joined<T: Send>(
    ranks: usize,
    backend: Backend,
    run: impl Fn(&dyn Group) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let bind = |_| tcp::Listener::bind(local);
    let listeners = (0..ranks).map(bind).collect::<Result<Vec<_>, _>>();
    let listeners = listeners.map_err(|source| Error::System {
        what: "listen for the ranks of a probe",
        source,
    })?;
    let addrs: Vec<SocketAddr> = listeners.iter().map(tcp::Listener::addr).collect();
    let (id, addrs, run) = (GroupId::random(), &addrs[..], &run);
    let at = move |listener, rank| -> Result<T> {
        let seat = JoinParams {
            listener,
            rank: Rank(rank),
            addrs,
            id,
            config: tcp::Config::default(),
        };
        run(&*init(backend, Strict::Yes, seat, &[], soon())?)
    };
    thread::scope(|scope| {
        let ranks = listeners.into_iter().zip(0..);
        let threads: Vec<_> = ranks
            .map(|(own, rank)| scope.spawn(move || at(own, rank)))
            .collect();
        let ends = threads.into_iter().map(thread::ScopedJoinHandle::join);
        ends.map(|end| {
            end.ok().ok_or(Error::Ended {
                what: "a rank of the probe",
            })?
        })
        .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchanges_are_what_being_in_step_adds() {
        let layer = |free, synced| {
            let all = GroupCost {
                free,
                synced,
                head: 1.0,
                turns: 2.0,
                hop: 0.1,
            };
            all.exchange()
        };
        assert!((layer(1.0, 3.0) - 1.0).abs() < 1e-12);
        assert_eq!(layer(3.0, 1.0), 1e-7, "noise is no time won");
    }

    #[test]
    fn messages_between_threads_take_time() {
        let wire = wire(Backend::Any).unwrap();
        assert!(wire.bytes_per_s > 1e6 && wire.wake < 1.0, "{wire:?}");
    }
}
