//! A rank's group, and the calls of a step. All ranks make them in the same order; those that a
//! later part needs run while this one is computed.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_cluster::network;
use paceline_comm::tcp::{Config, GroupId, GroupKey, KEY_BYTES, Listener, Protection};
use paceline_comm::{
    Backend, Deadline, Element, Group, JoinParams, NonblockingCalls, PendingCall, Strict, init,
};
use serde::{Deserialize, Serialize};

use crate::activity::Activity;
use crate::error::Error;
use crate::shard::ShardRole;

/// Longest wait of a call for the slowest rank. The loss of a rank is noticed within seconds, and
/// [`Activity`] finds one that hangs. The leaves of a step of a large model take minutes on the
/// slowest machines.
const WAIT: Duration = Duration::from_secs(1800);

/// Longest wait for all ranks to join.
const JOIN_LIMIT: Duration = Duration::from_secs(30);

/// Numbers of a message of a shard: 128 KiB. `MESSAGES_HELD` (16) of them may wait at a receiver,
/// which keeps their buffers of each of the two ranks that send it copies.
const PIECE: usize = 1 << 15;

/// Tag of values that a rank gets from another.
const TAG: u32 = 1;

/// Ranks wait for ranks in other processes.
fn within(limit: Duration) -> Deadline {
    Deadline::at(Instant::now() + limit)
}

/// Values on their way.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    call: PendingCall<Result<Vec<T>, paceline_comm::Error>>,
    activity: Arc<Activity>,
}

impl<T> Pending<T> {
    /// Waits for them.
    pub(crate) fn wait(self) -> Result<Vec<T>, paceline_comm::Error> {
        let (Self { call, activity }, start) = (self, Instant::now());
        let got = activity.wait(|| call.wait());
        activity.waited(start.elapsed());
        got
    }
}

/// How ranks form a group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct GroupPlan {
    pub(crate) id: [u8; 16],
    /// For groups over several machines.
    pub(crate) key: Option<SecretKey>,
    /// By rank.
    pub(crate) addrs: Vec<Vec<SocketAddr>>,
}

/// The key of a group's traffic.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct SecretKey(pub(crate) [u8; KEY_BYTES]);

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey")
    }
}

/// Listens for other ranks: at loopback, or with `open` at all addresses of this machine.
pub(crate) fn listen(open: bool) -> Result<(Listener, Vec<SocketAddr>), Error> {
    let mut addrs = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
    if open {
        addrs = network::addresses();
    }
    let addrs: Vec<SocketAddr> = addrs.into_iter().map(|ip| (ip, 0).into()).collect();
    let listener = Listener::bind_all(&addrs).map_err(Error::Listen)?;
    let addrs = listener.addrs().to_vec();
    Ok((listener, addrs))
}

/// A rank's group.
#[derive(Debug)]
pub(crate) struct Link {
    calls: NonblockingCalls,
    activity: Arc<Activity>,
}

impl Link {
    /// Joins a group. Collective; blocks until all ranks have arrived.
    pub(crate) fn join(
        listener: Listener,
        (rank, activity): (usize, &Arc<Activity>),
        plan: &GroupPlan,
    ) -> Result<Self, Error> {
        let protection = match &plan.key {
            Some(key) => Protection::Key(GroupKey::new(key.0)),
            None => Protection::Loopback,
        };
        let seat = JoinParams {
            listener,
            rank: Rank(rank as u32),
            addrs: &plan.addrs,
            id: GroupId(plan.id),
            config: Config {
                protection,
                ..Config::default()
            },
        };
        let deadline = within(JOIN_LIMIT);
        let group = init(Backend::Any, Strict::Yes, seat, &[], deadline)?;
        let calls = NonblockingCalls::new(Arc::from(group));
        let activity = Arc::clone(activity);
        Ok(Self { calls, activity })
    }

    /// Starts a call of all ranks.
    fn start<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Group) -> Result<Vec<T>, paceline_comm::Error> + Send + 'static,
    ) -> Pending<T> {
        let (call, activity) = (self.calls.start(work), Arc::clone(&self.activity));
        Pending { call, activity }
    }

    fn start_message(
        &self,
        work: impl FnOnce(&dyn Group) -> Result<Vec<f32>, paceline_comm::Error> + Send + 'static,
    ) -> Pending<f32> {
        let (call, activity) = (self.calls.start_message(work), Arc::clone(&self.activity));
        Pending { call, activity }
    }

    /// Bytes that this rank has sent so far.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.calls.group().traffic().sent.0
    }

    /// All ranks' values, in rank order; `counts` are their lengths. Collective.
    pub(crate) fn gather<T: Element + Default>(
        &self,
        own: Vec<T>,
        counts: Vec<usize>,
    ) -> Pending<T> {
        let by = within(WAIT);
        self.start(move |group| {
            let mut all = vec![T::default(); counts.iter().sum()];
            group.all_gather_v(&own, &mut all, &counts, by)?;
            Ok(all)
        })
    }

    /// Sends `counts[0][r]` of `values` to rank r, and gets `counts[1][r]` from it. Collective.
    pub(crate) fn swap(&self, values: Vec<f32>, counts: [Vec<usize>; 2]) -> Pending<f32> {
        let by = within(WAIT);
        self.start(move |group| {
            let [sends, receives] = &counts;
            let mut got = vec![0.0; receives.iter().sum()];
            group.all_to_all_v(&values, sends, &mut got, receives, by)?;
            Ok(got)
        })
    }

    /// Starts to send `values` to a rank, under a tag; gives them back.
    pub(crate) fn transmit(&self, values: Vec<f32>, (to, tag): (usize, u32)) -> Pending<f32> {
        let by = within(WAIT);
        self.start_message(move |group| {
            group.send(&values, Rank(to as u32), tag, by)?;
            Ok(values)
        })
    }

    /// Starts to receive `n` values that a rank [`transmit`](Self::transmit)s.
    pub(crate) fn receive(&self, n: usize, (from, tag): (usize, u32)) -> Pending<f32> {
        let by = within(WAIT);
        self.start_message(move |group| {
            let mut got = vec![0.0; n];
            group.recv(&mut got, Rank(from as u32), tag, by)?;
            Ok(got)
        })
    }

    /// Sends `values` to the rank behind, and gets as many as `n` from the one before. All ranks
    /// call it.
    pub(crate) fn pass_on(&self, role: ShardRole, values: Vec<f32>, n: usize) -> Pending<f32> {
        let by = within(WAIT);
        self.start(move |group| {
            let mut got = vec![0.0; n];
            group.send(&values, Rank(role.behind() as u32), TAG, by)?;
            group.recv(&mut got, Rank(role.before() as u32), TAG, by)?;
            Ok(got)
        })
    }

    /// Sends vectors to a rank that gets them by [`get`](Self::get). Blocks until they are copied.
    pub(crate) fn give(&self, vectors: [&[f32]; 3], to: usize) -> Result<(), Error> {
        let by = within(WAIT);
        for piece in vectors.into_iter().flat_map(|vector| vector.chunks(PIECE)) {
            self.calls.group().send(piece, Rank(to as u32), TAG, by)?;
        }
        Ok(())
    }

    /// Gets vectors of the same lengths from a rank that [`give`](Self::give)s them.
    pub(crate) fn get(&self, vectors: [&mut [f32]; 3], from: usize) -> Result<(), Error> {
        let by = within(WAIT);
        for piece in vectors
            .into_iter()
            .flat_map(|vector| vector.chunks_mut(PIECE))
        {
            self.calls.group().recv(piece, Rank(from as u32), TAG, by)?;
        }
        Ok(())
    }

    /// Sends vectors to the rank behind and gets those of the one before, piece by piece. All ranks
    /// call it.
    pub(crate) fn pass_all(
        &self,
        role: ShardRole,
        own: [&[f32]; 3],
        copy: [&mut [f32]; 3],
    ) -> Result<(), Error> {
        let by = within(WAIT);
        let group = self.calls.group();
        let mut sends = own.into_iter().flat_map(|vector| vector.chunks(PIECE));
        let mut gets = copy.into_iter().flat_map(|vector| vector.chunks_mut(PIECE));
        loop {
            let (send, get) = (sends.next(), gets.next());
            if send.is_none() && get.is_none() {
                return Ok(());
            }
            if let Some(piece) = send {
                group.send(piece, Rank(role.behind() as u32), TAG, by)?;
            }
            if let Some(piece) = get {
                group.recv(piece, Rank(role.before() as u32), TAG, by)?;
            }
        }
    }
}
