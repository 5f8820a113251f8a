//! When this process gives freed memory back to the system.
//!
//! The C library keeps what was freed between blocks in use. Long requests leave tens of megabytes
//! so. A trim is due while the process has [`GROWTH_BYTES`] more than it had at the least. It is
//! due again at the next look, as what a trim finds in use may be freed a moment later. The size
//! of the process does not show that. Memory that stays in use, as of a model that was loaded, is
//! learned after [`VAIN_MAX`] trims that gave nothing back.

/// Growth of the process since the least, before it is told to give back what is free.
const GROWTH_BYTES: u64 = 16 << 20;

/// A trim that gives back less was in vain: a page of each of some hundred blocks.
const GAIN_BYTES: u64 = 1 << 20;

/// Trims in vain after which the memory counts as in use: a minute of looks every 4 s. While large
/// requests come and go, some of these trims find what such a request left.
const VAIN_MAX: u32 = 15;

/// What the process had at the least.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heap {
    least: u64,
    /// Trims in vain since one that gave memory back.
    vain: u32,
}

impl Heap {
    /// Of a process that has so many bytes.
    pub(crate) const fn new(bytes: u64) -> Self {
        Self {
            least: bytes,
            vain: 0,
        }
    }

    /// Whether a process that has so many bytes now is to give back what is free.
    pub(crate) fn is_due(&mut self, bytes: u64) -> bool {
        self.least = self.least.min(bytes);
        bytes - self.least > GROWTH_BYTES
    }

    /// Takes in what the process had before and after a trim.
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
        let mut heap = Heap::new(100 * MB);
        assert!(!heap.is_due(110 * MB));
        // While they are under way a trim gives back a part.
        for _ in 0..40 {
            assert!(heap.is_due(180 * MB));
            heap.trimmed(180 * MB, 170 * MB);
        }
        // Freed after the last trim: less than that one left, and yet too much.
        assert!(heap.is_due(147 * MB));
        heap.trimmed(147 * MB, 102 * MB);
        assert!(!heap.is_due(102 * MB));
    }

    #[test]
    fn memory_in_use_is_learned() {
        let mut heap = Heap::new(40 * MB);
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
