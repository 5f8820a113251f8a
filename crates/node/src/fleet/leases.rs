//! Leased instances: programs of this machine's user use and load instances through the node's
//! local socket.
//!
//! ```text
//! program -> answer {"id":..,"request":..}   node <- a reply each, null as a sign of life
//! program -> borrow {what to load}           node <- the instance as it is, until the program goes
//! ```
//! - [`LeasedInstance`]: an instance of the node as a [`Service`] in the program.
//! - [`answer`], [`lend`]: the node's side.
//! - [`Fleet::lease`]: instances for the life of this node itself, as those of `up MODEL`.
//! - [`LostLenders`]: instances whose lending node is dead. Their record names it, and their owner
//!   unloads them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use paceline_base::{AwakeTime, lock};
use paceline_cluster::nodes::agent::local::{self, CommandProgress};
use paceline_cluster::nodes::placement::{self, EPOCH_UNWANTED, InstanceSpec};
use paceline_cluster::nodes::{InstanceId, Registers};
use paceline_engine::{
    GenerationRequest, Reply, RequestFailure, Service, ServiceStatus, Sink, State, Ticket,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::replica_names::Name;
use super::{Fleet, Inner, LOOK_EVERY, LoadRequest, new_id};

/// Queued replies for a program. A program that falls further behind loses its answer.
const REPLIES_MAX: usize = 16_384;

/// Heartbeat interval of the node, by which it also detects that the program is gone.
const BEAT: Duration = Duration::from_millis(200);

/// Silence after which a program takes its node for dead.
const SILENCE: Duration = Duration::from_secs(30);

/// An instance is unloaded when its lending node has been dead for this time. A briefly suspended
/// node is back within it, and its program is still waiting: that waits for [`SILENCE`].
const RETURN_LIMIT: Duration = Duration::from_secs(10);

/// Answers a program's request by an instance; the replies are sent as progress. Ends early when
/// the program is gone.
///
/// # Errors
/// The arguments do not parse, or there is no such instance.
pub fn answer(
    fleet: &Fleet,
    arguments: &Value,
    progress: &mut CommandProgress<'_>,
) -> Result<Value, String> {
    let id = arguments["id"].as_str().unwrap_or_default();
    let request =
        GenerationRequest::deserialize(&arguments["request"]).map_err(|error| error.to_string())?;
    let tokens =
        Vec::<u32>::deserialize(&arguments["tokens"]).map_err(|error| error.to_string())?;
    let service = fleet.service(id)?;
    let (sender, replies) = sync_channel(REPLIES_MAX);
    let mut sender = Some(sender);
    let sink = Box::new(move |reply| {
        // One lost reply loses the answer.
        sender.take_if(|sender| sender.try_send(reply).is_err());
    });
    let ticket = match service.submit_after(request, tokens, sink) {
        Ok(ticket) => ticket,
        Err(failure) => {
            progress(json!(Reply::Failed(failure)));
            return Ok(Value::Null);
        }
    };
    loop {
        let (told, is_last) = match replies.recv_timeout(BEAT) {
            Ok(reply) => {
                let is_last = matches!(reply, Reply::Finished { .. } | Reply::Failed(_));
                (json!(reply), is_last)
            }
            Err(RecvTimeoutError::Timeout) => (Value::Null, false),
            Err(RecvTimeoutError::Disconnected) => return Err("the answer was lost".to_owned()),
        };
        if !progress(told) {
            service.cancel(ticket);
            return Ok(Value::Null);
        }
        if is_last {
            return Ok(Value::Null);
        }
    }
}

/// Loads a model for the lifetime of a program; the instance's status is sent as progress.
///
/// # Errors
/// As of [`Fleet::load`], and when the node stops.
pub fn lend(
    fleet: &Weak<Fleet>,
    ask: &LoadRequest,
    progress: &mut CommandProgress<'_>,
) -> Result<Value, String> {
    let here = fleet.upgrade().ok_or("the node is stopping")?;
    let id = here.inner.load_lent(ask)?;
    drop(here); // a lease does not keep the fleet alive
    let outcome = hold(fleet, id, ask, progress);
    if let Some(fleet) = fleet.upgrade() {
        lock(&fleet.inner.loans).remove(&id);
    }
    outcome
}

impl Fleet {
    /// As [`load`](Self::load), until this node stops: then the instance is unloaded, and no other
    /// node takes it over.
    ///
    /// # Errors
    /// As there.
    pub fn lease(&self, ask: &LoadRequest) -> Result<InstanceId, String> {
        self.inner.load_lent(ask)
    }

    /// As [`load`](Self::load) of one replica, unless the cluster has such an instance already.
    ///
    /// # Errors
    /// As there.
    pub fn load_once(&self, ask: &LoadRequest) -> Result<InstanceId, String> {
        let records = self.inner.asked(ask)?;
        let record = records.first().ok_or("nothing is asked for")?;
        let map = self.inner.agent.map();
        let is_same =
            |wanted: &InstanceSpec| wanted.lender.is_none() && Name::of(wanted) == Name::of(record);
        let known = placement::wanted(&map).find(|(.., wanted)| is_same(wanted));
        let id = known.map_or_else(|| self.inner.want_new(record), |(id, ..)| Ok(id));
        self.inner.agent.save();
        id
    }
}

/// Waits until the program is gone, then unloads its instance.
fn hold(
    fleet: &Weak<Fleet>,
    id: InstanceId,
    ask: &LoadRequest,
    progress: &mut CommandProgress<'_>,
) -> Result<Value, String> {
    let here = || fleet.upgrade().ok_or("the node is stopping");
    let id = id.to_string();
    loop {
        let view = here()?.list().into_iter().find(|view| view.id == id);
        let Some(view) = view else {
            return Err(format!("{} was unloaded", ask.model));
        };
        if !progress(json!(view)) {
            return here()?
                .unload(&id, None)
                .map(|count| json!({ "unloaded": count }));
        }
        std::thread::sleep(BEAT);
    }
}

/// Instances whose lending node is dead, and for how long.
#[derive(Debug)]
pub(super) struct LostLenders {
    /// Clock that stops while this node is suspended and receives no heartbeats.
    awake: AwakeTime,
    since: BTreeMap<InstanceId, Duration>,
}

impl LostLenders {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            awake: AwakeTime::new(now, 2 * LOOK_EVERY),
            since: BTreeMap::new(),
        }
    }

    /// Instances of `abandoned` whose lending node has been dead for [`RETURN_LIMIT`]. Call it
    /// about every [`LOOK_EVERY`].
    fn look(&mut self, now: Instant, abandoned: &[InstanceId]) -> Vec<InstanceId> {
        self.awake.tick(now);
        let total = self.awake.total();
        self.since.retain(|id, _| abandoned.contains(id));
        for id in abandoned {
            self.since.entry(*id).or_insert(total);
        }
        let over = |since: &Duration| total.saturating_sub(*since) >= RETURN_LIMIT;
        let due = self.since.iter().filter(|(_, since)| over(since));
        due.map(|(id, _)| *id).collect()
    }
}

impl Inner {
    /// As [`load`](Self::load) for a program of this machine.
    fn load_lent(&self, ask: &LoadRequest) -> Result<InstanceId, String> {
        let one = LoadRequest {
            replicas: 1,
            spare: Some(ask.spare.unwrap_or(0)), // not worth it for one command
            ..ask.clone()
        };
        let records = self.asked(&one)?.into_iter().next();
        let (id, mut wanted) = (new_id()?, records.ok_or("nothing is asked for")?);
        wanted.lender = Some(self.agent.id());
        // No node takes over from a dead lending node.
        wanted.successors.retain(|id| wanted.nodes.contains(id));
        // Before the record is written: this node unloads leased instances without a lease.
        lock(&self.loans).insert(id);
        let written = self.want(id, 1, Some(&wanted));
        if written.is_err() {
            lock(&self.loans).remove(&id);
        }
        written.map(|()| id)
    }

    /// Unloads leased instances without a program: their lending node is dead, or it is this node
    /// and was restarted.
    pub(super) fn reclaim(&self, lost: &mut LostLenders) {
        let (map, own) = (self.agent.map(), self.agent.id());
        let abandoned = placement::abandoned(&map, own, |id| self.agent.life(id));
        let mut over = lost.look(Instant::now(), &abandoned);
        over.extend(self.past_loans(&map));
        for id in over {
            (self.spec.tell)(&format!(
                "unloading {id}: the command that borrowed it is gone"
            ));
            // Fails if the map is full; the next poll tries again.
            let _: Result<(), _> = self.want(id, EPOCH_UNWANTED, None);
        }
    }

    /// Unloads the instances that this node leased before its restart, so that new ones have
    /// their names and memory.
    pub(super) fn end_past_leases(&self) {
        for id in self.past_loans(&self.agent.map()) {
            let _: Result<(), _> = self.want(id, EPOCH_UNWANTED, None); // `reclaim` tries again
        }
    }

    /// Unloads what this node leases, at its end.
    pub(super) fn end_leases(&self) {
        for id in std::mem::take(&mut *lock(&self.loans)) {
            if self.is_wanted(id) {
                let _: Result<(), _> = self.want(id, EPOCH_UNWANTED, None); // as of a killed node
            }
        }
        self.agent.save();
    }

    /// Instances that this node leased before its restart.
    fn past_loans(&self, map: &Registers) -> Vec<InstanceId> {
        let own = Some(self.agent.id());
        let lent = placement::wanted(map).filter(|(.., wanted)| wanted.lender == own);
        // After the map was read: a lease is recorded before its record is written.
        let held = lock(&self.loans);
        let past = lent.map(|(id, ..)| id).filter(|id| !held.contains(id));
        past.collect()
    }
}

/// An instance of this machine's node as a service in another program of its user. Uses one thread
/// for each open answer.
#[derive(Debug)]
pub struct LeasedInstance {
    home: PathBuf,
    id: String,
    last_ticket: AtomicU64,
    open: Arc<Mutex<BTreeMap<Ticket, Arc<AtomicBool>>>>,
}

impl LeasedInstance {
    /// The instance `id` of the node whose files are below `home`.
    pub fn new(home: &Path, id: &str) -> Self {
        Self {
            home: home.to_owned(),
            id: id.to_owned(),
            last_ticket: AtomicU64::new(0),
            open: Arc::default(),
        }
    }
}

impl Service for LeasedInstance {
    fn submit_after(
        &self,
        request: GenerationRequest,
        tokens: Vec<u32>,
        mut sink: Sink,
    ) -> Result<Ticket, RequestFailure> {
        let ticket = Ticket(self.last_ticket.fetch_add(1, Ordering::Relaxed) + 1);
        let over = Arc::new(AtomicBool::new(false));
        lock(&self.open).insert(ticket, Arc::clone(&over));
        let (home, open) = (self.home.clone(), Arc::clone(&self.open));
        let arguments = json!({ "id": self.id, "request": request, "tokens": tokens });
        let run = move || {
            let mut is_complete = false;
            let told = |value: Value| {
                if let Ok(reply) = Reply::deserialize(&value) {
                    is_complete |= matches!(reply, Reply::Finished { .. } | Reply::Failed(_));
                    sink(reply);
                }
                !over.load(Ordering::SeqCst)
            };
            let asked = local::ask_while(&home, "answer", arguments, SILENCE, told);
            if !is_complete && !over.load(Ordering::SeqCst) {
                let reason = asked.err().map(|error| error.to_string());
                let reason = reason.unwrap_or_else(|| "the node says no more".to_owned());
                sink(Reply::Failed(RequestFailure::Lost { reason }));
            }
            lock(&open).remove(&ticket);
        };
        let thread = std::thread::Builder::new().name("at node".to_owned());
        match thread.spawn(run) {
            Ok(_) => Ok(ticket),
            Err(error) => Err(RequestFailure::Unavailable {
                reason: error.to_string(),
            }),
        }
    }

    fn cancel(&self, ticket: Ticket) {
        if let Some(over) = lock(&self.open).get(&ticket) {
            over.store(true, Ordering::SeqCst);
        }
    }

    fn status(&self) -> ServiceStatus {
        ServiceStatus {
            state: State::Ready,
            running: lock(&self.open).len(),
            waiting: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_given_up_once_its_lender_has_been_dead_for_a_while() {
        let start = Instant::now();
        let mut lost = LostLenders::new(start);
        let both = [InstanceId(1), InstanceId(2)];
        let mut look =
            |s: u64, abandoned: &[InstanceId]| lost.look(start + Duration::from_secs(s), abandoned);
        assert_eq!(look(1, &both), []);
        for s in 2..=5 {
            assert_eq!(look(s, &both), []);
        }
        assert_eq!(look(6, &both[1..]), [], "the lender of 1 is back");
        for s in 7..=10 {
            assert_eq!(look(s, &both), []);
        }
        assert_eq!(look(11, &both), [InstanceId(2)]);
        assert_eq!(look(12, &[]), []);
        // This node was suspended for an hour, and counts 2 s of it.
        assert_eq!(look(13, &both), []);
        assert_eq!(look(3613, &both), []);
    }
}
