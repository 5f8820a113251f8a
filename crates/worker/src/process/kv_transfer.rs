//! KV transfer: sends the pages of prompts from the prefill ranks to the decode ranks.
//!
//! ```text
//! engine that reads prompts --put--> Outgoing: a queue and a thread for each taker
//!                                        | a group of two ranks, encrypted between machines
//! engine that decodes <--get-- Incoming <+ a thread for each giver
//! ```
//!
//! A page has the format of the disk cache: header, bytes, SHA-256 of both. Each sender sends each
//! receiver the layers and heads that the receiver holds, as computed by [`handed`]. A page is
//! complete when all senders have sent their part. The decode ranks compute pages that do not
//! arrive in time.

mod receiver;
mod sender;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::tcp::{self, GroupId, GroupKey, Listener, Protection};
use paceline_comm::{Deadline, Group};
use paceline_model::{Config, Kinds, LoadedModel, PageName, PageStore, Split, kv_transfer_plan};
use paceline_tensor::KvType;
use tracing::warn;

use super::joining::{by_own_interface, listen};
use super::{ControlChannel, parse};
use crate::messages::{
    FromWorker, PrefillRole, RankAssignment, ReceivePages, SendPages, TransferRound,
};
use crate::prefill_classes::{UnlikePrefill, page_type};
use crate::{Error, disk};
use receiver::{ReceivedPageStore, ReceivedPages};
use sender::{ReceiverQueues, Sent};

/// Longest wait for the other rank of a pair to connect.
const MEET_LIMIT: Duration = Duration::from_secs(5);

/// Heartbeat interval of an idle sender.
const BEAT: Duration = Duration::from_secs(1);

/// Longest wait for a sender's next message: ten heartbeats. A dead sender is detected within 2 s
/// by other means.
const RECEIVE_LIMIT: Duration = Duration::from_secs(10);

/// Longest time for a page of some 10 MB over a link of 10 Mbit/s.
const PAGE_LIMIT: Duration = Duration::from_secs(10);

/// The stream of messages.
const TAG: u32 = 1;

/// Ranks of a pair. The sender connects to the receiver.
const TAKER: Rank = Rank(0);
const GIVER: Rank = Rank(1);

/// Pool number of a sender's heartbeat header.
const NO_POOL: u32 = u32::MAX;

/// Facts of this rank that determine the parts and names of pages.
#[derive(Clone, Debug)]
struct TransferContext {
    config: Config,
    kv: KvType,
    split: Split,
    rank: Rank,
    /// Model identity and kernel classes of both sides, as text.
    classes: String,
    listen: SocketAddr,
}

impl TransferContext {
    fn new(job: &RankAssignment, weights: &dyn LoadedModel) -> Result<Self, Error> {
        let unlike = job.unlike.as_ref();
        let kv = unlike.map(|it| &*it.kv).or(job.kv.as_deref());
        let kv = kv.map(|kv| parse(kv, "kv")).transpose()?;
        let classes = match unlike {
            Some(UnlikePrefill { from, to, .. }) => format!("{from}>{to}"),
            None => weights.numbers(),
        };
        Ok(Self {
            config: weights.config().clone(),
            kv: kv.unwrap_or_else(|| page_type(weights.class())),
            split: job.split.clone(),
            rank: Rank(job.rank),
            classes: format!("{}/{classes}", job.identity),
            listen: job.listen,
        })
    }

    /// The page space between a sender and a receiver in a round, equal at both ends.
    fn space(
        &self,
        round: &TransferRound,
        (givers, giver): (&Split, Rank),
        (takers, taker): (&Split, Rank),
    ) -> [u8; 16] {
        let (classes, [from, to]) = (&self.classes, &round.numbers);
        let numbers = format!("{classes}/{from}>{to}");
        disk::space(&format!("{numbers}/{givers:?}/{giver}/{takers:?}/{taker}"))
    }
}

/// A rank's role in KV transfer, if it has one.
#[derive(Debug)]
pub(super) enum KvTransfer {
    None,
    Takes(Box<KvReceiver>),
    Gives(Box<KvSender>),
}

/// A decode rank.
#[derive(Debug)]
pub(super) struct KvReceiver {
    own: TransferContext,
    incoming: ReceivedPages,
}

/// A prefill rank.
#[derive(Debug)]
pub(super) struct KvSender {
    own: TransferContext,
    outgoing: ReceiverQueues,
}

type OptionalPageStore = Option<Box<dyn PageStore>>;

impl KvTransfer {
    /// The role of a rank in `job` with these weights, and the page store of its engine. A
    /// receiver's store has received pages first, then those of `disk`; a sender's store sends all
    /// pages. With senders of other numbers no page is kept on disk.
    pub(super) fn new(
        job: &RankAssignment,
        weights: &dyn LoadedModel,
        disk: OptionalPageStore,
    ) -> Result<(Self, OptionalPageStore), Error> {
        let Some(hands) = job.hands else {
            return Ok((Self::None, disk));
        };
        let own = TransferContext::new(job, weights)?;
        Ok(match hands {
            PrefillRole::Take => {
                let windows = Kinds::new(&own.config).windows(std::iter::repeat(0));
                let incoming = ReceivedPages::new(job.engine.context, &windows);
                let disk = disk.filter(|_| job.unlike.is_none());
                let store = ReceivedPageStore::new(incoming.clone(), disk, own.kv);
                let taker = Box::new(KvReceiver { own, incoming });
                (Self::Takes(taker), Some(Box::new(store)))
            }
            PrefillRole::Give => {
                let outgoing = ReceiverQueues::default();
                let store = Sent::new(outgoing.clone(), own.kv);
                let giver = Box::new(KvSender { own, outgoing });
                (Self::Gives(giver), Some(Box::new(store)))
            }
        })
    }

    /// Listens for the prefill ranks; replaces the connections of an earlier round.
    pub(super) fn receive(
        &self,
        channel: &ControlChannel,
        ports: Option<std::ops::RangeInclusive<u16>>,
        wanted: &ReceivePages,
    ) -> Result<(), Error> {
        let Self::Takes(taker) = self else {
            return Ok(()); // of an earlier epoch
        };
        let number = wanted.round.number;
        let answer = match taker.listen(channel, ports, wanted) {
            Ok(addrs) => FromWorker::Receives {
                round: number,
                addrs,
            },
            Err(error) => unlinked(number, &error),
        };
        Ok(channel.send(&answer)?)
    }

    /// Connects to the decode ranks; replaces the connections of an earlier round.
    pub(super) fn hand_to(&self, channel: &ControlChannel, wanted: SendPages) -> Result<(), Error> {
        let Self::Gives(giver) = self else {
            return Ok(());
        };
        let number = wanted.round.number;
        let own = Arc::clone(channel);
        let (of, outgoing) = (giver.own.clone(), giver.outgoing.clone());
        let run = move || {
            let answer = match connect(&own, &of, &outgoing, &wanted) {
                Ok(()) => FromWorker::HandsOver { round: number },
                Err(error) => unlinked(number, &error),
            };
            // Should the instance be gone, the reader of the channel ends this process.
            let _ = own.send(&answer);
        };
        start("hand over", run)
    }

    /// Reports when a page and all before it have arrived.
    pub(super) fn expect(
        &self,
        channel: &ControlChannel,
        number: u64,
        page: [u32; 8],
    ) -> Result<(), Error> {
        let Self::Takes(taker) = self else {
            return Ok(());
        };
        match taker.incoming.expect(number, PageName(page)) {
            true => Ok(channel.send(&FromWorker::Arrived { number })?),
            false => Ok(()),
        }
    }
}

impl Drop for KvTransfer {
    /// Ends the threads of the connections, within a heartbeat.
    fn drop(&mut self) {
        match self {
            Self::None => {}
            Self::Takes(taker) => taker.incoming.begin((u64::MAX, None), 0, &[]),
            Self::Gives(giver) => giver.outgoing.set(u64::MAX, Vec::new()),
        }
    }
}

impl KvReceiver {
    /// Listens for each sender, on a thread each; returns the addresses.
    fn listen(
        &self,
        channel: &ControlChannel,
        ports: Option<std::ops::RangeInclusive<u16>>,
        wanted: &ReceivePages,
    ) -> Result<Vec<SocketAddr>, Error> {
        let (own, givers) = (&self.own, &wanted.from);
        let taker = (&own.split, own.rank);
        let ranks: Vec<Rank> = (0..givers.ranks()).map(Rank).collect();
        let parts = ranks
            .iter()
            .map(|giver| kv_transfer_plan(&own.config, own.kv, (givers, *giver), taker));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let page_bytes = parts.first().map(|part| part.page_bytes.clone());
        let number = wanted.round.number;
        let round = (number, wanted.round.read_by().cloned());
        self.incoming
            .begin(round, ranks.len(), &page_bytes.unwrap_or_default());
        let mut addrs = Vec::new();
        for (giver, part) in ranks.into_iter().zip(parts) {
            let listener = listen(wanted.listen, ports.clone())?;
            let addr = listener.addr();
            addrs.push(addr);
            let lane = receiver::SenderConnection {
                channel: Arc::clone(channel),
                incoming: self.incoming.clone(),
                round: number,
                giver: giver.0 as usize,
                part,
                space: own.space(&wanted.round, (givers, giver), taker),
            };
            let pair = pair(&wanted.round, (giver, own.rank));
            start("take pages", move || {
                // Its own address is a placeholder for the sender's, which is never used.
                let group = meet(listener, TAKER, [addr, addr], pair);
                lane.run(group);
            })?;
        }
        Ok(addrs)
    }
}

/// Connects a sender to all receivers, and starts their threads.
fn connect(
    channel: &ControlChannel,
    own: &TransferContext,
    outgoing: &ReceiverQueues,
    wanted: &SendPages,
) -> Result<(), Error> {
    let round = wanted.round.number;
    outgoing.set(round, Vec::new()); // ends those of an earlier round
    let giver = (&own.split, own.rank);
    let mut lanes = Vec::new();
    for (taker, addr) in (0..).map(Rank).zip(&wanted.addrs) {
        let mut addr = *addr;
        by_own_interface(&mut addr, own.listen);
        let to = (&wanted.to, taker);
        let part = kv_transfer_plan(&own.config, own.kv, giver, to)?;
        let listener = Listener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let listener = listener.map_err(cannot_listen)?;
        let mine = listener.addr();
        let pair = pair(&wanted.round, (own.rank, taker));
        let group = meet(listener, GIVER, [addr, mine], pair)?;
        let space = own.space(&wanted.round, giver, to);
        let channel = Arc::clone(channel);
        let (lane, sender) = sender::lane(part, space);
        start("give pages", move || {
            if let Err(error) = sender.run(&*group) {
                warn!(round, %error, "pages cannot be handed over");
                let _ = channel.send(&unlinked(round, &error)); // as above
            }
        })?;
        lanes.push(lane);
    }
    outgoing.set(round, lanes);
    Ok(())
}

fn pair(round: &TransferRound, (giver, taker): (Rank, Rank)) -> (GroupId, Protection) {
    let mut id = round.group;
    for (byte, of) in id.iter_mut().zip([giver, taker]) {
        *byte ^= of.0 as u8;
    }
    let protection = match &round.key {
        Some(key) => Protection::Key(GroupKey::new(key.0)),
        None => Protection::Loopback,
    };
    (GroupId(id), protection)
}

/// Connects to the other rank of a pair.
fn meet(
    listener: Listener,
    rank: Rank,
    addrs: [SocketAddr; 2],
    (id, protection): (GroupId, Protection),
) -> Result<Box<dyn Group>, Error> {
    let config = tcp::Config {
        protection,
        ..tcp::Config::default()
    };
    let group = tcp::join_with(listener, rank, &addrs, id, config, within(MEET_LIMIT));
    let group = group.map_err(paceline_comm::InitError::from)?;
    Ok(Box::new(group))
}

fn within(limit: Duration) -> Deadline {
    Deadline::at(Instant::now() + limit)
}

fn unlinked(round: u64, error: &Error) -> FromWorker {
    let reason = error.to_string();
    FromWorker::Unlinked { round, reason }
}

fn cannot_listen(source: io::Error) -> Error {
    Error::System {
        what: "listen for a rank that takes pages",
        source,
    }
}

fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    let started = thread.spawn(run);
    started.map(drop).map_err(|source| Error::System {
        what: "start a thread",
        source,
    })
}
