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
//! - The record names the lending node: once that is dead, the owner unloads the instance.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use paceline_base::lock;
use paceline_cluster::nodes::agent::local::{self, CommandProgress};
use paceline_engine::{
    Reply, RequestFailure, Service, ServiceStatus, Sink, State, Submission, Ticket,
};
use paceline_fleet::rules::retire::past_leases;
use paceline_fleet::{EPOCH_UNWANTED, InstanceId, InstanceSpec, specs};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Error, Fleet, Inner, LoadRequest, new_id};
use paceline_fleet::replica_names::Name;

/// Queued replies for a program. A program that falls further behind loses its answer.
const REPLIES_MAX: usize = 16_384;

/// Heartbeat interval of the node, by which it also detects that the program is gone.
const BEAT: Duration = Duration::from_millis(200);

/// The request asks for no replica, which [`Fleet::load`] takes as one.
const NOTHING: Error = Error::Replicas { replicas: 0 };

/// Silence after which a program takes its node for dead.
const SILENCE: Duration = Duration::from_secs(30);

/// Answers a program's request by an instance; the replies are sent as progress. Ends early when
/// the program is gone.
///
/// # Errors
/// The arguments do not parse, or there is no such instance.
pub fn answer(
    fleet: &Fleet,
    arguments: &Value,
    progress: &mut CommandProgress<'_>,
) -> Result<Value, Error> {
    let id = arguments["id"].as_str().unwrap_or_default();
    let submission = Submission::deserialize(&arguments["submission"]);
    let submission = submission.map_err(Error::of("submission"))?;
    let ticket = submission.ticket;
    let service = fleet.service(id)?;
    let (sender, replies) = sync_channel(REPLIES_MAX);
    let mut sender = Some(sender);
    let sink = Box::new(move |reply| {
        // One lost reply loses the answer.
        sender.take_if(|sender| sender.try_send(reply).is_err());
    });
    if let Err(failure) = service.accept(submission, sink) {
        progress(json!(Reply::Failed(failure)));
        return Ok(Value::Null);
    }
    loop {
        let (told, is_last) = match replies.recv_timeout(BEAT) {
            Ok(reply) => {
                let is_last = matches!(reply, Reply::Finished { .. } | Reply::Failed(_));
                (json!(reply), is_last)
            }
            Err(RecvTimeoutError::Timeout) => (Value::Null, false),
            Err(RecvTimeoutError::Disconnected) => return Err(Error::AnswerLost),
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
) -> Result<Value, Error> {
    let here = fleet.upgrade().ok_or(Error::Stopping)?;
    let id = here.inner.load_lent(ask)?;
    drop(here); // a lease does not keep the fleet alive
    let outcome = hold(fleet, id, ask, progress);
    if let Some(fleet) = fleet.upgrade() {
        lock(&fleet.inner.state).leased.remove(&id);
    }
    outcome
}

impl Fleet {
    /// As [`load`](Self::load), until this node stops: then the instance is unloaded, and no other
    /// node takes it over.
    ///
    /// # Errors
    /// As there.
    pub fn lease(&self, ask: &LoadRequest) -> Result<InstanceId, Error> {
        self.inner.load_lent(ask)
    }

    /// As [`load`](Self::load) of one replica, unless the cluster has such an instance already.
    ///
    /// # Errors
    /// As there.
    pub fn load_once(&self, ask: &LoadRequest) -> Result<InstanceId, Error> {
        let records = self.inner.asked(ask)?;
        let record = records.first().ok_or(NOTHING)?;
        let map = self.inner.agent.map();
        let is_same =
            |wanted: &InstanceSpec| wanted.lender.is_none() && Name::of(wanted) == Name::of(record);
        let known = specs(&map).find(|(.., wanted)| is_same(wanted));
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
) -> Result<Value, Error> {
    let here = || fleet.upgrade().ok_or(Error::Stopping);
    let id = id.to_string();
    loop {
        let view = here()?.list().into_iter().find(|view| view.id == id);
        let Some(view) = view else {
            let model = ask.model.clone();
            return Err(Error::Unloaded { model });
        };
        if !progress(json!(view)) {
            return here()?
                .unload(&id, None)
                .map(|count| json!({ "unloaded": count }));
        }
        std::thread::sleep(BEAT);
    }
}

impl Inner {
    /// As [`load`](Self::load) for a program of this machine.
    fn load_lent(&self, ask: &LoadRequest) -> Result<InstanceId, Error> {
        let one = LoadRequest {
            replicas: 1,
            spare: Some(ask.spare.unwrap_or(0)), // not worth it for one command
            ..ask.clone()
        };
        let records = self.asked(&one)?.into_iter().next();
        let (id, mut wanted) = (new_id()?, records.ok_or(NOTHING)?);
        wanted.lender = Some(self.agent.id());
        // No node takes over from a dead lending node.
        wanted.successors.retain(|id| wanted.nodes.contains(id));
        // Before the record is written: this node unloads leased instances without a lease.
        lock(&self.state).leased.insert(id);
        let written = self.want(id, 1, Some(&wanted));
        if written.is_err() {
            lock(&self.state).leased.remove(&id);
        }
        written.map(|()| id)
    }

    /// Unloads the instances that this node leased before its restart, so that new ones have
    /// their names and memory.
    pub(super) fn end_past_leases(&self) {
        let (observed, specs) = self.observe();
        for id in past_leases(&observed, &specs) {
            let _: Result<(), _> = self.want(id, EPOCH_UNWANTED, None); // each round tries again
        }
    }

    /// Unloads what this node leases, at its end.
    pub(super) fn end_leases(&self) {
        let leased = std::mem::take(&mut lock(&self.state).leased);
        for id in leased {
            if self.is_wanted(id) {
                let _: Result<(), _> = self.want(id, EPOCH_UNWANTED, None); // as of a killed node
            }
        }
        self.agent.save();
    }
}

/// An instance of this machine's node as a service in another program of its user. Uses one thread
/// for each open answer.
#[derive(Debug)]
pub struct LeasedInstance {
    home: PathBuf,
    id: String,
    open: Arc<Mutex<BTreeMap<Ticket, Arc<AtomicBool>>>>,
}

impl LeasedInstance {
    /// The instance `id` of the node whose files are below `home`.
    pub fn new(home: &Path, id: &str) -> Self {
        Self {
            home: home.to_owned(),
            id: id.to_owned(),
            open: Arc::default(),
        }
    }
}

impl Service for LeasedInstance {
    fn accept(&self, submission: Submission, mut sink: Sink) -> Result<(), RequestFailure> {
        let ticket = submission.ticket;
        let over = Arc::new(AtomicBool::new(false));
        lock(&self.open).insert(ticket, Arc::clone(&over));
        let (home, open) = (self.home.clone(), Arc::clone(&self.open));
        let arguments = json!({ "id": self.id, "submission": submission });
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
            Ok(_) => Ok(()),
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
