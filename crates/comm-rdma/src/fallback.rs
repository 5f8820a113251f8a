//! Joins that use TCP between ranks whose cables fail, where [`super::join`] alone would fail.
//!
//! ```text
//! each rank opens its devices, one by one   gather: which cables work at this end
//! cables without two working ends are dropped
//! strict join over the others               ends well, or fails on all ranks
//!                                           gather: the peers whose cables are at fault
//! their cables are dropped; again
//! ```
//! Each round has fewer cables, and a matrix without any joins over TCP alone.

use std::sync::Arc;

use paceline_base::Rank;

use super::error::RdmaError;
use super::join::{CableJoin, ConnectedCables, Gather};
use super::matrix::{CABLES_MAX, Matrix};
use super::verbs::RdmaAdapter;

/// Why this rank does not use its cables to another one.
pub type Refusal = (Rank, Arc<RdmaError>);

/// The joined cables, the matrix without those that were dropped, and this rank's reasons.
pub(super) struct FallbackJoin {
    pub(super) connected: ConnectedCables,
    pub(super) matrix: Matrix,
    pub(super) refusals: Vec<Refusal>,
}

/// The cables at fault by an error.
enum FallbackFault<'a> {
    /// Another rank knows.
    Nobody,
    Pair(Rank, Rank),
    Device(&'a str),
    AllDevices,
    /// The join itself.
    Join,
}

impl CableJoin<'_> {
    /// As [`wire`](CableJoin::wire), without the cables that fail. Collective. `refused` are peers
    /// to which this rank opens no device.
    pub(super) fn wire_or_tcp(
        &self,
        refused: &[Rank],
        gather: Gather<'_>,
    ) -> Result<FallbackJoin, RdmaError> {
        let (size, mut refusals) = (self.matrix.size(), Vec::new());
        let (own, _open) = self.usable(refused, &mut refusals);
        let all = gather(&own)?;
        let works = |from: usize, to: usize, cable: usize| {
            all[(from * size + to) * CABLES_MAX + cable] != 0
        };
        let is_kept = |a: usize, b: usize, cable: usize| works(a, b, cable) && works(b, a, cable);
        let mut matrix = self.matrix.filtered(is_kept);
        loop {
            let attempt = CableJoin {
                matrix: &matrix,
                ..*self
            };
            let error = match attempt.wire(gather) {
                Err(error) if !matrix.is_bare() => error,
                outcome => {
                    return outcome.map(|connected| FallbackJoin {
                        connected,
                        matrix,
                        refusals,
                    });
                }
            };
            let own = attempt.at_fault(error, &mut refusals)?;
            let all = gather(&own)?;
            let is_kept = |a: usize, b: usize, _| all[a * size + b] == 0 && all[b * size + a] == 0;
            let less = matrix.filtered(is_kept);
            matrix = match less == matrix {
                true => matrix.filtered(|_, _, _| false), // no rank knows the cause
                false => less,
            };
        }
    }

    /// A byte for each cable of this rank, by peer: whether its device opens. Returns the devices
    /// too, so that the join does not open them again.
    fn usable(
        &self,
        refused: &[Rank],
        refusals: &mut Vec<Refusal>,
    ) -> (Vec<u8>, Vec<Arc<RdmaAdapter>>) {
        let (mut flags, mut open) = (Vec::new(), Vec::new());
        for (rank, peer) in (0..self.matrix.size()).zip((0..).map(Rank)) {
            let names = self.matrix.devices(self.rank, rank).iter();
            let opened = names.map(|name| match refused.contains(&peer) {
                true => Err(RdmaError::NotTrusted { peer }),
                false => self.cabling.host.adapter(name),
            });
            let mut of_peer = [0; CABLES_MAX];
            for (flag, opened) in of_peer.iter_mut().zip(opened) {
                match opened {
                    Ok(adapter) => {
                        *flag = 1;
                        open.push(adapter);
                    }
                    Err(error) => refusals.push((peer, Arc::new(error))),
                }
            }
            flags.extend(of_peer);
        }
        (flags, open)
    }

    /// A byte for each rank: whether the cables to it are at fault, as far as this rank knows.
    fn at_fault(
        &self,
        error: RdmaError,
        refusals: &mut Vec<Refusal>,
    ) -> Result<Vec<u8>, RdmaError> {
        let own = Rank(u32::try_from(self.rank).unwrap_or(u32::MAX));
        let fault = match fault_of(&error, own) {
            FallbackFault::Join => return Err(error),
            fault => fault,
        };
        let is_at_fault = |(rank, peer): (usize, Rank)| {
            let names = self.matrix.devices(self.rank, rank);
            match fault {
                FallbackFault::Pair(a, b) => [(own, peer), (peer, own)].contains(&(a, b)),
                FallbackFault::Device(device) => names.iter().any(|name| name == device),
                FallbackFault::AllDevices => !names.is_empty(),
                FallbackFault::Nobody | FallbackFault::Join => false,
            }
        };
        let peers = (0..self.matrix.size()).zip((0..).map(Rank));
        let faulty: Vec<bool> = peers.map(is_at_fault).collect();
        let error = Arc::new(error);
        let named = (0..).map(Rank).zip(&faulty).filter(|(_, is_one)| **is_one);
        refusals.extend(named.map(|(peer, _)| (peer, Arc::clone(&error))));
        Ok(faulty.into_iter().map(u8::from).collect())
    }
}

fn fault_of(error: &RdmaError, own: Rank) -> FallbackFault<'_> {
    match error {
        RdmaError::Elsewhere { .. } => FallbackFault::Nobody,
        RdmaError::Unwired { rank, peer, .. } => FallbackFault::Pair(*rank, *peer),
        RdmaError::NotTrusted { peer }
        | RdmaError::Completion { peer, .. }
        | RdmaError::Stray { peer, .. }
        | RdmaError::Garbled { peer, .. }
        | RdmaError::Unheard { peer, .. }
        | RdmaError::Silent { peer, .. }
        | RdmaError::GivenUp { peer, .. } => FallbackFault::Pair(own, *peer),
        RdmaError::NoSuchDevice { wanted: device, .. }
        | RdmaError::Operation { device, .. }
        | RdmaError::Verb { device, .. }
        | RdmaError::PortDown { device, .. }
        | RdmaError::NoAddress { device, .. }
        | RdmaError::Limit { device, .. } => FallbackFault::Device(device),
        RdmaError::Library { .. } | RdmaError::Symbol { .. } | RdmaError::NoList { .. } => {
            FallbackFault::AllDevices
        }
        RdmaError::Matrix(_)
        | RdmaError::Different { .. }
        | RdmaError::Side { .. }
        | RdmaError::NoMeeting { .. }
        | RdmaError::Join(_) => FallbackFault::Join,
    }
}
