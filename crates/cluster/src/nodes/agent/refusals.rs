//! Connections to the control port that were refused, counted by cause and address: for a log that
//! no stranger can fill.
//!
//! A row is told at once, and again after [`EVERY`] at the earliest. Each cause has rows of its
//! own, so that many strangers do not hide a node that was revoked.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use super::super::{pairing, session};

/// How often the same refusal is told. At 130 bytes a line and seventeen lines for each of six
/// causes, strangers write less than 14 KB an hour. Of a log of 4 MiB they push nothing out within
/// twelve days.
const EVERY: Duration = Duration::from_secs(3600);

/// Addresses of a cause that are told apart; further ones share a row.
const ADDRESSES_MAX: usize = 16;

/// Why [`Inner::judge`](super::Inner) refuses a node that was revoked.
pub(super) const REVOKED: &str = "this node was revoked";

/// Connections that were refused for one cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// A word for the cause: `node_wrong_key`, `node_revoked`, `node_refused` (a member whose clock
    /// is off, or whose identity was copied), `node_protocol`, `join_not_invited`,
    /// `join_wrong_code`.
    pub cause: &'static str,
    /// Where they came from; `None` for further addresses together.
    pub from: Option<IpAddr>,
    /// How many, since it was told last.
    pub times: u64,
}

/// Counts them.
#[derive(Debug, Default)]
pub(super) struct Refusals(BTreeMap<(&'static str, Option<IpAddr>), Row>);

#[derive(Debug, Default)]
struct Row {
    /// When it was told last, since the node's start.
    told: Option<Duration>,
    untold: u64,
}

impl Row {
    fn is_due(&self, now: Duration) -> bool {
        self.told
            .is_none_or(|told| now.saturating_sub(told) >= EVERY)
    }
}

impl Refusals {
    /// Counts one more.
    pub(super) fn note(&mut self, cause: &'static str, from: IpAddr) {
        let is_known = self.0.contains_key(&(cause, Some(from)));
        let rows = self
            .0
            .keys()
            .filter(|(of, from)| *of == cause && from.is_some());
        let from = (is_known || rows.count() < ADDRESSES_MAX).then_some(from);
        self.0.entry((cause, from)).or_default().untold += 1;
    }

    /// The refusals that are due to be told.
    pub(super) fn take(&mut self, now: Duration) -> Vec<Refusal> {
        let mut due = Vec::new();
        for ((cause, from), row) in &mut self.0 {
            if row.untold > 0 && row.is_due(now) {
                due.push(Refusal {
                    cause,
                    from: *from,
                    times: std::mem::take(&mut row.untold),
                });
                row.told = Some(now);
            }
        }
        self.0.retain(|_, row| !row.is_due(now)); // the others make room
        due
    }
}

/// Why an incoming session was refused, if it was: connections also break, or say nothing.
pub(super) fn of_session(error: &session::Error) -> Option<&'static str> {
    match error {
        session::Error::Stranger => Some("node_wrong_key"),
        session::Error::Protocol | session::Error::TooLong { .. } => Some("node_protocol"),
        session::Error::Refusing { reason, .. } if reason == REVOKED => Some("node_revoked"),
        session::Error::Refusing { .. } => Some("node_refused"),
        session::Error::Connect { .. }
        | session::Error::Broken(_)
        | session::Error::Closed
        | session::Error::Late { .. }
        | session::Error::Refused { .. } => None,
    }
}

/// The same of a newcomer with a code.
pub(super) const fn of_pairing(error: &pairing::Error) -> Option<&'static str> {
    match error {
        pairing::Error::NotInvited => Some("join_not_invited"),
        pairing::Error::WrongCode => Some("join_wrong_code"),
        pairing::Error::NotACode | pairing::Error::Broken(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn address(number: u32) -> IpAddr {
        Ipv4Addr::from_bits(number).into()
    }

    #[test]
    fn the_same_refusal_is_told_at_once_and_then_once_an_hour() {
        let mut refusals = Refusals::default();
        let start = Duration::from_secs(5);
        let told = |times| Refusal {
            cause: "node_wrong_key",
            from: Some(address(1)),
            times,
        };
        refusals.note("node_wrong_key", address(1));
        assert_eq!(refusals.take(start), [told(1)]);
        for _ in 0..7 {
            refusals.note("node_wrong_key", address(1));
        }
        let soon = start + EVERY - Duration::from_millis(1);
        assert_eq!(refusals.take(soon), []);
        assert_eq!(refusals.take(start + EVERY), [told(7)]);
        assert_eq!(refusals.take(start + EVERY * 2), []);
        assert!(refusals.0.is_empty(), "what is told makes room");
    }

    #[test]
    fn strangers_neither_fill_the_log_nor_hide_a_revoked_node() {
        let mut refusals = Refusals::default();
        let (mut lines, mut counted) = (0, 0);
        for number in 0..10_000 {
            refusals.note("node_wrong_key", address(number));
            // Every second a look: an hour and fifty minutes.
            let told = refusals.take(Duration::from_secs(u64::from(number) * 2 / 3));
            lines += told.len();
            counted += told.iter().map(|refusal| refusal.times).sum::<u64>();
            assert!(refusals.0.len() <= ADDRESSES_MAX + 1);
        }
        // A row of its own for sixteen, twice; the others share two lines.
        assert_eq!(lines, 2 * (ADDRESSES_MAX + 1));
        assert!((5_000..10_000).contains(&counted), "{counted}");
        refusals.note("node_revoked", address(7));
        let told = refusals.take(Duration::from_secs(6_667));
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].cause, "node_revoked");
        assert_eq!(told[0].from, Some(address(7)));
    }
}
