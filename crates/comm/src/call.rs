//! The announcement of a call, and the check of its arguments before it starts.

use std::fmt;

use paceline_base::Rank;

use crate::{Collective, Dtype, ElementCounts, Error, Reduce, Site};

/// The operation of a [`Call`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Everyone waits for everyone.
    Barrier,
    /// Every rank's part to every rank.
    AllGather,
    /// A reduction over all ranks, to every rank.
    AllReduce(Reduce),
    /// A reduction over all ranks, a part to every rank.
    ReduceScatter(Reduce),
    /// From every rank a part to every rank.
    AllToAll,
    /// The root's buffer to every rank.
    Broadcast { root: Rank },
    /// The sender's side of a message.
    Send {
        /// Receiver.
        to: Rank,
        /// Stream within the pair.
        tag: u32,
    },
    /// The receiver's side of a message.
    Recv {
        /// Sender.
        from: Rank,
        /// Stream within the pair.
        tag: u32,
    },
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Barrier => write!(f, "barrier"),
            Self::AllGather => write!(f, "all_gather"),
            Self::AllReduce(op) => write!(f, "all_reduce {op}"),
            Self::ReduceScatter(op) => write!(f, "reduce_scatter {op}"),
            Self::AllToAll => write!(f, "all_to_all"),
            Self::Broadcast { root } => write!(f, "broadcast from {root}"),
            Self::Send { to, tag } => write!(f, "send to {to} with tag {tag}"),
            Self::Recv { from, tag } => write!(f, "recv from {from} with tag {tag}"),
        }
    }
}

/// The identity of a call. The lockstep guard compares it between ranks before any data is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// Number of the call on its rank, from 1. Collectives and messages are counted apart.
    pub sequence: u64,
    pub kind: Kind,
    /// Element type; `U8` for a barrier.
    pub dtype: Dtype,
    /// Elements: of all ranks together for a gather or scatter, 0 for an all_to_all (each rank has
    /// its own), of one rank otherwise.
    pub length: u64,
    /// FNV-1a of the counts of a gather or scatter, else 0.
    pub digest: u64,
    /// Where in the program a collective is called; none for messages.
    pub site: Site,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Barrier => write!(f, "{}", self.kind)?,
            Kind::AllToAll => write!(f, "{} of {}", self.kind, self.dtype)?,
            Kind::AllGather | Kind::ReduceScatter(_) => {
                let Self {
                    kind,
                    dtype,
                    length,
                    digest,
                    ..
                } = self;
                write!(f, "{kind} of {length} {dtype} in counts #{digest:016x}")?;
            }
            _ => write!(f, "{} of {} {}", self.kind, self.length, self.dtype)?,
        }
        match self.site {
            Site::NONE => write!(f, " (call {})", self.sequence),
            site => write!(f, " (call {} at {site})", self.sequence),
        }
    }
}

impl Call {
    /// The call that `rank` of `size` announces when it starts `collective`.
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::NoSuchRank`] if the arguments do not fit the group: to be
    /// found before anything is sent.
    ///
    /// # Panics
    /// If input and output of a gather differ in type; the typed methods of
    /// [`dyn Group`](crate::Group) cannot do that.
    pub fn of(
        collective: &Collective<'_>,
        sequence: u64,
        rank: Rank,
        size: u32,
    ) -> Result<Self, Error> {
        let (kind, dtype, length, digest) = match collective {
            Collective::Barrier => (Kind::Barrier, Dtype::U8, 0, 0),
            Collective::AllGather { output, counts, .. } => {
                let length = counts.total(size as usize);
                (Kind::AllGather, output.dtype(), length, digest(counts))
            }
            Collective::AllReduce { data, op } => {
                (Kind::AllReduce(*op), data.dtype(), data.len(), 0)
            }
            Collective::ReduceScatter {
                input, counts, op, ..
            } => {
                let length = counts.total(size as usize);
                (
                    Kind::ReduceScatter(*op),
                    input.dtype(),
                    length,
                    digest(counts),
                )
            }
            Collective::AllToAll { input, .. } => (Kind::AllToAll, input.dtype(), 0, 0),
            Collective::Broadcast { data, root } => {
                (Kind::Broadcast { root: *root }, data.dtype(), data.len(), 0)
            }
        };
        let call = Self {
            digest,
            ..Self::plain(sequence, kind, dtype, length)
        };
        check(collective, call, rank, size).map(|()| call)
    }

    /// A call with no counts and no site: a message, or a call of a backend without the lockstep
    /// guard.
    pub const fn plain(sequence: u64, kind: Kind, dtype: Dtype, length: usize) -> Self {
        Self {
            sequence,
            kind,
            dtype,
            length: length as u64,
            digest: 0,
            site: Site::NONE,
        }
    }

    /// This call as made by `rank` of `size`, if the peer of its send or receive exists.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`] if the peer is `rank` itself or not in a group of `size`.
    pub fn with_peer(self, rank: Rank, size: u32) -> Result<Self, Error> {
        match self.kind {
            Kind::Send { to: peer, .. } | Kind::Recv { from: peer, .. }
                if peer == rank || peer.0 >= size =>
            {
                Err(Error::NoSuchRank {
                    call: self,
                    rank,
                    named: peer,
                    size,
                })
            }
            _ => Ok(self),
        }
    }
}

/// Whether the arguments of `collective` fit a group of `size`.
fn check(collective: &Collective<'_>, call: Call, rank: Rank, size: u32) -> Result<(), Error> {
    let same = |buffer, expected: usize, got: usize| {
        let error = Error::Length {
            call,
            rank,
            buffer,
            expected: expected as u64,
            got: got as u64,
        };
        if expected == got { Ok(()) } else { Err(error) }
    };
    match collective {
        Collective::Barrier | Collective::AllReduce { .. } => Ok(()),
        Collective::Broadcast { root, .. } if root.0 >= size => Err(Error::NoSuchRank {
            call,
            rank,
            named: *root,
            size,
        }),
        Collective::Broadcast { .. } => Ok(()),
        Collective::AllGather {
            input,
            output,
            counts,
        } => {
            same("counts", size as usize, entries(counts, size))?;
            if let Some(input) = input {
                assert_eq!(input.dtype(), output.dtype(), "element types of one gather");
                same("input", counts.of(rank.0 as usize), input.len())?;
            }
            same("output", counts.total(size as usize), output.len())
        }
        Collective::ReduceScatter {
            input,
            output,
            counts,
            ..
        } => {
            assert_eq!(
                input.dtype(),
                output.dtype(),
                "element types of one scatter"
            );
            same("counts", size as usize, entries(counts, size))?;
            same("input", counts.total(size as usize), input.len())?;
            same("output", counts.of(rank.0 as usize), output.len())
        }
        Collective::AllToAll {
            input,
            output,
            sends,
            receives,
        } => {
            assert_eq!(
                input.dtype(),
                output.dtype(),
                "element types of one exchange"
            );
            let own = rank.0 as usize;
            same("sends", size as usize, entries(sends, size))?;
            same("receives", size as usize, entries(receives, size))?;
            same("receives", sends.of(own), receives.of(own))?;
            same("input", sends.total(size as usize), input.len())?;
            same("output", receives.total(size as usize), output.len())
        }
    }
}

/// Number of ranks that `counts` has entries for.
fn entries(counts: &ElementCounts<'_>, size: u32) -> usize {
    match counts {
        ElementCounts::Even(_) => size as usize,
        ElementCounts::Each(each) => each.len(),
    }
}

/// The error of ranks that made different calls, from the calls they announced, in rank order. The
/// majority counts as right; on a tie, the call of the lowest rank.
pub(crate) fn judge(calls: &[(Rank, Call)]) -> Error {
    let votes = |call: &Call| calls.iter().filter(|(_, other)| other == call).count();
    let usual = calls.iter().rev().max_by_key(|(_, call)| votes(call));
    let expected = usual.expect("a rank has its own call").1;
    let odd = calls.iter().find(|(_, call)| *call != expected);
    let (rank, got) = *odd.unwrap_or(&calls[0]);
    Error::Mismatch {
        rank,
        expected,
        got,
    }
}

/// FNV-1a, 64 bits (offset basis and prime from the authors' page, isthe.com/chongo/tech/comp/fnv).
fn digest(counts: &ElementCounts<'_>) -> u64 {
    let step = |hash: u64, count: usize| {
        (count as u64)
            .to_le_bytes()
            .iter()
            .fold(hash, |hash, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
            })
    };
    match counts {
        ElementCounts::Even(count) => step(0, *count),
        ElementCounts::Each(counts) => counts
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |hash, count| step(hash, *count)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Data, DataMut};

    fn gather(input: usize, output: usize, counts: ElementCounts<'_>) -> Result<Call, Error> {
        let (input, mut output) = (vec![0.0_f32; input], vec![0.0_f32; output]);
        let (input, output) = (Data::new(&input), DataMut::new(&mut output));
        Call::of(
            &Collective::AllGather {
                input: Some(input),
                output,
                counts,
            },
            7,
            Rank(1),
            3,
        )
    }

    fn text(result: Result<Call, Error>) -> String {
        result.map_or_else(|error| error.to_string(), |call| call.to_string())
    }

    #[test]
    fn gathers_are_checked_before_they_start() {
        let end = " in counts #";
        for (input, output, counts, expected) in [
            (2, 9, ElementCounts::Each(&[3, 2, 4]), "all_gather of 9 f32"),
            (2, 6, ElementCounts::Even(2), "all_gather of 6 f32"),
            (
                3,
                9,
                ElementCounts::Each(&[3, 2, 4]),
                "length of input on rank 1 is 3, expected 2",
            ),
            (
                2,
                8,
                ElementCounts::Each(&[3, 2, 4]),
                "length of output on rank 1 is 8, expected 9",
            ),
            (
                2,
                5,
                ElementCounts::Each(&[3, 2]),
                "length of counts on rank 1 is 2, expected 3",
            ),
            (
                0,
                0,
                ElementCounts::Each(&[]),
                "length of counts on rank 1 is 0, expected 3",
            ),
        ] {
            let text = text(gather(input, output, counts));
            assert!(text.contains(expected) && text.contains(end), "{text}");
        }
        let digest = |counts| gather(2, 9, counts).unwrap().digest;
        assert_ne!(
            digest(ElementCounts::Each(&[3, 2, 4])),
            digest(ElementCounts::Each(&[4, 2, 3]))
        );
    }

    #[test]
    fn peers_must_exist() {
        let call = |kind| Call {
            sequence: 1,
            kind,
            dtype: Dtype::F32,
            length: 4,
            digest: 0,
            site: Site::NONE,
        };
        let send = |to| {
            text(
                call(Kind::Send {
                    to: Rank(to),
                    tag: 5,
                })
                .with_peer(Rank(1), 3),
            )
        };
        assert_eq!(send(2), "send to rank 2 with tag 5 of 4 f32 (call 1)");
        for to in [1, 3] {
            assert!(
                send(to).ends_with("is not its peer in a group of 3"),
                "{}",
                send(to)
            );
        }
        let mut data = [0.0_f32; 4];
        let mut broadcast = |root| {
            let data = DataMut::new(&mut data);
            Call::of(
                &Collective::Broadcast {
                    data,
                    root: Rank(root),
                },
                2,
                Rank(1),
                3,
            )
        };
        assert_eq!(
            text(broadcast(1)),
            "broadcast from rank 1 of 4 f32 (call 2)"
        );
        assert!(matches!(
            broadcast(3),
            Err(Error::NoSuchRank { named: Rank(3), .. })
        ));
    }
}
