//! Workers of an instance on one machine, as `up` starts them: processes of this node, by the
//! options of its record.

use std::path::PathBuf;
use std::sync::Arc;

use paceline_base::UnknownKernelClass;
use paceline_comm::{Backend, UnknownBackend};
use paceline_fleet::MachineOptions;

use super::Inner;
use super::owner::OwnedInstance;
use crate::workers::{LocalInstanceWorkers, LocalSpec};
use crate::{Instance, PrefillOptions, PreparedModel, Rehearsal};

impl OwnedInstance {
    /// Starts all workers on this machine, as `options` say. The split is chosen, and changed, by
    /// this machine's measurements, which the first start takes. The answer that a ready instance
    /// may have to measure comes with it.
    pub(super) fn start_here(
        &self,
        inner: &Arc<Inner>,
        (mut prepared, options): (PreparedModel, &MachineOptions),
        files: LocalFiles,
    ) -> Result<(Instance, Option<Rehearsal>), String> {
        prepared.forecast(&inner.spec.home, &*inner.spec.kernels);
        let rehearsal = prepared.rehearsal();
        let pin = options.pin.then_some(prepared.options().threads);
        let shape = (prepared.config().clone(), prepared.options().threads);
        let crew = inner.workers_here(&files, (options.ranks.max(1), pin), "")?;
        let observer = self.observer(inner, shape);
        let instance = match options.prefill_ranks {
            0 => prepared.over(crew, true, observer),
            ranks => {
                // Not pinned: the decode workers occupy the first cores.
                let prompts = inner.workers_here(&files, (ranks, None), "prompts ")?;
                prepared.over_apart(crew, prompts, true, observer)
            }
        };
        let instance = instance.map_err(|error| error.to_string())?;
        Ok((instance, rehearsal))
    }
}

/// Files of workers on this machine: of the model, its draft and its adapters.
pub(super) type LocalFiles = (PathBuf, Option<PathBuf>, Vec<(String, PathBuf)>);

impl Inner {
    /// Workers on this machine: their number, and the threads to pin of each. `of` precedes ranks
    /// in their lines.
    fn workers_here(
        &self,
        (model, draft, adapters): &LocalFiles,
        (ranks, pin): (u32, Option<usize>),
        of: &'static str,
    ) -> Result<Box<LocalInstanceWorkers>, String> {
        let tell = Arc::clone(&self.spec.tell);
        let workers = LocalInstanceWorkers::spawn(LocalSpec {
            program: self.spec.program.0.clone(),
            args: self.spec.program.1.clone(),
            env: self.spec.worker_env.clone(),
            writable: self.spec.worker_folders.clone(),
            model: model.clone(),
            draft: draft.clone(),
            adapters: adapters.iter().map(|(_, path)| path.clone()).collect(),
            ranks,
            pin,
            on_line: Some(Box::new(move |rank, line| {
                tell(&format!("[{of}{rank}] {line}"))
            })),
        });
        workers.map(Box::new).map_err(|error| error.to_string())
    }
}

/// The transport of an instance on one machine.
pub(super) fn backend(options: &MachineOptions) -> Result<Backend, String> {
    match options.transport.as_str() {
        "" => Ok(Backend::Any),
        name => name
            .parse()
            .map_err(|error: UnknownBackend| error.to_string()),
    }
}

/// The transport to measure for predictions. Devices need ranks in separate processes, so threads
/// use shared memory instead.
pub(super) fn probed(options: &MachineOptions) -> Result<Backend, String> {
    backend(options).map(|backend| match backend {
        Backend::Rdma => Backend::Any,
        other => other,
    })
}

/// Adds the prefill workers of `options`, if there are some.
pub(super) fn read_prompts(
    prepared: &mut PreparedModel,
    options: &MachineOptions,
) -> Result<(), String> {
    if options.prefill_ranks == 0 {
        return Ok(());
    }
    let class = options.prefill_class.as_ref().map(|class| class.parse());
    let class = class.transpose();
    let wanted = PrefillOptions {
        nodes: options.prefill_ranks,
        from: options.prefill_from,
        class: class.map_err(|error: UnknownKernelClass| error.to_string())?,
    };
    let reads = prepared.read_prompts_on(wanted);
    reads.map_err(|error| error.to_string())
}
