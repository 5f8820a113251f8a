//! Encoders over the nodes of a cluster: each node that has the model computes its own requests.
//!
//! An encoder is small and has no state between requests, so it needs no workers and no owner.
//! Vectors have the same bits on every node, by the numerics rule.

use std::path::Path;
use std::sync::Arc;

use paceline_engine::EncoderService;
use paceline_fleet::InstanceSpec;
use paceline_model::ModelSource;
use paceline_model::encoder::{Encoder, EncoderConfig};
use paceline_tensor::Kernels;

/// Whether the model at `path` makes vectors.
pub(super) fn is_encoder(path: &Path) -> bool {
    ModelSource::open(path).is_ok_and(|source| EncoderConfig::is_encoder(&source))
}

/// Loads the encoder at `path`, for `wanted`'s threads. Blocks for one pass over its file.
///
/// # Errors
/// Kernels that cannot be started, or a file that cannot be read and loaded as an encoder.
pub(super) fn load(path: &Path, wanted: &InstanceSpec) -> Result<Arc<EncoderService>, String> {
    let threads = usize::from(wanted.threads.max(1));
    let kernels = Kernels::new(threads).map_err(|error| error.to_string())?;
    let source = ModelSource::open(path).map_err(|error| error.to_string())?;
    let encoder = Encoder::load(&source, Arc::new(kernels)).map_err(|error| error.to_string())?;
    Ok(Arc::new(EncoderService::new(encoder)))
}
