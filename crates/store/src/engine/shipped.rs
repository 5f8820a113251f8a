//! The C layer that a release brings with the program.
//!
//! `packaging/layer.py` builds it for a released program, and writes the record.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::pins::{MLX_C_VERSION, MLX_VERSION};
use super::{MLX_LAYER, RECORD_BYTES_MAX};
use crate::hash::{expect_sha256, hash_file};
use crate::progress::{Cancel, PullProgress};
use crate::{Error, options::PackageIndex};

/// File name of the record.
const RECORD: &str = "mlx-layer.json";

/// Contents of [`RECORD`].
#[derive(Clone, Debug, Deserialize)]
struct LayerRecord {
    /// Version of MLX whose headers it was compiled with.
    mlx: String,
    mlx_c: String,
    /// SHA-256 of [`MLX_LAYER`], in the record's folder.
    sha256: String,
    /// Address of the package index that the release was made with.
    index: String,
}

/// A usable C layer of a release.
#[derive(Clone, Debug)]
pub(super) struct ShippedLayer {
    path: PathBuf,
    record: LayerRecord,
}

impl ShippedLayer {
    /// The layer in `folder`, if it is there and has this program's version.
    pub(super) fn find(folder: &Path, progress: &mut dyn PullProgress) -> Option<Self> {
        let path = folder.join(RECORD);
        if fs::metadata(&path).ok()?.len() > RECORD_BYTES_MAX {
            return None;
        }
        let record: LayerRecord = serde_json::from_slice(&fs::read(&path).ok()?).ok()?;
        if (&*record.mlx, &*record.mlx_c) != (MLX_VERSION, MLX_C_VERSION) {
            progress.message(&format!(
                "the C layer in {} is mlx-c {} for MLX {}, expected {MLX_C_VERSION} for \
                 {MLX_VERSION}",
                folder.display(),
                record.mlx_c,
                record.mlx,
            ));
            return None;
        }
        let path = folder.join(MLX_LAYER);
        path.is_file().then_some(Self { path, record })
    }

    /// Copies it to `target`, and verifies the copy.
    pub(super) fn copy(&self, target: &Path, cancel: &Cancel) -> Result<(), Error> {
        fs::copy(&self.path, target).map_err(|error| Error::io("copy", &self.path, error))?;
        let (_, hasher) = hash_file(target, cancel, |_| {})?;
        let what = self.path.display().to_string();
        expect_sha256(&what, &self.record.sha256, &hasher.hex())
    }
}

/// The address of the index to ask; `None` for pip.
pub(super) fn index<'a>(
    setting: &'a PackageIndex,
    shipped: Option<&'a ShippedLayer>,
) -> Option<&'a str> {
    match setting {
        PackageIndex::Release => shipped.map(|layer| &*layer.record.index),
        PackageIndex::Address(address) => Some(address),
        PackageIndex::Pip => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_recorded_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layer");
        fs::write(&path, "").unwrap();
        let record = LayerRecord {
            mlx: MLX_VERSION.into(),
            mlx_c: MLX_C_VERSION.into(),
            // Of no bytes, by FIPS 180-4.
            sha256: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855".into(),
            index: String::new(),
        };
        let (layer, target) = (ShippedLayer { path, record }, dir.path().join("copy"));
        layer.copy(&target, &Cancel::default()).unwrap();
        fs::write(&layer.path, "damaged").unwrap();
        let refused = layer.copy(&target, &Cancel::default());
        assert!(
            matches!(refused, Err(Error::HashMismatch { .. })),
            "{refused:?}"
        );
    }
}
