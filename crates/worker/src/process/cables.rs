//! Groups over the RDMA cables that the owner names, and over TCP where there is none or one fails.

use std::net::SocketAddr;

use paceline_base::Rank;
use paceline_comm::{Deadline, Group, InitError, JoinParams};
use paceline_comm_rdma::{self as rdma, Cabling, Matrix, Rdma, RdmaError};

use crate::messages::{PeerWire, RankCables};

/// Joins the ranks; also returns what became of this rank's cables. Collective.
///
/// # Errors
/// [`InitError::Join`] as without cables; [`InitError::Wire`] if the ranks have other cables.
pub(super) fn join(
    cables: &RankCables,
    seat: JoinParams<'_, SocketAddr>,
    deadline: Deadline,
) -> Result<(Box<dyn Group>, Vec<PeerWire>), InitError> {
    let JoinParams {
        listener,
        rank,
        addrs,
        id,
        config,
    } = seat;
    let matrix = Matrix::new(cables.devices.clone()).map_err(InitError::wire)?;
    let refused = cables.refused.iter().copied().map(Rank).collect();
    let cabling = Cabling::with_fallback(matrix, refused).with_tcp(config);
    let joined = rdma::join(&cabling, listener, rank, addrs, id, deadline);
    let group = joined.map_err(|error| match error {
        RdmaError::Join(error) => InitError::Join(error),
        error => InitError::wire(error),
    })?;
    let wires = wires(&group, &cables.devices[rank.0 as usize]);
    Ok((Box::new(group), wires))
}

/// The state of the cables of a rank whose devices by peer are `row`.
fn wires(group: &Rdma, row: &[Vec<String>]) -> Vec<PeerWire> {
    let peers = (0..).zip(row).filter(|(_, devices)| !devices.is_empty());
    let wire = |(peer, _): (u32, _)| {
        let mut refusals = group.refusals().iter();
        let refusal = refusals.find(|(rank, _)| rank.0 == peer);
        PeerWire {
            peer,
            cables: group.cables(Rank(peer)).0 as u32,
            reason: refusal.map(|(_, error)| reason(error)),
        }
    };
    peers.map(wire).collect()
}

/// An error with the setting that is off, if it is of one.
fn reason(error: &RdmaError) -> String {
    match error.setting(std::env::consts::OS) {
        Some(setting) => format!("{error}: {setting}"),
        None => error.to_string(),
    }
}
