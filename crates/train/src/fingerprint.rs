//! Fingerprint of a model from samples of its tensors.

use paceline_base::hex;
use paceline_model::ModelSource;
use sha2::{Digest, Sha256};

use crate::error::Error;

/// Places of a tensor that are looked at.
const SAMPLES: usize = 16;
const SAMPLE_BYTES: usize = 256;

/// SHA-256 of names, sizes, types and samples of all tensors. Another quantisation, another
/// fine-tuning or another order of rows changes samples; a single changed number may not.
pub(crate) fn fingerprint(source: &ModelSource) -> Result<String, Error> {
    let mut hash = Sha256::new();
    let mut add = |name: &str, about: &str, bytes: &[u8]| {
        hash.update(format!("{name}\0{about}\0{}\0", bytes.len()));
        let apart = (bytes.len() / SAMPLES).max(SAMPLE_BYTES);
        for sample in bytes.chunks(apart) {
            hash.update(&sample[..sample.len().min(SAMPLE_BYTES)]);
        }
    };
    match source {
        ModelSource::Gguf(file) => {
            let mut names: Vec<&str> = file.tensors().map(|info| info.name()).collect();
            names.sort_unstable();
            for name in names {
                let tensor = file.tensor(name);
                let tensor = tensor.map_err(paceline_model::Error::Gguf)?;
                let about = format!("{:?} {:?}", tensor.shape, tensor.block_type);
                add(name, &about, &tensor.bytes);
                tensor.bytes.discard();
            }
        }
        ModelSource::Hf(folder) => {
            let mut names: Vec<&str> = folder.names().collect();
            names.sort_unstable();
            for name in names {
                if let (Some(info), Some(bytes)) = (folder.info(name), folder.bytes_of(name)) {
                    let about = format!("{:?} {}", info.shape(), info.dtype());
                    add(name, &about, &bytes);
                    bytes.discard(); // the system maps 64 KiB around each sample
                }
            }
        }
    }
    Ok(hex(&hash.finalize()))
}
