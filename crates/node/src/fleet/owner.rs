//! An instance that this node owns: the model on every node, workers over them, and reports.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::{KernelClass, lock};
use paceline_cluster::nodes::placement::{self, Report, State, Wanted};
use paceline_cluster::nodes::{InstanceId, Key, NodeId, Registers};
use paceline_comm::Backend;
use paceline_model::Source;

use super::flaps::{Flaps, LOSSES_MAX, Named};
use super::places::Nodes;
use super::{Answers, Inner, Running, copies, encoders, name_of, report};
use crate::crew::remote::RemoteCrew;
use crate::supervisor::Notice;
use crate::{Options, Prepared};

/// Progress is written to the shared map at most this often: each write goes to all nodes.
const TELL_EVERY: Duration = Duration::from_millis(500);

/// An instance of this node.
#[derive(Clone)]
pub(super) struct Owned {
    pub(super) id: InstanceId,
    pub(super) epoch: u64,
    pub(super) wanted: Wanted,
    /// Workers that each of its nodes has lost so far.
    pub(super) flaps: Arc<Flaps>,
}

impl Owned {
    /// Brings the instance up and reports how it goes; what answers for it.
    pub(super) fn start(&self, inner: &Arc<Inner>) -> Option<Answers> {
        let started = self.try_start(inner);
        match started {
            Ok(answers) => {
                self.report(inner, State::Ready, None, None);
                Some(answers)
            }
            Err(reason) => {
                (inner.spec.tell)(&format!("error: {}: {reason}", self.wanted.model));
                self.report(inner, State::Failed, None, Some(reason));
                None
            }
        }
    }

    fn try_start(&self, inner: &Arc<Inner>) -> Result<Answers, String> {
        self.report(inner, State::Fetching, None, None);
        let path = self.own_file(inner)?;
        self.share(inner)?;
        self.report(inner, State::Loading, None, None);
        if encoders::is_encoder(&path) {
            return encoders::load(&path, &self.wanted).map(Answers::Encoder);
        }
        let mut prepared = self.prepare(inner, &path)?;
        if self.wanted.spare > 0 {
            prepared.keep_spares();
        }
        let places = Nodes {
            agent: inner.agent.clone(),
            wanted: self.wanted.clone(),
            nodes: self.wanted.nodes.clone(),
            host: Arc::clone(&inner.host),
            flaps: Arc::clone(&self.flaps),
            spares: Mutex::default(),
            known: Mutex::default(),
        };
        let ranks = self.wanted.nodes.len() as u32;
        let crew = RemoteCrew::new(Box::new(places), name_of(&self.wanted), ranks, None);
        let instance = prepared.over(Box::new(crew), true, self.observer(inner));
        let instance = instance.map_err(|error| error.to_string())?;
        instance.ready().map_err(|error| error.to_string())?;
        Ok(Answers::Instance(Arc::new(instance)))
    }

    /// The model's file on this node, copied from the node that loaded it where this one lacks it.
    fn own_file(&self, inner: &Inner) -> Result<PathBuf, String> {
        let other = self.wanted.source.filter(|id| *id != inner.agent.id());
        let source = match (path_of(inner, &self.wanted), other) {
            (Err(_), Some(source)) => source,
            (found, _) => return found,
        };
        let told = Cell::new(Instant::now());
        let progress = |bytes: u64| {
            if told.get().elapsed() >= TELL_EVERY {
                told.set(Instant::now());
                let progress = Some((bytes, self.wanted.bytes));
                self.report(inner, State::Fetching, progress, None);
            }
        };
        let taken = inner
            .copies
            .take(&inner.agent, source, &self.wanted, &progress);
        taken.map_err(|reason| format!("the copy from {}: {reason}", inner.name(source)))?;
        path_of(inner, &self.wanted)
    }

    fn prepare(&self, inner: &Inner, path: &Path) -> Result<Prepared, String> {
        let source = Source::open(path).map_err(|error| error.to_string())?;
        let options = Options {
            classes: vec![KernelClass::Cpu; self.wanted.nodes.len()],
            threads: usize::from(self.wanted.threads.max(1)),
            kv: None,
            nodes: self.wanted.nodes.len() as u32,
            kind: self.wanted.split.parse().map_err(|_| {
                format!(
                    "{:?} is no split: try auto, tensor or pipeline",
                    self.wanted.split
                )
            })?,
            shares: Vec::new(),
            backend: Backend::Any,
            probed: Backend::Tcp,
        };
        let sizes = |config: &_| (inner.spec.sizes)(path, config, &self.wanted);
        Prepared::new(Arc::new(source), options, sizes).map_err(|error| error.to_string())
    }

    /// Has all nodes have the model, side by side.
    fn share(&self, inner: &Inner) -> Result<(), String> {
        let others = self.wanted.nodes.iter().copied();
        let others = others.filter(|id| *id != inner.agent.id());
        let done = AtomicU64::new(0);
        let told = std::sync::Mutex::new(Instant::now());
        std::thread::scope(|scope| {
            let fetch = |node: NodeId| {
                let (before, done, told) = (Cell::new(0), &done, &told);
                move || {
                    let progress = |bytes: u64| {
                        done.fetch_add(bytes - before.replace(bytes), Ordering::Relaxed);
                        let mut told = lock(told);
                        if told.elapsed() >= TELL_EVERY {
                            *told = Instant::now();
                            let progress = (done.load(Ordering::Relaxed), self.wanted.bytes);
                            self.report(inner, State::Fetching, Some(progress), None);
                        }
                    };
                    let had = copies::ensure(&inner.agent, node, &self.wanted, &progress);
                    had.map_err(|reason| format!("{}: {reason}", inner.name(node)))
                }
            };
            let all: Vec<_> = others.map(|node| scope.spawn(fetch(node))).collect();
            let all = all.into_iter().map(|thread| {
                let ended = thread.join();
                ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            all.collect()
        })
    }

    /// Tells the cluster what becomes of the workers.
    fn observer(&self, inner: &Arc<Inner>) -> crate::Observer {
        let (own, inner) = (self.clone(), Arc::downgrade(inner));
        let mut last = Instant::now();
        Box::new(move |notice, _| {
            let Some(inner) = inner.upgrade() else { return };
            match notice {
                Notice::Loading { done, of, .. } if last.elapsed() >= TELL_EVERY => {
                    last = Instant::now();
                    let progress = (*done as u64, *of as u64);
                    own.report(&inner, State::Loading, Some(progress), None);
                }
                Notice::Ready { again: true, .. } => {
                    let without = own.left_out(&inner);
                    let note = without
                        .as_ref()
                        .map_or(String::new(), |it| format!(", {it}"));
                    (inner.spec.tell)(&format!("{} answers again{note}", own.wanted.model));
                    own.report(&inner, State::Ready, None, without);
                }
                Notice::Failed { rank, reason, .. } => {
                    own.flaps.lost(*rank, Instant::now());
                    (inner.spec.tell)(&format!("error: {}: {reason}", own.wanted.model));
                    own.report(&inner, State::Recovering, None, Some(reason.clone()));
                }
                Notice::Changed(change) => (inner.spec.tell)(&change.line()),
                Notice::Loading { .. } | Notice::Ready { .. } => {}
            }
        })
    }

    /// Takes back nodes that loads have named, and tells when other nodes are left out than were
    /// told.
    fn take_back(&self, inner: &Inner, map: &Registers, named: &[Named]) {
        self.flaps.take_back(named);
        let said = report(map, self.id).filter(|it| it.epoch == self.epoch);
        let said = said.filter(|it| it.state == State::Ready);
        // News that was not told yet is told once the instance answers again.
        let Some(said) = said.and_then(|it| it.reason) else {
            return;
        };
        let out = self.left_out(inner);
        if out.as_ref() != Some(&said) {
            self.report(inner, State::Ready, None, out);
        }
    }

    /// Which nodes are left out, and why.
    fn left_out(&self, inner: &Inner) -> Option<String> {
        let out = self.flaps.out(Instant::now());
        let names: Vec<String> = out.into_iter().map(|id| inner.name(id)).collect();
        let verb = if names.len() == 1 { "is" } else { "are" };
        (!names.is_empty()).then(|| {
            format!(
                "{} {verb} left out: lost {LOSSES_MAX} workers within minutes",
                names.join(", ")
            )
        })
    }

    fn report(
        &self,
        inner: &Inner,
        state: State,
        progress: Option<(u64, u64)>,
        reason: Option<String>,
    ) {
        let report = Report {
            epoch: self.epoch,
            state,
            progress,
            reason,
        };
        let text = serde_json::to_string(&report).expect("a report is JSON");
        // The map is full, or this node owns it no more: a report is not worth more.
        let _: Result<(), _> = inner
            .agent
            .write(Key::State(self.id), self.epoch, Some(text));
    }
}

impl Inner {
    /// Has the instances of this node take back nodes that they left out.
    pub(super) fn take_back(&self) {
        // A copy, so that the lock is not held while the map is written.
        let of = |it: &Running| it.owned.clone();
        let owned: Vec<Owned> = lock(&self.owned).values().map(of).collect();
        if owned.is_empty() {
            return;
        }
        let map = self.agent.map();
        let named = placement::wanted(&map).filter(|(.., wanted)| wanted.named);
        let named: Vec<Named> = named.map(|(id, _, wanted)| (id, wanted.nodes)).collect();
        for one in owned {
            one.take_back(self, &map, &named);
        }
    }
}

/// The model's file of an instance on this node.
pub(super) fn path_of(inner: &Inner, wanted: &Wanted) -> Result<PathBuf, String> {
    inner.copies.find(&name_of(wanted))
}
