//! Limits on MLX's memory, and how much it uses.

use std::ffi::c_int;

use paceline_base::Bytes;

use crate::library::done;
use crate::{DeviceKind, Error, Library, Stream};

/// Limits on MLX's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// All arrays together; MLX frees what it keeps, then waits, before it takes more.
    pub memory: Bytes,
    /// Memory that is kept for reuse after arrays were freed.
    pub cache: Bytes,
    /// Memory that stays resident: Metal only, no effect elsewhere.
    pub wired: Bytes,
}

/// Memory that MLX uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// By arrays.
    pub active: Bytes,
    /// Kept for reuse.
    pub cache: Bytes,
    /// By arrays, the most there was.
    pub peak: Bytes,
}

/// Names of the memory that models may fill: what Metal recommends, all there is. A device with
/// the first lends all of it, also while other programs use some.
const LIMITS: [&str; 3] = [
    "max_recommended_working_set_size",
    "total_memory",
    "memory_size",
];

impl Stream {
    /// Memory that a model may fill. On a CUDA card, what is free and what this process keeps for
    /// reuse. On the processor, MLX's own limit at its start, which is a share of the machine's
    /// memory.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn available(&self) -> Result<Bytes, Error> {
        if let Some(free) = self.free() {
            return Ok(Bytes(free.0 + self.library.memory_use()?.cache.0));
        }
        match self.gpu_fact(&LIMITS) {
            Some(bytes) => Ok(bytes),
            None => self
                .library
                .number("mlx_get_memory_limit", |table| table.get_memory_limit),
        }
    }

    /// All memory of a device whose [`available`](Self::available) is what is free, so that models
    /// of all processes lower it: a CUDA card. `None` for a device with a fixed limit.
    pub fn total(&self) -> Option<Bytes> {
        self.free().and_then(|_| self.gpu_fact(&LIMITS[1..]))
    }

    /// Free memory of a device that states no limit.
    fn free(&self) -> Option<Bytes> {
        let has_limit = self.gpu_fact(&LIMITS[..1]).is_some();
        let free = self.gpu_fact(&["free_memory"]);
        free.filter(|_| !has_limit)
    }

    fn gpu_fact(&self, keys: &[&str]) -> Option<Bytes> {
        let is_gpu = self.device() == DeviceKind::Gpu;
        is_gpu.then(|| self.fact(keys)).flatten().map(Bytes)
    }
}

impl Library {
    fn number(
        &self,
        name: &'static str,
        get: impl FnOnce(&crate::table::Table) -> unsafe extern "C" fn(*mut usize) -> c_int,
    ) -> Result<Bytes, Error> {
        let mut bytes = 0;
        // SAFETY: the number is written.
        done(name, unsafe { get(self.table())(&raw mut bytes) })?;
        Ok(Bytes(bytes as u64))
    }

    /// Memory in use.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn memory_use(&self) -> Result<MemoryUse, Error> {
        Ok(MemoryUse {
            active: self.number("mlx_get_active_memory", |table| table.get_active_memory)?,
            cache: self.number("mlx_get_cache_memory", |table| table.get_cache_memory)?,
            peak: self.number("mlx_get_peak_memory", |table| table.get_peak_memory)?,
        })
    }

    /// Sets the limits, of the whole process.
    ///
    /// # Errors
    /// [`Error::Call`], when more is to be wired than Metal allows.
    pub fn limit(&self, limits: MemoryLimits) -> Result<(), Error> {
        let (table, mut before) = (self.table(), 0);
        let size = |bytes: Bytes| usize::try_from(bytes.0).unwrap_or(usize::MAX);
        // SAFETY: the number before is written.
        unsafe {
            let code = (table.set_memory_limit)(&raw mut before, size(limits.memory));
            done("mlx_set_memory_limit", code)?;
            let code = (table.set_cache_limit)(&raw mut before, size(limits.cache));
            done("mlx_set_cache_limit", code)?;
            let code = (table.set_wired_limit)(&raw mut before, size(limits.wired));
            done("mlx_set_wired_limit", code)
        }
    }

    /// Gives back what is kept for reuse.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn clear_cache(&self) -> Result<(), Error> {
        // SAFETY: takes nothing.
        done("mlx_clear_cache", unsafe { (self.table().clear_cache)() })
    }
}
