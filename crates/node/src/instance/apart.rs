//! Ranks of their own that read prompts for an instance: the shell around [`Apart`].
//!
//! ```text
//! Instance::submit --signals--> thread "prompts": Apart::step --> instance of the prompts' ranks
//!                                  ^        |                 --> workers of both: pages, links
//!  workers of both, news of both --+        '--> the decoding ranks' thread: the request
//! ```
//! The ranks for prompts are an [`Instance`] too, with a supervisor of its own. A rank that is lost
//! there is started again, and costs the decoding ranks nothing.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_cluster::nodes::InstanceId;
use paceline_engine::{Failure, Reply, Request, SamplingParams, Service, Sink, Ticket};
use paceline_model::{PageName, Split};
use paceline_plan::Pipeline;
use paceline_plan::apart::{LEAST, Readers};
use paceline_tensor::PAGE;
use tracing::{debug, warn};

use super::{Command, Instance, Meeting, Shared};
use crate::apart::{Action, Apart, Counts, Event};
use crate::fleet::prefixes::{Prefixes, blocks};
use crate::messages::{FromWorker, HandTo, Receive, Round, ToWorker};
use crate::supervisor::Notice;
use crate::{Error, disk};

/// Longest sleep of the thread.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long [`Prompts::linked`] waits for both groups to be connected.
const LINKED_LIMIT: Duration = Duration::from_secs(5);

/// Between two looks of it.
const LINKED_LOOK: Duration = Duration::from_millis(5);

/// The only key that prefixes are remembered by here.
const OWN: InstanceId = InstanceId(0);

/// Which of the two groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// It decodes.
    Here,
    /// It reads prompts.
    There,
}

/// A message to the thread.
pub(super) enum Signal {
    Submit(Ticket, Box<Request>, Vec<u32>, Sink),
    Cancel(Ticket),
    /// A group is ready by this split.
    Ready(Side, Split),
    Lost(Side, String),
    /// A worker says something about pages.
    Worker(Rank, FromWorker),
    Read(Ticket, Result<(), String>),
    ReadHere(u32, Duration),
    End,
}

/// Tells the thread what becomes of one of the groups.
#[derive(Clone)]
pub(crate) struct Hears {
    side: Side,
    signals: Sender<Signal>,
}

/// The far end of [`Hears`].
pub(crate) struct Heard {
    signals: Sender<Signal>,
    heard: Receiver<Signal>,
}

/// A way to hear of both groups, before there are any.
pub(crate) fn hears() -> (Hears, Hears, Heard) {
    let (signals, heard) = channel();
    let of = |side| Hears {
        side,
        signals: signals.clone(),
    };
    (of(Side::Here), of(Side::There), Heard { signals, heard })
}

impl Hears {
    pub(crate) const fn side(&self) -> Side {
        self.side
    }

    /// Passes on what a worker says about pages; gives anything else back.
    pub(super) fn worker(&self, rank: Rank, message: FromWorker) -> Option<FromWorker> {
        let is_ours = matches!(
            message,
            FromWorker::Receives { .. }
                | FromWorker::HandsOver { .. }
                | FromWorker::Unlinked { .. }
                | FromWorker::Arrived { .. }
        );
        if !is_ours {
            return Some(message);
        }
        self.say(Signal::Worker(rank, message));
        None
    }

    /// Hears a notice of the group, whose ways have these splits.
    pub(super) fn notice(&self, notice: &Notice, split: impl Fn(usize) -> Split) {
        match notice {
            Notice::Ready { way, .. } => self.say(Signal::Ready(self.side, split(*way))),
            Notice::Failed { reason, .. } => self.say(Signal::Lost(self.side, reason.clone())),
            Notice::Changed(_) | Notice::Loading { .. } | Notice::Prompts(_) => {}
        }
    }

    fn say(&self, signal: Signal) {
        let _ = self.signals.send(signal); // nobody hears it when the instance ends
    }
}

/// How prompts are read, for those who watch.
#[derive(Clone, Copy, Debug, Default)]
struct View {
    up: bool,
    held: usize,
    counts: Counts,
    readers: Readers,
}

/// The ranks for prompts of an instance.
pub(super) struct Prompts {
    pub(super) instance: Arc<Instance>,
    signals: Sender<Signal>,
    view: Arc<Mutex<View>>,
    /// Whether the first start waits for them.
    awaited: bool,
    thread: Option<JoinHandle<()>>,
}

impl Prompts {
    /// Has `instance` read prompts for the ranks of `here`. Both tell `heard` what becomes of them.
    pub(super) fn begin(
        instance: Instance,
        here: Arc<Shared>,
        heard: Heard,
        (readers, awaited): (Readers, bool),
    ) -> Result<Self, Error> {
        let instance = Arc::new(instance);
        let view = Arc::new(Mutex::new(View::default()));
        let mut shell = Shell {
            core: Apart::new(readers),
            here,
            there: Arc::clone(&instance),
            signals: heard.signals.clone(),
            view: Arc::clone(&view),
            begun: Instant::now(),
            open: HashMap::new(),
            read: Prefixes::default(),
            splits: [None, None],
            meeting: Meeting::default(),
        };
        let thread = std::thread::Builder::new().name("prompts".to_owned());
        let thread = thread.spawn(move || shell.run(&heard.heard));
        let thread = thread.map_err(|source| Error::System {
            what: "start a thread",
            source,
        })?;
        Ok(Self {
            instance,
            signals: heard.signals,
            view,
            awaited,
            thread: Some(thread),
        })
    }

    pub(super) fn submit(
        &self,
        ticket: Ticket,
        request: Box<Request>,
        tokens: Vec<u32>,
        sink: Sink,
    ) {
        self.say(Signal::Submit(ticket, request, tokens, sink));
    }

    pub(super) fn cancel(&self, ticket: Ticket) {
        self.say(Signal::Cancel(ticket));
    }

    fn say(&self, signal: Signal) {
        let _ = self.signals.send(signal); // the thread ends with this
    }

    /// Waits until the ranks for prompts are ready for the first time and both groups connected.
    ///
    /// # Errors
    /// As [`Instance::ready`].
    pub(super) fn ready(&self) -> Result<(), Error> {
        if self.awaited {
            self.instance.ready()?;
            self.linked();
        }
        Ok(())
    }

    /// As [`Instance::ready_while`].
    pub(super) fn ready_while(&self, goes_on: impl Fn() -> bool) -> Result<(), Error> {
        if self.awaited {
            self.instance.ready_while(goes_on)?;
            self.linked();
        }
        Ok(())
    }

    /// Requests that are held.
    pub(super) fn held(&self) -> usize {
        lock(&self.view).held
    }

    /// The pipeline that reads prompts, on nodes behind the `first` that decode.
    pub(super) fn pipeline(&self, first: usize) -> Pipeline {
        let mut pipeline = self.instance.placement().replicas.swap_remove(0);
        let stages = pipeline.stages.iter_mut();
        let members = stages.flat_map(|stage| &mut stage.members);
        members.for_each(|member| member.node += first);
        pipeline
    }

    pub(super) fn figures(&self) -> (bool, Counts, Readers) {
        let view = lock(&self.view);
        (view.up, view.counts, view.readers)
    }

    /// Waits a bounded time until both groups are connected. Where they are not, prompts are read
    /// by the decoding ranks until they are.
    fn linked(&self) {
        let until = Instant::now() + LINKED_LIMIT;
        while !lock(&self.view).up && Instant::now() < until {
            std::thread::sleep(LINKED_LOOK);
        }
    }
}

impl Drop for Prompts {
    fn drop(&mut self) {
        self.say(Signal::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has no result, and a panic there was reported
        }
    }
}

/// A request that is held.
struct Open {
    request: Box<Request>,
    tokens: Vec<u32>,
    sink: Sink,
    since: Instant,
    /// Tokens of the prompt that nobody has read.
    fresh: u32,
    /// The ranks' name for its prompt while they read it.
    reading: Option<Ticket>,
}

struct Shell {
    core: Apart,
    here: Arc<Shared>,
    there: Arc<Instance>,
    signals: Sender<Signal>,
    view: Arc<Mutex<View>>,
    begun: Instant,
    open: HashMap<Ticket, Open>,
    /// Beginnings of prompts that the decoding ranks have.
    read: Prefixes,
    /// Of the groups, while they are ready.
    splits: [Option<Split>; 2],
    meeting: Meeting,
}

impl Shell {
    fn run(&mut self, heard: &Receiver<Signal>) {
        loop {
            let now = self.begun.elapsed();
            let due = self
                .core
                .due()
                .map_or(LOOK_EVERY, |due| due.saturating_sub(now));
            let event = match heard.recv_timeout(due.min(LOOK_EVERY)) {
                Ok(Signal::End) | Err(RecvTimeoutError::Disconnected) => return self.end(),
                Ok(signal) => self.hear(signal),
                Err(RecvTimeoutError::Timeout) => Some(Event::Tick),
            };
            if let Some(event) = event {
                let actions = self.core.step(self.begun.elapsed(), event);
                actions.into_iter().for_each(|action| self.act(action));
                self.publish();
            }
        }
    }

    /// Leaves the requests that are held to the decoding ranks, whose instance tells callers that
    /// it ends.
    fn end(&mut self) {
        for (ticket, open) in self.open.drain() {
            let submit = Command::Submit(ticket, open.request, open.tokens, open.sink);
            self.here.command(submit);
        }
    }

    fn publish(&self) {
        *lock(&self.view) = View {
            up: self.core.is_up(),
            held: self.core.held(),
            counts: self.core.counts(),
            readers: *self.core.readers(),
        };
    }

    fn hear(&mut self, signal: Signal) -> Option<Event> {
        Some(match signal {
            Signal::Submit(ticket, request, tokens, sink) => {
                self.submit(ticket, request, tokens, sink)
            }
            Signal::Cancel(ticket) if self.open.contains_key(&ticket) => Event::Cancel(ticket),
            Signal::Cancel(ticket) => {
                self.here.command(Command::Cancel(ticket));
                return None;
            }
            Signal::Ready(side, split) => {
                let ranks = split.ranks();
                self.splits[side as usize] = Some(split);
                match side {
                    Side::Here => {
                        self.read.forget(OWN); // an epoch begins with an empty cache
                        Event::HereReady(ranks)
                    }
                    Side::There => Event::ThereReady(ranks),
                }
            }
            Signal::Lost(Side::Here, _) => {
                self.read.forget(OWN);
                self.splits[Side::Here as usize] = None;
                Event::HereLost
            }
            Signal::Lost(Side::There, reason) => {
                self.splits[Side::There as usize] = None;
                Event::ThereLost(reason)
            }
            Signal::Worker(rank, message) => return self.worker(rank, message),
            Signal::Read(ticket, outcome) => Event::Read(ticket, outcome),
            Signal::ReadHere(tokens, took) => Event::ReadHere { tokens, took },
            Signal::End => return None,
        })
    }

    fn worker(&self, rank: Rank, message: FromWorker) -> Option<Event> {
        Some(match message {
            FromWorker::Receives { round, addrs } => Event::Receives {
                rank,
                round,
                addrs: self.seen(rank, addrs),
            },
            FromWorker::HandsOver { round } => Event::HandsOver { rank, round },
            FromWorker::Unlinked { round, reason } => Event::Unlinked { round, reason },
            FromWorker::Arrived { number } => Event::Arrived(Ticket(number), rank),
            _ => return None,
        })
    }

    /// Where the ranks for prompts reach what a decoding rank listens at. What is on this machine
    /// is at the address by which another machine of either group reaches this one.
    fn seen(&self, rank: Rank, addrs: Vec<SocketAddr>) -> Vec<SocketAddr> {
        let (here, there) = (&*self.here.crew, &*self.there.shared.crew);
        let own = there.own_addr().or_else(|| here.own_addr());
        let own = own.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let seen = |addr| here.seen(rank, addr, own);
        addrs.into_iter().map(seen).collect()
    }

    fn submit(
        &mut self,
        ticket: Ticket,
        request: Box<Request>,
        tokens: Vec<u32>,
        sink: Sink,
    ) -> Event {
        let blocks = blocks(&request.prompt);
        let known = self.read.read_by(&blocks, OWN) * PAGE;
        self.read.remember(&blocks, OWN);
        let fresh = request.prompt.len().saturating_sub(known);
        // The logits of all its tokens are wanted, which no page has.
        let fresh = if request.prompt_logprobs { 0 } else { fresh };
        let fresh = u32::try_from(fresh).unwrap_or(u32::MAX);
        let open = Open {
            request,
            tokens,
            sink,
            since: Instant::now(),
            fresh,
            reading: None,
        };
        self.open.insert(ticket, open);
        let tokens = fresh;
        Event::Submit { ticket, tokens }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Go(ticket) => self.go(ticket),
            Action::Read(ticket) => self.read(ticket),
            Action::Stop(ticket) => {
                let open = self.open.get_mut(&ticket);
                if let Some(reading) = open.and_then(|open| open.reading.take()) {
                    self.there.cancel(reading);
                }
            }
            Action::Forget(ticket) => drop(self.open.remove(&ticket)),
            Action::Listen(round) => self.listen(round),
            Action::Connect { round, addrs } => self.connect(round, addrs),
            Action::Tell(news) => {
                debug!(news = news.line(), "prompts");
                self.here.command(Command::Tell(Notice::Prompts(news)));
            }
        }
    }

    /// Gives a request to the decoding ranks. How long they take to read a prompt by themselves is
    /// learned where nothing else is under way.
    fn go(&mut self, ticket: Ticket) {
        let Some(open) = self.open.remove(&ticket) else {
            return;
        };
        let Open {
            mut request, sink, ..
        } = open;
        let waited = open.since.elapsed().as_millis();
        if let Some(deadline) = &mut request.order.deadline_ms {
            *deadline = deadline.saturating_sub(u32::try_from(waited).unwrap_or(u32::MAX));
        }
        let is_alone = self.core.is_idle() && lock(&self.here.view).load == (0, 0);
        let sink = match is_alone && open.fresh >= LEAST && open.reading.is_none() {
            true => self.timed(request.prompt.len(), sink),
            false => sink,
        };
        let submit = Command::Submit(ticket, request, open.tokens, sink);
        self.here.command(submit);
    }

    /// A sink that tells how long the decoding ranks took to read a prompt.
    fn timed(&self, prompt: usize, mut sink: Sink) -> Sink {
        let (since, signals) = (Instant::now(), self.signals.clone());
        Box::new(move |reply| {
            if let Reply::PromptRead { reused, .. } = &reply {
                let tokens = prompt.saturating_sub(*reused) as u32;
                if tokens >= LEAST {
                    let _ = signals.send(Signal::ReadHere(tokens, since.elapsed()));
                }
            }
            sink(reply);
        })
    }

    /// Has the ranks for prompts read one, and the decoding ranks tell when they have its pages.
    fn read(&mut self, ticket: Ticket) {
        let Some(open) = self.open.get_mut(&ticket) else {
            return;
        };
        let prompt = &open.request.prompt;
        let page = last_page(prompt).0;
        let number = ticket.0;
        let ranks = self.splits[Side::Here as usize]
            .as_ref()
            .map_or(0, Split::ranks);
        for rank in (0..ranks).map(Rank) {
            // A rank that is gone is found by its own silence.
            let _ = self
                .here
                .crew
                .send(rank, &ToWorker::Expect { number, page });
        }
        let request = Request {
            prompt: prompt.clone(),
            max_tokens: 1,
            sampling: SamplingParams {
                temperature: 0.0,
                ..SamplingParams::default()
            },
            ..Request::default()
        };
        let signals = self.signals.clone();
        let sink: Sink = Box::new(move |reply| {
            let outcome = match reply {
                Reply::Finished { .. } => Ok(()),
                Reply::Failed(failure) => Err(failure.to_string()),
                Reply::PromptRead { .. } | Reply::Token { .. } => return,
            };
            let _ = signals.send(Signal::Read(ticket, outcome)); // the instance ends
        });
        match self.there.submit(request, sink) {
            Ok(reading) => open.reading = Some(reading),
            Err(failure) => self.refused(ticket, &failure),
        }
    }

    fn refused(&self, ticket: Ticket, failure: &Failure) {
        let outcome = Err(failure.to_string());
        let _ = self.signals.send(Signal::Read(ticket, outcome)); // read by this thread
    }

    fn round(&self, number: u64) -> Round {
        let (here, there) = (&*self.here.crew, &*self.there.shared.crew);
        let is_here = here.is_one_machine() && there.is_one_machine();
        Round {
            number,
            group: self.meeting.group,
            key: (!is_here).then(|| self.meeting.key.clone()),
        }
    }

    fn listen(&mut self, round: u64) {
        let [Some(here), Some(there)] = &self.splits else {
            return;
        };
        let (ranks, from) = (here.ranks(), there.clone());
        if let Err(error) = self.meeting.renew() {
            warn!(%error, "prompts are not read apart");
            return;
        }
        let round = self.round(round);
        for rank in (0..ranks).map(Rank) {
            let receive = Receive {
                round: round.clone(),
                from: from.clone(),
                listen: self.here.crew.door(rank),
            };
            let receive = ToWorker::Receive(Box::new(receive));
            let _ = self.here.crew.send(rank, &receive); // as in `read`
        }
    }

    fn connect(&self, round: u64, addrs: Vec<Vec<SocketAddr>>) {
        let [Some(here), Some(_)] = &self.splits else {
            return;
        };
        let round = self.round(round);
        for (rank, addrs) in (0..).map(Rank).zip(addrs) {
            let (round, to) = (round.clone(), here.clone());
            let hand = ToWorker::HandTo(Box::new(HandTo { round, to, addrs }));
            let _ = self.there.shared.crew.send(rank, &hand); // as in `read`
        }
    }
}

/// The name of the last full page of a prompt whose last token is still to be computed.
fn last_page(prompt: &[u32]) -> PageName {
    let whole = prompt.len().saturating_sub(1) / PAGE;
    let pages = prompt.chunks_exact(PAGE).take(whole);
    pages.fold(PageName::default(), |before, page| {
        disk::name(&before, page)
    })
}
