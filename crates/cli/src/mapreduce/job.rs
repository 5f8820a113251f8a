//! Parts that all jobs have: options, a crew, and figures of the run.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use paceline_mapreduce::sort::{Sort, Sorted};
use paceline_mapreduce::{Choice, Crew, Dtype, Input, Journal, Kind, Partial, Processes, Task};
use serde::Serialize;

use super::Columns;
use super::watch::Watch;
use super::{hosts, limit};
use crate::machines;
use crate::output::{print, tell};
use crate::process::{own_program, ssh_env, worker_env};

/// Most worker processes.
const NODES_MAX: i64 = 64;

/// Arguments of every job.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct JobArgs {
    /// Compute with N workers: machines of the cluster where this machine's node runs and has as
    /// many, else processes here; the result has the same bits for any N. Another machine needs the
    /// inputs at the same paths, in a folder that it lends: `paceline up --arrays DIR` there
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=NODES_MAX))]
    nodes: u32,
    /// Compute on these hosts, which ssh reaches without a password, with commas between. Each
    /// needs paceline, and the inputs at the same paths
    #[arg(long, value_name = "A,B", conflicts_with = "nodes")]
    hosts: Option<String>,
    /// Compute on this machine alone, whatever the cluster has
    #[arg(long, conflicts_with = "hosts")]
    local: bool,
    /// Threads of each node [default: the cores, shared by the nodes of a machine]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Inputs are raw values of this type (f64, f32, i64, u32, ...) instead of .npy files
    #[arg(long, visible_alias = "dtype", value_name = "TYPE")]
    raw: Option<Dtype>,
    /// What computes: cpu, gpu (a graphics processor, or software that acts as one), or auto (the
    /// CPU, and a graphics processor beside it where that is worth it). The result has the same
    /// bits
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    device: Choice,
    /// Keep finished parts in this file, and go on from it if it is there; removed at the end
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

/// Figures that every job's JSON object has.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figures {
    rows: u64,
    gb_s: f64,
    /// The speed at which this machine reads from memory; `None` for jobs too short to compare.
    machine_gb_s: Option<f64>,
    seconds: f64,
    nodes: u32,
    /// Threads of each node; `None` where they differ or a node has not said it.
    threads: Option<usize>,
    /// Threads of each node, this machine's first, or in the order of `--hosts`; `None` of one that
    /// has not said it.
    node_threads: Vec<Option<usize>>,
    /// The device that was to compute: cpu, or the device's name; of several nodes, what was asked
    /// for.
    device: String,
    /// Parts of which a device has computed some.
    device_parts: u64,
    /// Workers that were lost on the way, or left out because of their inputs.
    lost: u32,
}

impl Figures {
    /// Prints the object, or what `shown` says of it with the figures on stderr.
    ///
    /// # Errors
    /// When nobody reads.
    pub(super) fn print<T: Serialize>(
        self,
        json: bool,
        result: T,
        shown: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<()> {
        #[derive(Serialize)]
        struct Both<T> {
            #[serde(flatten)]
            result: T,
            #[serde(flatten)]
            figures: Figures,
        }
        if json {
            let figures = self;
            return print(&serde_json::to_string(&Both { result, figures })?);
        }
        let limit = self.machine_gb_s.map_or(String::new(), |limit| {
            format!(" (memory of this machine: {limit:.1} GB/s)")
        });
        let Self {
            rows,
            seconds,
            gb_s,
            ..
        } = self;
        tell(format_args!(
            "{rows} rows in {seconds:.2} s, {gb_s:.2} GB/s{limit}"
        ));
        print(&shown(&result))
    }
}

/// A crew that runs, and what it has done so far.
pub(super) struct Running<'a> {
    args: &'a JobArgs,
    crew: Crew,
    start: Instant,
    bytes: u64,
}

impl Running<'_> {
    /// Sorts a file.
    ///
    /// # Errors
    /// What is wrong with it, or became of the workers.
    pub(super) fn sort(&mut self, sort: &Sort) -> anyhow::Result<Sorted> {
        let mut watch: Option<(bool, Watch)> = None;
        self.bytes += sort.input.bytes();
        let sorted = sort.run(&mut self.crew, &mut |task, progress| {
            let is_second = matches!(task.kind, Kind::Gather(_));
            if watch
                .as_ref()
                .is_none_or(|(second, _)| *second != is_second)
            {
                watch = Some((is_second, Watch::new(task)));
            }
            if let Some((_, watch)) = &mut watch {
                watch.hear(progress);
            }
        })?;
        Ok(sorted)
    }

    /// Runs a job.
    ///
    /// # Errors
    /// What is wrong with it, or became of the workers.
    pub(super) fn run(&mut self, task: &Task) -> anyhow::Result<Partial> {
        let mut watch = Watch::new(task);
        let mut hear = |progress| watch.hear(progress);
        self.bytes += task.bytes();
        let Some(path) = &self.args.resume else {
            return Ok(self.crew.run(task, None, &mut hear)?);
        };
        task.prepare()?; // a wrong task leaves no file
        let part_rows = task.part_rows(self.crew.threads());
        let mut journal = Journal::open(path, task, part_rows)?;
        let partial = self.crew.run(task, Some(&mut journal), &mut hear)?;
        journal.remove()?;
        Ok(partial)
    }

    /// The figures of all jobs together, over `rows` rows.
    ///
    /// # Errors
    /// When the system refuses memory or threads to measure the machine with.
    pub(super) fn end(self, rows: u64) -> anyhow::Result<Figures> {
        let seconds = self.start.elapsed().as_secs_f64();
        let lost = self.crew.lost();
        let threads = self.crew.threads();
        let device = match (self.crew.is_processes(), self.crew.device()) {
            (false, None) => "cpu".to_owned(),
            (false, Some(label)) => label.to_owned(),
            (true, _) => self.args.device.name().to_owned(),
        };
        let device_parts = self.crew.device_parts();
        let nodes = self.crew.nodes();
        let node_threads = self.crew.node_threads();
        drop(self.crew); // the machine is measured without the workers
        Ok(Figures {
            rows,
            gb_s: self.bytes as f64 / seconds / 1e9,
            machine_gb_s: limit::measure(self.bytes, threads as usize)?,
            seconds,
            nodes,
            threads: all_the_same(&node_threads),
            node_threads,
            device,
            device_parts,
            lost,
        })
    }
}

impl JobArgs {
    /// Describes a file.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn input(&self, path: &Path) -> Result<Input, paceline_mapreduce::Error> {
        let path = Self::place(path);
        match self.raw {
            Some(dtype) => Input::raw(&path, dtype, 1),
            None => Input::npy(&path),
        }
    }

    /// The path as all nodes have it: workers of other machines start in another folder. The same
    /// for any crew, so that another one can go on from a journal.
    pub(super) fn place(path: &Path) -> PathBuf {
        std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
    }

    /// Files as columns of all their values.
    ///
    /// # Errors
    /// What is wrong with one.
    pub(super) fn flat(&self, columns: &Columns) -> Result<Vec<Input>, paceline_mapreduce::Error> {
        let inputs = columns.inputs.iter().map(|path| self.input(path));
        inputs.map(|input| input.map(Input::flat)).collect()
    }

    /// Threads of each node.
    fn threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let even = (cores / self.nodes as usize).max(1);
        self.threads.map_or(even, usize::from)
    }

    /// Whether a job can go on from where it was.
    pub(super) const fn resumes(&self) -> bool {
        self.resume.is_some()
    }

    /// The file that keeps finished parts.
    pub(super) fn journal(&self) -> Option<&Path> {
        self.resume.as_deref()
    }

    /// Starts what computes.
    ///
    /// # Errors
    /// When workers cannot be started, or there is no device where one is asked for.
    pub(super) fn start(&self) -> anyhow::Result<Running<'_>> {
        let start = Instant::now();
        let crew = match (&self.hosts, self.nodes) {
            (Some(hosts), _) => self.on_hosts(hosts)?,
            (None, 1) => {
                let device = self.device.open()?;
                Crew::here(self.threads()).with_device(device, self.device)
            }
            (None, nodes) => self.on_nodes(nodes as usize)?,
        };
        Ok(Running {
            args: self,
            crew,
            start,
            bytes: 0,
        })
    }

    /// Starts a worker on each of these hosts.
    fn on_hosts(&self, hosts: &str) -> anyhow::Result<Crew> {
        let names = hosts::names(hosts).map_err(anyhow::Error::msg)?;
        let args = names.iter().map(|host| worker_args(&["--on", host]));
        self.workers(args.collect(), names.clone(), self.threads_elsewhere())
    }

    /// Starts workers on machines of the cluster, or as many processes here.
    fn on_nodes(&self, nodes: usize) -> anyhow::Result<Crew> {
        let machines = if self.local {
            None
        } else {
            machines::chosen(nodes)?
        };
        let Some(machines) = machines else {
            let args = vec![worker_args(&[]); nodes];
            return self.workers(args, Vec::new(), self.threads());
        };
        let args = machines.iter().map(|machine| match machine.is_own {
            true => worker_args(&[]),
            false => worker_args(&["--node", &machine.id]),
        });
        let names = machines.iter().map(|machine| match machine.is_own {
            true => String::new(), // it shares its files
            false => machine.name.clone(),
        });
        self.workers(args.collect(), names.collect(), self.threads_elsewhere())
    }

    /// Threads of each machine; 0 for as many as it has cores.
    fn threads_elsewhere(&self) -> usize {
        self.threads.map_or(0, usize::from)
    }

    /// Starts worker processes, which may be bridges to other machines.
    fn workers(
        &self,
        args: Vec<Vec<OsString>>,
        hosts: Vec<String>,
        threads: usize,
    ) -> anyhow::Result<Crew> {
        Ok(Crew::start(Processes {
            program: own_program().context("cannot find this program's own file")?,
            args,
            // Workers here and bridges to nodes need no more than that.
            env: if self.hosts.is_none() {
                worker_env()
            } else {
                ssh_env()
            },
            hosts,
            threads,
            device: self.device,
        })?)
    }
}

/// Arguments of a worker.
fn worker_args(more: &[&str]) -> Vec<OsString> {
    let own = ["mapreduce", "worker"].into_iter();
    own.chain(more.iter().copied())
        .map(OsString::from)
        .collect()
}

/// The number that all nodes have said.
fn all_the_same(threads: &[Option<usize>]) -> Option<usize> {
    let first = threads.first().copied().flatten()?;
    threads.iter().all(|it| *it == Some(first)).then_some(first)
}

/// The choice of this name.
fn device(name: &str) -> Result<Choice, String> {
    let mut all = [Choice::Auto, Choice::Cpu, Choice::Gpu].into_iter();
    let named = all.find(|choice| choice.name() == name);
    named.ok_or_else(|| "expected auto, cpu or gpu".to_owned())
}
