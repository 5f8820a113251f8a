//! Radix sort of unsigned integers: four bits a pass, lowest first.

use wgpu::Buffer;

use crate::Error;
use crate::device::{Gpu, Kernel, KernelDispatch};
use crate::kernels::{bytes_of_words, words};

const SORT: &str = include_str!("wgsl/sort.wgsl");

/// Keys of a workgroup, as in the kernel.
const TILE: u64 = 128 * 16;

const DIGIT_BITS: u32 = 4;

/// Width of a key in 32-bit words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyWidth {
    /// Keys are u32.
    One,
    /// Keys are u64, little-endian.
    Two,
}

impl KeyWidth {
    const fn count(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }

    /// Declarations before the kernels.
    const fn head(self) -> &'static str {
        match self {
            Self::One => "const WORDS = 1u;\n",
            Self::Two => "const WORDS = 2u;\n",
        }
    }
}

impl Gpu {
    /// Whether keys of `bytes` bytes fit the device: at most 64 MiB, and the adapter's limits.
    pub fn sorts(&self, bytes: u64) -> bool {
        let tiles = bytes.div_ceil(4).div_ceil(TILE);
        (1..=self.bytes_max()).contains(&bytes) && tiles <= u64::from(self.groups_max())
    }

    /// Sorts whole keys in ascending order.
    ///
    /// # Errors
    /// As of [`Gpu::values`]; the keys are then unchanged.
    pub fn sort(&self, keys: &mut [u8], width: KeyWidth) -> Result<(), Error> {
        self.sort_by(keys, width, 0..32 * width.count())
    }

    /// Radix partition: numbers of rows in the order of their partitions, which have numbers of
    /// `bits` bits. Rows of a partition stay in order.
    ///
    /// # Errors
    /// As of [`Gpu::values`].
    ///
    /// # Panics
    /// If `bits` is no multiple of 8 up to 32.
    pub fn partition(&self, partitions: &[u32], bits: u32) -> Result<Vec<u32>, Error> {
        assert!(bits.is_multiple_of(8) && bits <= 32, "{bits} bits");
        if partitions.is_empty() {
            return Ok(Vec::new());
        }
        let pairs = (0..).zip(partitions);
        let pairs: Vec<u32> = pairs.flat_map(|(row, of): (u32, _)| [row, *of]).collect();
        let mut keys = bytes_of_words(&pairs);
        self.sort_by(&mut keys, KeyWidth::Two, 32..32 + bits)?;
        let sorted = words(&keys);
        Ok(sorted
            .as_chunks::<2>()
            .0
            .iter()
            .map(|[row, _]| *row)
            .collect())
    }

    /// Sorts keys by these bits, an even number of digits; equal ones stay in order.
    fn sort_by(
        &self,
        keys: &mut [u8],
        width: KeyWidth,
        bits: std::ops::Range<u32>,
    ) -> Result<(), Error> {
        let _turn = self.turn();
        let pipelines = ["count", "scan", "scatter"].map(|entry| {
            self.pipeline(Kernel {
                entry,
                text: &[width.head(), SORT],
            })
        });
        let [count, scan, scatter] = pipelines;
        let pipelines = [count?, scan?, scatter?];
        let n = keys.len() as u64 / 4 / u64::from(width.count());
        let tiles = n.div_ceil(TILE).max(1);
        let (done, counts) = (self.room(4)?, self.room(4 * 16 * tiles)?);
        let both = [self.filled(keys)?, self.room(keys.len() as u64)?];
        let params = bits
            .step_by(DIGIT_BITS as usize)
            .map(|bit| self.filled(&bytes_of_words(&[n as u32, bit, tiles as u32])));
        let params = params.collect::<Result<Vec<Buffer>, Error>>()?;
        let mut buffers = Vec::new();
        for (pass, params) in params.iter().enumerate() {
            let (from, to) = (&both[pass % 2], &both[(pass + 1) % 2]);
            let all = [(0, params), (1, &done), (2, &counts), (3, from), (4, to)];
            buffers.push(all);
        }
        let mut steps = Vec::new();
        for all in &buffers {
            // Each kernel binds the buffers that it uses.
            let used = [
                (0, &all[..4], tiles),
                (1, &all[..3], 1),
                (2, &all[..], tiles),
            ];
            steps.extend(used.map(|(which, buffers, groups)| KernelDispatch {
                pipeline: &pipelines[which],
                buffers,
                groups: groups as u32,
            }));
        }
        // An even number of passes ends in the first buffer.
        let sorted = self.execute(&steps, &done, &both[0])?;
        keys.copy_from_slice(&sorted[..keys.len()]);
        Ok(())
    }
}
