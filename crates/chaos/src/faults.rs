//! The fault schedule: which fault hits which node and when, drawn from a seed.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use paceline_base::SplitMix64;

use super::memory::MemoryCgroup;

/// Declares the faults: each with its name on the command line and its meaning for help texts.
macro_rules! faults {
    ($($fault:ident $name:literal: $meaning:literal;)*) => {
        /// A fault of a node.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Fault {
            $(#[doc = $meaning] $fault,)*
        }

        impl Fault {
            /// All of them.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$fault),*];

            /// Its name on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$fault => $name,)*
                }
            }

            /// Its meaning, for help texts.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$fault => $meaning,)*
                }
            }
        }
    };
}

faults! {
    KillNode "kill-node":
        "SIGKILL to the node's process: a crash or a power cut";
    KillWorker "kill-worker":
        "SIGKILL to the node's worker alone: a crash";
    FreezeNode "freeze-node":
        "SIGSTOP to the node and its worker, SIGCONT when the answers ended: a sleeping machine";
    FreezeWorker "freeze-worker":
        "SIGSTOP to the worker alone: a process that the system does not run";
    HangWorker "hang-worker":
        "SIGUSR2 to the worker: its next layer never ends, as in a kernel or a driver that \
         hangs";
    LeaveNode "leave-node":
        "SIGTERM to the node's process: its work moves before it goes";
    Flap "flap":
        "SIGKILL to the node's worker three times, each time once the model answers again";
    CutNode "cut-node":
        "The node's cable is pulled, and plugged in again when the answers ended; with \
         --namespaces";
    SplitNode "split-node":
        "The node's cable is pulled, and plugged in again 5 s later, while answers go on; with \
         --namespaces";
    FillDisk "fill-disk":
        "The disk of the node's home is full until the answers ended; with --namespaces";
    OutOfMemory "out-of-memory":
        "The node's worker gets no further page of memory, and the kernel kills it; with \
         --namespaces";
    BitRot "bit-rot":
        "Bits of the node's copy of the model change, and its worker is killed, so that they \
         are read; with --namespaces";
    CutFile "cut-file":
        "The node's copy of the model loses its second half, and its worker is killed; with \
         --namespaces";
    LoseInLoad "lose-in-load":
        "The model is unloaded and loaded again; meanwhile SIGKILL to a worker or a node";
    CutPair "cut-pair":
        "The node and another one cannot speak until the answers ended; with --namespaces";
    CutOneWay "cut-one-way":
        "Nothing that the node sends to another one arrives until the answers ended; with \
         --namespaces";
    DelayLinks "delay-links":
        "All that the node sends and receives arrives 50 ms later, for 5 s; with --namespaces";
    LimitLinks "limit-links":
        "The node's links carry 1 Mbit/s each way, for 5 s; with --namespaces";
    LossyLinks "lossy-links":
        "The node's links lose 5 % of frames, for 5 s; with --namespaces";
}

impl Fault {
    /// Whether it damages a copy of the model.
    pub(crate) const fn is_of_copy(self) -> bool {
        matches!(self, Self::BitRot | Self::CutFile)
    }

    /// Whether it needs a network, a disk or a control group of the node's own.
    fn needs_namespaces(self) -> bool {
        self.meaning().ends_with("with --namespaces")
    }

    /// Whether it hits a worker and spares its node, so that two faults leave copies of all tokens.
    /// `HangWorker` is excluded: a hang in a worker's first step is only detected after 30 s.
    const fn is_of_worker(self) -> bool {
        matches!(
            self,
            Self::KillWorker | Self::FreezeWorker | Self::OutOfMemory
        )
    }

    /// Whether no second fault can be combined with it. It takes the second node, or leaves none
    /// with a worker.
    const fn is_alone(self) -> bool {
        matches!(
            self,
            Self::Flap | Self::LoseInLoad | Self::CutPair | Self::CutOneWay
        )
    }

    /// Checks whether it is available here. It may need a list of a node's processes, networks and
    /// disks of the nodes' own, or a bound on a worker's memory.
    fn check(self, namespaces: bool) -> Result<()> {
        match self {
            Self::KillNode | Self::LeaveNode => Ok(()),
            _ if self.needs_namespaces() && !namespaces => bail!("{self} needs --namespaces"),
            Self::OutOfMemory => {
                let made = MemoryCgroup::new().map(drop);
                made.with_context(|| format!("{self} needs a control group"))
            }
            _ if self.needs_namespaces() => Ok(()),
            _ if cfg!(target_os = "linux") => Ok(()),
            _ => bail!("{self} needs Linux, which tells the processes of a node"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A fault of the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) fault: Fault,
    /// Index into the nodes that the instance has at that moment.
    pub(crate) victim: usize,
    /// Fragments of the first answer before the fault.
    pub(crate) at_token: u32,
    /// A fault of another node's worker, and its delay after the first.
    pub(crate) second: Option<(Fault, Duration)>,
}

/// Of this many rounds, one has a simultaneous second fault, and one has a second fault during
/// recovery.
const SECOND_EVERY: usize = 5;

/// Delay at which workers restart after a detected fault.
const DURING_RECOVERY: Duration = Duration::from_millis(700);

/// Faults to draw from: `asked`, or all that this system supports.
///
/// # Errors
/// A requested fault that is unavailable here.
pub fn of(asked: &[Fault], namespaces: bool) -> Result<Vec<Fault>> {
    if asked.is_empty() {
        let all = Fault::ALL.into_iter();
        return Ok(all
            .filter(|fault| fault.check(namespaces).is_ok())
            .collect());
    }
    for fault in asked {
        fault.check(namespaces)?;
    }
    Ok(asked.to_vec())
}

/// Draws `rounds` faults. Each kind is equally frequent, in random order.
pub(crate) fn schedule(seed: u64, rounds: u32, faults: &[Fault], tokens: u32) -> Vec<Round> {
    let mut random = SplitMix64::new(seed);
    let mut bag: Vec<Fault> = Vec::new();
    let mut next = |_| {
        if bag.is_empty() {
            bag = faults.to_vec();
            random.shuffle(&mut bag);
        }
        let fault = bag.pop().unwrap_or(Fault::KillNode);
        let workers: Vec<Fault> = faults
            .iter()
            .copied()
            .filter(|it| it.is_of_worker())
            .collect();
        let after = [Some(Duration::ZERO), Some(DURING_RECOVERY)];
        let after = after.get(random.below(SECOND_EVERY)).copied().flatten();
        let other = random.below(1 << 16);
        Round {
            fault,
            victim: random.below(1 << 16),
            // Early enough that all answers are running, with half of their tokens to come.
            at_token: 2 + random.below((tokens as usize / 2).max(1)) as u32,
            second: after
                .filter(|_| !workers.is_empty() && !fault.is_alone())
                .map(|after| (workers[other % workers.len()], after)),
        }
    };
    (0..rounds).map(&mut next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_follows_from_its_seed() {
        let of = |seed| schedule(seed, 10 * Fault::ALL.len() as u32, &Fault::ALL, 300);
        assert_eq!(of(3), of(3));
        assert_ne!(of(3), of(4));
        for fault in Fault::ALL {
            let count = of(3).iter().filter(|round| round.fault == fault).count();
            assert_eq!(count, 10, "{fault}");
        }
        assert!(of(3).iter().all(|round| (2..152).contains(&round.at_token)));
        let seconds = of(3).into_iter().filter_map(|round| round.second);
        let (at_once, later): (Vec<_>, Vec<_>) = seconds.partition(|(_, after)| after.is_zero());
        assert!(!at_once.is_empty() && !later.is_empty());
    }

    #[test]
    fn a_fault_that_cannot_be_had_says_what_it_needs() {
        for fault in Fault::ALL.into_iter().filter(|it| it.needs_namespaces()) {
            let error = of(&[Fault::KillNode, fault], false).unwrap_err();
            assert_eq!(error.to_string(), format!("{fault} needs --namespaces"));
            assert!(!of(&[], false).unwrap().contains(&fault));
        }
    }
}
