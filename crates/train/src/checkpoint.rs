//! States of a run on disk: folders that appear whole, by renaming.
//!
//! ```text
//! step-0000100/params.safetensors     what is trained
//!              optimiser.safetensors  its moments
//!              state.json             the step, and a digest of both
//! ```

use std::path::{Path, PathBuf};

use paceline_base::hex;
use paceline_model::adapter::files::tensors;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::optimiser::Optimiser;
use crate::params::Layout;

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
        let name = format!("{PREFIX}{:07}", self.step);
        let (path, temporary) = (output.join(&name), output.join(format!(".{name}.tmp")));
        remove(&temporary)?;
        std::fs::create_dir_all(&temporary).map_err(Error::file("make", &temporary))?;
        let params = named(layout, &self.params);
        let borrowed = params.iter().map(|(n, s, v)| (n.as_str(), *s, *v));
        tensors::write(
            &temporary.join("params.safetensors"),
            &borrowed.collect::<Vec<_>>(),
        )?;
        let n = [self.optimiser.first.len()];
        if n != [0] {
            let moments: [(&str, &[usize], &[f32]); 2] = [
                ("first", &n, &self.optimiser.first),
                ("second", &n, &self.optimiser.second),
            ];
            tensors::write(&temporary.join("optimiser.safetensors"), &moments)?;
        }
        let about = CheckpointInfo {
            version: VERSION,
            step: self.step,
            digest: self.digest(),
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

    /// The newest checkpoint of a folder, if it has any.
    pub(crate) fn newest(
        output: &Path,
        layout: &Layout,
        fresh: Optimiser,
    ) -> Result<Option<Self>, Error> {
        match checkpoints(output)?.pop() {
            Some((_, path)) => Self::load(&path, layout, fresh).map(Some),
            None => Ok(None),
        }
    }

    fn load(path: &Path, layout: &Layout, fresh: Optimiser) -> Result<Self, Error> {
        let about_path = path.join("state.json");
        let about = std::fs::read(&about_path).map_err(Error::file("read", &about_path))?;
        let about: CheckpointInfo =
            serde_json::from_slice(&about).map_err(|e| Error::malformed(&about_path, e))?;
        if about.version != VERSION {
            let reason = format!("version {}, expected {VERSION}", about.version);
            return Err(Error::malformed(&about_path, reason));
        }
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
