//! A collective call, as data.

use paceline_base::Rank;

use crate::{Data, DataMut, ElementCounts, Reduce};

/// A collective call, as data: its buffers and the place of the result.
#[derive(Debug)]
pub enum Collective<'a> {
    /// See `barrier`.
    Barrier,
    /// See `all_gather` and `all_gather_v`. `input` and `output` have one type.
    AllGather {
        /// This rank's part, `(counts[rank],)`; `None` if it is already in place in `output`.
        input: Option<Data<'a>>,
        /// All parts in rank order, `(sum of counts,)`.
        output: DataMut<'a>,
        /// The length of every part, the same on all ranks.
        counts: ElementCounts<'a>,
    },
    /// See `all_reduce`.
    AllReduce {
        /// This rank's values, then the result, `(n,)`.
        data: DataMut<'a>,
        op: Reduce,
    },
    /// See `reduce_scatter` and `reduce_scatter_v`. `input` and `output` have one type.
    ReduceScatter {
        /// This rank's values of all parts, `(sum of counts,)`.
        input: Data<'a>,
        /// This rank's part of the result, `(counts[rank],)`.
        output: DataMut<'a>,
        /// The length of every part, the same on all ranks.
        counts: ElementCounts<'a>,
        op: Reduce,
    },
    /// See `all_to_all` and `all_to_all_v`. `input` and `output` have one type.
    AllToAll {
        /// The data that each rank gets from this one, in rank order, `(sum of sends,)`.
        input: Data<'a>,
        /// The data that this rank gets from each, in rank order, `(sum of receives,)`.
        output: DataMut<'a>,
        sends: ElementCounts<'a>,
        /// Elements from each rank; must equal that rank's `sends` entry for this one.
        receives: ElementCounts<'a>,
    },
    /// See `broadcast`.
    Broadcast {
        /// The data to send on `root`, the destination elsewhere, `(n,)`.
        data: DataMut<'a>,
        root: Rank,
    },
}
