//! The machine's measured limits: the best speed of work that a kernel is compared with.
//!
//! A limit is a lower bound that this program can show, not a data sheet's figure: the best of
//! loops that do nothing else. On virtual machines it changes within seconds as the host moves
//! cores. So measure it together with the kernel.

use std::sync::atomic::{AtomicU64, Ordering};

use paceline_base::Bytes;

use crate::isa::Isa;
use crate::memory::HugeMap;
use crate::pool::ThreadPool;
use crate::{Error, Kernels};

/// Bytes that a thread reads at a time: whole pages, few enough that the threads end together.
const PART: usize = 2 << 20;

/// Dot products of a timed loop for the peak of integer arithmetic: some ms.
const DOTS: u64 = 1 << 21;

/// Memory to be read, in huge pages where the system has them.
#[derive(Debug)]
pub struct ReadLimit {
    memory: HugeMap,
}

impl ReadLimit {
    /// Reserves and touches `bytes` of memory, rounded up to 2 MiB. To measure memory and not a
    /// cache, use several times the size of the last-level cache.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn new(bytes: usize, pool: &ThreadPool) -> Result<Self, Error> {
        let mut memory = HugeMap::zeroed(bytes.next_multiple_of(PART))?;
        let parts = crate::pool::DisjointMut::new(&mut memory, PART);
        // SAFETY: each task has a part of its own.
        pool.run(parts.len(), &|i| unsafe { parts.part(i) }.fill(i as u8));
        Ok(Self { memory })
    }

    /// Memory that a pass reads.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.memory.len() as u64)
    }

    /// Reads all memory once, on all threads of `kernels`, asking for lines `ahead` bytes before
    /// they are read if that is not 0. For callers to time.
    pub fn read(&self, kernels: &Kernels, ahead: usize) {
        let sum = AtomicU64::new(0);
        let part = |i: usize| {
            let bytes = &self.memory[i * PART..(i + 1) * PART];
            // SAFETY: the table was detected; the part has whole runs of 256 bytes.
            let read = unsafe { (kernels.table.read)(bytes, ahead) };
            sum.fetch_add(read, Ordering::Relaxed); // so that the loads are not left out
        };
        kernels.pool().run(self.memory.len() / PART, &part);
    }
}

/// Does dot products of bytes on registers, those that the kernels use, tiles' too, on all threads
/// of `kernels` for about a ms. For callers to time; returns the operations done, a multiplication
/// and an addition being two.
pub fn integer_work(kernels: &Kernels) -> u64 {
    let threads = kernels.pool().threads();
    let sum = AtomicU64::new(0);
    let work = |_| {
        // SAFETY: the table was detected.
        sum.fetch_add(unsafe { (kernels.table.dots)(DOTS) }, Ordering::Relaxed);
    };
    kernels.pool().run(threads, &work);
    2 * sum.into_inner()
}

/// Loads all of `bytes`, runs of 256, asking for lines `ahead` of them.
///
/// # Safety
/// The features of `S`.
#[inline(always)]
pub(crate) unsafe fn read<S: Isa>(bytes: &[u8], ahead: usize) -> u64 {
    let mut all = [0u8; 64];
    // SAFETY: loads lie within runs of 256 bytes; a prefetch may lie anywhere.
    unsafe {
        let mut any = [S::load_w(all.as_ptr()); 4];
        for run in bytes.chunks_exact(256) {
            let mut i = 0;
            while i < any.len() {
                let at = run.as_ptr().add(64 * i);
                if ahead > 0 {
                    S::prefetch(at.wrapping_add(ahead));
                }
                any[i] = S::or(any[i], S::load_w(at));
                i += 1;
            }
        }
        let any = S::or(S::or(any[0], any[1]), S::or(any[2], any[3]));
        S::store_w(all.as_mut_ptr(), any);
    }
    all.into_iter().map(u64::from).sum()
}

/// Does `count` dot products, rounded up to eight, on registers. Returns the sum of their products,
/// which are all 1. Eight run at once, so that two multipliers with a latency of four cycles stay
/// busy. That is as many as 16 registers of half the width hold. Each has activations of its own,
/// or AVX2 would multiply once for all.
///
/// # Safety
/// The features of `S`.
#[inline(always)]
pub(crate) unsafe fn dots<S: Isa>(count: u64) -> u64 {
    let (weights, x) = ([1u8; 64], [[1i8; 4]; 8]);
    // SAFETY: 64 bytes are there, and 4 for each accumulator.
    unsafe {
        let weights = S::load_w(std::hint::black_box(&weights).as_ptr());
        let mut acc = [S::splat_i(0); 8];
        let at_once = acc.len().min(S::REGISTERS / 2);
        let own = usize::from(at_once < acc.len());
        for _ in 0..count.div_ceil(8) * (8 / at_once) as u64 {
            let x = std::hint::black_box(&x).as_ptr();
            let mut i = 0;
            while i < at_once {
                acc[i] = S::dot_unsigned(acc[i], weights, x.add(i * own).cast());
                i += 1;
            }
        }
        let sum = acc
            .into_iter()
            .map(|a| i64::from(S::reduce_add_i(a)))
            .sum::<i64>();
        sum.unsigned_abs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tile product does 16 products per product counted.
    fn times(set: crate::InstructionSet) -> u64 {
        if set == crate::InstructionSet::AmxInt8 {
            16
        } else {
            1
        }
    }

    #[test]
    fn all_is_read_and_worked_on_every_instruction_set() {
        for set in crate::InstructionSet::available() {
            let kernels = Kernels::with_set(set, 2).unwrap();
            let read = ReadLimit::new(4 << 20, kernels.pool()).unwrap();
            [0, 64]
                .into_iter()
                .for_each(|ahead| read.read(&kernels, ahead));
            let done = (2 * 128 * times(set)) << 21;
            assert_eq!(
                (read.bytes().0, integer_work(&kernels)),
                (4 << 20, done),
                "{set:?}"
            );
        }
    }

    #[test]
    fn dots_are_done_and_bytes_are_read() {
        for set in crate::InstructionSet::available() {
            let table = set.table().unwrap();
            // SAFETY: the set is available.
            let (dots, read) = unsafe { ((table.dots)(64), (table.read)(&[3; 512], 64)) };
            assert_eq!((dots, read), (times(set) * 64 * 4 * 16, 3 * 64), "{set:?}");
        }
    }
}
