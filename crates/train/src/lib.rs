//! Training that gives the same bits on any number of workers, and after any of them was lost.
//!
//! A *step* takes `batch` sequences, cut into *leaves*: logical micro-batches that depend on seed
//! and step, and on no machine. Every worker computes the same gradient of a leaf. The gradients
//! are added by the tree of [`paceline_base::tree`], and one optimiser applies the sum. So a step
//! is a pure function of the values before it, and other workers compute a lost worker's leaves
//! again.
//!
//! ```text
//! data --examples--> leaves of step s --Net::gradient--> roots --tree--> sum --Optimiser--> values
//!                    (any worker)                        (files)        (the run's process)
//! ```
//!
//! In reading order:
//! - [`LayerEngine`]: layers and their gradients, layer by layer, on the CPU or on MLX
//!   ([`TrainingClass`]). [`TrainableModel`]: a model of such layers.
//! - [`Examples`]: the training data. [`ExampleOrder`]: the examples of each step.
//! - [`Optimiser`]: AdamW, schedules, clipping.
//! - [`TrainingRun`]: a training from start to end, its checkpoints and its metrics.
//!   [`TrainingWorkers`]: the processes that compute leaves. [`worker`]: the other side.
//!   [`remote`]: workers on other machines.
//! - [`ModelStage`]: a part of a model that does not fit one machine.
//! - [`drafter`]: EAGLE-3 heads, which propose tokens for a model.
//! - [`fuse`]: a model with an adapter in it. [`mlx_lm`]: configurations of `mlx_lm.lora`.
//!
//! **Numerics.** In class `cpu` products are chains of fused multiply-adds
//! ([`paceline_tensor::chain`]), and the rest is plain f32 in a written order. So threads, blocking
//! and instruction set cannot show in a bit. On MLX workers of one version and device give the same
//! bits where the device repeats its own, which is tried at the start. Values between layers, sums
//! over leaves and updates are f32 of the CPU in every class.

mod activity;
mod checkpoint;
mod class;
mod cpu;
mod curve;
mod data;
pub mod drafter;
mod dropout;
mod engine;
mod error;
mod events;
mod fingerprint;
mod forecast;
pub mod fuse;
mod hashed;
mod messages;
mod metrics;
mod mlx;
pub mod mlx_lm;
mod net;
mod ops;
mod optimiser;
mod options;
mod order;
mod params;
mod pool;
mod random;
pub mod remote;
mod report;
mod reporter;
mod rows;
mod run;
mod shard;
mod stage;
pub mod testing;
mod turns;
mod values;
mod weights;
pub mod worker;
mod workers;

pub use class::{Means, TrainingClass};
pub use curve::svg;
pub use data::{ExampleReader, Examples, TrainOn};
pub use engine::LayerEngine;
pub use error::Error;
pub use forecast::{
    FitChange, Forecast, TrainedShape, TrainingMachine, TrainingSpec, changes, forecast,
    measured_flops, too_small,
};
pub use metrics::{Measured, read_metrics};
pub use net::{FAMILIES, Leaf, TrainableModel, Trained};
pub use optimiser::{Optimiser, OptimiserOptions, Rule, Schedule};
pub use options::{RunFigures, RunOptions};
pub use order::ExampleOrder;
pub use params::{Layout, Lora, ParameterSlot};
pub use report::{Report, RunInfo, TrainingProgress};
pub use reporter::StepReporter;
pub use rows::LeafRows;
pub use run::{TrainingJob, TrainingRun};
pub use shard::Sharding;
pub use stage::ModelStage;
pub use weights::{Method, targets};
pub use workers::{ALLOCATOR, Post, TrainingWorkers, WorkerOptions};
