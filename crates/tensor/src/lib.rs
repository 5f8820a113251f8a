//! CPU kernels: naive definitions and the fast versions that must equal them bit for bit.
//!
//! **Numerics rule.** A result depends on the weights, the activations and the kernel class. It
//! never depends on the batch, the threads, the instruction set or how a product was cut. So a
//! register lane is always one row (or channel, or position), and integer dot products are exact.
//! Every float sum has one documented order: [`matmul`] for products, [`attention`] for attention,
//! [`paceline_base::tree`] for the sums that a split may cut.
//!
//! Modules in reading order:
//! - [`storage`]: blocks as files hold them.
//! - [`naive`]: the definitions of results.
//! - `isa`: sixteen lanes per instruction set.
//! - `formats` and `packing`: weights repacked for the lanes.
//! - [`matmul`].
//! - `batch`: many activation rows.
//! - [`vector`], [`attention`], `sparse`, [`kv`], [`pool`].
//! - `dispatch`: functions per instruction set.
//! - [`kernels`]: what the model calls.
//! - [`meter`]: its time.
//!
//! ```
//! use paceline_base::BlockType;
//! use paceline_tensor::{Activations, Kernels, PackOptions, PackedMatrix, Product, StoredMatrix};
//!
//! let kernels = Kernels::new(2)?;
//! let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|x| x.to_le_bytes()).collect();
//! let stored = StoredMatrix::new(BlockType::F32, 2, 2, &bytes);
//! let weights = PackedMatrix::new(stored, PackOptions::default(), kernels.pool())?;
//!
//! let mut x = Activations::new(1, 2, 0, None);
//! kernels.fill_rows(&mut x, |_, row| row.copy_from_slice(&[1.0, 10.0]));
//! let mut y = [0.0; 2];
//! kernels.products(&x, [Product::new(&weights, &mut y)]);
//! assert_eq!(y, [21.0, 43.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod activations;
pub mod attention;
mod batch;
pub mod chain;
pub mod delta;
mod dispatch;
mod error;
mod formats;
mod isa;
pub mod kernels;
pub mod kv;
pub mod limits;
pub mod matmul;
pub mod memory;
pub mod meter;
pub mod naive;
mod packing;
pub mod pool;
mod quantisation;
mod rounding;
mod sparse;
pub mod storage;
pub mod vector;

pub use activations::{Activations, Precision};
pub use attention::PAGE;
#[cfg(target_arch = "x86_64")]
pub use batch::amx::AmxState;
pub use dispatch::InstructionSet;
pub use error::Error;
pub use kernels::{
    AttentionRows, AttentionScratch, AttentionStep, BLOCK, Choice, DeltaStep, HeadRows, IndexStep,
    Kernels, MAX_PRODUCTS, Product, Recurrence, Recurrent, RunScratch, RunStep, Runs,
    ShortConvStep, SparseScratch, StateRule, Unavailable, rows_store,
};
pub use kv::{
    DeltaShape, KvCache, KvShape, KvType, LayerStore, NO_TOKEN, StateShape, UnknownKvType,
};
pub use memory::{MatrixMemory, MemoryBlock};
pub use meter::{Meter, Metered};
pub use packing::{PACKING, PackOptions, PackedMatrix, StoredMatrix};
pub use pool::{Pinning, ThreadPool};
pub use storage::units::UNIT;
pub use vector::RopePairs;
