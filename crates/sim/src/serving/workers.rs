//! Workers of simulated instances: they obey their owner, fail and are found lost.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use paceline_base::Rank;
use paceline_cluster::workers::Event as CrewEvent;
use paceline_engine::{Finish, Reply, Ticket};
use paceline_node::supervisor::Event;
use paceline_process::Ending;
use paceline_worker::RankTraffic;
use paceline_worker::messages::{FromWorker, RankFacts};

use super::{
    BEAT, Later, NetworkView, PendingOrder, SILENCE, Serving, ServingEvent, SimOwner, TOKEN_EVERY,
    WORD, token,
};

#[derive(Debug, Default)]
pub(super) struct SimWorker {
    pub(super) at: usize,
    pub(super) process: u64,
    pub(super) alive: bool,
    /// Its node crashed, so that no exit is reported.
    pub(super) lost: bool,
    pub(super) epoch: Option<u64>,
    pub(super) ready: bool,
    pub(super) packed: bool,
    /// Requests, with their tokens so far.
    pub(super) answers: BTreeMap<Ticket, (usize, usize)>,
    /// Since when it waits for another rank.
    pub(super) stalled: Option<Duration>,
    /// Since when owner and worker receive no heartbeats of each other.
    pub(super) silent: Option<Duration>,
    pub(super) orders: VecDeque<PendingOrder>,
    pub(super) held: VecDeque<FromWorker>,
}

impl Serving {
    pub(super) fn seat(&mut self, life: u64, rank: Rank, process: u64) -> Option<&mut SimWorker> {
        let owner = self.owners.get_mut(&life)?;
        let seat = owner.seats.get_mut(rank.0 as usize)?;
        (seat.process == process).then_some(seat)
    }

    /// Whether the owner and a rank's live worker reach each other.
    fn hears(&self, life: u64, rank: Rank, net: &NetworkView<'_>) -> bool {
        let Some(owner) = self.owners.get(&life) else {
            return false;
        };
        let seat = &owner.seats[rank.0 as usize];
        seat.alive && net.reach(owner.node, seat.at)
    }

    /// A worker executes its pending orders, if its connection works.
    pub(super) fn obey(&mut self, life: u64, rank: Rank, net: &NetworkView<'_>, later: &mut Later) {
        while self.hears(life, rank, net) {
            let Some(owner) = self.owners.get_mut(&life) else {
                return;
            };
            let seat = &mut owner.seats[rank.0 as usize];
            let Some(order) = seat.orders.pop_front() else {
                return;
            };
            let process = seat.process;
            match order {
                PendingOrder::Assign(epoch) => {
                    (seat.epoch, seat.ready, seat.stalled) = (Some(epoch), false, None);
                    seat.answers.clear();
                    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
                    self.say(life, rank, FromWorker::Listening { addr }, later);
                }
                PendingOrder::Join => {
                    let Some(epoch) = seat.epoch else { continue };
                    let load = match seat.packed {
                        true => Duration::from_millis(10),
                        false => self.disks[seat.at],
                    };
                    later.push((load, ServingEvent::Loaded(life, rank, process, epoch)));
                }
                PendingOrder::Leave => {
                    let Some(epoch) = seat.epoch.take() else {
                        continue;
                    };
                    seat.ready = false;
                    seat.answers.clear();
                    let moved = RankTraffic::default();
                    self.say(life, rank, FromWorker::Left { epoch, moved }, later);
                }
                PendingOrder::Submit(ticket, number, tokens) if seat.ready => {
                    seat.answers.insert(ticket, (number, tokens));
                    later.push((
                        TOKEN_EVERY,
                        ServingEvent::Token(life, rank, process, ticket),
                    ));
                }
                PendingOrder::Submit(..) => {} // it has failed meanwhile, as its owner will learn
                PendingOrder::Cancel(ticket) => drop(seat.answers.remove(&ticket)),
            }
        }
    }

    /// A worker sends a message, which arrives after those before it.
    fn say(&self, life: u64, rank: Rank, message: FromWorker, later: &mut Later) {
        if let Some(owner) = self.owners.get(&life) {
            let process = owner.seats[rank.0 as usize].process;
            later.push((WORD, ServingEvent::Say(life, rank, process, message)));
        }
    }

    /// An owner receives what has arrived from a worker, if their connection works.
    pub(super) fn hear(&mut self, life: u64, rank: Rank, net: &NetworkView<'_>, later: &mut Later) {
        loop {
            let Some(owner) = self.owners.get_mut(&life) else {
                return;
            };
            let node = owner.node;
            let seat = &mut owner.seats[rank.0 as usize];
            if !net.reach(node, seat.at) {
                return;
            }
            let Some(message) = seat.held.pop_front() else {
                return;
            };
            let event = Event::Worker(CrewEvent::Message { rank, message });
            self.step(life, event, net, later);
        }
    }

    pub(super) fn loaded(
        &mut self,
        (life, rank, process): (u64, Rank, u64),
        epoch: u64,
        net: &NetworkView<'_>,
        later: &mut Later,
    ) {
        let bad = self.absent_mate(life, rank, net);
        let Some(seat) = self.seat(life, rank, process) else {
            return;
        };
        if !seat.alive || seat.epoch != Some(epoch) {
            return;
        }
        seat.packed = true;
        if let Some(bad) = bad {
            return self.fail(life, rank, (epoch, bad), later);
        }
        seat.ready = true;
        let facts = RankFacts {
            pid: 1,
            weight_bytes: 1,
            packings: 1,
            threads: 1,
            instruction_set: "simulated".to_owned(),
            wires: Vec::new(),
        };
        self.say(life, rank, FromWorker::Ready(facts), later);
    }

    /// The first rank that another one does not reach.
    fn absent_mate(&self, life: u64, rank: Rank, net: &NetworkView<'_>) -> Option<u32> {
        let owner = self.owners.get(&life)?;
        let at = owner.seats[rank.0 as usize].at;
        let mates = (0..).zip(&owner.seats);
        let mut absent = mates.filter(|(_, mate)| !mate.alive || !net.reach(at, mate.at));
        absent.next().map(|(other, _)| other)
    }

    /// A rank fails its epoch because of another one.
    fn fail(&self, life: u64, rank: Rank, (epoch, blamed): (u64, u32), later: &mut Later) {
        let reason = format!("rank {blamed} is silent");
        let blamed = Some(blamed);
        let failed = FromWorker::Failed {
            epoch,
            reason,
            blamed,
            interrupted: false,
        };
        self.say(life, rank, failed, later);
    }

    /// The next token of an answer, or its end.
    pub(super) fn token(
        &mut self,
        (life, rank, process): (u64, Rank, u64),
        ticket: Ticket,
        net: &NetworkView<'_>,
        later: &mut Later,
    ) {
        let bad = self.absent_mate(life, rank, net);
        let lengths: Vec<usize> = self.asked.iter().map(|asked| asked.length).collect();
        let Some(seat) = self.seat(life, rank, process) else {
            return;
        };
        let Some((number, count)) = seat.answers.get_mut(&ticket) else {
            return;
        };
        let Some(epoch) = seat.epoch.filter(|_| seat.alive && seat.ready) else {
            return;
        };
        if let Some(bad) = bad {
            let since = *seat.stalled.get_or_insert(net.now);
            if net.now - since < SILENCE {
                later.push((
                    TOKEN_EVERY * 3,
                    ServingEvent::Token(life, rank, process, ticket),
                ));
                return;
            }
            seat.ready = false;
            seat.answers.clear();
            return self.fail(life, rank, (epoch, bad), later);
        }
        seat.stalled = None;
        let reply = match *count < lengths[*number] {
            true => Reply::Token {
                token: token(*number, *count),
                text: String::new(),
                logprobs: None,
            },
            false => Reply::Finished {
                text: String::new(),
                reason: Finish::Length,
                drafts: paceline_engine::DraftCounts::default(),
            },
        };
        *count += 1;
        match reply {
            Reply::Finished { .. } => drop(seat.answers.remove(&ticket)),
            _ => later.push((
                TOKEN_EVERY,
                ServingEvent::Token(life, rank, process, ticket),
            )),
        }
        let word = FromWorker::Reply {
            ticket,
            at_us: Some(net.now.as_micros() as u64),
            reply,
        };
        self.say(life, rank, word, later);
    }

    pub(super) fn kill(&mut self, net: &NetworkView<'_>, later: &mut Later) {
        let alive = |owner: &SimOwner| {
            let seats = (0..).map(Rank).zip(&owner.seats);
            let alive = seats.filter(|(_, seat)| seat.alive && net.reach(owner.node, seat.at));
            alive.map(|(rank, _)| rank).collect::<Vec<Rank>>()
        };
        let all = self.owners.iter();
        let all =
            all.flat_map(|(life, owner)| alive(owner).into_iter().map(move |rank| (*life, rank)));
        let all: Vec<(u64, Rank)> = all.collect();
        if all.is_empty() {
            return;
        }
        let (life, rank) = all[self.random.below(all.len() as u64) as usize];
        if let Some(owner) = self.owners.get_mut(&life) {
            let seat = &mut owner.seats[rank.0 as usize];
            seat.alive = false;
            let exit = ServingEvent::Exit(life, rank, seat.process);
            later.push((Duration::from_millis(20), exit));
        }
    }

    pub(super) fn exit(
        &mut self,
        life: u64,
        rank: Rank,
        process: u64,
        net: &NetworkView<'_>,
        later: &mut Later,
    ) {
        let Some(seat) = self.seat(life, rank, process) else {
            return;
        };
        seat.lost = true;
        let at = seat.at;
        let is_told = |owner: &SimOwner| net.reach(owner.node, at);
        if !self.owners.get(&life).is_some_and(is_told) {
            return; // the next heartbeat reports it
        }
        if let Some(seat) = self.seat(life, rank, process) {
            seat.lost = false;
        }
        let exited = CrewEvent::Exited {
            rank,
            ending: Ending::Signal(9),
            tail: Vec::new(),
        };
        self.step(life, Event::Worker(exited), net, later);
    }

    /// An owner and its workers check each other's heartbeats.
    pub(super) fn beat(&mut self, life: u64, net: &NetworkView<'_>, later: &mut Later) {
        let Some(owner) = self.owners.get(&life) else {
            return;
        };
        let has_duty = net.nodes[owner.node].runs.contains_key(&owner.id);
        if !has_duty && !self.bridges(owner, net) {
            self.owners.remove(&life);
            return;
        }
        later.push((BEAT, ServingEvent::Beat(life)));
        for rank in (0..owner.seats.len() as u32).map(Rank) {
            if self.has_lost(life, rank, net) {
                let reason = "its machine is out of reach".to_owned();
                let gone = Event::Worker(CrewEvent::Gone { rank, reason });
                self.step(life, gone, net, later);
            } else {
                self.hear(life, rank, net, later);
                self.obey(life, rank, net, later);
            }
        }
    }

    /// Whether a rank's worker is declared lost now; its machine ends it at the same time.
    fn has_lost(&mut self, life: u64, rank: Rank, net: &NetworkView<'_>) -> bool {
        let hears = self.hears(life, rank, net);
        let Some(owner) = self.owners.get_mut(&life) else {
            return false;
        };
        let node = owner.node;
        let seat = &mut owner.seats[rank.0 as usize];
        if seat.lost && net.reach(node, seat.at) {
            seat.lost = false;
            return true;
        }
        if hears || !(seat.alive || seat.lost) {
            seat.silent = None;
            return false;
        }
        let since = *seat.silent.get_or_insert(net.now);
        let is_over = net.now - since >= SILENCE;
        if is_over {
            (seat.alive, seat.lost, seat.silent) = (false, false, None);
        }
        is_over
    }
}
