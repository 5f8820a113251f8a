//! Shared by all jobs: options, and starting the workers.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use paceline_bench::limits::{COMPARED_BYTES, compared_gb_s};
use paceline_mapreduce::jobs::{Columns, Figures, Runs};
use paceline_mapreduce::{BlockMap, DeviceChoice, Dtype, InputFile, JobWorkers, ProcessOptions};
use serde::Serialize;

use super::watch::JobWatcher;
use super::{ColumnArgs, hosts};
use crate::output::{print, print_err};
use crate::process::{own_program, ssh_env, worker_env};
use crate::{load, machines};

/// Maximum worker processes.
const NODES_MAX: i64 = 64;

/// Arguments of every job.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ArrayJobArgs {
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
    /// Compute on this machine alone, without the cluster
    #[arg(long, conflicts_with = "hosts")]
    local: bool,
    /// Threads of each node [default: the cores, shared by the nodes of a machine]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Inputs are raw values of this type (f64, f32, i64, u32, ...) instead of .npy files
    #[arg(long, visible_alias = "dtype", value_name = "TYPE")]
    raw: Option<Dtype>,
    /// Device: cpu, gpu (a graphics processor, or software that acts as one), or auto (the CPU,
    /// with a graphics processor where that pays). The result has the same bits
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    device: DeviceChoice,
    /// Keep finished parts in this file, and resume from it if it exists; removed at the end
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

/// Prints a result with its statistics as JSON, or `text`, with the statistics on stderr.
pub(super) fn show<T: Serialize>(
    figures: &Figures,
    json: bool,
    result: &T,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    if json {
        return print(&figures.json(result)?);
    }
    print_err(figures.line());
    print(&text(result))
}

/// Statistics of `runs` over `rows` rows, compared with this machine's memory bandwidth.
pub(super) fn end(runs: Runs<'_>, rows: u64) -> anyhow::Result<Figures> {
    runs.end(rows, |bytes, threads| -> anyhow::Result<_> {
        if bytes < COMPARED_BYTES {
            return Ok(None);
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let kernels = load::kernels((threads as usize).min(cores))?;
        Ok(Some(compared_gb_s(&kernels)?))
    })
}

impl ArrayJobArgs {
    /// Opens an input's description.
    pub(super) fn input(&self, path: &Path) -> Result<InputFile, paceline_mapreduce::Error> {
        let path = Self::place(path);
        match self.raw {
            Some(dtype) => InputFile::raw(&path, dtype, 1),
            None => InputFile::npy(&path),
        }
    }

    /// The absolute path: workers on other machines start in another folder. It does not depend on
    /// the workers, so that others can resume a journal.
    pub(super) fn place(path: &Path) -> PathBuf {
        std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
    }

    /// Opens files as columns of values.
    pub(super) fn columns(&self, args: &ColumnArgs) -> Result<Columns, paceline_mapreduce::Error> {
        let inputs = args.inputs.iter().map(|path| self.input(path));
        let mut inputs: Vec<InputFile> = inputs.collect::<Result<_, _>>()?;
        let wgsl = args.wgsl.as_deref().map(Columns::function).transpose()?;
        let block = match (&wgsl, args.halo) {
            (Some(text), Some(halo)) => Some(BlockMap::new(text, &inputs, halo, args.steps)?),
            _ => None,
        };
        if block.is_none() {
            inputs = inputs.into_iter().map(InputFile::flat).collect();
        }
        Ok(Columns {
            inputs,
            map: args.map.clone(),
            wgsl,
            block,
        })
    }

    fn threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let even = (cores / self.nodes as usize).max(1);
        self.threads.map_or(even, usize::from)
    }

    /// Whether the job is resumable.
    pub(super) const fn resumes(&self) -> bool {
        self.resume.is_some()
    }

    /// The journal of finished parts.
    pub(super) fn journal(&self) -> Option<&Path> {
        self.resume.as_deref()
    }

    pub(super) fn start<'a>(&self, watch: &'a mut JobWatcher) -> anyhow::Result<Runs<'a>> {
        let start = Instant::now();
        let crew = match (&self.hosts, self.nodes) {
            (Some(hosts), _) => self.on_hosts(hosts)?,
            (None, 1) => {
                let device = self.device.open()?;
                JobWorkers::here(self.threads()).with_device(device, self.device)
            }
            (None, nodes) => self.on_nodes(nodes as usize)?,
        };
        Ok(Runs::new((crew, start), self.device, self.journal(), watch))
    }

    /// Starts a worker on each of these hosts.
    fn on_hosts(&self, hosts: &str) -> anyhow::Result<JobWorkers> {
        let names = hosts::names(hosts).map_err(anyhow::Error::msg)?;
        let args = names.iter().map(|host| worker_args(&["--on", host]));
        self.workers(args.collect(), names.clone(), self.threads_elsewhere())
    }

    /// Starts workers on machines of the cluster, or else as local processes.
    fn on_nodes(&self, nodes: usize) -> anyhow::Result<JobWorkers> {
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

    /// Threads of each machine; 0 for all its cores.
    fn threads_elsewhere(&self) -> usize {
        self.threads.map_or(0, usize::from)
    }

    /// Starts worker processes, which may relay to other machines.
    fn workers(
        &self,
        args: Vec<Vec<OsString>>,
        hosts: Vec<String>,
        threads: usize,
    ) -> anyhow::Result<JobWorkers> {
        Ok(JobWorkers::start(ProcessOptions {
            program: own_program().context("cannot find this program's own file")?,
            args,
            // Local workers and relays to nodes need only this.
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

fn worker_args(more: &[&str]) -> Vec<OsString> {
    let own = ["mapreduce", "worker"].into_iter();
    own.chain(more.iter().copied())
        .map(OsString::from)
        .collect()
}

fn device(name: &str) -> Result<DeviceChoice, String> {
    let mut all = [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Gpu].into_iter();
    let named = all.find(|choice| choice.name() == name);
    named.ok_or_else(|| "expected auto, cpu or gpu".to_owned())
}
