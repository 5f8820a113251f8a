//! What computes the leaves of a step: this process, or worker processes.
//!
//! A worker that ends, hangs or sends garbage loses its leaves, and the others compute those. The
//! sum is the same, because a leaf depends on no worker and the tree on no share. Another worker
//! is started in its place and joins when it has loaded the model.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_base::Rank;
use paceline_base::tree::{self, Stack};
use paceline_cluster::workers::{Event, Limits, Spec, Workers};
use sha2::{Digest, Sha256};

use crate::data::hex;
use crate::error::Error;
use crate::messages::{FromWorker, ToWorker, params_file, roots_file};
use crate::run::{Job, Progress, Run};
use crate::tensors;

/// Longest silence of a worker before its leaves go to others. Its signs of life do not depend on
/// what it computes.
const SILENCE: Duration = Duration::from_secs(5);

/// How long workers have to end by themselves.
const GRACE: Duration = Duration::from_millis(300);

/// How often the parent looks up while workers compute.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Workers that end in a row without having computed anything before none is started any more.
const FRUITLESS_MAX: u32 = 8;

/// What computes leaves.
#[derive(Debug)]
pub struct Crew {
    team: Option<Team>,
}

/// Worker processes that are to be started.
#[derive(Debug)]
pub struct Processes {
    /// A program that is [`worker::run`](crate::worker::run).
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// How many, at least one.
    pub nodes: u32,
    /// Threads of each.
    pub threads: usize,
    /// Folder of exchanged files: made, and removed at the end.
    pub exchange: PathBuf,
}

impl Crew {
    /// This process.
    pub const fn here() -> Self {
        Self { team: None }
    }

    /// Starts workers on this machine. They end with the crew.
    ///
    /// # Errors
    /// [`Error::Cluster`], [`Error::File`].
    pub fn start(processes: Processes, job: &Job) -> Result<Self, Error> {
        let exchange = processes.exchange;
        let _ = std::fs::remove_dir_all(&exchange); // of a run that was killed
        std::fs::create_dir_all(&exchange).map_err(Error::file("make", &exchange))?;
        let mut spec = Spec::new(
            processes.program,
            vec![processes.args; processes.nodes as usize],
        );
        spec.limits = Limits {
            silence: SILENCE,
            write: SILENCE,
            ..Limits::default()
        };
        let member = Member::default;
        let mut team = Team {
            workers: Workers::spawn(spec)?,
            members: (0..processes.nodes).map(|_| member()).collect(),
            lost: 0,
            fruitless: 0,
            last: String::new(),
            untold: Vec::new(),
            start: (job.clone(), processes.threads.max(1)),
            exchange,
        };
        for rank in 0..processes.nodes {
            team.welcome(rank);
        }
        Ok(Self { team: Some(team) })
    }

    /// Workers that were lost so far.
    pub fn lost(&self) -> u32 {
        self.team.as_ref().map_or(0, |team| team.lost)
    }

    /// Workers that can compute now.
    pub fn nodes(&self) -> u32 {
        let ready = |team: &Team| team.members.iter().filter(|m| m.is_ready).count() as u32;
        self.team.as_ref().map_or(1, ready)
    }

    /// Process ids by rank: for reports.
    pub fn ids(&self) -> Vec<u32> {
        self.team
            .as_ref()
            .map(|team| team.workers.ids())
            .unwrap_or_default()
    }

    /// The loss and the gradient of a step.
    pub(crate) fn step(
        &mut self,
        run: &Run,
        params: &[f32],
        step: u64,
        clock: &dyn Fn() -> f64,
        watch: &mut dyn FnMut(Progress),
    ) -> Result<(f64, Vec<f32>), Error> {
        let leaves = run.order.leaves();
        match &mut self.team {
            None => {
                let (losses, mut roots) = compute(run, params, step, 0..leaves);
                roots.truncate(params.len());
                Ok((losses.iter().sum(), roots))
            }
            Some(team) => {
                let at = At {
                    step,
                    leaves,
                    width: params.len(),
                    clock,
                };
                team.step(params, &at, watch)
            }
        }
    }
}

/// Losses of leaves and the values of the roots of their range.
pub(crate) fn compute(
    run: &Run,
    params: &[f32],
    step: u64,
    leaves: Range<usize>,
) -> (Vec<f64>, Vec<f32>) {
    let mut stack = Stack::new(run.order.leaves(), params.len());
    stack.reset(leaves.start);
    let losses = leaves.map(|leaf| {
        let (loss, grads) = run.leaf(params, step, leaf);
        stack.push(&grads);
        loss
    });
    let losses = losses.collect();
    (losses, stack.values().to_vec())
}

/// A worker, as far as the parent knows.
#[derive(Debug, Default)]
struct Member {
    is_ready: bool,
    /// Has a process.
    is_there: bool,
    /// What it computes, and since when.
    has: Vec<Range<usize>>,
    since: f64,
    /// Leaves a second, 0 before it has computed any.
    speed: f64,
}

/// What a step is.
struct At<'a> {
    step: u64,
    leaves: usize,
    width: usize,
    clock: &'a dyn Fn() -> f64,
}

/// What workers have given for a step: by first leaf, the one behind the last, losses and roots.
type Given = BTreeMap<usize, (usize, Vec<f64>, Vec<f32>)>;

#[derive(Debug)]
struct Team {
    workers: Workers<ToWorker, FromWorker>,
    members: Vec<Member>,
    lost: u32,
    fruitless: u32,
    /// What became of the last worker that was lost.
    last: String,
    /// The same of those that the caller was not told of.
    untold: Vec<String>,
    start: (Job, usize),
    exchange: PathBuf,
}

impl Team {
    fn step(
        &mut self,
        params: &[f32],
        at: &At<'_>,
        watch: &mut dyn FnMut(Progress),
    ) -> Result<(f64, Vec<f32>), Error> {
        let file = params_file(&self.exchange, at.step);
        publish(&file, params)?;
        let mut open: Vec<Range<usize>> = std::iter::once(0..at.leaves).collect();
        let mut given = Given::new();
        while given
            .values()
            .map(|(_, losses, _)| losses.len())
            .sum::<usize>()
            < at.leaves
        {
            if self.is_ready() {
                for range in std::mem::take(&mut open) {
                    open.extend(self.lease(range, at));
                }
            } else if !self.members.iter().any(|member| member.is_there) {
                return Err(Error::Lost {
                    last: self.last.clone(),
                });
            }
            if let Some(event) = self.workers.recv(LOOK_EVERY) {
                open.extend(self.take(event, at, &mut given)?);
            }
            for why in self.untold.drain(..) {
                watch(Progress::Lost { why });
            }
        }
        let _ = std::fs::remove_file(&file);
        Ok(summed(given, at))
    }

    /// Whether all of those who load the model are waited for: only before anything was computed.
    fn is_ready(&self) -> bool {
        let (mut ready, mut loading) = (false, false);
        for member in &self.members {
            ready |= member.is_ready;
            loading |= member.is_there && !member.is_ready;
        }
        let begun = self.members.iter().any(|member| member.speed > 0.0) || self.lost > 0;
        ready && (begun || !loading)
    }

    /// Cuts leaves among those who are ready, by their speed. Gives back what nobody took.
    fn lease(&mut self, leaves: Range<usize>, at: &At<'_>) -> Vec<Range<usize>> {
        let ready: Vec<usize> = (0..self.members.len())
            .filter(|rank| self.members[*rank].is_ready)
            .collect();
        let speeds: Vec<f64> = ready.iter().map(|rank| self.members[*rank].speed).collect();
        let mut back = Vec::new();
        for (rank, range) in ready.into_iter().zip(shares(leaves, &speeds)) {
            if range.is_empty() {
                continue;
            }
            let message = ToWorker::Compute {
                step: at.step,
                start: range.start,
                end: range.end,
            };
            let member = &mut self.members[rank];
            if member.has.is_empty() {
                member.since = (at.clock)();
            }
            member.has.push(range);
            if let Err(error) = self.workers.send(Rank(rank as u32), &message) {
                back.extend(self.lose(rank as u32, error.to_string()));
            }
        }
        back
    }

    /// Gives the leaves that are open again.
    fn take(
        &mut self,
        event: Event<FromWorker>,
        at: &At<'_>,
        given: &mut Given,
    ) -> Result<Vec<Range<usize>>, Error> {
        let (text, rank) = (event.to_string(), event.rank().0);
        let why = match event {
            Event::Message { message, .. } => match self.hear(rank, message, at, given)? {
                None => return Ok(Vec::new()),
                Some(why) => why,
            },
            Event::Exited { .. } | Event::Silent { .. } => text,
            Event::Garbled { .. } | Event::Gone { .. } => text,
        };
        if !self.members[rank as usize].is_there {
            return Ok(Vec::new());
        }
        Ok(self.lose(rank, why))
    }

    /// What is wrong with a message, if anything.
    fn hear(
        &mut self,
        rank: u32,
        message: FromWorker,
        at: &At<'_>,
        given: &mut Given,
    ) -> Result<Option<String>, Error> {
        let member = &mut self.members[rank as usize];
        match message {
            FromWorker::Ready => member.is_ready = true,
            FromWorker::Failed { reason } => return Err(Error::Worker { rank, reason }),
            FromWorker::Done {
                step,
                start,
                end,
                losses,
                digest,
            } => {
                let mine = member.has.iter().position(|range| *range == (start..end));
                let Some(mine) = mine.filter(|_| step == at.step && losses.len() == end - start)
                else {
                    return Ok(None); // leaves that are others' by now
                };
                member.has.remove(mine);
                let file = roots_file(&self.exchange, step, start, end);
                let n = tree::roots(start..end, at.leaves).len() * at.width;
                let Some(roots) = read_roots(&file, n, &digest) else {
                    member.has.push(start..end);
                    return Ok(Some(format!("rank {rank} wrote other roots than it says")));
                };
                let now = (at.clock)();
                member.speed = (end - start) as f64 / (now - member.since).max(1e-6);
                member.since = now;
                self.fruitless = 0;
                let losses = losses.into_iter().map(f64::from_bits).collect();
                given.insert(start, (end, losses, roots));
            }
        }
        Ok(None)
    }

    /// Gives up a worker, starts another in its place, and gives its leaves back.
    fn lose(&mut self, rank: u32, why: String) -> Vec<Range<usize>> {
        let gone = std::mem::take(&mut self.members[rank as usize]);
        self.lost += 1;
        self.fruitless += 1;
        self.untold.push(why.clone());
        self.last = why;
        if self.fruitless > FRUITLESS_MAX {
            self.workers.kill(Rank(rank));
        } else if self.workers.replace(Rank(rank)).is_ok() {
            self.welcome(rank);
        }
        gone.has
    }

    /// Tells a worker that was just started what the run is.
    fn welcome(&mut self, rank: u32) {
        let (job, threads) = &self.start;
        let message = ToWorker::Start {
            job: Box::new(job.clone()),
            threads: *threads,
            exchange: self.exchange.clone(),
        };
        // What does not read will be reported as ended.
        let _ = self.workers.send(Rank(rank), &message);
        self.members[rank as usize].is_there = true;
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.workers.stop(GRACE);
        let _ = std::fs::remove_dir_all(&self.exchange); // nothing of it is needed
    }
}

/// Adds up what was given, the losses leaf by leaf.
fn summed(given: Given, at: &At<'_>) -> (f64, Vec<f32>) {
    let (mut loss, mut nodes, mut values) = (0.0, Vec::new(), Vec::new());
    for (start, (end, losses, roots)) in given {
        loss = losses.iter().fold(loss, |sum, loss| sum + loss);
        nodes.extend(tree::roots(start..end, at.leaves));
        values.extend(roots);
    }
    let n = tree::combine(at.leaves, &nodes, &mut values).len();
    values.truncate(n);
    (loss, values)
}

/// Neighbouring parts of a range, in proportion to speeds; those not known count as the mean.
fn shares(range: Range<usize>, speeds: &[f64]) -> Vec<Range<usize>> {
    let known: Vec<f64> = speeds
        .iter()
        .copied()
        .filter(|speed| *speed > 0.0)
        .collect();
    let mean = known.iter().sum::<f64>() / known.len() as f64;
    let of = |speed: &f64| {
        if *speed > 0.0 {
            *speed
        } else if mean > 0.0 {
            mean
        } else {
            1.0
        }
    };
    let total: f64 = speeds.iter().map(of).sum();
    let (mut sum, mut start, n) = (0.0, range.start, range.len() as f64);
    let mut parts = Vec::with_capacity(speeds.len());
    for (i, speed) in speeds.iter().enumerate() {
        sum += of(speed);
        let end = match i + 1 == speeds.len() {
            true => range.end,
            false => range.start + (n * sum / total).round() as usize,
        };
        let end = end.clamp(start, range.end);
        parts.push(start..end);
        start = end;
    }
    parts
}

/// Writes values where other processes see them whole or not at all.
pub(crate) fn publish(path: &Path, values: &[f32]) -> Result<String, Error> {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let written =
        std::fs::write(&temporary, &bytes).and_then(|()| std::fs::rename(&temporary, path));
    written.map_err(Error::file("write", path))?;
    Ok(hex(&Sha256::digest(&bytes)))
}

/// The `n` values of a file with this digest, which is removed.
fn read_roots(path: &Path, n: usize, digest: &str) -> Option<Vec<f32>> {
    let bytes = std::fs::read(path).ok()?;
    let _ = std::fs::remove_file(path);
    let right = bytes.len() == n * size_of::<f32>() && hex(&Sha256::digest(&bytes)) == digest;
    right.then(|| tensors::floats(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_speeds_and_cover_the_range() {
        assert_eq!(shares(0..8, &[0.0, 0.0]), [0..4, 4..8]);
        assert_eq!(shares(2..10, &[3.0, 1.0]), [2..8, 8..10]);
        assert_eq!(shares(0..4, &[2.0, 0.0, 2.0]), [0..1, 1..3, 3..4]);
        assert_eq!(
            shares(0..1, &[1.0, 1.0, 1.0])
                .iter()
                .map(Range::len)
                .sum::<usize>(),
            1
        );
        assert_eq!(shares(5..5, &[1.0, 2.0]), [5..5, 5..5]);
    }
}
