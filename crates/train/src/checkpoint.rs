//! States of a run on disk: folders that appear whole, by renaming.
//!
//! ```text
//! step-0000100/params.safetensors     what is trained
//!              optimiser.safetensors  its moments
//!              state.json             the step, and a digest of both
//! ```

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use paceline_base::{BlockType, hex};
use paceline_model::adapter::files::tensors;
use paceline_weights::safetensors::Safetensors;
use paceline_weights::tensor::Tensor;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::hashed::Hashed;
use crate::optimiser::{Optimiser, Rule};
use crate::params::Layout;
use crate::run::TrainingRun;
use crate::shard::{ShardCuts, ShardFile};

/// Number of checkpoints to retain.
const KEPT: usize = 2;

const PREFIX: &str = "step-";

/// The state of a run after a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct State {
    /// Steps that are done.
    pub(crate) step: u64,
    pub(crate) params: Vec<f32>,
    pub(crate) optimiser: Optimiser,
}

#[derive(Debug, Serialize, Deserialize)]
struct CheckpointInfo {
    version: u32,
    step: u64,
    digest: String,
}

const VERSION: u32 = 1;

impl State {
    /// SHA-256 of all numbers.
    pub(crate) fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for values in [&self.params, &self.optimiser.first, &self.optimiser.second] {
            values.iter().for_each(|x| hash.update(x.to_le_bytes()));
        }
        hex(&hash.finalize())
    }

    /// Writes a checkpoint into `output` and removes all but the newest two.
    pub(crate) fn save(&self, output: &Path, layout: &Layout) -> Result<(), Error> {
        let moments = self.optimiser.first.len();
        write(
            output,
            (self.step, layout, moments),
            |vector, range, file| {
                let vectors = [&self.params, &self.optimiser.first, &self.optimiser.second];
                tensors::write_floats(file, &vectors[vector][range])
            },
        )
    }

    /// The state of a checkpoint.
    pub(crate) fn of(
        checkpoint: &Checkpoint,
        layout: &Layout,
        fresh: Optimiser,
    ) -> Result<Self, Error> {
        Self::load(&checkpoint.path, layout, fresh)
    }

    fn load(path: &Path, layout: &Layout, fresh: Optimiser) -> Result<Self, Error> {
        let (about_path, about) = read_info(path)?;
        let params_path = path.join("params.safetensors");
        let mut params = vec![0.0; layout.len()];
        let mut found = tensors::read(&params_path)?;
        for slot in layout.slots() {
            let at = found
                .iter()
                .position(|(n, s, _)| *n == slot.name && *s == slot.shape);
            let missing = || {
                let reason = format!("has no tensor {} of {:?}", slot.name, slot.shape);
                Error::malformed(&params_path, reason)
            };
            let (_, _, values) = found.swap_remove(at.ok_or_else(missing)?);
            params[slot.range.clone()].copy_from_slice(&values);
        }
        let mut optimiser = fresh;
        if !optimiser.first.is_empty() {
            let moments_path = path.join("optimiser.safetensors");
            for (name, _, values) in tensors::read(&moments_path)? {
                if values.len() != layout.len() {
                    let reason = format!("{name} has {} numbers", values.len());
                    return Err(Error::malformed(&moments_path, reason));
                }
                match name.as_str() {
                    "first" => optimiser.first = values,
                    _ => optimiser.second = values,
                }
            }
        }
        let state = Self {
            step: about.step,
            params,
            optimiser,
        };
        if state.digest() != about.digest {
            let reason = format!("digest {} differs from that of the files", about.digest);
            return Err(Error::malformed(&about_path, reason));
        }
        Ok(state)
    }
}

/// A checkpoint on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    pub(crate) step: u64,
    path: PathBuf,
}

impl Checkpoint {
    /// The newest one of a folder, if it has any.
    pub(crate) fn newest(output: &Path) -> Result<Option<Self>, Error> {
        let newest = checkpoints(output)?.pop();
        Ok(newest.map(|(step, path)| Self { step, path }))
    }

    /// SHA-256 of all numbers.
    pub(crate) fn digest(&self) -> Result<String, Error> {
        Ok(read_info(&self.path)?.1.digest)
    }

    /// The file of trained values.
    pub(crate) fn params(&self) -> PathBuf {
        self.path.join("params.safetensors")
    }

    fn moments(&self) -> PathBuf {
        self.path.join("optimiser.safetensors")
    }
}

fn read_info(path: &Path) -> Result<(PathBuf, CheckpointInfo), Error> {
    let path = path.join("state.json");
    let about = std::fs::read(&path).map_err(Error::file("read", &path))?;
    let about: CheckpointInfo =
        serde_json::from_slice(&about).map_err(|e| Error::malformed(&path, e))?;
    if about.version != VERSION {
        let reason = format!("version {}, expected {VERSION}", about.version);
        return Err(Error::malformed(&path, reason));
    }
    Ok((path, about))
}

/// Writes a checkpoint into `output` and removes all but the newest two. `fill` writes a range of a
/// vector: 0 for the values, 1 and 2 for their `moments`. It is called for all vectors in order.
fn write(
    output: &Path,
    (step, layout, moments): (u64, &Layout, usize),
    mut fill: impl FnMut(usize, Range<usize>, &mut dyn Write) -> std::io::Result<()>,
) -> Result<(), Error> {
    let name = format!("{PREFIX}{step:07}");
    let (path, temporary) = (output.join(&name), output.join(format!(".{name}.tmp")));
    remove(&temporary)?;
    std::fs::create_dir_all(&temporary).map_err(Error::file("make", &temporary))?;
    let mut hash = Sha256::new();
    let mut hashed = |vector, range, file: &mut dyn Write| {
        let mut both = Hashed {
            file,
            hash: hash.clone(),
        };
        fill(vector, range, &mut both)?;
        hash = both.hash;
        Ok(())
    };
    let slots = layout.slots();
    let named = slots
        .iter()
        .map(|slot| (slot.name.as_str(), slot.shape.as_slice()));
    let params = temporary.join("params.safetensors");
    tensors::write_by(&params, &named.collect::<Vec<_>>(), |i, file| {
        hashed(0, slots[i].range.clone(), file)
    })?;
    if moments > 0 {
        let n = [moments];
        let both: [(&str, &[usize]); 2] = [("first", &n), ("second", &n)];
        tensors::write_by(
            &temporary.join("optimiser.safetensors"),
            &both,
            |i, file| hashed(i + 1, 0..moments, file),
        )?;
    }
    let about = CheckpointInfo {
        version: VERSION,
        step,
        digest: hex(&hash.finalize()),
    };
    let about = serde_json::to_string_pretty(&about).unwrap_or_default();
    tensors::replace(&temporary.join("state.json"), |file| {
        file.write_all(about.as_bytes())
    })?;
    remove(&path)?;
    std::fs::rename(&temporary, &path).map_err(Error::file("rename", &temporary))?;
    let all = checkpoints(output)?;
    for (_, old) in all.iter().rev().skip(KEPT) {
        remove(old)?;
    }
    Ok(())
}

/// Writes a checkpoint of ranks' files, which have these SHA-256: the same as of one process.
///
/// # Errors
/// [`Error::Files`], also for a file that is another than its rank wrote.
pub(crate) fn join(
    output: &Path,
    step: u64,
    run: &TrainingRun,
    (cuts, files): (&ShardCuts, &[(PathBuf, String)]),
) -> Result<(), Error> {
    let (layout, options) = (run.net.layout(), run.job.optimiser);
    let moments = Optimiser::new(options, layout.len()).first.len();
    let mut shards = Vec::with_capacity(files.len());
    for (path, digest) in files {
        let mut file = File::open(path).map_err(Error::file("read", path))?;
        let mut hash = Hashed {
            file: std::io::sink(),
            hash: Sha256::new(),
        };
        std::io::copy(&mut file, &mut hash).map_err(Error::file("read", path))?;
        if hex(&hash.hash.finalize()) != *digest {
            return Err(Error::malformed(
                path,
                "is another file than its rank wrote",
            ));
        }
        shards.push(file);
    }
    write(output, (step, layout, moments), |vector, range, out| {
        for (rank, piece) in cuts.pieces(&range) {
            let first = 4 * (vector * cuts.len(rank) + piece.start) as u64;
            let file = &mut shards[rank];
            file.seek(SeekFrom::Start(first))?;
            let bytes = 4 * piece.len() as u64;
            let copied = std::io::copy(&mut file.take(bytes), out)?;
            if copied != bytes {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    })
}

/// Writes the file of each rank's shard of a checkpoint into `exchange`.
///
/// # Errors
/// [`Error::Files`] for files that are cut, or of other tensors or numbers than they say.
pub(crate) fn split(
    checkpoint: &Checkpoint,
    run: &TrainingRun,
    cuts: &ShardCuts,
    exchange: &Path,
) -> Result<(), Error> {
    let (layout, fresh) = (run.net.layout(), Optimiser::new(run.job.optimiser, 0));
    let path = checkpoint.params();
    let open = |path: &Path| {
        let file = Safetensors::open(path);
        file.map_err(|error| Error::malformed(path, error))
    };
    let params = open(&path)?;
    let mut slots = Vec::with_capacity(layout.slots().len());
    for slot in layout.slots() {
        let found = params.tensor(&slot.name).ok();
        let found = found.filter(|tensor| tensor.shape == slot.shape && is_f32(tensor));
        let reason = || format!("has no tensor {} of {:?}", slot.name, slot.shape);
        slots.push(found.ok_or_else(|| Error::malformed(&path, reason()))?);
    }
    let mut moments = Vec::new();
    if fresh.options.rule == Rule::AdamW {
        let path = checkpoint.moments();
        let file = open(&path)?;
        for name in ["first", "second"] {
            let found = file.tensor(name).ok();
            let found = found.filter(|tensor| tensor.shape == [layout.len()] && is_f32(tensor));
            let reason = || format!("has no tensor {name} of [{}]", layout.len());
            moments.push(found.ok_or_else(|| Error::malformed(&path, reason()))?);
        }
    }
    let mut hash = Sha256::new();
    let all = slots.iter().chain(&moments);
    all.for_each(|tensor| hash.update(&tensor.bytes[..]));
    let digest = checkpoint.digest()?;
    if hex(&hash.finalize()) != digest {
        let reason = format!("digest {digest} differs from that of the files");
        return Err(Error::malformed(
            &checkpoint.path.join("state.json"),
            reason,
        ));
    }
    for rank in 0..cuts.ranks() {
        let name = exchange.join(ShardFile::given(checkpoint.step, rank));
        let folder = name.parent().unwrap_or(exchange);
        std::fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
        tensors::replace(&name, |file| {
            for slice in cuts.shard(rank) {
                for (slot, tensor) in layout.slots().iter().zip(&slots) {
                    let start = slice.start.max(slot.range.start);
                    let end = slice.end.min(slot.range.end);
                    if start < end {
                        let at = slot.range.start;
                        file.write_all(&tensor.bytes[4 * (start - at)..4 * (end - at)])?;
                    }
                }
            }
            for tensor in &moments {
                for slice in cuts.shard(rank) {
                    file.write_all(&tensor.bytes[4 * slice.start..4 * slice.end])?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn is_f32(tensor: &Tensor) -> bool {
    tensor.block_type == BlockType::F32
}

/// The tensors of a vector.
pub(crate) fn named<'a>(
    layout: &'a Layout,
    params: &'a [f32],
) -> Vec<(String, &'a [usize], &'a [f32])> {
    let slots = layout.slots().iter();
    let of = |slot: &'a crate::params::ParameterSlot| {
        let values = &params[slot.range.clone()];
        (slot.name.clone(), slot.shape.as_slice(), values)
    };
    slots.map(of).collect()
}

/// Checkpoints of a folder, oldest first. Those that were not finished have other names.
fn checkpoints(output: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(output).map_err(Error::file("list", output))? {
        let entry = entry.map_err(Error::file("list", output))?;
        let name = entry.file_name();
        let step = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX)?.parse().ok());
        if let Some(step) = step {
            found.push((step, entry.path()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn remove(path: &Path) -> Result<(), Error> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("remove", path)(error))
        }
        _ => Ok(()),
    }
}
