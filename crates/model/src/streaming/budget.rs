//! A budget of memory, and how it is divided among layers and experts.

use std::fs;

use paceline_base::Bytes;

use super::{MARGIN, PROGRAM};

/// Layers read ahead of the one that computes.
pub(super) const AHEAD: usize = 2;

/// The most memory of a model that streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// Of its whole process: program, cache and steps too.
    Process(Bytes),
    /// Of the layers and experts alone.
    Units(Bytes),
}

impl MemoryLimit {
    /// Bytes that it leaves for weights, caches and steps of this process, which has everything
    /// else already.
    pub fn left(self) -> Bytes {
        match self {
            Self::Units(bytes) => bytes,
            Self::Process(bytes) => {
                let taken = ProcessMemory::now().map_or(PROGRAM, |memory| memory.resident);
                Bytes(bytes.0.saturating_sub(taken + bytes.0 / MARGIN))
            }
        }
    }

    /// The limit itself.
    pub const fn bytes(self) -> Bytes {
        match self {
            Self::Units(bytes) | Self::Process(bytes) => bytes,
        }
    }
}

/// Counters of a streamed model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounts {
    /// Bytes read from the disk.
    pub read: u64,
    /// Units that a step found in memory.
    pub hits: u64,
    /// Units that a step waited for.
    pub misses: u64,
    /// Experts that were read because a router would probably choose them.
    pub guesses: u64,
    /// Most bytes of units in memory at a time.
    pub most: u64,
    /// The bytes of units that may be in memory.
    pub budget: u64,
}

/// Memory of this process in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessMemory {
    /// Now, including file pages.
    pub(super) resident: u64,
    /// Allocated, touched or not.
    pub(super) data: u64,
}

impl ProcessMemory {
    /// `None` if the system does not report it.
    pub(crate) fn now() -> Option<Self> {
        let text = fs::read_to_string("/proc/self/status").ok()?;
        let field = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            Some(kib << 10)
        };
        Some(Self {
            resident: field("VmRSS:")?,
            data: field("VmData:")?,
        })
    }
}

/// Bytes for layers and for experts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Division {
    pub(super) layers: u64,
    pub(super) experts: u64,
    /// How many layers stay, from the first on.
    pub(super) stay: usize,
    /// Bytes that are needed in any case.
    pub(super) least: u64,
}

impl Division {
    /// Every token needs all layers, but few experts. So layers come first, as long as a quarter of
    /// the budget is left for experts.
    pub(super) fn of(layers: &[(usize, u64)], (expert, experts): (u64, u64), budget: u64) -> Self {
        let all: u64 = layers.iter().map(|(_, bytes)| bytes).sum();
        let largest = layers.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        let some = experts.min((budget / 4).max(expert));
        let for_layers = all.min(budget.saturating_sub(some));
        let window = largest * (AHEAD as u64 + 1);
        let (mut stay, mut kept) = (0, 0);
        for (_, bytes) in layers {
            kept += bytes;
            if for_layers < all && kept + window > for_layers {
                break;
            }
            stay += 1;
        }
        Self {
            layers: for_layers,
            experts: budget.saturating_sub(for_layers).min(experts),
            stay,
            least: largest + expert,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_divided_between_layers_and_experts() {
        let layers: Vec<(usize, u64)> = (0..8).map(|index| (index, 10)).collect();
        for (experts, budget, expected) in [
            // Dense: all fit; a window of three besides those that stay; not even a window.
            ((0, 0), 80, (80, 0, 8, 10)),
            ((0, 0), 55, (55, 0, 2, 10)),
            ((0, 0), 10, (10, 0, 0, 10)),
            // Experts: all; some; as many as leave three quarters for layers.
            ((2, 100), 200, (80, 100, 8, 12)),
            ((2, 100), 120, (80, 40, 8, 12)),
            ((2, 100), 80, (60, 20, 3, 12)),
            ((2, 100), 12, (9, 3, 0, 12)),
        ] {
            let (layer_bytes, expert_bytes, stay, least) = expected;
            let division = Division {
                layers: layer_bytes,
                experts: expert_bytes,
                stay,
                least,
            };
            assert_eq!(Division::of(&layers, experts, budget), division, "{budget}");
        }
    }
}
