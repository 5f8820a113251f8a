//! Why RDMA does not work here.

use std::io;

use paceline_base::Rank;
use paceline_comm::tcp::JoinError;

use super::matrix::MatrixError;

/// Why a group over RDMA did not come about, or a link of one broke.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// The verbs library is not on this machine.
    #[error("open {name}: {source}")]
    Library {
        /// File name or path that was tried.
        name: String,
        /// The loader's error.
        source: libloading::Error,
    },
    /// The library lacks a function.
    #[error("{library} has no function {symbol}")]
    Symbol {
        /// The library.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// A device context has no function for posting or polling.
    #[error("device {device}: its table of operations lacks {symbol}")]
    Operation {
        /// The device.
        device: String,
        /// The function.
        symbol: &'static str,
    },
    /// The library has no list of devices: the system has no RDMA.
    #[error("list RDMA devices: {source}")]
    NoList {
        /// The library's error.
        source: io::Error,
    },
    /// No device has this name.
    #[error("no RDMA device {wanted}; there are: {}", .there.join(", "))]
    NoSuchDevice {
        /// The name in the device matrix.
        wanted: String,
        /// All names.
        there: Vec<String>,
    },
    /// A function of the library failed.
    #[error("device {device}: {call}({operands}): {source}")]
    Verb {
        /// The device.
        device: String,
        /// The function.
        call: &'static str,
        /// Its arguments, as far as they matter.
        operands: String,
        /// `errno`.
        source: io::Error,
    },
    /// The port is not up.
    #[error("device {device}: port 1 is in state {state}, expected 4 (active)")]
    PortDown {
        /// The device.
        device: String,
        /// `enum ibv_port_state`.
        state: u32,
    },
    /// The port has no address that peers can be told.
    #[error("device {device}: none of the {entries} GIDs of port 1 is an IPv4 address")]
    NoAddress {
        /// The device.
        device: String,
        /// Entries of the table.
        entries: i32,
    },
    /// A device cannot hold as many objects.
    #[error("device {device}: {wanted} {what}, at most {limit}")]
    Limit {
        /// The device.
        device: String,
        /// Of what.
        what: &'static str,
        /// How many are wanted.
        wanted: usize,
        /// How many there may be.
        limit: usize,
    },
    /// A work request failed.
    #[error("cable {cable} to {peer}: {what} completed with status {status} (vendor {vendor})")]
    Completion {
        /// The other end.
        peer: Rank,
        /// Which of the cables to it.
        cable: usize,
        /// Send or receive.
        what: &'static str,
        /// `enum ibv_wc_status`.
        status: u32,
        /// The vendor's own number.
        vendor: u32,
    },
    /// A completion came that nothing was posted for.
    #[error("cable {cable} to {peer}: a completion for work request {id:#x} and {bytes} bytes")]
    Stray {
        /// The other end.
        peer: Rank,
        /// Which of the cables to it.
        cable: usize,
        /// `wr_id`.
        id: u64,
        /// `byte_len`.
        bytes: u32,
    },
    /// A message has a valid head and cannot be meant.
    #[error("cable {cable} to {peer}: message {sequence} of lane {lane} does not fit")]
    Garbled {
        /// The other end.
        peer: Rank,
        /// Which of the cables to it.
        cable: usize,
        /// The lane, from its head.
        lane: u8,
        /// Its number, from its head.
        sequence: u64,
    },
    /// A peer does not acknowledge what it is sent, although its process lives.
    #[error("{peer} has not acknowledged message {sequence} for {millis} ms, sent {tries} times")]
    Unheard {
        /// The other end.
        peer: Rank,
        /// The oldest message on its way.
        sequence: u64,
        /// How often it was sent.
        tries: u32,
        /// Since when.
        millis: u128,
    },
    /// A cable, of several, loses whatever is sent over it.
    #[error("cable {cable} to {peer} loses whatever is sent over it")]
    Silent {
        /// The other end.
        peer: Rank,
        /// Which of the cables to it.
        cable: usize,
    },
    /// A cable, of several, carries nothing any more, says the other end.
    #[error("cable {cable} to {peer} was given up at the other end")]
    GivenUp {
        /// The other end.
        peer: Rank,
        /// Which of the cables to it.
        cable: usize,
    },
    /// Nothing comes over a cable: it leads elsewhere, or nowhere.
    #[error(
        "nothing from {peer} reaches {rank} over cable {cable} (device {device}): \
         is it the cable between these two?"
    )]
    Unwired {
        /// The rank that hears nothing.
        rank: Rank,
        /// The rank that should be heard.
        peer: Rank,
        /// Which of the cables between them.
        cable: usize,
        /// The device on the side of `rank`.
        device: String,
    },
    /// The table of devices is wrong.
    #[error(transparent)]
    Matrix(#[from] MatrixError),
    /// Ranks were given different tables of devices, or different options.
    #[error("{rank} was given other devices or options than rank 0")]
    Different {
        /// The first that differs.
        rank: Rank,
    },
    /// Another rank could not set its devices up; it knows why.
    #[error("{rank} could not set up its RDMA devices")]
    Elsewhere {
        /// The first such rank.
        rank: Rank,
    },
    /// A connection of JACCL's side channel failed.
    #[error("side channel: {what} {peer}: {source}")]
    Side {
        /// The other end.
        peer: Rank,
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A rank's message over the side channel makes no sense.
    #[error("side channel: {rank} sent no address")]
    NoMeeting {
        /// The first such rank.
        rank: Rank,
    },
    /// The ranks did not meet.
    #[error(transparent)]
    Join(#[from] JoinError),
}

impl RdmaError {
    /// The error of a call whose `errno` is the calling thread's.
    pub(super) fn verb(device: &str, call: &'static str, operands: String) -> Self {
        Self::coded(device, call, operands, io::Error::last_os_error())
    }

    /// The error of a call that handed back `code`: `errno`, or -1 and `errno` is the thread's.
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
