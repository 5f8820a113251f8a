//! Adapters: their facts, and fusing one into its model.

use std::io;
use std::path::{Path, PathBuf};

use paceline_base::hex;
use paceline_model::adapter::files::{Adapter, Base, Form};
use paceline_model::{Config, ModelSource};
use paceline_store::storage::{self, FileSystem};
use paceline_store::verified::{ChecksumError, record_own_checksums};
use paceline_tensor::Kernels;
use paceline_train::fuse::fuse;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::api_model::changed_unix_s;

/// Why an adapter cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The adapter is unusable, or cannot be fused into the model.
    #[error("{0}")]
    Adapter(#[from] paceline_train::Error),
    #[error("{0}")]
    Model(#[from] paceline_model::Error),
    #[error("{0}")]
    System(#[from] io::Error),
    #[error(transparent)]
    Checksums(#[from] ChecksumError),
    #[error("{}", path.display())]
    At { path: PathBuf, source: io::Error },
}

/// The facts of the model at `path` that adapter files depend on.
pub fn base(path: &Path) -> Result<Base, Error> {
    Ok(Base::of(&Config::read(&ModelSource::open(path)?)?))
}

/// Default name of an adapter: that of its folder or file.
pub fn name_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// An adapter's facts as a JSON object.
pub fn facts(adapter: &Adapter, form: Form) -> Value {
    json!({
        "form": word(form),
        "base": adapter.base,
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "scale": adapter.scale(),
        "targets": adapter.targets(),
        "matrices": adapter.pairs().len(),
        "numbers": adapter.numbers(),
    })
}

/// An adapter's facts, a line each.
pub fn text(adapter: &Adapter, form: Form) -> String {
    format!(
        "form      {}\nbase      {}\nrank      {}\nalpha     {} (scale {})\n\
         targets   {}\nmatrices  {}\nnumbers   {}",
        word(form),
        adapter.base.as_deref().unwrap_or("not said"),
        adapter.rank,
        adapter.alpha,
        adapter.scale(),
        adapter.targets().join(", "),
        adapter.pairs().len(),
        adapter.numbers()
    )
}

const fn word(form: Form) -> &'static str {
    match form {
        Form::Peft => "peft",
        Form::Mlx => "mlx",
        Form::Gguf => "gguf",
    }
}

/// The model at `model` with an adapter fused in; made once and stored below paceline's `home`.
/// `kernels` computes a missing one, which is reported to `tell`.
pub fn fused<E: From<Error>>(
    home: &Path,
    (model, adapter): (&Path, &Path),
    kernels: impl FnOnce() -> Result<Kernels, E>,
    tell: &dyn Fn(&str),
) -> Result<PathBuf, E> {
    let read = Adapter::read_for(adapter, Some(base(model)?));
    let (read, _) = read.map_err(|error| Error::Adapter(error.into()))?;
    let name = hash(model, &read).map_err(Error::from)?;
    let folder = home.join("fused");
    let ending = if model.is_dir() { "" } else { ".gguf" };
    let path = folder.join(format!("{name}{ending}"));
    if path.exists() {
        record_own_checksums(&path).map_err(Error::from)?;
        return Ok(path);
    }
    std::fs::create_dir_all(&folder).map_err(|source| at(&folder, source))?;
    tell(&format!(
        "putting the adapter into the model, once: {}",
        path.display()
    ));
    let own = folder.join(format!(".{name}-{}{ending}", std::process::id()));
    fuse(model, (&read, adapter), &own, &kernels()?).map_err(Error::from)?;
    storage::sync_all(&own).map_err(|error| at(&own, error))?;
    if let Err(error) = storage::rename(&FileSystem, &own, &path)
        && !path.exists()
    {
        return Err(at(&path, error).into());
    }
    record_own_checksums(&path).map_err(Error::from)?;
    Ok(path)
}

fn at(path: &Path, source: io::Error) -> Error {
    let path = path.to_owned();
    Error::At { path, source }
}

/// A hash of the model file's current state and the adapter, for the fused file's name.
fn hash(model: &Path, adapter: &Adapter) -> io::Result<String> {
    let mut hash = Sha256::new();
    let changed = changed_unix_s(model);
    let absolute = std::path::absolute(model)?;
    hash.update(format!(
        "{}\0{changed}\0{}\0",
        absolute.display(),
        adapter.scale()
    ));
    for pair in adapter.pairs() {
        hash.update(pair.matrix);
        [pair.a, pair.b]
            .into_iter()
            .flatten()
            .for_each(|x| hash.update(x.to_le_bytes()));
    }
    let digest = hash.finalize();
    Ok(hex(&digest[..16]))
}
