//! Refused connections to the control port, counted by cause and address, so that strangers cannot
//! fill the log.
//!
//! A count is logged at once, and again after [`EVERY`] at the earliest. Each cause has separate
//! counts, so that many strangers do not hide a revoked node.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use super::super::{pairing, session};

/// Least interval of logging the same refusal. At 130 bytes a line and seventeen lines for each of
/// six causes, strangers cause less than 14 KB an hour. A log of 4 MiB then keeps all other lines
/// for twelve days.
const EVERY: Duration = Duration::from_secs(3600);

/// Most separately counted addresses of a cause; further ones share a count.
const ADDRESSES_MAX: usize = 16;

/// The reason with which [`Inner::judge`](super::Inner) refuses a revoked node.
pub(super) const REVOKED: &str = "this node was revoked";

/// Refused connections of one cause and address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// A word for the cause: `node_wrong_key`, `node_revoked`, `node_refused` (a member whose clock
    /// is off, or whose identity was copied), `node_protocol`, `join_not_invited`,
    /// `join_wrong_code`.
    pub cause: &'static str,
    /// Their address; `None` for all further addresses together.
    pub from: Option<IpAddr>,
    /// Their number since the last report.
    pub times: u64,
}

/// Counts by cause and address.
#[derive(Debug, Default)]
pub(super) struct Refusals(BTreeMap<(&'static str, Option<IpAddr>), RefusalCount>);

#[derive(Debug, Default)]
struct RefusalCount {
    /// Time of the last report, since the node's start.
    told: Option<Duration>,
    untold: u64,
}

impl RefusalCount {
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

    /// Removes and returns the refusals due for the log.
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

/// The cause of a refused incoming session; `None` if the connection just broke or was silent.
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

/// The same for a newcomer with a code.
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
            // A poll every second: an hour and fifty minutes.
            let told = refusals.take(Duration::from_secs(u64::from(number) * 2 / 3));
            lines += told.len();
            counted += told.iter().map(|refusal| refusal.times).sum::<u64>();
            assert!(refusals.0.len() <= ADDRESSES_MAX + 1);
        }
        // A separate count for sixteen, twice; the others share two lines.
        assert_eq!(lines, 2 * (ADDRESSES_MAX + 1));
        assert!((5_000..10_000).contains(&counted), "{counted}");
        refusals.note("node_revoked", address(7));
        let told = refusals.take(Duration::from_secs(6_667));
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].cause, "node_revoked");
        assert_eq!(told[0].from, Some(address(7)));
    }
}
