//! Compares the bits of two instruction sets. Runs once, for a set whose machines we lack for
//! tests.

use paceline_base::BlockType;

use super::{Kernels, Product};
use crate::activations::{Activations, Precision};
use crate::dispatch::KernelTable;
use crate::meter::Meter;
use crate::packing::{PackOptions, PackedMatrix, StoredMatrix};
use crate::pool::ThreadPool;
use crate::storage::random::random_row;

const COLS: usize = 512;
/// Two groups and a rest.
const ROWS: usize = 40;
/// Two tiles of 16 and a rest.
const BATCH: usize = 37;

/// Whether two tables give the same bits for products of random blocks of every type with many
/// rows, for one leaf and for several.
pub(crate) fn same_products(one: &'static KernelTable, other: &'static KernelTable) -> bool {
    let with = |table| {
        let pool = ThreadPool::new(1).ok()?;
        let meter = Meter::default();
        Some(Kernels { table, pool, meter })
    };
    let (Some(one), Some(other)) = (with(one), with(other)) else {
        return false;
    };
    let mut types = BlockType::ALL
        .into_iter()
        .filter(|t| !t.computed().is_float());
    types.all(|block_type| {
        let bytes = random_row(block_type, ROWS * COLS, 7);
        let leaves = [0, 224].map(|cols| [Precision::Eight, Precision::Fifteen].map(|p| (cols, p)));
        leaves.into_iter().flatten().all(|(leaf_cols, precision)| {
            let stored = StoredMatrix::new(block_type, ROWS, COLS, &bytes);
            let [one, other] = [&one, &other].map(|k| product(k, stored, leaf_cols, precision));
            one.zip(other).is_some_and(|(one, other)| one == other)
        })
    })
}

/// The bits of a product; `None` when there is no memory for it.
fn product(
    kernels: &Kernels,
    stored: StoredMatrix<'_>,
    leaf_cols: usize,
    precision: Precision,
) -> Option<Vec<u32>> {
    let options = PackOptions {
        leaf_cols,
        as_f32: false,
    };
    let weights = PackedMatrix::new(stored, options, kernels.pool()).ok()?;
    let mut x = Activations::new(BATCH, COLS, leaf_cols, Some(precision));
    kernels.fill_rows(&mut x, |t, row| {
        let wave = |k: usize| ((k + 1) * (t + 3) % 101) as f32 - 50.0;
        row.iter_mut().enumerate().for_each(|(k, x)| *x = wave(k));
    });
    let mut out = vec![0.0f32; BATCH * ROWS];
    let product = Product::new(&weights, &mut out);
    kernels.products(&x, [product]);
    Some(out.iter().map(|y| y.to_bits()).collect())
}
