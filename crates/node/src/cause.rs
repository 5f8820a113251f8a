//! Root cause of an epoch's failure, from the failure reports of its ranks.
//!
//! When one rank dies, all others fail within moments and in any order. The user's message must
//! name the rank that died, so each report gets a degree of doubt and the surest one is the cause.

use std::fmt;
use std::time::Duration;

use paceline_base::Rank;
use paceline_cluster::workers::{Event, last_words};
use paceline_process::Ending;

use paceline_worker::messages::FromWorker;

/// A report that a worker failed, from its process, its connection or itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FailureReport {
    /// A process ended.
    Exited {
        rank: Rank,
        ending: Ending,
        tail: Vec<String>,
    },
    /// A process missed its heartbeats.
    Silent { rank: Rank, silence: Duration },
    /// A process sent a message that does not parse.
    Garbled { rank: Rank, what: String },
    /// A worker's machine is unreachable.
    Gone { rank: Rank, reason: String },
    /// A worker did not start, or cannot be told its orders.
    Unreachable { rank: Rank, reason: String },
    /// A worker reported that its epoch failed.
    Failed {
        rank: Rank,
        reason: String,
        blamed: Option<Rank>,
        /// Its device interrupted a step that took too long.
        interrupted: bool,
    },
}

impl FailureReport {
    /// The failure report in an event, else the worker's message.
    pub(crate) fn of(event: Event<FromWorker>) -> Result<Self, (Rank, FromWorker)> {
        Ok(match event {
            Event::Exited { rank, ending, tail } => Self::Exited { rank, ending, tail },
            Event::Silent { rank, silence } => Self::Silent { rank, silence },
            Event::Garbled { rank, garbage } => Self::Garbled {
                rank,
                what: garbage.to_string(),
            },
            Event::Gone { rank, reason } => Self::Gone { rank, reason },
            Event::Message { rank, message } => match message {
                FromWorker::Failed {
                    epoch: _,
                    reason,
                    blamed,
                    interrupted,
                } => Self::Failed {
                    rank,
                    reason,
                    blamed: blamed.map(Rank),
                    interrupted,
                },
                message => return Err((rank, message)),
            },
        })
    }

    pub(crate) const fn reporter(&self) -> Rank {
        match self {
            Self::Exited { rank, .. }
            | Self::Silent { rank, .. }
            | Self::Garbled { rank, .. }
            | Self::Gone { rank, .. }
            | Self::Unreachable { rank, .. }
            | Self::Failed { rank, .. } => *rank,
        }
    }

    /// The rank to blame by this report alone.
    pub(crate) const fn rank(&self) -> Rank {
        match self {
            Self::Exited { rank, .. }
            | Self::Silent { rank, .. }
            | Self::Garbled { rank, .. }
            | Self::Gone { rank, .. }
            | Self::Unreachable { rank, .. }
            | Self::Failed {
                rank, blamed: None, ..
            } => *rank,
            Self::Failed {
                blamed: Some(rank), ..
            } => *rank,
        }
    }

    /// Whether it reports a step that the rank's device interrupted.
    pub(crate) const fn is_interrupted(&self) -> bool {
        matches!(
            self,
            Self::Failed {
                interrupted: true,
                ..
            }
        )
    }

    /// Whether a worker, machine or connection was lost, so that another epoch may succeed. A rank
    /// that gives its own reason would give it again.
    pub(crate) const fn is_loss(&self) -> bool {
        match self {
            Self::Exited { ending, .. } => matches!(ending, Ending::Signal(_)),
            Self::Failed { blamed, .. } => blamed.is_some(),
            Self::Silent { .. } | Self::Gone { .. } | Self::Unreachable { .. } => true,
            Self::Garbled { .. } => false,
        }
    }

    /// Rank of the report as a root cause; the lowest is the most certain.
    const fn doubt(&self) -> u8 {
        match self {
            Self::Exited {
                ending: Ending::Signal(_),
                ..
            }
            | Self::Silent { .. }
            | Self::Garbled { .. }
            | Self::Gone { .. } => 0,
            Self::Unreachable { .. } | Self::Failed { blamed: None, .. } => 1,
            Self::Failed { .. } => 2,
            Self::Exited { .. } => 4, // its earlier report has the reason
        }
    }
}

impl fmt::Display for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited { rank, ending, tail } => {
                write!(f, "{rank} {ending}")?;
                match last_words(tail) {
                    Some(line) => write!(f, "; its last words: {line}"),
                    None => Ok(()),
                }
            }
            Self::Silent { rank, silence } => {
                let seconds = silence.as_secs_f64();
                write!(f, "{rank} has given no sign of life for {seconds:.1} s")
            }
            Self::Garbled { rank, what } => write!(f, "{rank} speaks nonsense: {what}"),
            Self::Gone { rank, reason } => write!(f, "{rank} on {reason}"),
            Self::Unreachable { rank, reason } => write!(f, "{rank}: {reason}"),
            Self::Failed {
                rank,
                reason,
                blamed: None,
                ..
            } => write!(f, "{rank}: {reason}"),
            Self::Failed {
                rank,
                reason,
                blamed: Some(blamed),
                ..
            } => write!(f, "{blamed} is lost, says {rank}: {reason}"),
        }
    }
}

/// The most certain of `signs`, the first among equals. `signs` is not empty.
pub(crate) fn cause(signs: &[FailureReport]) -> &FailureReport {
    let said_why = |of: Rank| {
        let says = |sign: &FailureReport| match sign {
            FailureReport::Failed { rank, .. } | FailureReport::Unreachable { rank, .. } => {
                *rank == of
            }
            _ => false,
        };
        signs.iter().any(says)
    };
    let doubt = |sign: &&FailureReport| match sign {
        // The process ended without an order or a reason, which is as certain as its own report.
        FailureReport::Exited { rank, .. } if !said_why(*rank) => sign.doubt().min(1),
        // It failed because of another rank.
        FailureReport::Failed {
            blamed: Some(rank), ..
        } if said_why(*rank) => sign.doubt() + 1,
        _ => sign.doubt(),
    };
    signs
        .iter()
        .min_by_key(doubt)
        .expect("a failure has a sign")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(rank: u32, blamed: Option<u32>) -> FailureReport {
        FailureReport::Failed {
            rank: Rank(rank),
            reason: "it broke".to_owned(),
            blamed: blamed.map(Rank),
            interrupted: false,
        }
    }

    fn exited(rank: u32, ending: Ending) -> FailureReport {
        FailureReport::Exited {
            rank: Rank(rank),
            ending,
            tail: Vec::new(),
        }
    }

    #[test]
    fn memory_that_was_not_there_is_named_before_a_backtrace() {
        let tail = [
            "memory allocation of 1048576 bytes failed",
            "stack backtrace:",
            "note: Some details are omitted",
        ];
        let tail = tail.map(str::to_owned).to_vec();
        let (rank, ending) = (Rank(1), Ending::Signal(6));
        let text = FailureReport::Exited { rank, ending, tail }.to_string();
        assert!(text.ends_with("its last words: memory allocation of 1048576 bytes failed"));
    }

    #[test]
    fn the_one_that_died_is_named_whatever_came_first() {
        let silent = FailureReport::Silent {
            rank: Rank(2),
            silence: Duration::from_millis(1600),
        };
        for (signs, rank, text) in [
            (
                vec![
                    failed(0, Some(2)),
                    exited(0, Ending::Code(1)),
                    exited(2, Ending::Signal(9)),
                ],
                2,
                "rank 2 was ended by SIGKILL",
            ),
            (
                vec![failed(0, Some(2)), silent],
                2,
                "rank 2 has given no sign of life for 1.6 s",
            ),
            (
                vec![failed(0, Some(1)), failed(1, None)],
                1,
                "rank 1: it broke",
            ),
            (
                vec![failed(0, Some(1))],
                1,
                "rank 1 is lost, says rank 0: it broke",
            ),
            (
                vec![failed(2, Some(0)), failed(0, Some(1))],
                1,
                "rank 1 is lost, says rank 0: it broke",
            ),
            (
                vec![
                    failed(0, Some(2)),
                    exited(0, Ending::Code(1)),
                    exited(2, Ending::Code(1)),
                ],
                2,
                "rank 2 exited with code 1",
            ),
            (
                vec![exited(1, Ending::Code(3))],
                1,
                "rank 1 exited with code 3",
            ),
        ] {
            let cause = cause(&signs);
            assert_eq!(cause.rank(), Rank(rank), "{signs:?}");
            assert_eq!(cause.to_string(), text);
        }
    }

    #[test]
    fn last_words_are_passed_on() {
        let sign = FailureReport::Exited {
            rank: Rank(1),
            ending: Ending::Code(101),
            tail: vec!["thread panicked".to_owned(), "out of range".to_owned()],
        };
        assert!(sign.to_string().ends_with("its last words: out of range"));
    }
}
