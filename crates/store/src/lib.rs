//! The model store: the models on this machine, and downloads of others.
//!
//! ```text
//!  MODEL ──resolve──► Path ─────────────────────────────────► use, check_used
//!              │                                        ▲
//!              └────► NeedsDownload ──pull──► hub ──────┤
//!                                              └─► wheel┘
//! ```
//!
//! [`resolve`] finds the model for a name on the local disk. [`pull`] downloads missing files. It
//! is resumable, and one process at a time pulls a model. It verifies SHA-256 before any file gets
//! its final name. [`list`], [`remove`] and [`verify`] manage stored models. No model is removed
//! without a request.
//!
//! The crate reads no environment variables and prints nothing. Settings come in [`PullOptions`]
//! and reports go to [`PullProgress`]. [`Cancel`] stops operations, and wall-clock time is an
//! argument.
//!
//! ```
//! use paceline_store::{Error, Home, Resolution, resolve};
//!
//! let dir = tempfile::tempdir()?;
//! let home = Home::new(dir.path());
//! match resolve(&home, "smollm2")? {
//!     Resolution::Path(found) => println!("at {}", found.path.display()),
//!     Resolution::NeedsDownload(plan) => println!("{} has {:?} bytes", plan.name(), plan.bytes()),
//! }
//! match resolve(&home, "smolm2") {
//!     Err(Error::UnknownModel { close, .. }) => assert_eq!(close, ["smollm2"]),
//!     other => panic!("{other:?}"),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Modules in reading order:
//! - `spec` (resolution of MODEL), `catalogue`, `usual_names` (names in other libraries);
//! - `name` and `home` (folders), `index` (records), `pull` (the order of the steps);
//! - `http`, `download` and `parallel_fetch`, `hub`, `select` and `gguf_name`, `preview`,
//!   `pip` and `wheel`, `disk`, `lock`, `hash`.
//!
//! Others:
//! - `pinned_file`: single files for nodes of a cluster.
//! - `engine`: the same for MLX's libraries; `package_index`: their wheels without pip.
//! - [`release`]: published releases of this program, and the files of an installation.
//! - `child`: external programs.
//! - `listing`: all models as text and JSON.
//! - `audit`: the log.
//! - [`storage`]: durable files; [`verified`]: hash trees, checksums and partial files.

mod audit;
mod catalogue;
mod child;
mod disk;
mod download;
mod engine;
mod error;
mod gguf_name;
mod hash;
mod home;
mod http;
mod hub;
mod index;
mod lines;
mod listing;
mod lock;
mod name;
mod options;
mod package_index;
mod parallel_fetch;
mod pinned_file;
mod pip;
mod preview;
mod progress;
mod pull;
pub mod release;
mod select;
mod spec;
pub mod storage;
pub mod testing;
mod usual_names;
pub mod verified;
mod wheel;

pub use audit::Audit;
pub use catalogue::{Catalogue, CatalogueModel, HubFile, Wheel};
pub use disk::free_space;
pub use engine::{
    MLX_LAYER, MLX_VERSION, MlxBuild, MlxInstallation, find_mlx, install_mlx, mlx_bytes,
};
pub use error::{Error, GgufChoice};
pub use gguf_name::quant_of_name;
pub use home::Home;
pub use hub::{FoundRepo, look_up, search};
pub use index::{
    FileIdentity, FileRecord, Kind, RemovedModel, ResolvedModel, State, StoreEntry, check_used,
    find_for_removal, list, recorded_files, remove, verify,
};
pub use lines::PlainProgress;
pub use listing::StoreListing;
pub use name::{EntryName, HubId};
pub use options::{
    Hub, HubDeadlines, HubToken, PackageIndex, Pip, ProxySetting, PullOptions, RetryPolicy,
    SystemVersion, Toolchain,
};
pub use pinned_file::{PinnedFile, fetch_pinned, origin, read_pinned};
pub use preview::preview;
pub use progress::{Cancel, FileProgress, PullPreview, PullProgress, SilentProgress};
pub use pull::{PulledModel, pull};
pub use spec::{DownloadPlan, Resolution, resolve, resolve_in};
pub use usual_names::{HubFiles, USUAL_NAMES, UsualName, parse as parse_usual_names};
pub use usual_names::{usual_name, usual_names};
