//! Dependencies of a node's control plane on the program around it.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_base::CallbackError;
use paceline_engine::{EngineConfig, Service};
use paceline_fleet::rules::route::UnservedModel;
use paceline_fleet::{AdapterFile, InstanceSpec};
use paceline_model::Config;
use paceline_tensor::Kernels;

use super::FileLookup;
use super::hub::ModelHub;
use super::stores::OwnStore;

/// Receives the models that this node can answer with. The HTTP server implements it.
pub trait ModelRegistrar: Send + Sync {
    /// Registers a model over all of its replicas, or one of its adapters. `key` identifies the
    /// registration. `path` is the model's file on this node; `model` is the spec of one replica,
    /// and the adapter.
    ///
    /// # Errors
    /// Why this node cannot answer with it.
    fn open(
        &self,
        key: &str,
        model: (&InstanceSpec, Option<&AdapterFile>),
        path: &Path,
        service: Arc<dyn Service>,
    ) -> Result<(), CallbackError>;

    /// Removes the registration `key`.
    fn close(&self, key: &str);

    /// Receives all models of the cluster that this node does not answer with, when they change.
    fn set_unserved(&self, models: Vec<UnservedModel>);

    /// Returns the journal of a streamed answer of this node and ends the stream. Its client, the
    /// holder of the API key with this id, resumes at another node.
    fn journal(&self, id: &str, key: Option<&str>) -> Option<Vec<u8>>;
}

/// Engine sizes for the model at a path, by its spec.
pub type Sizes = dyn Fn(&Path, &Config, &InstanceSpec) -> EngineConfig + Send + Sync;

/// Makes kernels for a number of threads.
pub type MakeKernels = dyn Fn(usize) -> std::io::Result<Arc<Kernels>> + Send + Sync;

/// Dependencies of a fleet on the program around it.
#[derive(derive_more::Debug)]
#[debug("workers by {}", self.program.0.display())]
pub struct FleetSpec {
    /// Starts workers: program and arguments.
    pub program: (PathBuf, Vec<std::ffi::OsString>),
    /// The complete environment of every worker: see [`for_workers`](crate::crew::for_workers).
    pub worker_env: Vec<(std::ffi::OsString, std::ffi::OsString)>,
    /// Folders below which workers may write.
    pub worker_folders: Vec<PathBuf>,
    /// The file of a model of this machine, by the user's name for it.
    pub find: Box<FileLookup>,
    /// Where copies of models are kept.
    pub copies: PathBuf,
    /// The user's models on this machine, and the disk budget.
    pub store: Arc<OwnStore>,
    /// The hub, for bytes of models that no node has.
    pub hub: Arc<dyn ModelHub>,
    /// Paceline's home folder, with the measurements for forecasts.
    pub home: PathBuf,
    /// Folder for the journals of open answers, so that they outlive a power cut; `None` keeps them
    /// in memory alone.
    pub journals: Option<PathBuf>,
    /// Makes kernels for a number of threads.
    pub kernels: Box<MakeKernels>,
    /// The only interface on which workers listen; `None` for all.
    pub interface: Option<String>,
    /// Sizes of an engine.
    pub sizes: Box<Sizes>,
    /// Default threads of a worker.
    pub threads: usize,
    /// Receives the models that this node answers with.
    pub doors: Box<dyn ModelRegistrar>,
    /// Receives log lines for people; must not block.
    pub tell: Arc<dyn Fn(&str) + Send + Sync>,
}
