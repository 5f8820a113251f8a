//! Failover of a link when one of its cables fails.
//!
//! A cable is given up when one of its requests fails, when it loses many consecutive messages, or
//! when the peer has given it up. Its messages in flight move to the other cables. The link breaks
//! with the last one.

use std::sync::Arc;

use paceline_comm::provider;

use super::{CableLink, LANES};
use crate::error::RdmaError;
use crate::message::HEAD_BYTES;
use crate::message_pair::MessageQueuePair;

/// Consecutive messages lost on a cable that arrive over another: then it is dead. A peer without a
/// core may cause some losses; this many take 50 ms.
const LOST_MOST: u32 = 16;

impl CableLink {
    /// Gives a cable up, if there is another: its messages in flight move there.
    pub(super) fn lose(&mut self, cable: usize, error: RdmaError) -> Result<(), RdmaError> {
        if self.cables[cable].dead {
            self.reading -= self.cables[cable].forget();
            return Ok(());
        }
        if self.live() == 1 {
            return Err(error);
        }
        let _ = self.cables[cable].pair().fail();
        self.cables[cable].dead = true;
        self.lost.get_or_insert(Arc::new(error));
        self.urgent = true;
        self.abandon();
        let now = provider::now();
        for lane in 0..LANES.len() {
            for index in 0..self.outgoing[lane].flights.len() {
                let flight = &self.outgoing[lane].flights[index];
                if flight.cable == cable && !flight.held {
                    self.transmit(lane, self.outgoing[lane].received + index as u64, now)?;
                }
            }
        }
        Ok(())
    }

    /// Gives up cables that lose many consecutive messages.
    pub(super) fn judge(&mut self) -> Result<(), RdmaError> {
        let peer = self.peer;
        for cable in 0..self.cables.len() {
            let suspect = &self.cables[cable];
            if !suspect.dead && suspect.lost >= LOST_MOST && self.live() > 1 {
                self.lose(cable, RdmaError::Silent { peer, cable })?;
            }
        }
        Ok(())
    }

    /// The dead cables, a bit each.
    pub(super) fn dead(&self) -> u64 {
        let bit = |(index, cable): (usize, &MessageQueuePair)| u64::from(cable.dead) << index;
        self.cables.iter().enumerate().map(bit).sum()
    }

    /// Gives up the cables that the peer has given up.
    pub(super) fn lose_all(&mut self, dead: u64) -> Result<(), RdmaError> {
        let peer = self.peer;
        for cable in 0..self.cables.len() {
            if dead & (1 << cable) != 0 && !self.cables[cable].dead {
                self.lose(cable, RdmaError::GivenUp { peer, cable })?;
            }
        }
        Ok(())
    }

    /// Copies a message into a slot of another cable, if one is free.
    pub(super) fn shift(&mut self, lane: usize, index: usize) {
        let flight = &self.outgoing[lane].flights[index];
        let (from, old, end, body) = (flight.cable, flight.slot, flight.bytes, flight.body);
        let room = self
            .place(lane, from + 1)
            .filter(|(cable, _)| *cable != from);
        let Some((cable, slot)) = room else { return };
        let mut payload = self.cables[from].payload(old, end);
        if let Some(body) = body {
            // SAFETY: the writer keeps the body unchanged while the link `holds` it.
            payload.extend(unsafe { std::slice::from_raw_parts(body.start, body.bytes) });
            self.outgoing[lane].in_place -= 1;
            self.placed.sent -= body.bytes as u64;
        }
        self.cables[from].own(old, false);
        self.cables[cable].own(slot, true);
        self.cables[cable].fill(slot, HEAD_BYTES, &[&payload]);
        let flight = &mut self.outgoing[lane].flights[index];
        (flight.cable, flight.slot) = (cable, slot);
        (flight.bytes, flight.body) = (HEAD_BYTES + payload.len(), None);
    }
}
