//! Disaggregated prefill of an instance: the shell around [`Apart`].
//!
//! ```text
//! Instance::submit --signals--> thread "prompts": Apart::step --> instance of the prompts' ranks
//!                                  ^        |                 --> workers of both: pages, links
//!  workers of both, news of both --+        '--> the decoding ranks' thread: the request
//! ```
//! The prefill ranks are an [`Instance`] too, with its own supervisor. A lost prefill rank is
//! restarted without any effect on the decode ranks.

mod group_events;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_base::{KernelClass, Rank, lock};
use paceline_engine::{
    GenerationRequest, Reply, RequestFailure, SamplingParams, Service, Sink, Submission, Ticket,
};
use paceline_fleet::InstanceId;
use paceline_model::{PageName, Split};
use paceline_plan::Pipeline;
use paceline_plan::prefill_offload::{LEAST, PrefillOffload};
use paceline_tensor::PAGE;
use tracing::{debug, warn};

use super::{Command, GroupCredentials, Instance, InstanceShared, numbers};
use crate::Error;
use crate::fleet::prefixes::{Prefixes, blocks};
use crate::prefill::{Event, PrefillAction, PrefillCounts, PrefillScheduler};
use crate::supervisor::Notice;
pub(super) use group_events::PrefillSignal;
pub(crate) use group_events::{GroupEventReceiver, GroupEventSender, GroupRole, group_events};
use paceline_worker::disk;
use paceline_worker::messages::{FromWorker, ReceivePages, SendPages, ToWorker, TransferRound};

/// Longest sleep of the thread.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long [`Prompts::linked`] waits for both groups to be connected.
const LINKED_LIMIT: Duration = Duration::from_secs(5);

/// Poll interval of that wait.
const LINKED_LOOK: Duration = Duration::from_millis(5);

/// The only key of the recorded prefixes here.
const OWN: InstanceId = InstanceId(0);

#[derive(Clone, Copy, Debug, Default)]
struct PrefillStatus {
    up: bool,
    held: usize,
    counts: PrefillCounts,
    readers: PrefillOffload,
}

/// The prefill ranks of an instance.
pub(super) struct PrefillGroup {
    pub(super) instance: Arc<Instance>,
    signals: Sender<PrefillSignal>,
    view: Arc<Mutex<PrefillStatus>>,
    /// Whether the first start waits for these ranks.
    awaited: bool,
    thread: Option<JoinHandle<()>>,
}

impl PrefillGroup {
    /// Attaches `instance` as prefill ranks of `here`. Both send their events to `heard`.
    pub(super) fn begin(
        instance: Instance,
        here: Arc<InstanceShared>,
        heard: GroupEventReceiver,
        (readers, awaited, decoding): (PrefillOffload, bool, DecodingClasses),
    ) -> Result<Self, Error> {
        let instance = Arc::new(instance);
        let view = Arc::new(Mutex::new(PrefillStatus::default()));
        let mut shell = Shell {
            core: PrefillScheduler::new(readers),
            here,
            there: Arc::clone(&instance),
            signals: heard.signals.clone(),
            view: Arc::clone(&view),
            begun: Instant::now(),
            open: HashMap::new(),
            read: Prefixes::default(),
            splits: [None, None],
            meeting: GroupCredentials::default(),
            decoding,
            numbers: Default::default(),
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

    pub(super) fn accept(&self, submission: Submission, sink: Sink) {
        self.say(PrefillSignal::Accept(submission, sink));
    }

    pub(super) fn cancel(&self, ticket: Ticket) {
        self.say(PrefillSignal::Cancel(ticket));
    }

    fn say(&self, signal: PrefillSignal) {
        let _ = self.signals.send(signal); // the thread ends with this
    }

    /// Waits until the prefill ranks are ready for the first time and both groups are connected.
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

    /// Number of held requests.
    pub(super) fn held(&self) -> usize {
        lock(&self.view).held
    }

    /// The prefill pipeline, on nodes after the `first` decode nodes.
    pub(super) fn pipeline(&self, first: usize) -> Pipeline {
        let mut pipeline = self.instance.placement().replicas.swap_remove(0);
        let stages = pipeline.stages.iter_mut();
        let members = stages.flat_map(|stage| &mut stage.members);
        members.for_each(|member| member.node += first);
        pipeline
    }

    pub(super) fn figures(&self) -> (bool, PrefillCounts, PrefillOffload) {
        let view = lock(&self.view);
        (view.up, view.counts, view.readers)
    }

    /// Waits a bounded time until both groups are connected. Until then the decode ranks compute
    /// all prompts.
    fn linked(&self) {
        let until = Instant::now() + LINKED_LIMIT;
        while !lock(&self.view).up && Instant::now() < until {
            std::thread::sleep(LINKED_LOOK);
        }
    }
}

impl Drop for PrefillGroup {
    fn drop(&mut self) {
        self.say(PrefillSignal::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has no result, and a panic there was reported
        }
    }
}

/// A request that waits for its prefill.
struct HeldRequest {
    submission: Submission,
    sink: Sink,
    since: Instant,
    /// Uncached tokens of the prompt.
    fresh: u32,
    /// Whether the prefill ranks have its prompt, under the request's ticket.
    is_reading: bool,
}

struct Shell {
    core: PrefillScheduler,
    here: Arc<InstanceShared>,
    there: Arc<Instance>,
    signals: Sender<PrefillSignal>,
    view: Arc<Mutex<PrefillStatus>>,
    begun: Instant,
    open: HashMap<Ticket, HeldRequest>,
    /// Prompt prefixes in the decode ranks' cache.
    read: Prefixes,
    /// Split of each group while it is ready.
    splits: [Option<Split>; 2],
    meeting: GroupCredentials,
    decoding: DecodingClasses,
    /// Names of the numbers of the prefill and of the decode ranks, in this round of connections.
    numbers: [String; 2],
}

/// Kernel classes of the decode ranks.
#[derive(Debug)]
pub(super) struct DecodingClasses {
    pub(super) classes: Vec<KernelClass>,
    /// Whether they take no pages of other numbers.
    pub(super) strict: bool,
}

impl Shell {
    fn run(&mut self, heard: &Receiver<PrefillSignal>) {
        loop {
            let now = self.begun.elapsed();
            let due = self
                .core
                .due()
                .map_or(LOOK_EVERY, |due| due.saturating_sub(now));
            let event = match heard.recv_timeout(due.min(LOOK_EVERY)) {
                Ok(PrefillSignal::End) | Err(RecvTimeoutError::Disconnected) => return self.end(),
                Ok(signal) => self.handle_signal(signal),
                Err(RecvTimeoutError::Timeout) => Some(Event::Tick),
            };
            if let Some(event) = event {
                let actions = self.core.step(self.begun.elapsed(), event);
                actions.into_iter().for_each(|action| self.act(action));
                self.publish();
            }
        }
    }

    /// Submits held requests to the decode ranks, whose instance reports its end to the callers.
    fn end(&mut self) {
        for (_, open) in self.open.drain() {
            self.here
                .command(Command::Accept(open.submission, open.sink));
        }
    }

    fn publish(&self) {
        *lock(&self.view) = PrefillStatus {
            up: self.core.is_up(),
            held: self.core.held(),
            counts: self.core.counts(),
            readers: *self.core.readers(),
        };
    }

    fn handle_signal(&mut self, signal: PrefillSignal) -> Option<Event> {
        Some(match signal {
            PrefillSignal::Accept(submission, sink) => self.accept(submission, sink),
            PrefillSignal::Cancel(ticket) if self.open.contains_key(&ticket) => {
                Event::Cancel(ticket)
            }
            PrefillSignal::Cancel(ticket) => {
                self.here.command(Command::Cancel(ticket));
                return None;
            }
            PrefillSignal::Ready(side, split) => {
                let ranks = split.ranks();
                self.splits[side as usize] = Some(split);
                match side {
                    GroupRole::Decode => {
                        self.read.forget(OWN); // a new epoch has an empty cache
                        Event::DecodeReady(ranks)
                    }
                    GroupRole::Prefill => Event::PrefillReady(ranks),
                }
            }
            PrefillSignal::Lost(GroupRole::Decode, _) => {
                self.read.forget(OWN);
                self.splits[GroupRole::Decode as usize] = None;
                Event::DecodeLost
            }
            PrefillSignal::Lost(GroupRole::Prefill, reason) => {
                self.splits[GroupRole::Prefill as usize] = None;
                Event::PrefillLost(reason)
            }
            PrefillSignal::Worker(rank, message) => return self.worker(rank, message),
            PrefillSignal::Read(ticket, outcome) => Event::Read(ticket, outcome),
            PrefillSignal::ReadHere(tokens, took) => Event::ReadHere { tokens, took },
            PrefillSignal::End => return None,
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

    /// Addresses of a decode rank as seen by the prefill ranks. A rank on this machine has the
    /// address by which another machine of either group reaches this one.
    fn seen(&self, rank: Rank, addrs: Vec<SocketAddr>) -> Vec<SocketAddr> {
        let (here, there) = (&*self.here.crew, &*self.there.shared.crew);
        let own = there.own_addr().or_else(|| here.own_addr());
        let own = own.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let seen = |addr| here.seen(rank, addr, own);
        addrs.into_iter().map(seen).collect()
    }

    fn accept(&mut self, submission: Submission, sink: Sink) -> Event {
        let (ticket, request) = (submission.ticket, &submission.request);
        let blocks = blocks(&request.prompt);
        let known = self.read.read_by(&blocks, OWN) * PAGE;
        if !self.is_unlike() {
            self.read.remember(&blocks, OWN);
        }
        let fresh = request.prompt.len().saturating_sub(known);
        // It needs the logits of all its tokens, which no page has.
        let fresh = if request.prompt_logprobs { 0 } else { fresh };
        let fresh = u32::try_from(fresh).unwrap_or(u32::MAX);
        let open = HeldRequest {
            submission,
            sink,
            since: Instant::now(),
            fresh,
            is_reading: false,
        };
        self.open.insert(ticket, open);
        let tokens = fresh;
        Event::Prompt { ticket, tokens }
    }

    fn act(&mut self, action: PrefillAction) {
        match action {
            PrefillAction::Go(ticket) => self.submit_to_decode(ticket),
            PrefillAction::Read(ticket) => self.read(ticket),
            PrefillAction::Stop(ticket) => {
                let open = self.open.get_mut(&ticket);
                if open.is_some_and(|open| std::mem::take(&mut open.is_reading)) {
                    self.there.cancel(ticket);
                }
            }
            PrefillAction::Forget(ticket) => drop(self.open.remove(&ticket)),
            PrefillAction::Listen(round) => self.listen(round),
            PrefillAction::Connect { round, addrs } => self.connect(round, addrs),
            PrefillAction::Tell(news) => {
                debug!(news = news.line(), "prompts");
                self.here.command(Command::Tell(Notice::Prompts(news)));
            }
        }
    }

    /// Submits a request to the decode ranks. Measures their own prefill if nothing else is under
    /// way.
    fn submit_to_decode(&mut self, ticket: Ticket) {
        let Some(open) = self.open.remove(&ticket) else {
            return;
        };
        let HeldRequest {
            mut submission,
            sink,
            ..
        } = open;
        let request = &mut submission.request;
        if self.is_unlike() && !open.is_reading {
            self.read.remember(&blocks(&request.prompt), OWN);
        }
        let waited = open.since.elapsed().as_millis();
        if let Some(deadline) = &mut request.order.deadline_ms {
            *deadline = deadline.saturating_sub(u32::try_from(waited).unwrap_or(u32::MAX));
        }
        let is_alone = self.core.is_idle() && lock(&self.here.state).status.load == (0, 0);
        let sink = match is_alone && open.fresh >= LEAST && !open.is_reading {
            true => self.timed(request.prompt.len(), sink),
            false => sink,
        };
        self.here.command(Command::Accept(submission, sink));
    }

    /// Names of the numbers of both groups, as of their last epochs.
    fn known_numbers(&self) -> [String; 2] {
        let own = |numbers: Option<String>, classes: &[KernelClass]| {
            numbers.unwrap_or_else(|| classes[0].to_string())
        };
        let (there, decoding) = (&self.there, &self.decoding.classes);
        let facts = lock(&self.here.state).status.facts.clone();
        let here = self.splits[GroupRole::Decode as usize].as_ref();
        let here = here.and_then(|split| numbers(split, decoding, &facts));
        [own(there.numbers(), &there.classes), own(here, decoding)]
    }

    /// Whether the groups have other numbers: pages that were sent are not cached.
    fn is_unlike(&self) -> bool {
        let [from, to] = &self.numbers;
        from != to
    }

    /// A sink that also reports the decode ranks' prefill time of a prompt.
    fn timed(&self, prompt: usize, mut sink: Sink) -> Sink {
        let (since, signals) = (Instant::now(), self.signals.clone());
        Box::new(move |reply| {
            if let Reply::PromptRead { reused, .. } = &reply {
                let tokens = prompt.saturating_sub(*reused) as u32;
                if tokens >= LEAST {
                    let _ = signals.send(PrefillSignal::ReadHere(tokens, since.elapsed()));
                }
            }
            sink(reply);
        })
    }

    /// Submits a prompt to the prefill ranks, and asks the decode ranks to report its pages.
    fn read(&mut self, ticket: Ticket) {
        let Some(open) = self.open.get_mut(&ticket) else {
            return;
        };
        let prompt = &open.submission.request.prompt;
        let page = last_page(prompt).0;
        let number = ticket.0;
        let ranks = self.splits[GroupRole::Decode as usize]
            .as_ref()
            .map_or(0, Split::ranks);
        for rank in (0..ranks).map(Rank) {
            // A lost rank is detected by its silence.
            let _ = self
                .here
                .crew
                .send(rank, &ToWorker::Expect { number, page });
        }
        let request = GenerationRequest {
            prompt: prompt.clone(),
            max_tokens: 1,
            sampling: SamplingParams {
                temperature: 0.0,
                ..SamplingParams::default()
            },
            ..GenerationRequest::default()
        };
        let signals = self.signals.clone();
        let sink: Sink = Box::new(move |reply| {
            let outcome = match reply {
                Reply::Finished { .. } => Ok(()),
                Reply::Failed(failure) => Err(failure),
                Reply::PromptRead { .. } | Reply::Token { .. } | Reply::Continued => return,
            };
            let _ = signals.send(PrefillSignal::Read(ticket, outcome)); // the instance ends
        });
        let submission = Submission {
            ticket,
            request: Box::new(request),
            tokens: Vec::new(),
        };
        match self.there.accept(submission, sink) {
            Ok(()) => open.is_reading = true,
            Err(failure) => self.refused(ticket, failure),
        }
    }

    fn refused(&self, ticket: Ticket, failure: RequestFailure) {
        let refused = PrefillSignal::Read(ticket, Err(failure));
        let _ = self.signals.send(refused); // read by this thread
    }

    fn round(&self, number: u64) -> TransferRound {
        let (here, there) = (&*self.here.crew, &*self.there.shared.crew);
        let is_here = here.is_one_machine() && there.is_one_machine();
        TransferRound {
            number,
            group: self.meeting.group,
            key: (!is_here).then(|| self.meeting.key.clone()),
            numbers: self.numbers.clone(),
        }
    }

    fn listen(&mut self, round: u64) {
        let [Some(here), Some(there)] = &self.splits else {
            return;
        };
        let (ranks, from) = (here.ranks(), there.clone());
        self.numbers = self.known_numbers();
        if self.decoding.strict && self.is_unlike() {
            warn!("prompts are not read apart: the answers would only be near");
            return;
        }
        if let Err(error) = self.meeting.renew() {
            warn!(%error, "prompts are not read apart");
            return;
        }
        let round = self.round(round);
        for rank in (0..ranks).map(Rank) {
            let receive = ReceivePages {
                round: round.clone(),
                from: from.clone(),
                listen: self.here.crew.transfer_addr(rank),
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
            let hand = ToWorker::HandTo(Box::new(SendPages { round, to, addrs }));
            let _ = self.there.shared.crew.send(rank, &hand); // as in `read`
        }
    }
}

/// The name of the last full page of a prompt, without its last token, which is computed for the
/// logits.
fn last_page(prompt: &[u32]) -> PageName {
    let whole = prompt.len().saturating_sub(1) / PAGE;
    let pages = prompt.chunks_exact(PAGE).take(whole);
    pages.fold(PageName::default(), |before, page| {
        disk::name(&before, page)
    })
}
