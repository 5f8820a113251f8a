//! The verbs library, its open devices, and the device matrix, shared by all groups of a process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use paceline_base::{Rank, lock};
use paceline_comm::tcp;

use super::error::RdmaError;
use super::matrix::Matrix;
use super::memory::Registry;
use super::verbs::{RdmaAdapter, Verbs};

/// Default of [`Config::message_bytes`]. Long enough that heads and completions cost little (32 KiB
/// at 7 GB/s: 5 us). Sixty-four messages are 2 MiB for each cable.
pub const MESSAGE_BYTES: u32 = 32 << 10;

/// Default of [`Config::in_place_bytes`]: the agreement takes some microseconds, in which shorter
/// parts are copied (docs/measurements.md).
pub const IN_PLACE_BYTES: usize = 128 << 10;

/// How a group behaves. The same on all ranks.
#[derive(Clone, Debug)]
pub struct Config {
    /// Settings of the TCP join and the control connections.
    pub tcp: tcp::Config,
    /// Longest message, head included: 4 KiB to 1 MiB. macOS before 26.3 takes 4 KiB only.
    pub message_bytes: u32,
    /// Shortest part of registered memory that is sent without a copy into registered memory of
    /// another rank. Both ends must agree on each transfer, so shorter parts, which are copied at
    /// the receiver, arrive sooner.
    pub in_place_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            tcp: tcp::Config::default(),
            message_bytes: MESSAGE_BYTES,
            in_place_bytes: IN_PLACE_BYTES,
        }
    }
}

/// Bounds of [`Config::message_bytes`].
const MESSAGE_BYTES_MIN: u32 = 4 << 10;
const MESSAGE_BYTES_MAX: u32 = 1 << 20;

/// The library, and the open devices of this process. Each is opened once, as a second context of
/// one device hangs on macOS (ml-explore/mlx #3245).
pub(super) struct CabledHost {
    /// `None` until a device is needed.
    verbs: Mutex<Option<Verbs>>,
    /// Registered memory, for all groups over these devices.
    pub(super) registry: Arc<Registry>,
    adapters: Mutex<BTreeMap<String, Weak<RdmaAdapter>>>,
}

impl CabledHost {
    pub(super) fn adapter(&self, name: &str) -> Result<Arc<RdmaAdapter>, RdmaError> {
        let mut adapters = lock(&self.adapters);
        if let Some(adapter) = adapters.get(name).and_then(Weak::upgrade) {
            return Ok(adapter);
        }
        let adapter = RdmaAdapter::open(&self.verbs()?, name)?;
        adapters.insert(name.to_string(), Arc::downgrade(&adapter));
        Ok(adapter)
    }

    fn verbs(&self) -> Result<Verbs, RdmaError> {
        let mut verbs = lock(&self.verbs);
        if let Some(verbs) = &*verbs {
            return Ok(verbs.clone());
        }
        Ok(verbs.insert(Verbs::load()?).clone())
    }
}

/// The library, the device matrix, and the settings. Cheap to clone; clones share open devices, so
/// a process has one.
#[derive(Clone, derive_more::Debug)]
#[debug("cables {}", self.matrix.to_json())]
pub struct Cabling {
    pub(super) host: Arc<CabledHost>,
    pub(super) matrix: Arc<Matrix>,
    pub(super) config: Config,
    /// Use a ring even in a full mesh.
    pub(super) ring: bool,
    /// Use TCP where a cable fails, and for these peers. `None`: fail.
    pub(super) fallback: Option<Vec<Rank>>,
}

impl Cabling {
    /// With the default [`Config`].
    pub fn new(verbs: Verbs, matrix: Matrix) -> Self {
        Self::with(verbs, matrix, Config::default())
    }

    /// The same, for a group that joins with the settings `tcp`.
    #[must_use]
    pub fn with_tcp(&self, tcp: tcp::Config) -> Self {
        let mut own = self.clone();
        own.config.tcp = tcp;
        own
    }

    /// Cables between ranks that use TCP where a cable fails, and from this rank to `refused`. The
    /// system's library is opened once a device is needed.
    pub fn with_fallback(matrix: Matrix, refused: Vec<Rank>) -> Self {
        Self {
            fallback: Some(refused),
            ..Self::of(None, matrix, Config::default())
        }
    }

    /// Clamps the message length to its bounds.
    pub fn with(verbs: Verbs, matrix: Matrix, config: Config) -> Self {
        Self::of(Some(verbs), matrix, config)
    }

    fn of(verbs: Option<Verbs>, matrix: Matrix, mut config: Config) -> Self {
        let bytes = config.message_bytes;
        config.message_bytes = bytes.clamp(MESSAGE_BYTES_MIN, MESSAGE_BYTES_MAX) & !63;
        let host = Arc::new(CabledHost {
            verbs: Mutex::new(verbs),
            registry: Arc::default(),
            adapters: Mutex::default(),
        });
        Self {
            host,
            matrix: Arc::new(matrix),
            config,
            ring: false,
            fallback: None,
        }
    }
}
