//! Decides when this process returns freed memory to the system (`malloc_trim`).
//!
//! The C library keeps freed memory between blocks in use; long requests leave tens of megabytes. A
//! trim is due while the process exceeds its least size by [`GROWTH_BYTES`]. It is due again at the
//! next check, since memory in use during a trim may be freed a moment later. The process size does
//! not show that. Memory that stays in use, such as a loaded model, is learned after [`VAIN_MAX`]
//! vain trims.

/// Growth over the least size that makes a trim due.
const GROWTH_BYTES: u64 = 16 << 20;

/// A trim that returns less is vain: a page of each of some hundred blocks.
const GAIN_BYTES: u64 = 1 << 20;

/// Vain trims after which the memory counts as in use: a minute of checks every 4 s. While large
/// requests come and go, some of these trims find their leftovers.
const VAIN_MAX: u32 = 15;

#[derive(Clone, Copy, Debug)]
pub(crate) struct TrimPolicy {
    least: u64,
    /// Vain trims since the last useful one.
    vain: u32,
}

impl TrimPolicy {
    /// For a process of `bytes` bytes.
    pub(crate) const fn new(bytes: u64) -> Self {
        Self {
            least: bytes,
            vain: 0,
        }
    }

    /// Whether a trim is due at a size of `bytes`.
    pub(crate) fn is_due(&mut self, bytes: u64) -> bool {
        self.least = self.least.min(bytes);
        bytes - self.least > GROWTH_BYTES
    }

    /// Records the size before and after a trim.
    pub(crate) fn trimmed(&mut self, before: u64, after: u64) {
        let is_vain = before.saturating_sub(after) < GAIN_BYTES;
        self.vain = if is_vain { self.vain + 1 } else { 0 };
        if self.vain >= VAIN_MAX {
            *self = Self::new(after);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    #[test]
    fn what_large_requests_leave_is_given_back() {
        let mut heap = TrimPolicy::new(100 * MB);
        assert!(!heap.is_due(110 * MB));
        // While requests run, a trim returns a part.
        for _ in 0..40 {
            assert!(heap.is_due(180 * MB));
            heap.trimmed(180 * MB, 170 * MB);
        }
        // Freed after the last trim: less than that trim left, but still above the threshold.
        assert!(heap.is_due(147 * MB));
        heap.trimmed(147 * MB, 102 * MB);
        assert!(!heap.is_due(102 * MB));
    }

    #[test]
    fn memory_in_use_is_learned() {
        let mut heap = TrimPolicy::new(40 * MB);
        for _ in 0..VAIN_MAX {
            assert!(heap.is_due(100 * MB));
            heap.trimmed(100 * MB, 100 * MB);
        }
        assert!(!heap.is_due(100 * MB));
        assert!(heap.is_due(120 * MB));
        assert!(!heap.is_due(60 * MB), "it is the least now");
        assert!(heap.is_due(100 * MB));
    }
}
