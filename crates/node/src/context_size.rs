//! Default context size of a model: its trained length, as far as memory allows. On MLX that is
//! the memory of its device.
//!
//! KV memory is allocated only on use, so this is a bound and no cost. One long conversation may
//! use all positions, or several share them.

use std::path::Path;

use paceline_base::{Bytes, KernelClass};
use paceline_cluster::machine;
use paceline_engine::EngineConfig;
use paceline_fleet::memory::WEIGHTS;
use paceline_fleet::{CONTEXT_MAX, InstanceOptions};
use paceline_model::{BatchSize, Config};
use paceline_tensor::{KvType, PAGE};

/// Positions that a model gets in any case, if it was trained for as many: some pages of text. Also
/// used if the machine does not report its memory.
pub(crate) const LEAST: usize = 8192;

/// Fraction of the memory left by the weights that positions may take: the rest is for buffers, the
/// system and other programs.
const SHARE: f64 = 0.5;

/// A bound by memory is rounded down to a multiple of this.
const STEP: usize = 1024;

/// The form of keys and values, and the memory that has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMemory {
    /// Main memory, on the CPU.
    Main(KvType),
    /// The memory of MLX's device, which computes in this class. Keys and values may be quantised.
    Device(KernelClass, Option<KvType>),
}

impl KvMemory {
    /// Where this machine has keys and values of a class, and the bytes that programs can have of
    /// that memory, if known. `kv` replaces the class's type. Asks the system.
    pub fn of_machine(class: KernelClass, kv: Option<KvType>) -> (Self, Option<Bytes>) {
        if !class.is_mlx() {
            let kv = kv.unwrap_or_else(|| KvType::of(class));
            return (Self::Main(kv), machine::available());
        }
        // MLX's CPU build computes in main memory.
        let device = machine::gpu_memory().map(|memory| memory.limit);
        (Self::Device(class, kv), device.or_else(machine::available))
    }

    /// Bytes of [`PAGE`] more positions over all layers, in a long context: layers with a window
    /// store only part of them.
    pub(crate) fn page_bytes(self, config: &Config) -> usize {
        match self {
            Self::Main(kv) => page_bytes(config, kv),
            Self::Device(class, kv) => paceline_model_mlx::mlx_page_bytes(config, class, kv),
        }
    }
}

/// The positions that an instance needs in any case: those that were asked for, else the least. It
/// uses more where memory allows.
pub(crate) fn needed_positions(config: &Config, options: &InstanceOptions) -> usize {
    match options.context {
        Some(context) => {
            positions(context, config).saturating_mul(usize::from(options.parallel.max(1)))
        }
        None => config.context.min(LEAST),
    }
}

/// The positions that a request for `context` means: for [`CONTEXT_MAX`] those that the model was
/// trained for.
pub fn positions(context: u32, config: &Config) -> usize {
    match context {
        CONTEXT_MAX => config.context,
        context => context as usize,
    }
}

/// The positions of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextBudget {
    /// Positions of one sequence.
    pub context: usize,
    /// Positions of all sequences together.
    pub all: usize,
}

impl ContextBudget {
    /// For the model at `path` with `parallel` concurrent sequences. `memory` is what programs can
    /// have of the memory of `kv`, if known. `asked` positions per sequence are used unchanged.
    pub fn of(
        (path, config): (&Path, &Config),
        (kv, memory): (KvMemory, Option<Bytes>),
        asked: Option<u32>,
        parallel: usize,
    ) -> Self {
        if let Some(context) = asked.map(|context| positions(context, config)) {
            let all = context.saturating_mul(parallel);
            return Self { context, all };
        }
        let left = memory.map(|memory| {
            let weights = bytes_at(path) as f64 * WEIGHTS;
            Bytes((memory.0 as f64 - weights).max(0.0) as u64)
        });
        Self::within(config.context, kv.page_bytes(config), left, parallel)
    }

    /// For a model with `trained` positions; `left` is the memory left by its weights.
    pub(crate) fn within(
        trained: usize,
        page_bytes: usize,
        left: Option<Bytes>,
        parallel: usize,
    ) -> Self {
        let fitting = left.map(|left| {
            let pages = left.0 as f64 * SHARE / page_bytes.max(1) as f64;
            ((pages * PAGE as f64) as usize / STEP * STEP).max(LEAST)
        });
        // Two are the least: one for the prompt and one for the answer.
        let context = trained.min(fitting.unwrap_or(LEAST)).max(2);
        let all = context.saturating_mul(parallel);
        Self {
            context,
            all: all.min(fitting.unwrap_or(all)),
        }
    }

    pub fn engine(self, model: &str) -> EngineConfig {
        EngineConfig {
            cache_positions: self.all,
            ..EngineConfig::single(model.to_owned(), self.context)
        }
    }
}

/// Bytes of a file, or of the files of a folder; for a split model those of all parts.
pub fn bytes_at(path: &Path) -> u64 {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |facts| facts.len());
    let is_part = path
        .to_str()
        .is_some_and(|name| name.contains("-00001-of-"));
    let folder = match path.parent() {
        _ if path.is_dir() => Some(path),
        Some(parent) if is_part => Some(parent),
        _ => None,
    };
    let Some(entries) = folder.and_then(|folder| std::fs::read_dir(folder).ok()) else {
        return size(path);
    };
    entries.flatten().map(|entry| size(&entry.path())).sum()
}

/// As [`KvMemory::page_bytes`], in main memory.
fn page_bytes(config: &Config, kv_type: KvType) -> usize {
    const MANY: usize = 1 << 20;
    let bytes = |positions| {
        config
            .cache_bytes(kv_type, BatchSize::single(1, 1), positions)
            .0
    };
    let pages = (MANY / PAGE) as u64;
    ((bytes(2 * MANY) - bytes(MANY)) / pages) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 64 KiB a position.
    const PAGE_BYTES: usize = PAGE << 16;

    #[test]
    fn room_follows_model_and_memory() {
        let gib = |n: u64| Some(Bytes(n << 30));
        for (trained, left, parallel, context, all) in [
            // Short trained length: every sequence gets all of it.
            (2048, gib(8), 4, 2048, 8192),
            // Half of 8 GiB is 65536 positions: one sequence may use them all.
            (131_072, gib(8), 4, 65_536, 65_536),
            (32_768, gib(8), 4, 32_768, 65_536),
            (131_072, gib(64), 1, 131_072, 131_072),
            // Little memory: 8192 for all together; unknown memory: 8192 for each.
            (131_072, gib(0), 4, 8192, 8192),
            (131_072, None, 2, 8192, 16_384),
            (512, gib(0), 2, 512, 1024),
        ] {
            let room = ContextBudget::within(trained, PAGE_BYTES, left, parallel);
            assert_eq!(
                room,
                ContextBudget { context, all },
                "{trained} {left:?} {parallel}"
            );
        }
    }
}
