//! Installs the MLX engine's libraries.
//!
//! ```text
//! ROOT/<version>/mlx/lib/libmlx.so       the wheel, unpacked as it is: its libraries find each
//! ROOT/<version>/mlx_cpu.libs/...        other by relative paths
//! ROOT/<version>/mlx/lib/libmlxc.so      the C layer, shipped or built here
//! ROOT/<version>/lib -> mlx/lib
//! ROOT/<version>/paceline.json           the record; present when all of it is complete
//! ```
//!
//! MLX comes as the published Python wheel, verified by SHA-256 before it is opened: from a package
//! index whose address is known, else by pip. The C layer (`mlx-c`) is not packaged as a library. A
//! release brings it with the program. Elsewhere its sources come with the crate `mlx-sys`, by
//! cargo, and are compiled by the system's C++ compiler. No program from either package runs, and
//! nothing is installed outside of `ROOT`.

mod layer;
mod pins;
mod shipped;
mod unpack;

use std::fs;
use std::path::{Path, PathBuf};

use paceline_base::Bytes;
use serde::{Deserialize, Serialize};

use crate::download::PullContext;
use crate::hash::{hash_file, is_sha256};
use crate::lock::Lock;
use crate::options::{PullOptions, SystemVersion, Toolchain};
use crate::progress::{Cancel, PullProgress};
use crate::{Error, disk, package_index, pip};
use pins::Pin;
use shipped::ShippedLayer;

/// File name of the record, written last.
const RECORD: &str = "paceline.json";
/// Maximum record; ours have a few hundred bytes.
const RECORD_BYTES_MAX: u64 = 64 << 10;

paceline_base::named_enum! {
    /// A build of MLX; its name is the wheel's without `mlx-`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum MlxBuild {
        /// Linux without a GPU; slow, for tests.
        Cpu = "cpu",
        /// Apple silicon.
        Metal = "metal",
        /// NVIDIA, CUDA 12.
        #[serde(rename = "cuda-12")]
        Cuda12 = "cuda-12",
        /// NVIDIA, CUDA 13.
        #[serde(rename = "cuda-13")]
        Cuda13 = "cuda-13",
    }
}

impl MlxBuild {
    /// Whether wheels exist for an operating system and processor, as named in
    /// [`std::env::consts`].
    pub fn exists_for(self, os: &str, arch: &str) -> bool {
        match self {
            Self::Metal => os == "macos" && arch == "aarch64",
            _ => os == "linux" && matches!(arch, "x86_64" | "aarch64"),
        }
    }

    /// Fails on a system that is older than the wheels.
    fn check_system(self, found: Option<SystemVersion>) -> Result<(), Error> {
        let (system, needed) = match self {
            Self::Metal => ("macOS", pins::MACOS[0]),
            _ => ("glibc", pins::GLIBC),
        };
        match found {
            Some(found) if found < needed => Err(Error::OldSystem {
                what: format!("MLX {MLX_VERSION}"),
                system,
                needed,
                found,
            }),
            _ => Ok(()),
        }
    }

    /// Hash of the wheel for this processor and system.
    fn sha256(self, pin: &Pin, system: Option<SystemVersion>) -> &'static str {
        match self {
            Self::Metal => pin.for_macos(system),
            _ => pin.for_linux(std::env::consts::ARCH),
        }
    }

    const fn pins(self) -> &'static [Pin] {
        match self {
            Self::Cpu => pins::CPU,
            Self::Metal => pins::METAL,
            Self::Cuda12 => pins::CUDA_12,
            Self::Cuda13 => pins::CUDA_13,
        }
    }
}

/// An installed MLX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlxInstallation {
    pub build: MlxBuild,
    pub version: String,
    /// Version of the C layer.
    pub layer: String,
    pub folder: PathBuf,
    /// The C layer's library to open; it finds MLX's in the same folder.
    pub library: PathBuf,
}

/// Contents of [`RECORD`].
#[derive(Debug, Serialize, Deserialize)]
struct MlxRecord {
    build: MlxBuild,
    mlx: String,
    mlx_c: String,
    /// `NAME==VERSION` and SHA-256 of the unpacked wheels.
    wheels: Vec<(String, String)>,
}

/// Version of MLX that [`install_mlx`] installs.
pub const MLX_VERSION: &str = pins::MLX_VERSION;

/// File name of the C layer.
pub const MLX_LAYER: &str = if cfg!(target_os = "macos") {
    "libmlxc.dylib"
} else {
    "libmlxc.so"
};

/// The installed MLX below `root`, if it has this program's version.
pub fn find_mlx(root: &Path) -> Option<MlxInstallation> {
    let folder = root.join(MLX_VERSION);
    let path = folder.join(RECORD);
    if fs::metadata(&path).ok()?.len() > RECORD_BYTES_MAX {
        return None;
    }
    let record: MlxRecord = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let library = layer_path(&folder);
    library.is_file().then_some(MlxInstallation {
        build: record.build,
        version: record.mlx,
        layer: record.mlx_c,
        folder,
        library,
    })
}

/// Path of the C layer, next to MLX's library. Not through the link `lib`: MLX's CUDA build derives
/// its header path from its library's path.
fn layer_path(folder: &Path) -> PathBuf {
    folder.join("mlx/lib").join(MLX_LAYER)
}

/// Installs `build` below `root`; keeps complete parts. Blocks; one process at a time. Downloads 10
/// MB (cpu) to some GB (cuda, with NVIDIA's libraries). Compiles for about 10 s where no release
/// has the C layer.
///
/// # Errors
/// See [`Error`]. An earlier installation stays.
pub fn install_mlx(
    root: &Path,
    build: MlxBuild,
    tools: &Toolchain,
    options: &PullOptions,
    cancel: &Cancel,
    progress: &mut dyn PullProgress,
) -> Result<MlxInstallation, Error> {
    let lock = root.join(".lock");
    let _lock = Lock::acquire(&lock, cancel, || {
        progress.message("waiting for another process that installs MLX");
    })?;
    if let Some(present) = find_mlx(root).filter(|mlx| mlx.build == build) {
        return Ok(present);
    }
    build.check_system(tools.system)?;
    let folder = tools.shipped.as_deref().filter(|_| tools.sources.is_none());
    let shipped = folder.and_then(|folder| ShippedLayer::find(folder, progress));
    if shipped.is_none() {
        layer::check_tools(tools, root, cancel)?;
    }
    let index = shipped::index(&options.index, shipped.as_ref());
    let mut ctx = PullContext {
        options,
        cancel,
        progress,
    };
    let work = disk::temp_dir(root)?;
    let fresh = work.path().join("new");
    disk::create_dir(&fresh)?;
    let mut wheels = Vec::new();
    for pin in build.pins() {
        let sha256 = build.sha256(pin, tools.system);
        let path = fetch_wheel(pin, (sha256, index), work.path(), &mut ctx)?;
        wheels.push(add_wheel(pin, &path, &fresh, &mut ctx)?);
    }
    add_layer(shipped.as_ref(), &fresh, tools, work.path(), &mut ctx)?;
    let record = MlxRecord {
        build,
        mlx: MLX_VERSION.into(),
        mlx_c: pins::MLX_C_VERSION.into(),
        wheels,
    };
    let text = serde_json::to_vec_pretty(&record).expect("a record is plain data");
    disk::write_atomic(&fresh.join(RECORD), &text)?;
    put_in_place(&fresh, root, work.path())
}

/// Renames a complete folder; the previous one is removed with `work`.
fn put_in_place(fresh: &Path, root: &Path, work: &Path) -> Result<MlxInstallation, Error> {
    let target = root.join(MLX_VERSION);
    if target.exists() {
        disk::rename(&target, &work.join("old"))?;
    }
    disk::rename(fresh, &target)?;
    find_mlx(root).ok_or_else(|| Error::Damaged {
        name: "mlx".into(),
        reason: format!("{} is not complete", target.display()),
    })
}

/// Downloads a wheel to a folder below `work`: the one of hash `sha256` from `index`, else by pip.
fn fetch_wheel(
    pin: &Pin,
    (sha256, index): (&str, Option<&str>),
    work: &Path,
    ctx: &mut PullContext<'_>,
) -> Result<PathBuf, Error> {
    if let Some(index) = index {
        return package_index::download((pin.requirement, sha256), index, (work, work), ctx);
    }
    let request = pip::WheelRequest {
        requirement: pin.requirement,
        bytes: None,
    };
    // pip expects an empty folder. It is removed with `work`.
    pip::download(request, &disk::temp_dir(work)?.keep(), ctx)
}

/// Unpacks the wheel at `path` into `folder` and removes it; returns its name and hash.
fn add_wheel(
    pin: &Pin,
    path: &Path,
    folder: &Path,
    ctx: &mut PullContext<'_>,
) -> Result<(String, String), Error> {
    let (_, hasher) = hash_file(path, ctx.cancel, |_| {})?;
    let sha256 = hasher.hex();
    debug_assert!(is_sha256(&sha256));
    if !pin.sha256.contains(&sha256.as_str()) {
        return Err(Error::HashMismatch {
            what: pin.requirement.into(),
            expected: pin.sha256.join(" or "),
            got: sha256,
        });
    }
    unpack::wheel(pin.requirement, path, folder, ctx)?;
    disk::remove_file(path)?;
    Ok((pin.requirement.into(), sha256))
}

/// Adds the C layer to the unpacked wheels in `folder`: the shipped one, else one built here.
fn add_layer(
    shipped: Option<&ShippedLayer>,
    folder: &Path,
    tools: &Toolchain,
    work: &Path,
    ctx: &mut PullContext<'_>,
) -> Result<(), Error> {
    let target = layer_path(folder);
    match shipped {
        Some(layer) => layer.copy(&target, ctx.cancel)?,
        None => {
            let text = "building the C layer from the sources in mlx-sys";
            ctx.progress.message(text);
            layer::build(folder, &target, tools, work, ctx.cancel)?;
        }
    }
    let link = folder.join("lib");
    std::os::unix::fs::symlink("mlx/lib", &link)
        .map_err(|error| Error::io("create the link", &link, error))
}

/// Disk usage of `mlx`.
pub fn mlx_bytes(mlx: &MlxInstallation) -> Bytes {
    // The deepest path in a wheel is a header of cutlass, 9 folders down.
    Bytes(disk::tree_bytes(&mlx.folder, 16))
}
