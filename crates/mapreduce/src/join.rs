//! A join of two tables by integer keys, reduced for each key.
//!
//! Inputs are the keys and values of the left table, then those of the right one. Each pair of a
//! left and a right row with equal keys gives a value: an expression of `x` (left) and `y` (right).
//! The values of each key are reduced as by [`groupby`](crate::groupby); sums are exact. The left
//! table is cut into parts; the right one is in the memory of each process.
//!
//! A graphics processor partitions the rows of both tables by the keys' hashes: the lookups of a
//! partition stay in a cache. The order of rows changes no bit.

use std::ops::Range;

use crate::device::ComputeDevice;
use crate::expr::{ExprProgram, Registers};
use crate::groupby::{GroupTable, hash};
use crate::{Decoded, Error, FileSource, RowSource as _, Values};

/// Columns of an expression of a pair.
pub(crate) const COLUMNS: usize = 2;

/// Pairs that are computed at a time: three columns of 32 KiB.
const PAIRS: usize = 4096;

/// Bits of a partition's number: 256 partitions of a million rows fit a second-level cache each. A
/// multiple of 8, which the device sorts by.
const PARTITION_BITS: u32 = 8;

/// Rows from which on a device's partitions are worth its copies of them.
const ROWS_WORTH: usize = 1 << 12;

/// The right table of a join: rows by key.
#[derive(Debug)]
pub(crate) struct RightTable {
    /// Keys and their rows by hash, open addressing. A slot without rows is free.
    slots: Vec<(i64, Range<u32>)>,
    /// Values of the rows, those of a key together.
    values: Vec<f64>,
}

impl RightTable {
    /// Reads the table. Memory: up to 92 bytes a row; 72 of them stay.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Right`] with more than 2^31 rows.
    pub(crate) fn read(
        keys: &FileSource,
        values: &FileSource,
        device: Option<&dyn ComputeDevice>,
    ) -> Result<Self, Error> {
        let rows = keys.rows();
        if rows > 1 << 31 {
            return Err(Error::Right { rows });
        }
        let (keys, values) = (whole(keys, &(0..rows))?, nearest(values, &(0..rows))?);
        let mut order = partitioned(&keys, device);
        // By key within a partition; the sort is stable, so equal keys keep their order.
        order.sort_by_key(|row| (partition(keys[*row as usize]), keys[*row as usize]));
        let mut slots = vec![(0, 0..0); (2 * rows as usize).next_power_of_two().max(2)];
        let mask = slots.len() - 1;
        let mut first = 0u32;
        for rows in order.chunk_by(|a, b| keys[*a as usize] == keys[*b as usize]) {
            let key = keys[rows[0] as usize];
            let mut at = hash(key) & mask;
            while !slots[at].1.is_empty() {
                at = (at + 1) & mask;
            }
            slots[at] = (key, first..first + rows.len() as u32);
            first += rows.len() as u32;
        }
        let values = order.iter().map(|row| values[*row as usize]).collect();
        Ok(Self { slots, values })
    }

    /// Values of the rows with a key.
    fn find(&self, key: i64) -> &[f64] {
        let mask = self.slots.len() - 1;
        let mut at = hash(key) & mask;
        loop {
            let (other, rows) = &self.slots[at];
            if rows.is_empty() || *other == key {
                return &self.values[rows.start as usize..rows.end as usize];
            }
            at = (at + 1) & mask;
        }
    }
}

/// Adds the pairs of rows of the left table to `groups`.
pub(crate) fn join(
    left: (&FileSource, &FileSource),
    rows: &Range<u64>,
    right: &RightTable,
    program: &ExprProgram,
    groups: &mut GroupTable,
    device: Option<&dyn ComputeDevice>,
) -> Result<(), Error> {
    let (keys, values) = (whole(left.0, rows)?, nearest(left.1, rows)?);
    let mut pairs = Pairs::default();
    for row in partitioned(&keys, device) {
        let (key, x) = (keys[row as usize], values[row as usize]);
        for y in right.find(key) {
            pairs.keys.push(i128::from(key));
            pairs.x.push(x);
            pairs.y.push(*y);
            if pairs.x.len() == PAIRS {
                pairs.add_to(groups, program);
            }
        }
    }
    pairs.add_to(groups, program);
    Ok(())
}

/// Pairs that were not computed yet.
#[derive(Default)]
struct Pairs {
    keys: Vec<i128>,
    x: Vec<f64>,
    y: Vec<f64>,
    values: Vec<f64>,
    registers: Registers,
}

impl Pairs {
    fn add_to(&mut self, groups: &mut GroupTable, program: &ExprProgram) {
        let columns: [&[f64]; COLUMNS] = [&self.x, &self.y];
        program.run(&columns, 0, &mut self.registers, &mut self.values);
        groups.take(&Values::Wide(&self.keys), &Values::Floats(&self.values));
        self.keys.clear();
        for column in [&mut self.x, &mut self.y, &mut self.values] {
            column.clear();
        }
    }
}

const fn partition(key: i64) -> u32 {
    // The low bits choose the slot of a table.
    (hash(key) >> 24) as u32 & ((1 << PARTITION_BITS) - 1)
}

/// The order of rows in which a device has partitioned them; without one as they are.
pub(crate) fn partitioned(keys: &[i64], device: Option<&dyn ComputeDevice>) -> Vec<u32> {
    let device = device.filter(|_| keys.len() >= ROWS_WORTH);
    let order = device.and_then(|device| {
        let partitions: Vec<u32> = keys.iter().map(|key| partition(*key)).collect();
        let order = device.partition(&partitions, PARTITION_BITS).ok()?;
        (order.len() == keys.len()).then_some(order)
    });
    order.unwrap_or_else(|| (0..keys.len() as u32).collect())
}

fn read(source: &FileSource, rows: &Range<u64>) -> Result<Vec<u8>, Error> {
    let values = (rows.end - rows.start) as usize * source.columns() as usize;
    let mut bytes = vec![0; values * source.dtype().bytes()];
    source.read(rows.clone(), &mut bytes)?;
    Ok(bytes)
}

/// Keys of rows; those of u64 keep their bits.
pub(crate) fn whole(source: &FileSource, rows: &Range<u64>) -> Result<Vec<i64>, Error> {
    let bytes = read(source, rows)?;
    Ok(match Decoded::default().decode(source.dtype(), &bytes) {
        Values::Floats(values) => values.iter().map(|value| *value as i64).collect(),
        Values::Wide(values) => values.iter().map(|value| *value as i64).collect(),
    })
}

fn nearest(source: &FileSource, rows: &Range<u64>) -> Result<Vec<f64>, Error> {
    let bytes = read(source, rows)?;
    let mut decoded = Decoded::default();
    let values = decoded.decode(source.dtype(), &bytes);
    Ok(values.nearest(&mut Vec::new()).to_vec())
}
