//! Instances for programs of this machine's user, by the local socket of its node.
//!
//! ```text
//! program -> answer {"id":..,"request":..}   node <- a reply each, null as a sign of life
//! program -> borrow {what to load}           node <- the instance as it is, until the program goes
//! ```
//! - [`AtNode`]: an instance of the node as a [`Service`] of the program.
//! - [`answer`], [`lend`]: the node's side.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use paceline_base::lock;
use paceline_cluster::nodes::agent::local::{self, Progress};
use paceline_engine::{Failure, Reply, Request, Service, Sink, State, Status, Ticket};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Ask, Fleet};

/// Replies that wait for a program. One that is behind by more loses its answer.
const REPLIES_MAX: usize = 16_384;

/// How often the node says that it is still there, and so sees that the program is not.
const BEAT: Duration = Duration::from_millis(200);

/// A node that says nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(30);

/// Answers a request of a program by an instance: its replies are the progress. Ends early when the
/// program goes.
///
/// # Errors
/// Arguments that are none, an instance that there is not.
pub fn answer(
    fleet: &Fleet,
    arguments: &Value,
    progress: &mut Progress<'_>,
) -> Result<Value, String> {
    let id = arguments["id"].as_str().unwrap_or_default();
    let request = Request::deserialize(&arguments["request"]).map_err(|error| error.to_string())?;
    let tokens =
        Vec::<u32>::deserialize(&arguments["tokens"]).map_err(|error| error.to_string())?;
    let service = fleet.service(id)?;
    let (sender, replies) = sync_channel(REPLIES_MAX);
    let mut sender = Some(sender);
    let sink = Box::new(move |reply| {
        // Once one is lost, so is the answer.
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

/// Loads a model for as long as a program is there: how the instance is, is the progress.
///
/// # Errors
/// As of [`Fleet::load`], and when the node stops.
pub fn lend(fleet: &Weak<Fleet>, ask: &Ask, progress: &mut Progress<'_>) -> Result<Value, String> {
    let here = || fleet.upgrade().ok_or("the node is stopping");
    let ask = Ask {
        replicas: 1,
        ..ask.clone()
    };
    let ids = here()?.load(&ask)?;
    let id = ids.first().map(ToString::to_string).unwrap_or_default();
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

/// An instance of this machine's node, as a service of another program of its user. A thread for
/// each open answer.
#[derive(Debug)]
pub struct AtNode {
    home: PathBuf,
    id: String,
    last_ticket: AtomicU64,
    open: Arc<Mutex<BTreeMap<Ticket, Arc<AtomicBool>>>>,
}

impl AtNode {
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

impl Service for AtNode {
    fn submit_after(
        &self,
        request: Request,
        tokens: Vec<u32>,
        mut sink: Sink,
    ) -> Result<Ticket, Failure> {
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
                sink(Reply::Failed(Failure::Lost { reason }));
            }
            lock(&open).remove(&ticket);
        };
        let thread = std::thread::Builder::new().name("at node".to_owned());
        match thread.spawn(run) {
            Ok(_) => Ok(ticket),
            Err(error) => Err(Failure::Unavailable {
                reason: error.to_string(),
            }),
        }
    }

    fn cancel(&self, ticket: Ticket) {
        if let Some(over) = lock(&self.open).get(&ticket) {
            over.store(true, Ordering::SeqCst);
        }
    }

    fn status(&self) -> Status {
        Status {
            state: State::Ready,
            running: lock(&self.open).len(),
            waiting: 0,
        }
    }
}
