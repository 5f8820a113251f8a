//! Partial results of parts in progress, until the rest of each part has arrived.
//!
//! Only groups are sent in several messages. Each group counts rows of its part, so a part's
//! messages have at most as many groups as the part has values. So no worker fills the parent's
//! memory.

use std::collections::BTreeMap;

use crate::{JobSpec, Kind, PartialResult, RowPartition};

/// Received partial results, by worker and part.
#[derive(Debug, Default)]
pub(super) struct Pieces(BTreeMap<(u32, u64), PartialPart>);

#[derive(Debug, Default)]
struct PartialPart {
    pieces: Vec<PartialResult>,
    /// Values that they count.
    values: u64,
}

impl Pieces {
    /// Keeps a piece of a part that `worker` holds. False if it cannot be one: it is empty, or it
    /// has with those before more values than the part.
    pub(super) fn keep(
        &mut self,
        worker: u32,
        part: RowPartition,
        piece: PartialResult,
        task: &JobSpec,
    ) -> bool {
        let came = self.0.entry((worker, part.id)).or_default();
        let values = match (&piece, &task.kind) {
            (PartialResult::GroupBy(groups), Kind::GroupBy(grouping)) => groups.values_of(grouping),
            _ => None,
        };
        let values = values.filter(|more| *more > 0);
        let all = values.and_then(|more| came.values.checked_add(more));
        let Some(all) = all.filter(|all| *all <= values_of(part, task)) else {
            return false;
        };
        came.values = all;
        came.pieces.push(piece);
        true
    }

    /// Removes the partial results of a part that `worker` holds. `None` if they and `rest` are not
    /// the part's result: another number of values.
    pub(super) fn take(
        &mut self,
        worker: u32,
        part: RowPartition,
        rest: &PartialResult,
        task: &JobSpec,
    ) -> Option<Vec<PartialResult>> {
        let came = self.0.remove(&(worker, part.id)).unwrap_or_default();
        if let (PartialResult::GroupBy(groups), Kind::GroupBy(grouping)) = (rest, &task.kind) {
            let values = groups.values_of(grouping)?.checked_add(came.values)?;
            if values != values_of(part, task) {
                return None;
            }
        }
        Some(came.pieces)
    }

    pub(super) fn lose(&mut self, worker: u32) {
        self.0.retain(|(of, _), _| *of != worker);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

fn values_of(part: RowPartition, task: &JobSpec) -> u64 {
    let columns = task.inputs().first().map_or(1, |input| input.columns);
    part.rows.saturating_mul(columns)
}
