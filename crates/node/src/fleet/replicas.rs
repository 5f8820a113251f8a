//! The replicas of a model, as one service of a node.
//!
//! ```text
//! client ──▶ Replicas ──choose──▶ ingress of replica 1 ──▶ its owner
//! └──────────────▶ ingress of replica 2 ──▶ its owner
//! ```
//! [`choose`] routes each request to one replica. When a replica is lost or recovers, its ingress
//! moves the open requests to the other replicas, which continue after the client's last token. The
//! data of a request (its journal, the stored response that it follows) stays on this node. So a
//! client that reconnects finds it, whichever replica answers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use paceline_base::lock;
use paceline_engine::{RequestFailure, Service, ServiceStatus, Sink, State, Submission, Ticket};
use paceline_fleet::InstanceId;
use paceline_fleet::rules::route::ReadyReplica;

use super::Inner;
use super::ingress::{Ingress, IngressRequest, IngressService, RequestFailover, UNKNOWN};
use super::prefixes::{Prefixes, blocks};
use paceline_fleet::choice::{ReplicaCandidate, choose};

/// Receives log lines for people.
type ReplicaLog = Arc<dyn Fn(&str) + Send + Sync>;

/// The service of a model on this node. Dropping it loses open requests.
pub(super) struct Replicas {
    routes: Arc<Routes>,
}

/// State shared by the ingress of all replicas.
struct Routes {
    model: String,
    tell: ReplicaLog,
    members: ReplicaMap,
    /// Locked from a choice until the chosen replica counts the request, so that the next choice
    /// sees it. Locked while requests move, and by a cancel, which so finds a request before or
    /// after its move. A send may take seconds; the members can be read meanwhile.
    prefixes: Mutex<Prefixes>,
}

/// The replicas of now. Locked for a look or a change, never while a request is sent.
#[derive(Default)]
struct ReplicaMap(Mutex<BTreeMap<InstanceId, ReplicaHandle>>);

impl ReplicaMap {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<InstanceId, ReplicaHandle>> {
        lock(&self.0)
    }

    fn all(&self) -> Vec<(InstanceId, ReplicaHandle)> {
        let members = self.lock();
        members.iter().map(|(id, it)| (*id, it.clone())).collect()
    }
}

#[derive(Clone)]
struct ReplicaHandle {
    remote: Arc<IngressService>,
    /// Answers that it computes concurrently.
    parallel: usize,
    /// Requests that this node has sent to it.
    asked: Arc<AtomicU64>,
    /// Name of its numbers, as its owner last reported it.
    numbers: Option<String>,
}

impl ReplicaHandle {
    fn entry(&self) -> &Ingress {
        &self.remote.entry
    }
}

/// Load of a replica, as far as this node knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Use {
    /// Requests that this node has sent to it.
    pub(super) asked: u64,
    /// Its running requests, of all nodes.
    pub(super) load: usize,
}

impl Replicas {
    /// An empty set for the model that its user calls `model`.
    pub(super) fn new(model: &str, tell: ReplicaLog) -> Self {
        let routes = Routes {
            model: model.to_owned(),
            tell,
            members: ReplicaMap::default(),
            prefixes: Mutex::default(),
        };
        let routes = Arc::new(routes);
        Self { routes }
    }

    /// Adds an instance, or stores the name of its numbers.
    pub(super) fn admit(&self, inner: &Arc<Inner>, ready: &ReadyReplica) {
        let id = ready.id;
        if let Some(member) = self.routes.members.lock().get_mut(&id) {
            member.numbers.clone_from(&ready.numbers);
            return;
        }
        let routes = Arc::downgrade(&self.routes);
        let relief: Weak<dyn RequestFailover> = routes;
        // Without a thread for it, the next update of services tries again.
        let Ok(remote) = IngressService::start(inner, id, Some(relief)) else {
            return;
        };
        let member = ReplicaHandle {
            remote: Arc::new(remote),
            parallel: usize::from(ready.spec.options.parallel.max(1)),
            asked: Arc::default(),
            numbers: ready.numbers.clone(),
        };
        self.routes.members.lock().insert(id, member);
    }

    /// Keeps these instances only. Open requests of the others move to them.
    pub(super) fn retain(&self, wanted: &BTreeSet<InstanceId>) {
        let mut members = self.routes.members.lock();
        members.retain(|id, _| wanted.contains(id));
    }

    /// The name of the numbers, if it is the same for all replicas: that of a request is not known
    /// in advance.
    fn numbers(&self) -> Option<String> {
        let members = self.routes.members.lock();
        let mut names = members.values().map(|member| member.numbers.clone());
        let first = names.next()??;
        names
            .all(|name| name.as_ref() == Some(&first))
            .then_some(first)
    }

    /// Whether an instance is one of them.
    pub(super) fn has(&self, id: InstanceId) -> bool {
        self.routes.members.lock().contains_key(&id)
    }

    pub(super) fn usage(&self, id: InstanceId) -> Use {
        let member = self.routes.members.lock().get(&id).cloned();
        member.map_or_else(Use::default, |member| Use {
            asked: member.asked.load(Ordering::Relaxed),
            load: member.entry().load(),
        })
    }

    /// Sends a request to a replica: to `first` if it answers, else to the chosen one.
    fn submit_to(
        &self,
        asked: IngressRequest,
        first: Option<InstanceId>,
    ) -> Result<(), RequestFailure> {
        let hashes = blocks(asked.prompt());
        let mut prefixes = lock(&self.routes.prefixes);
        let mut members = self.routes.members.all();
        let first = first.and_then(|id| members.iter().position(|(other, _)| *other == id));
        let first = first.filter(|at| members[*at].1.entry().is_ready());
        let mut refusal = RequestFailure::Unavailable {
            reason: "no replica of the model is loaded".to_owned(),
        };
        let (mut asked, mut at) = (asked, first);
        loop {
            let chosen = at.take().or_else(|| prefixes.choose(&members, &hashes));
            let Some(chosen) = chosen else {
                return Err(refusal);
            };
            let (id, member) = members.swap_remove(chosen);
            match give(&member, asked) {
                Ok(()) => {
                    prefixes.remember(&hashes, id);
                    return Ok(());
                }
                Err(back) => asked = back,
            }
            refusal = member.entry().refusal();
        }
    }

    fn cancel(&self, ticket: Ticket) {
        let _turn = lock(&self.routes.prefixes);
        for (_, member) in self.routes.members.all() {
            member.entry().cancel(ticket);
        }
    }

    fn status(&self) -> ServiceStatus {
        let members = self.routes.members.all();
        let all: Vec<ServiceStatus> = members.iter().map(|(_, it)| it.entry().status()).collect();
        let ready = all.iter().find(|it| it.state == State::Ready);
        let first = ready.or(all.first()).map(|it| it.state.clone());
        let none = || State::Recovering("no replica answers at the moment".to_owned());
        ServiceStatus {
            state: first.unwrap_or_else(none),
            running: all.iter().map(|it| it.running).sum(),
            waiting: all.iter().map(|it| it.waiting).sum(),
        }
    }
}

impl Prefixes {
    /// Moves an open request to one of `others`; returns it if none of them can continue it.
    fn hand_over(
        &mut self,
        from: &Ingress,
        others: &[(InstanceId, ReplicaHandle)],
        asked: IngressRequest,
    ) -> Result<(), IngressRequest> {
        let numbers = from.numbers();
        let fits = |(_, member): &&(InstanceId, ReplicaHandle)| {
            !asked.has_begun() || (numbers.is_some() && member.entry().numbers() == numbers)
        };
        let fitting: Vec<_> = others.iter().filter(fits).cloned().collect();
        let hashes = blocks(asked.prompt());
        let Some(chosen) = self.choose(&fitting, &hashes) else {
            return Err(asked);
        };
        let (id, member) = &fitting[chosen];
        give(member, asked)?;
        self.remember(&hashes, *id);
        Ok(())
    }

    /// The index of the replica chosen for a prompt with these blocks.
    fn choose(&self, members: &[(InstanceId, ReplicaHandle)], hashes: &[u64]) -> Option<usize> {
        let candidate = |(id, member): &(InstanceId, ReplicaHandle)| ReplicaCandidate {
            is_ready: member.entry().is_ready(),
            load: member.entry().load(),
            parallel: member.parallel,
            blocks: self.read_by(hashes, *id),
            asked: member.asked.load(Ordering::Relaxed),
        };
        let candidates: Vec<ReplicaCandidate> = members.iter().map(candidate).collect();
        choose(&candidates)
    }
}

/// Sends a request to a replica and counts it; returns it if the replica refuses.
fn give(member: &ReplicaHandle, asked: IngressRequest) -> Result<(), IngressRequest> {
    member.entry().take(asked)?;
    member.asked.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

impl RequestFailover for Routes {
    fn relieve(&self, from: &Ingress) -> bool {
        let mut prefixes = lock(&self.prefixes);
        let mut others = self.members.all();
        others.retain(|(id, member)| *id != from.id() && member.entry().is_ready());
        if others.is_empty() {
            return false;
        }
        // Later requests to it find an empty cache.
        prefixes.forget(from.id());
        let mut moved = 0;
        for asked in from.give_up() {
            match prefixes.hand_over(from, &others, asked) {
                Ok(()) => moved += 1,
                Err(asked) => from.keep(asked),
            }
        }
        if moved > 0 {
            from.hang_up();
        }
        drop(prefixes);
        if moved > 0 {
            let (model, plural) = (&self.model, if moved == 1 { "" } else { "s" });
            (self.tell)(&format!(
                "{model}: another replica goes on with {moved} request{plural}"
            ));
        }
        moved > 0
    }
}

impl Service for Replicas {
    fn accept(&self, submission: Submission, sink: Sink) -> Result<(), RequestFailure> {
        self.submit_to(IngressRequest::new(submission, sink), None)
    }

    fn cancel(&self, ticket: Ticket) {
        self.cancel(ticket);
    }

    fn cut(&self) -> String {
        let members = self.routes.members.lock();
        let members = members.values();
        let cuts: BTreeSet<String> = members
            .filter_map(|member| member.remote.entry.cut())
            .collect();
        // Replicas may have different splits: the one of a request is not known in advance.
        match cuts.len() {
            0 => UNKNOWN.to_owned(),
            1 => cuts.into_iter().collect(),
            _ => "mixed".to_owned(),
        }
    }

    fn numbers(&self) -> Option<String> {
        self.numbers()
    }

    fn status(&self) -> ServiceStatus {
        self.status()
    }
}

impl fmt::Debug for Replicas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids: Vec<InstanceId> = self.routes.members.lock().keys().copied().collect();
        write!(f, "replicas {ids:?} of {}", self.routes.model)
    }
}

/// A preferred replica: the others answer when it does not.
#[derive(Debug)]
pub(super) struct Preferred {
    pub(super) all: Arc<Replicas>,
    pub(super) first: InstanceId,
}

impl Service for Preferred {
    fn accept(&self, submission: Submission, sink: Sink) -> Result<(), RequestFailure> {
        let asked = IngressRequest::new(submission, sink);
        self.all.submit_to(asked, Some(self.first))
    }

    fn cancel(&self, ticket: Ticket) {
        self.all.cancel(ticket);
    }

    fn cut(&self) -> String {
        Service::cut(&*self.all)
    }

    fn numbers(&self) -> Option<String> {
        self.all.numbers()
    }

    fn status(&self) -> ServiceStatus {
        self.all.status()
    }
}

#[cfg(test)]
mod tests {
    use paceline_engine::GenerationRequest;

    use super::super::ingress::testing::{FakeOwner, connected, generate, numbered, say_stand};
    use super::super::prefixes::BLOCK;
    use super::*;

    /// Two replicas, 0 and 1, whose owners compute by these kernel classes.
    fn two(classes: [&str; 2]) -> (Replicas, [FakeOwner; 2]) {
        let all = Replicas::new("m", Arc::new(|_: &str| ()));
        let owners = [0_u64, 1].map(|id| {
            let (remote, owner) = connected(id, classes[id as usize]);
            let member = ReplicaHandle {
                remote: Arc::new(remote),
                parallel: 4,
                asked: Arc::default(),
                numbers: None,
            };
            all.routes.members.lock().insert(InstanceId(id), member);
            owner
        });
        (all, owners)
    }

    fn entry(all: &Replicas, id: u64) -> Arc<Ingress> {
        Arc::clone(&all.routes.members.lock()[&InstanceId(id)].remote.entry)
    }

    /// Sends a prompt of two blocks of this token, as the request of this number.
    fn ask(all: &Replicas, number: u64, token: u32) -> Ticket {
        let request = GenerationRequest {
            prompt: vec![token; 2 * BLOCK],
            ..GenerationRequest::default()
        };
        let submission = numbered(number, request);
        let ticket = submission.ticket;
        all.accept(submission, Box::new(|_| ())).unwrap();
        ticket
    }

    #[test]
    fn prefixes_and_load_say_where_a_request_goes() {
        let (all, [one, other]) = two(["cpu"; 2]);
        for (number, token, at) in [(1, 7, &one), (2, 8, &other), (3, 7, &one), (4, 8, &other)] {
            ask(&all, number, token);
            assert_eq!(at.heard(), Some(format!("submit {number} after []")));
        }
        // Other nodes' requests count: two of this node and three more, against two.
        say_stand(&entry(&all, 0), State::Ready, 5);
        ask(&all, 5, 7);
        assert_eq!(other.heard().as_deref(), Some("submit 5 after []"));
        let usage = all.usage(InstanceId(0));
        assert_eq!((usage.asked, usage.load), (2, 5));
        assert_eq!(one.heard(), None);
    }

    /// Eight prompts, each asked twice, all at the same time.
    #[test]
    fn the_second_request_of_a_pair_goes_where_the_first_went() {
        let (all, owners) = two(["cpu"; 2]);
        for number in 1..=16 {
            ask(&all, number, (number as u32 - 1) % 8 + 1);
        }
        let heard = |owner: FakeOwner| -> Vec<String> {
            let next = || owner.heard();
            std::iter::from_fn(next).collect()
        };
        let heard = owners.map(heard);
        assert_eq!(heard.each_ref().map(Vec::len), [8, 8]);
        for first in 1..=8 {
            let pair = [first, first + 8].map(|ticket| format!("submit {ticket} after []"));
            let is_home = |heard: &Vec<String>| pair.iter().all(|said| heard.contains(said));
            assert!(heard.iter().any(is_home), "{pair:?} in {heard:?}");
        }
    }

    #[test]
    fn a_lost_replica_hands_its_requests_to_the_other() {
        let (all, [one, other]) = two(["cpu"; 2]);
        let ticket = ask(&all, 1, 7);
        assert_eq!(one.heard().as_deref(), Some("submit 1 after []"));
        let lost = entry(&all, 0);
        generate(&lost, ticket, 5);
        assert_eq!(all.status().state, State::Ready);
        lost.hang_up();
        assert!(all.routes.relieve(&lost));
        assert_eq!(other.heard().as_deref(), Some("submit 1 after [5]"));
        assert!(!all.routes.relieve(&lost), "it has none left");
        // Its prefix is dropped, and it is avoided.
        ask(&all, 2, 7);
        assert_eq!(other.heard().as_deref(), Some("submit 2 after []"));
        all.cancel(ticket);
        assert_eq!(other.heard().as_deref(), Some("cancel 1"));
        let last = entry(&all, 1);
        last.hang_up();
        assert!(!all.routes.relieve(&last), "no other is left");
        assert_eq!(all.usage(InstanceId(1)).load, 1, "it waits for its owner");
    }

    #[test]
    fn a_replica_that_recovers_is_left() {
        let (all, [one, other]) = two(["cpu"; 2]);
        ask(&all, 1, 7);
        let entry = entry(&all, 0);
        say_stand(&entry, State::Recovering("rank 0 died".to_owned()), 1);
        assert!(all.routes.relieve(&entry));
        assert_eq!(other.heard().as_deref(), Some("submit 1 after []"));
        assert_eq!(one.heard().as_deref(), Some("submit 1 after []"));
        assert_eq!(one.heard().as_deref(), Some("closed"), "so that it stops");
    }

    #[test]
    fn an_answer_that_has_begun_goes_on_with_its_numbers_only() {
        let (all, [one, other]) = two(["cpu", "mlx"]);
        let begun = ask(&all, 1, 7);
        let lost = entry(&all, 0);
        generate(&lost, begun, 5);
        ask(&all, 2, 7); // it has the prefix
        assert_eq!(one.heard().as_deref(), Some("submit 1 after []"));
        assert_eq!(one.heard().as_deref(), Some("submit 2 after []"));
        lost.hang_up();
        assert!(all.routes.relieve(&lost));
        assert_eq!(other.heard().as_deref(), Some("submit 2 after []"));
        assert_eq!(other.heard(), None);
        assert_eq!(all.usage(InstanceId(0)).load, 1, "it waits for its owner");
    }
}
