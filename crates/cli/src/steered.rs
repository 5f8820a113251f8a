//! Workers that change to another split when live timings say that it is faster.
//!
//! ```text
//! sinks: a token came --> Steering --order--> thread: Handover::change(start the other split)
//!                            ^                   |
//!                            '--- Changed -------'  what was measured goes into measured.json
//! ```
//! `plan::steer` decides, [`Handover`] moves the answers that are under way, this joins them with
//! processes and a clock. The answer does not depend on the split, so nobody notices but by speed
//! and by a line.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use paceline_base::{Bytes, lock};
use paceline_engine::{Failure, Handover, Reply, Request, Service, Sink, Status, Ticket};
use paceline_model::{Config, Split, SplitKind};
use paceline_node::{Instance, Moved, RankFacts};
use paceline_plan::steer::{Event, Order, Steering, Way};
use serde::Serialize;

use crate::plan::local::Local;

/// What is learned from answers is kept at most this often, and at the end.
const LEARN_EVERY: Duration = Duration::from_secs(60);

/// Predictions that answers teach.
pub(crate) type Forecast = Arc<Mutex<Local>>;

/// Starts the workers of a split.
pub(crate) type Start = Box<dyn Fn(SplitKind, &Split) -> anyhow::Result<Instance> + Send>;

/// A way to cut the model.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    pub(crate) kind: SplitKind,
    pub(crate) split: Split,
    /// Decode tokens a second as expected; `None` when nothing was measured.
    pub(crate) tok_s: Option<f64>,
}

/// What the workers compute, and by which of `cuts` they begin.
pub(crate) struct Choice {
    pub(crate) config: Config,
    pub(crate) cuts: Vec<Cut>,
    pub(crate) first: usize,
    pub(crate) forecast: Option<Forecast>,
}

/// A change of the split, or one that could not be made.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Change {
    from: String,
    to: String,
    /// Decode tokens a second by `from`, measured.
    measured: f64,
    /// By `to`: expected, or measured when it was in use before.
    expected: f64,
    /// Whether `to` was in use before.
    back: bool,
    /// Seconds without a token.
    seconds: f64,
    /// Why it could not be made: `from` goes on.
    refused: Option<String>,
}

impl Change {
    /// One line for people.
    pub(crate) fn line(&self) -> String {
        let Self { from, to, .. } = self;
        let (measured, expected) = (self.measured, self.expected);
        if let Some(reason) = &self.refused {
            return format!("[split stays {from}: {to} could not be started: {reason}]");
        }
        let known = if self.back { "measured" } else { "expected" };
        let back = if self.back { " back" } else { "" };
        format!(
            "[split changed{back} from {from} ({measured:.1} tokens/s measured) to {to} \
             ({expected:.1} {known}) in {:.2} s]",
            self.seconds
        )
    }
}

/// Workers, and who watches them.
pub(crate) struct Steered {
    shared: Arc<Shared>,
    orders: Sender<Todo>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    choice: Choice,
    handover: Handover<Instance>,
    live: Arc<Live>,
    /// Locked while the workers change, so that who looks sees the whole change.
    past: Mutex<Past>,
}

/// What sinks share. They live in the workers' threads, so they must not own workers.
struct Live {
    begun: Instant,
    /// Locked for moments.
    steering: Mutex<Steering>,
}

impl Live {
    fn steering(&self) -> MutexGuard<'_, Steering> {
        lock(&self.steering)
    }

    /// Takes in an event of now.
    fn step(&self, event: Event) -> Option<Order> {
        let mut steering = self.steering(); // first, so that times are in order
        steering.step(self.begun.elapsed(), event)
    }
}

#[derive(Debug, Default)]
struct Past {
    changes: Vec<Change>,
    /// What workers who are gone moved.
    moved: Moved,
}

/// What sinks leave to the thread.
enum Todo {
    Change(Order),
    Learn,
    End,
}

/// What was learned last, and when.
#[derive(Debug, Default)]
struct Learned {
    what: Option<(usize, f64)>,
    when: Option<Instant>,
}

impl Learned {
    fn is_old(&self) -> bool {
        self.when.is_none_or(|when| when.elapsed() > LEARN_EVERY)
    }
}

impl Steered {
    /// Starts the workers; `told` hears of each change.
    ///
    /// # Errors
    /// Which worker failed, and how.
    pub(crate) fn start(choice: Choice, start: Start, told: fn(&Change)) -> anyhow::Result<Self> {
        let begun = Instant::now();
        let cut = &choice.cuts[choice.first];
        let instance = start(cut.kind, &cut.split)?;
        let steering = choice.steering(begun.elapsed())?;
        let shared = Arc::new(Shared {
            handover: Handover::new(instance),
            live: Arc::new(Live {
                begun: Instant::now(),
                steering: Mutex::new(steering),
            }),
            past: Mutex::default(),
            choice,
        });
        let (orders, todo) = channel();
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("steering".to_owned());
        let thread = thread.spawn(move || own.follow(&todo, &start, told));
        Ok(Self {
            shared,
            orders,
            thread: Some(thread.context("cannot start a thread")?),
        })
    }

    /// How the model is cut now.
    pub(crate) fn split(&self) -> Split {
        self.shared.cut().split.clone()
    }

    /// Decode tokens a second that were expected of the split that is in use.
    pub(crate) fn predicted(&self) -> Option<f64> {
        self.shared.cut().tok_s
    }

    /// Decode tokens a second of the split that is in use, from answers that were alone.
    pub(crate) fn measured(&self) -> Option<f64> {
        let steering = self.shared.live.steering();
        steering.measured(steering.at())
    }

    /// All changes so far. Waits for the end of one that is being made.
    pub(crate) fn changes(&self) -> Vec<Change> {
        lock(&self.shared.past).changes.clone()
    }

    /// Changes made so far.
    pub(crate) fn count(&self) -> u32 {
        self.shared.live.steering().changes()
    }

    /// Packed weights of each rank; nothing when the workers are gone.
    pub(crate) fn weights(&self) -> Vec<Bytes> {
        self.facts().iter().map(|rank| rank.weights).collect()
    }

    /// What the workers said of themselves; nothing when they are gone.
    pub(crate) fn facts(&self) -> Vec<RankFacts> {
        let instance = self.shared.handover.current();
        instance.map_or_else(Vec::new, |instance| instance.facts().to_vec())
    }

    /// What workers have moved; `None` when one does not say.
    pub(crate) fn moved(&self) -> Option<Moved> {
        let before = lock(&self.shared.past).moved;
        let now = self.shared.handover.current()?.moved()?;
        Some([before, now].into_iter().sum())
    }
}

impl Choice {
    /// Ways of which nothing is known are one, and never left.
    fn steering(&self, took: Duration) -> anyhow::Result<Steering> {
        let forecast = self.forecast.as_ref().map(|forecast| {
            let mut local = lock(forecast);
            local.loaded(&self.cuts[self.first].split, took.as_secs_f64());
            local
        });
        let way = |cut: &Cut| {
            let known = forecast.as_ref().and_then(|local| local.load_s(&cut.split));
            let known = known.and_then(|s| Duration::try_from_secs_f64(s).ok());
            let tok_s = cut.tok_s.filter(|v| v.is_finite() && *v > 0.0);
            Way {
                tok_s: tok_s.unwrap_or(1.0),
                change: known.unwrap_or(took),
            }
        };
        let ways: Vec<Way> = self.cuts.iter().map(way).collect();
        Ok(Steering::new(&ways, self.first)?)
    }
}

impl Shared {
    fn cut(&self) -> &Cut {
        &self.choice.cuts[self.live.steering().at()]
    }

    /// Makes the changes that are ordered, and learns, until the end.
    fn follow(&self, todo: &Receiver<Todo>, start: &Start, told: fn(&Change)) {
        let mut learned = Learned::default();
        for todo in todo {
            match todo {
                Todo::Change(order) => {
                    self.learn(&mut learned);
                    told(&self.change(order, start));
                }
                Todo::Learn if learned.is_old() => self.learn(&mut learned),
                Todo::Learn => {}
                Todo::End => break,
            }
        }
        self.learn(&mut learned);
    }

    /// Remembers how fast the way in use is, where that is known and new.
    fn learn(&self, learned: &mut Learned) {
        let (at, measured) = {
            let steering = self.live.steering();
            (steering.at(), steering.measured(steering.at()))
        };
        let (Some(measured), Some(forecast)) = (measured, &self.choice.forecast) else {
            return;
        };
        let what = Some((at, measured));
        if learned.what != what {
            let Choice { config, cuts, .. } = &self.choice;
            lock(forecast).learn(config, &cuts[at].split, measured);
            (learned.what, learned.when) = (what, Some(Instant::now()));
        }
    }

    fn change(&self, order: Order, start: &Start) -> Change {
        let mut past = lock(&self.past);
        let [from, to] = [order.from, order.to].map(|i| &self.choice.cuts[i]);
        let back = self.live.steering().measured(order.to).is_some();
        let old = self.handover.current();
        let moved = old.and_then(|old| old.moved()).unwrap_or_default();
        past.moved = [past.moved, moved].into_iter().sum();
        let (begun, mut refused) = (Instant::now(), None);
        let changed = self.handover.change(|| {
            let began = Instant::now();
            let started = start(to.kind, &to.split);
            if let (Ok(_), Some(forecast)) = (&started, &self.choice.forecast) {
                lock(forecast).loaded(&to.split, began.elapsed().as_secs_f64());
            }
            let started = started.or_else(|error| {
                refused = Some(format!("{error:#}"));
                start(from.kind, &from.split)
            });
            started.map_err(|error| format!("{error:#}"))
        });
        refused = refused.or(changed.err().map(|failure| failure.to_string()));
        let took = begun.elapsed();
        self.live.step(match refused {
            None => Event::Changed(took),
            Some(_) => Event::Refused,
        });
        let change = Change {
            from: from.split.to_string(),
            to: to.split.to_string(),
            measured: order.measured,
            expected: order.expected,
            back,
            seconds: took.as_secs_f64(),
            refused,
        };
        past.changes.push(change.clone());
        change
    }
}

/// Says that a request is over when its sink is dropped.
struct Closes {
    live: Arc<Live>,
    orders: Sender<Todo>,
}

impl Closes {
    fn step(&self, event: Event) {
        if let Some(order) = self.live.step(event) {
            let _ = self.orders.send(Todo::Change(order)); // all ends
        }
    }
}

impl Drop for Closes {
    fn drop(&mut self) {
        self.step(Event::Closed);
        let _ = self.orders.send(Todo::Learn); // all ends
    }
}

impl Service for Steered {
    fn submit(&self, request: Request, mut sink: Sink) -> Result<Ticket, Failure> {
        let closes = Closes {
            live: Arc::clone(&self.shared.live),
            orders: self.orders.clone(),
        };
        closes.step(Event::Opened);
        let sink = Box::new(move |reply| {
            if matches!(reply, Reply::Token { .. }) {
                closes.step(Event::Token);
            }
            sink(reply);
        });
        self.shared.handover.submit(request, sink)
    }

    fn cancel(&self, ticket: Ticket) {
        self.shared.handover.cancel(ticket);
    }

    fn status(&self) -> Status {
        self.shared.handover.status()
    }
}

impl Drop for Steered {
    fn drop(&mut self) {
        let _ = self.orders.send(Todo::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has no result, and a panic there was reported
        }
    }
}

impl std::fmt::Debug for Steered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "workers by split {}", self.split())
    }
}
