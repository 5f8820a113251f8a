//! Embedding models, loaded into this process since they are small.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use paceline_board::api_model;
use paceline_engine::EncoderService;
use paceline_model::ModelSource;
use paceline_model::encoder::{Encoder, EncoderConfig};

use super::{Args, HostedModel, ModelNames};
use crate::load;
use crate::output::print_err;

/// The encoder at `path`, if it is one. Errors of other models are not reported here.
pub(super) fn source(path: &Path) -> Option<ModelSource> {
    let source = ModelSource::open(path).ok();
    source.filter(EncoderConfig::is_encoder)
}

/// Loads it, with the names `named` for clients.
///
/// # Errors
/// A missing or unsupported file, by name.
pub(super) fn load(
    args: &Args,
    path: &Path,
    source: &ModelSource,
    named: ModelNames,
) -> anyhow::Result<HostedModel> {
    let kernels = load::kernels_at(load::threads(args.compute, 1), args.compute.pinning())?;
    let encoder = Encoder::load(source, kernels).map_err(|error| load::in_model(path, error))?;
    let config = encoder.config();
    print_err(format_args!(
        "{}: embeddings of {} numbers, texts of at most {} tokens, {}",
        named.id,
        config.width,
        config.context,
        encoder.bytes()
    ));
    let names = (named.id, named.aliases);
    let served = api_model::encoder(path, source, config, names);
    let model = served.with_context(|| format!("{}: cannot use its tokenizer", path.display()))?;
    Ok((model, Arc::new(EncoderService::new(encoder))))
}
