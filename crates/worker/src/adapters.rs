//! Adapters of an instance. The owner reads each adapter once to check it; each rank that computes
//! with it reads it again and compares its digest.

use std::path::{Path, PathBuf};

use paceline_base::hex;
use paceline_model::adapter::files::{Adapter as File, Base, Form, weights_file};
use paceline_model::{Adapter, Config};
use serde::{Deserialize, Serialize};

use crate::Error;

/// An adapter's file or folder, with the digest of its contents at the first read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterOf {
    pub name: String,
    /// Its path on the machine that receives this value.
    pub path: PathBuf,
    /// SHA-256 of its numbers, so that a file replaced later is detected.
    pub digest: [u8; 32],
}

impl AdapterOf {
    /// The adapter at `path`, for a model.
    ///
    /// # Errors
    /// [`Error::Adapter`] for files that are none, [`Error::Model`] for one that does not fit.
    pub fn look(name: &str, path: &Path, config: &Config) -> Result<Self, Error> {
        let adapter = read(name, path, config)?;
        Ok(Self {
            name: name.to_owned(),
            path: path.to_owned(),
            digest: adapter.id.digest,
        })
    }

    /// The first digits of its hash, for messages to people.
    pub fn short(&self) -> String {
        hex(&self.digest[..4])
    }

    /// Reads it.
    ///
    /// # Errors
    /// As [`look`](Self::look); [`Error::OtherAdapter`].
    pub fn read(&self, config: &Config) -> Result<Adapter, Error> {
        let adapter = read(&self.name, &self.path, config)?;
        match adapter.id.digest == self.digest {
            true => Ok(adapter),
            false => Err(Error::OtherAdapter {
                name: self.name.clone(),
                path: self.path.clone(),
            }),
        }
    }
}

/// Reads all of them.
pub fn read_all(all: &[AdapterOf], config: &Config) -> Result<Vec<Adapter>, Error> {
    all.iter().map(|adapter| adapter.read(config)).collect()
}

/// The same adapters with another machine's `paths`; unchanged if `paths` is empty.
pub fn at(all: &[AdapterOf], paths: &[PathBuf]) -> Vec<AdapterOf> {
    if paths.is_empty() {
        return all.to_vec();
    }
    let there = all.iter().zip(paths);
    let there = there.map(|(adapter, path)| AdapterOf {
        path: path.clone(),
        ..adapter.clone()
    });
    there.collect()
}

/// Checks that the adapter at a path fits the model and writes it into `folder` as one file.
/// Returns that file.
pub fn as_gguf(
    (name, path): (&str, &Path),
    config: &Config,
    folder: &Path,
) -> Result<PathBuf, Error> {
    let (file, _) = File::read_for(path, Some(Base::of(config)))?;
    file.beside(name, path)?.check(config)?;
    file.write_gguf(folder, Base::of(config))?;
    Ok(weights_file(folder, Form::Gguf))
}

fn read(name: &str, path: &Path, config: &Config) -> Result<Adapter, Error> {
    let (file, _) = File::read_for(path, Some(Base::of(config)))?;
    let adapter = file.beside(name, path)?;
    adapter.check(config)?;
    Ok(adapter)
}
