//! Capacity limits of a device. Known for Apple's; other devices report errors themselves.

/// Memory regions of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegions(pub usize);

/// Queue pairs of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairs(pub usize);

/// Work requests in flight on a queue pair, in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRequests(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    pub memory_regions: MemoryRegions,
    pub queue_pairs: QueuePairs,
    pub work_requests: WorkRequests,
}

impl DeviceLimits {
    /// RDMA over Thunderbolt on macOS 26. Regions: ml-explore/mlx #3162, "about 100". Pairs: mlx
    /// #4209, the eleventh is refused with EBUSY. Requests: the 64th post failed with ENOMEM, 32
    /// are safe (hellas-ai/thunderbolt-ibverbs #35, #41), and JACCL asks for 32.
    pub const APPLE: Self = Self {
        memory_regions: MemoryRegions(100),
        queue_pairs: QueuePairs(10),
        work_requests: WorkRequests(32),
    };

    /// Elsewhere: numbers that any data centre device exceeds, and rdma_rxe too (its defaults,
    /// Linux 6.1: 524287 regions, 1 Mi pairs of 16 Ki requests). The number of requests is Apple's,
    /// so that both ends of a link agree.
    pub const LINUX: Self = Self {
        memory_regions: MemoryRegions(4096),
        queue_pairs: QueuePairs(4096),
        work_requests: WorkRequests(32),
    };

    /// The limits of the system this was compiled for.
    pub const fn of_this_system() -> Self {
        if cfg!(target_os = "macos") {
            Self::APPLE
        } else {
            Self::LINUX
        }
    }
}
