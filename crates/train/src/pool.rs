//! Parallel loops; the distribution over threads does not affect results.

use std::sync::Mutex;

use paceline_base::lock;
use paceline_tensor::ThreadPool;

/// Calls `f` with every chunk of `len` elements and its number.
pub(crate) fn chunks<T: Send>(
    pool: &ThreadPool,
    out: &mut [T],
    len: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    let count = out.len().div_ceil(len.max(1));
    let parts = Mutex::new(out.chunks_mut(len.max(1)).enumerate());
    pool.run(count, &|_| {
        let next = lock(&parts).next();
        if let Some((i, part)) = next {
            f(i, part);
        }
    });
}

/// The results of `f` for each number below `n`, in order.
pub(crate) fn map<T: Send>(pool: &ThreadPool, n: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let mut out: Vec<Option<T>> = (0..n).map(|_| None).collect();
    chunks(pool, &mut out, 1, |i, slot| slot[0] = Some(f(i)));
    out.into_iter().flatten().collect()
}

/// The results of `f` for every chunk of `len` elements, in order.
pub(crate) fn chunks_map<T: Send, R: Send>(
    pool: &ThreadPool,
    values: &mut [T],
    len: usize,
    f: impl Fn(usize, &mut [T]) -> R + Sync,
) -> Vec<R> {
    let mut out: Vec<Option<R>> = values.chunks(len.max(1)).map(|_| None).collect();
    let mut both: Vec<_> = values.chunks_mut(len.max(1)).zip(&mut out).collect();
    chunks(pool, &mut both, 1, |i, pair| {
        let (chunk, slot) = &mut pair[0];
        **slot = Some(f(i, chunk));
    });
    out.into_iter().flatten().collect()
}
