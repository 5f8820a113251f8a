//! Errors of RDMA groups and their links.

use std::io;

use paceline_base::Rank;
use paceline_comm::tcp::JoinError;

use super::matrix::MatrixError;

/// Why a group over RDMA failed to form, or a link of one broke.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// The verbs library is not on this machine.
    #[error("open {name}: {source}")]
    Library {
        /// File name or path that was tried.
        name: String,
        source: libloading::Error,
    },
    #[error("{library} has no function {symbol}")]
    Symbol {
        library: String,
        symbol: &'static str,
    },
    /// A device context has no function for posting or polling.
    #[error("device {device}: its table of operations lacks {symbol}")]
    Operation {
        device: String,
        symbol: &'static str,
    },
    /// The library returns no device list: the system has no RDMA.
    #[error("list RDMA devices: {source}")]
    NoList { source: io::Error },
    #[error("no RDMA device {wanted}; there are: {}", .there.join(", "))]
    NoSuchDevice { wanted: String, there: Vec<String> },
    #[error("device {device}: {call}({operands}): {source}")]
    Verb {
        device: String,
        call: &'static str,
        operands: String,
        /// `errno`.
        source: io::Error,
    },
    #[error("device {device}: port 1 is in state {state}, expected 4 (active)")]
    PortDown {
        device: String,
        /// `enum ibv_port_state`.
        state: u32,
    },
    #[error("device {device}: none of the {entries} GIDs of port 1 is an IPv4 address")]
    NoAddress { device: String, entries: i32 },
    #[error("device {device}: {wanted} {what}, at most {limit}")]
    Limit {
        device: String,
        what: &'static str,
        wanted: usize,
        limit: usize,
    },
    #[error("cable {cable} to {peer}: {what} completed with status {status} (vendor {vendor})")]
    Completion {
        peer: Rank,
        cable: usize,
        what: &'static str,
        /// `enum ibv_wc_status`.
        status: u32,
        vendor: u32,
    },
    #[error("cable {cable} to {peer}: a completion for work request {id:#x} and {bytes} bytes")]
    Stray {
        peer: Rank,
        cable: usize,
        /// `wr_id`.
        id: u64,
        /// `byte_len`.
        bytes: u32,
    },
    /// A message with a valid head is inconsistent with the protocol.
    #[error("cable {cable} to {peer}: message {sequence} of lane {lane} does not fit")]
    Garbled {
        peer: Rank,
        cable: usize,
        /// The lane, from its head.
        lane: u8,
        /// Its number, from its head.
        sequence: u64,
    },
    #[error("{peer} has not acknowledged message {sequence} for {millis} ms, sent {tries} times")]
    Unheard {
        peer: Rank,
        /// Number of the oldest message in flight.
        sequence: u64,
        tries: u32,
        millis: u128,
    },
    #[error("cable {cable} to {peer} loses whatever is sent over it")]
    Silent { peer: Rank, cable: usize },
    #[error("cable {cable} to {peer} was given up at the other end")]
    GivenUp { peer: Rank, cable: usize },
    /// No message arrives over a cable: it leads elsewhere, or nowhere.
    #[error(
        "nothing from {peer} reaches {rank} over cable {cable} (device {device}): \
         is it the cable between these two?"
    )]
    Unwired {
        rank: Rank,
        peer: Rank,
        cable: usize,
        /// The device on the side of `rank`.
        device: String,
    },
    /// This machine's user does not trust the cables to a peer with unencrypted bytes.
    #[error("the cables to {peer} are not trusted here")]
    NotTrusted { peer: Rank },
    #[error(transparent)]
    Matrix(#[from] MatrixError),
    /// Ranks have different device matrices, or different options.
    #[error("{rank} was given other devices or options than rank 0")]
    Different { rank: Rank },
    /// Another rank could not set its devices up; it reports why.
    #[error("{rank} could not set up its RDMA devices")]
    Elsewhere { rank: Rank },
    #[error("side channel: {what} {peer}: {source}")]
    Side {
        peer: Rank,
        what: &'static str,
        source: io::Error,
    },
    #[error("side channel: {rank} sent no address")]
    NoMeeting { rank: Rank },
    #[error(transparent)]
    Join(#[from] JoinError),
}

/// How RDMA is switched on under macOS 26.2 or later. Apple showed the switch in System Settings at
/// WWDC26 (session 233, June 2026), and no source says from which version on it is there. Before
/// it there was recovery mode alone (technote TN3205).
pub const ENABLE_RDMA: &str = "search System Settings for RDMA, switch on \"Enable RDMA over \
    Thunderbolt\" and restart; without that entry run rdma_ctl enable in macOS Recovery (macOS \
    26.2 or later, Thunderbolt 5)";

impl RdmaError {
    /// The setting of this machine that is off, and how it is switched on; `None` if the error
    /// names no setting. `os` is as [`std::env::consts::OS`].
    pub fn setting(&self, os: &str) -> Option<&'static str> {
        let is_mac = os == "macos";
        match self {
            Self::Library { .. } | Self::NoList { .. } | Self::NoSuchDevice { .. } if is_mac => {
                Some(ENABLE_RDMA)
            }
            Self::Library { .. } => Some("apt install libibverbs1 ibverbs-providers"),
            Self::PortDown { .. } => Some("plug the cable in at both ends"),
            // Numbers by ml-explore/mlx: EINVAL while the Thunderbolt Bridge has the port.
            Self::Verb { call, source, .. }
                if is_mac && *call == "ibv_modify_qp" && source.raw_os_error() == Some(22) =>
            {
                Some("switch Thunderbolt Bridge off in System Settings, Network")
            }
            Self::NoAddress { .. } => {
                Some("give the port's interface an IPv4 address, as `paceline topology` does")
            }
            _ => None,
        }
    }

    /// The error of a call that set this thread's `errno`.
    pub(super) fn verb(device: &str, call: &'static str, operands: String) -> Self {
        Self::coded(device, call, operands, io::Error::last_os_error())
    }

    /// The error of a call that returned `code`: an error number, or -1 with `errno` set.
    pub(super) fn code(device: &str, call: &'static str, operands: String, code: i32) -> Self {
        let source = match code {
            ..=0 => io::Error::last_os_error(),
            code => io::Error::from_raw_os_error(code),
        };
        Self::coded(device, call, operands, source)
    }

    fn coded(device: &str, call: &'static str, operands: String, source: io::Error) -> Self {
        let device = device.to_string();
        Self::Verb {
            device,
            call,
            operands,
            source,
        }
    }
}
