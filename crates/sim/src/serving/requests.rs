//! Requests of simulated clients: asked, answered, copied to journals, resumed and checked.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use paceline_cluster::nodes::member::Life;
use paceline_engine::{
    GenerationRequest, Reply, RequestFailure, RequestMessage, Submission, Ticket,
};
use paceline_fleet::{InstanceId, specs};
use paceline_node::supervisor::{Event, Health};

use super::{
    AGAIN_MAX, COPY_LIMIT, LOOK_EVERY, Later, NetworkView, SETTLED_AFTER, SILENCE, Serving,
    ServingEvent, SimOwner, token,
};

/// The connection of an ingress to an owner.
#[derive(Debug)]
pub(super) struct SimConnection {
    pub(super) life: u64,
    pub(super) ticket: Ticket,
    pub(super) replies: VecDeque<Reply>,
    pub(super) cut: Option<Duration>,
}

/// The node that took a request.
#[derive(Debug)]
pub(super) struct SimIngress {
    pub(super) node: usize,
    pub(super) tokens: usize,
    pub(super) line: Option<SimConnection>,
    /// When the owner returned the request, and whether it refused it.
    pub(super) given_back: Option<(Duration, bool)>,
    pub(super) again: u8,
    /// The owner has sent the end.
    pub(super) ended: bool,
}

/// A client's request.
#[derive(Debug)]
pub(super) struct SimRequest {
    pub(super) id: InstanceId,
    /// Of its last submission.
    pub(super) ticket: Ticket,
    pub(super) length: usize,
    pub(super) since: Duration,
    /// `None` while the client looks for a node.
    pub(super) entry: Option<SimIngress>,
    /// Counts ingress nodes: messages of an earlier one do not arrive.
    pub(super) entries: u64,
    /// Tokens that the client has.
    pub(super) have: usize,
    /// Tokens that other nodes have copies of.
    pub(super) copies: BTreeMap<usize, usize>,
    pub(super) outcome: Option<RequestResult>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestResult {
    Whole,
    Unloaded,
    /// All nodes that had it were lost.
    Gone,
    Lost,
}

impl Serving {
    /// A client sends a request to a live node for an instance in the node's map that was ready
    /// once. Before that no node answers for its model.
    pub(super) fn ask(&mut self, net: &NetworkView<'_>, later: &mut Later) {
        let alive: Vec<usize> = (0..net.nodes.len())
            .filter(|node| net.lives(*node))
            .collect();
        let node = alive.get(self.random.below(alive.len().max(1) as u64) as usize);
        let known = node.and_then(|node| {
            let member = net.nodes[*node].member.as_ref()?;
            let answered = |id, epoch| self.answered.range((id, 0)..=(id, epoch)).next();
            let mut all = specs(member.map());
            all.find_map(|(id, epoch, _)| answered(id, epoch).map(|_| id))
        });
        let (Some(node), Some(id)) = (node, known) else {
            later.push((Duration::from_secs(2), ServingEvent::Ask));
            return;
        };
        let number = self.asked.len();
        let length = [0, 5, 40, 90][self.random.below(4) as usize];
        self.asked.push(SimRequest {
            id,
            ticket: Ticket((number as u64) << 8),
            length,
            since: net.now,
            entry: Some(SimIngress::new(*node, 0)),
            entries: 0,
            have: 0,
            copies: BTreeMap::new(),
            outcome: None,
        });
        self.look(number, net, later);
    }

    /// Delivers an owner's reply to the ingress of the request, if it still has it.
    pub(super) fn deliver(
        &mut self,
        (life, ticket): (u64, Ticket),
        number: Option<usize>,
        reply: Reply,
        later: &mut Later,
    ) {
        let way = self.way();
        let Some(number) = number else { return };
        let entry = self.asked[number].entry.as_mut();
        let line = entry.and_then(|entry| entry.line.as_mut());
        if let Some(line) = line.filter(|line| (line.life, line.ticket) == (life, ticket)) {
            line.replies.push_back(reply);
            later.push((way, ServingEvent::Drain(number)));
        }
    }

    /// An ingress receives what its owner has sent.
    pub(super) fn drain(&mut self, number: usize, net: &NetworkView<'_>, later: &mut Later) {
        loop {
            let asked = &mut self.asked[number];
            let Some(entry) = &mut asked.entry else {
                return;
            };
            let Some(line) = &mut entry.line else { return };
            let owner = self.owners.get(&line.life);
            if !owner.is_some_and(|owner| net.reach(entry.node, owner.node)) {
                return;
            }
            let Some(reply) = line.replies.pop_front() else {
                return;
            };
            match reply {
                Reply::PromptRead { .. } | Reply::Continued => {}
                Reply::Token { token: got, .. } => {
                    if got != token(number, entry.tokens) {
                        let said = format!("answer {number} gets {got} after {}", entry.tokens);
                        self.violations.push(said);
                    }
                    entry.tokens += 1;
                    entry.again = 0;
                    self.copy(number, false, net, later);
                }
                Reply::Finished { .. } => {
                    if entry.tokens != asked.length {
                        let said = format!("answer {number} ends after {}", entry.tokens);
                        self.violations.push(said);
                    }
                    (entry.line, entry.ended) = (None, true);
                    self.copy(number, true, net, later);
                }
                Reply::Failed(RequestFailure::Lost { .. }) => {
                    entry.given_back = Some((net.now, false));
                }
                Reply::Failed(RequestFailure::Unavailable { .. }) => {
                    entry.given_back = Some((net.now, true));
                }
                Reply::Failed(failure) => {
                    let said = format!("answer {number} is refused: {failure}");
                    self.violations.push(said);
                    asked.outcome = Some(RequestResult::Lost);
                    return;
                }
            }
        }
    }

    /// Another node gets a copy of an ingress's tokens, then the client gets them.
    pub(super) fn copy(
        &mut self,
        number: usize,
        ends: bool,
        net: &NetworkView<'_>,
        later: &mut Later,
    ) {
        let way = self.way();
        let asked = &mut self.asked[number];
        let Some(entry) = &asked.entry else { return };
        let mut others = (0..net.nodes.len()).filter(|node| *node != entry.node);
        let keeper = others.find(|node| net.reach(entry.node, *node));
        let wait = match keeper {
            Some(keeper) => {
                asked.copies.insert(keeper, entry.tokens);
                way * 2
            }
            None => COPY_LIMIT,
        };
        later.push((
            wait,
            ServingEvent::Told(number, asked.entries, entry.tokens, ends),
        ));
    }

    /// A client receives tokens from its ingress.
    pub(super) fn told(&mut self, number: usize, entry: u64, (count, ends): (usize, bool)) {
        let asked = &mut self.asked[number];
        if asked.entries != entry || asked.outcome.is_some() {
            return;
        }
        // A copy that took 2 s may arrive after a later, faster one.
        asked.have = asked.have.max(count);
        if ends {
            asked.outcome = Some(RequestResult::Whole);
            self.whole += 1;
            if asked.have != asked.length {
                let said = format!("a client has {} tokens of answer {number}", asked.have);
                self.violations.push(said);
            }
        }
    }

    /// An ingress, or a client without one, checks a request.
    pub(super) fn look(&mut self, number: usize, net: &NetworkView<'_>, later: &mut Later) {
        if self.asked[number].outcome.is_some() {
            return;
        }
        later.push((LOOK_EVERY, ServingEvent::Look(number)));
        if self.asked[number].entry.is_none() {
            return self.come_back(number, net, later);
        }
        self.drain(number, net, later);
        self.check_line(number, net, later);
        let asked = &self.asked[number];
        let entry = asked.entry.as_ref();
        let waits = entry.is_some_and(|entry| entry.line.is_none() && !entry.ended);
        if waits && asked.outcome.is_none() {
            self.connect(number, net, later);
        }
    }

    /// A client that lost its ingress resumes at a node that finds a copy of its tokens.
    fn come_back(&mut self, number: usize, net: &NetworkView<'_>, later: &mut Later) {
        let node = self.random.below(net.nodes.len() as u64) as usize;
        let way = self.way();
        let asked = &mut self.asked[number];
        // A node that has just started may not have the record yet, and refuses.
        if !net.lives(node) || net.record(node, asked.id).is_none() {
            return;
        }
        let has = asked.copies.values().copied().max();
        if has.is_none_or(|has| has < asked.have) && asked.have > 0 {
            asked.outcome = Some(RequestResult::Gone); // all that had it were lost
            return;
        }
        let found = asked.copies.iter().filter(|(at, _)| net.reach(node, **at));
        let found = found.map(|(_, count)| *count).max();
        let count = match found {
            Some(count) if count >= asked.have => count,
            None if asked.have == 0 => 0, // it sends a new request
            _ => return,
        };
        asked.entry = Some(SimIngress::new(node, count));
        self.resumed += 1;
        later.push((way, ServingEvent::Told(number, asked.entries, count, false)));
    }

    /// Closes a connection that is cut or whose owner is lost, and settles returned requests.
    fn check_line(&mut self, number: usize, net: &NetworkView<'_>, later: &mut Later) {
        let Some(entry) = &mut self.asked[number].entry else {
            return;
        };
        let Some(line) = &mut entry.line else { return };
        let (life, ticket) = (line.life, line.ticket);
        let Some(owner) = self.owners.get(&life) else {
            (entry.line, entry.given_back) = (None, None);
            return;
        };
        if net.reach(entry.node, owner.node) {
            line.cut = None;
        } else if net.now - *line.cut.get_or_insert(net.now) >= SILENCE {
            (entry.line, entry.given_back) = (None, None);
            let cancel = RequestMessage::Cancel(ticket);
            self.step(life, Event::Request(cancel), net, later);
            return;
        }
        let Some((at, refused)) = entry.given_back else {
            return;
        };
        if owner.supervisor.health() != Health::Ready || net.now - at < SETTLED_AFTER {
            return;
        }
        if refused && entry.again < AGAIN_MAX {
            (entry.line, entry.given_back) = (None, None);
            entry.again += 1;
            return;
        }
        self.asked[number].outcome = Some(RequestResult::Lost);
    }

    /// Connects to the owner of the instance, by the map of the ingress.
    fn connect(&mut self, number: usize, net: &NetworkView<'_>, later: &mut Later) {
        let asked = &mut self.asked[number];
        let Some(entry) = &mut asked.entry else {
            return;
        };
        let Some(member) = &net.nodes[entry.node].member else {
            return;
        };
        let Some(wanted) = net.record(entry.node, asked.id) else {
            asked.outcome = Some(RequestResult::Unloaded);
            return;
        };
        let id = wanted.nodes[0];
        let node = usize::from(id.0[15]);
        let lives = matches!(member.life(id), Life::Alive | Life::Suspect);
        if !lives || !net.reach(entry.node, node) {
            return;
        }
        let is_it =
            |owner: &SimOwner| owner.node == node && owner.id == asked.id && owner.was_ready;
        let found = self.owners.iter_mut().find(|(_, owner)| is_it(owner));
        let Some((life, owner)) = found else { return };
        asked.ticket = asked.ticket.again();
        let (life, ticket) = (*life, asked.ticket);
        owner.tickets.insert(ticket, number);
        let tokens: Vec<u32> = (0..entry.tokens).map(|i| token(number, i)).collect();
        self.resumed += u64::from(!tokens.is_empty());
        entry.line = Some(SimConnection {
            life,
            ticket,
            replies: VecDeque::new(),
            cut: None,
        });
        let request = Box::new(GenerationRequest {
            prompt: vec![number as u32],
            max_tokens: asked.length,
            ..GenerationRequest::default()
        });
        let submission = Submission {
            ticket,
            request,
            tokens,
        };
        let submit = Event::Request(RequestMessage::Submit(submission));
        self.step(life, submit, net, later);
    }
}

impl SimIngress {
    pub(super) const fn new(node: usize, tokens: usize) -> Self {
        Self {
            node,
            tokens,
            line: None,
            given_back: None,
            again: 0,
            ended: false,
        }
    }
}
