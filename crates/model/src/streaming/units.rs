//! The units of a model: which are in memory, which are read next, and which go.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use paceline_tensor::MemoryBlock;

use super::budget::{Division, StreamCounts};
use super::disk::Piece;
use crate::packed_file::records::{BLOCK, Hash, PIECE, StreamUnit, StreamedMatrix};

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) units: HashMap<StreamUnit, UnitState>,
    /// Layers that do not stay, in their order.
    pub(super) passing: Vec<usize>,
    /// Of `units`, those of a unit one after another.
    matrices: Vec<StreamedMatrix>,
    pub(super) queue: VecDeque<(StreamUnit, Piece)>,
    /// Experts that a later layer will probably use, in the order of their requests.
    guesses: VecDeque<StreamUnit>,
    /// Guessed experts that were requested.
    guessed: Vec<StreamUnit>,
    layers: Pool,
    experts: Pool,
    clock: u64,
    pub(super) counts: StreamCounts,
    pub(super) failed: Option<String>,
    pub(super) closed: bool,
}

/// Memory for units of one kind.
#[derive(Debug, Default)]
struct Pool {
    budget: u64,
    /// Bytes of units and of idle blocks.
    used: u64,
    idle: Vec<Arc<MemoryBlock>>,
    /// Units that may go, by their last use.
    free: BTreeMap<u64, StreamUnit>,
}

#[derive(Debug)]
pub(super) struct UnitState {
    /// Range in the state's matrices.
    matrices: Range<usize>,
    bytes: u64,
    pub(super) stays: bool,
    /// A step uses it or will.
    pinned: bool,
    last: u64,
    pub(super) at: Place,
}

#[derive(Debug)]
pub(super) enum Place {
    Disk,
    Reading {
        /// Pieces to be read.
        left: usize,
        /// By piece; zeros before it is read.
        hashes: Vec<Hash>,
        block: Arc<MemoryBlock>,
    },
    Memory(Arc<MemoryBlock>),
}

impl State {
    /// Of `matrices`, all on the disk.
    pub(super) fn of(mut matrices: Vec<StreamedMatrix>) -> Self {
        matrices.sort_by_key(|matrix| matrix.unit);
        Self {
            units: units_of(&matrices),
            matrices,
            ..Self::default()
        }
    }

    const fn pool(&mut self, unit: StreamUnit) -> &mut Pool {
        match unit {
            StreamUnit::Layer(_) => &mut self.layers,
            StreamUnit::Expert(..) => &mut self.experts,
        }
    }

    /// Whether a unit is in memory. Units without matrices always are.
    pub(super) fn is_there(&self, unit: StreamUnit) -> bool {
        let own = self.units.get(&unit);
        own.is_none_or(|own| matches!(own.at, Place::Memory(_)))
    }

    pub(super) fn is_on_its_way(&self, unit: StreamUnit) -> bool {
        let own = self.units.get(&unit);
        own.is_none_or(|own| !matches!(own.at, Place::Disk))
    }

    /// Bytes of blocks in memory.
    pub(super) const fn used(&self) -> u64 {
        self.layers.used + self.experts.used
    }

    /// Lets layers go that were read ahead.
    pub(super) fn release_passing(&mut self) {
        for place in 0..self.passing.len() {
            self.release(StreamUnit::Layer(self.passing[place]));
        }
    }

    /// Ends the use of a unit, which may go from now on.
    pub(super) fn release(&mut self, unit: StreamUnit) {
        if let Some(own) = self.units.get_mut(&unit) {
            own.pinned = false;
            self.set_free(unit);
        }
    }

    /// Enters a unit among those that may go, if it may.
    fn set_free(&mut self, unit: StreamUnit) {
        if let Some(own) = self.units.get(&unit)
            && matches!(own.at, Place::Memory(_))
            && !own.pinned
            && !own.stays
        {
            let last = own.last;
            self.pool(unit).free.insert(last, unit);
        }
    }

    /// Pins a unit that is not on the disk only.
    pub(super) fn keep(&mut self, unit: StreamUnit) {
        self.clock += 1;
        let clock = self.clock;
        if let Some(own) = self.units.get_mut(&unit)
            && !matches!(own.at, Place::Disk)
        {
            let last = std::mem::replace(&mut own.last, clock);
            own.pinned = true;
            self.pool(unit).free.remove(&last);
        }
    }

    /// Pins a unit, and queues its reads if it is on the disk only and there is room.
    pub(super) fn pin(&mut self, unit: StreamUnit) {
        self.keep(unit);
        let own = self.units.get(&unit);
        let Some(own) = own.filter(|own| matches!(own.at, Place::Disk)) else {
            return;
        };
        let (bytes, range) = (own.bytes, own.matrices.clone());
        let Some(block) = self.take_block(unit, bytes) else {
            return;
        };
        let (mut nth, mut start) = (0, 0);
        for matrix in &self.matrices[range] {
            let size = matrix.memory.size();
            for at in (0..size).step_by(PIECE) {
                let piece = Piece {
                    nth,
                    from: matrix.start + at as u64,
                    len: PIECE.min(size - at),
                    block: Arc::clone(&block),
                    to: start + at,
                };
                self.queue.push_back((unit, piece));
                nth += 1;
            }
            start += size.next_multiple_of(BLOCK);
        }
        let clock = self.clock;
        if let Some(own) = self.units.get_mut(&unit) {
            own.at = Place::Reading {
                left: nth,
                hashes: vec![[0; 32]; nth],
                block,
            };
            (own.pinned, own.last) = (true, clock);
        }
    }

    /// Has a layer's chosen `experts` read, as far as there is room, and then the guesses.
    pub(super) fn request(&mut self, layer: usize, experts: &[usize]) {
        let units = || experts.iter().map(|e| StreamUnit::Expert(layer, *e));
        // Experts in memory must not make room for those on disk.
        units().for_each(|unit| self.keep(unit));
        for unit in units() {
            self.pin(unit);
            if !self.is_on_its_way(unit) {
                return;
            }
        }
        while let Some(unit) = self.guesses.pop_front() {
            let was_there = self.is_there(unit);
            self.pin(unit);
            if !self.is_on_its_way(unit) {
                self.guesses.clear(); // no room
                return;
            }
            self.guessed.push(unit);
            self.counts.guesses += u64::from(!was_there);
        }
    }

    /// Has `units` read when all that are needed are on their way.
    pub(super) fn guess(&mut self, units: impl Iterator<Item = StreamUnit>) {
        self.guesses.extend(units);
    }

    /// Drops guesses that a layer's router did not choose, and reads of them that did not begin.
    pub(super) fn end_guesses(&mut self, layer: usize, chosen: &[usize]) {
        self.guesses.clear();
        for unit in std::mem::take(&mut self.guessed) {
            let is_chosen = |e: &usize| unit == StreamUnit::Expert(layer, *e);
            if !chosen.iter().any(is_chosen) {
                self.cancel(unit);
                self.release(unit);
            }
        }
    }

    /// Takes the reads of a unit back, if none of them began.
    fn cancel(&mut self, unit: StreamUnit) {
        let queued = self.queue.iter().filter(|(of, _)| *of == unit).count();
        let Some(own) = self.units.get_mut(&unit) else {
            return;
        };
        match &own.at {
            Place::Reading { left, hashes, .. } if *left == queued && queued == hashes.len() => {
                let at = std::mem::replace(&mut own.at, Place::Disk);
                self.queue.retain(|(of, _)| *of != unit);
                if let Place::Reading { block, .. } = at {
                    self.pool(unit).idle.push(block);
                }
            }
            _ => {}
        }
    }

    /// A block of `bytes` for `unit`: an idle one, a new one, or that of the least recently used
    /// unit. `None` without room.
    fn take_block(&mut self, unit: StreamUnit, bytes: u64) -> Option<Arc<MemoryBlock>> {
        loop {
            let pool = self.pool(unit);
            let mut idle = pool.idle.iter();
            if let Some(at) = idle.position(|block| block.size() as u64 == bytes) {
                return Some(pool.idle.swap_remove(at));
            }
            if pool.used + bytes <= pool.budget {
                break;
            }
            match pool.idle.pop() {
                Some(other) => pool.used -= other.size() as u64,
                None => {
                    let (_, oldest) = pool.free.pop_first()?;
                    self.drop_unit(oldest);
                }
            }
        }
        match MemoryBlock::new(bytes as usize) {
            Ok(block) => {
                self.pool(unit).used += bytes;
                self.counts.most = self.counts.most.max(self.used());
                Some(Arc::new(block))
            }
            Err(error) => {
                self.failed.get_or_insert_with(|| error.to_string());
                None
            }
        }
    }

    /// Gives the memory of a unit to others, if it is there.
    pub(super) fn drop_unit(&mut self, unit: StreamUnit) {
        let own = self.units.get_mut(&unit);
        let Some(own) = own.filter(|own| matches!(own.at, Place::Memory(_))) else {
            return;
        };
        let (last, at) = (own.last, std::mem::replace(&mut own.at, Place::Disk));
        let matrices = &self.matrices[own.matrices.clone()];
        matrices.iter().for_each(|matrix| matrix.memory.remove());
        let pool = self.pool(unit);
        pool.free.remove(&last);
        if let Place::Memory(block) = at {
            pool.idle.push(block);
        }
    }

    /// Takes the hash of a piece that was read. The last one of a unit checks all of it, has its
    /// matrices use the block, and gives true.
    ///
    /// # Errors
    /// The reason why the unit is not as it was written.
    pub(super) fn take(
        &mut self,
        (unit, piece): (StreamUnit, &Piece),
        hash: Hash,
    ) -> Result<bool, String> {
        self.counts.read += piece.len as u64;
        let Some(own) = self.units.get_mut(&unit) else {
            return Ok(false);
        };
        let Place::Reading {
            left,
            hashes,
            block,
        } = &mut own.at
        else {
            return Ok(false);
        };
        hashes[piece.nth] = hash;
        *left -= 1;
        if *left > 0 {
            return Ok(false);
        }
        let (mut first, mut start) = (0, 0);
        for matrix in &self.matrices[own.matrices.clone()] {
            let n = matrix.memory.size().div_ceil(PIECE);
            let sum = blake3::hash(hashes[first..first + n].as_flattened());
            if *sum.as_bytes() != matrix.sum {
                return Err(format!("{unit:?} has other bytes than were written"));
            }
            // SAFETY: the bytes were read. The streamer keeps the block while a step uses the unit,
            // and lets nothing be written to it.
            unsafe { matrix.memory.place(block, start) };
            first += n;
            start += matrix.memory.size().next_multiple_of(BLOCK);
        }
        own.at = Place::Memory(Arc::clone(block));
        self.set_free(unit);
        Ok(true)
    }

    pub(super) fn count(&mut self, unit: StreamUnit, is_hit: bool) {
        if self.units.contains_key(&unit) {
            match is_hit {
                true => self.counts.hits += 1,
                false => self.counts.misses += 1,
            }
        }
    }

    /// Divides `budget` among layers and experts, decides which layers stay, and drops the rest.
    /// Gives the bytes that are needed in any case.
    pub(super) fn set_budget(&mut self, budget: u64) -> u64 {
        let (mut layers, mut expert, mut experts) = (Vec::new(), 0, 0);
        for (unit, own) in &self.units {
            match unit {
                StreamUnit::Layer(index) => layers.push((*index, own.bytes)),
                StreamUnit::Expert(..) => {
                    expert = own.bytes.max(expert);
                    experts += own.bytes;
                }
            }
        }
        layers.sort_unstable();
        let division = Division::of(&layers, (expert, experts), budget);
        (self.layers.budget, self.experts.budget) = (division.layers, division.experts);
        self.passing.clear();
        for (place, (index, _)) in layers.iter().enumerate() {
            let (unit, stays) = (StreamUnit::Layer(*index), place < division.stay);
            if !stays {
                self.passing.push(*index);
            }
            self.units.entry(unit).and_modify(|own| own.stays = stays);
        }
        self.counts.budget = budget;
        let idle = self.units.iter().filter(|(_, own)| !own.stays);
        let idle: Vec<StreamUnit> = idle.map(|(unit, _)| *unit).collect();
        for unit in idle {
            self.release(unit);
            self.drop_unit(unit);
        }
        for pool in [&mut self.layers, &mut self.experts] {
            let blocks = std::mem::take(&mut pool.idle);
            pool.used -= blocks.iter().map(|block| block.size() as u64).sum::<u64>();
        }
        division.least
    }
}

/// The units of `matrices`, whose matrices follow one another.
fn units_of(matrices: &[StreamedMatrix]) -> HashMap<StreamUnit, UnitState> {
    let mut units = HashMap::new();
    let mut first = 0;
    for run in matrices.chunk_by(|a, b| a.unit == b.unit) {
        let bytes = run.iter().map(|matrix| matrix.memory.size());
        let state = UnitState {
            matrices: first..first + run.len(),
            bytes: bytes.map(|n| n.next_multiple_of(BLOCK) as u64).sum(),
            stays: false,
            pinned: false,
            last: 0,
            at: Place::Disk,
        };
        first += run.len();
        units.insert(run[0].unit, state);
    }
    units
}
