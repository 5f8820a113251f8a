//! Where a rank's weights lie in the model's files, so that they can be prefetched.

use std::ops::Range;
use std::path::Path;

use crate::{LayerRole, ModelFamily, ModelSource, Role, Shard};

impl ModelSource {
    /// Files and byte ranges of the weights of `shard`'s layers and ends, in read order: the
    /// embedding, each layer, the head. Every matrix is included whole.
    pub fn locations(&self, family: ModelFamily, shard: &Shard) -> Vec<(&Path, Range<usize>)> {
        let stem = |role| self.stem(family, role);
        let first = shard.embeds().then(|| vec![stem(Role::TokenEmbedding)]);
        let layer = |i| {
            let norm = stem(Role::Layer(i, LayerRole::AttentionNorm));
            let number = format!(".{i}.");
            let end = norm
                .find(&number)
                .map_or(norm.len(), |at| at + number.len());
            vec![norm[..end].to_owned()]
        };
        let output = match self.has_any(family, Role::Output) || shard.embeds() {
            true => Role::Output,
            false => Role::TokenEmbedding,
        };
        let ends = || vec![stem(Role::OutputNorm), stem(output)];
        let last = shard.has_head().then(ends);
        let parts = first.into_iter().chain(shard.layers.clone().map(layer));
        let of = |prefixes: Vec<String>| self.located(&prefixes);
        parts.chain(last).flat_map(of).collect()
    }

    /// The file that has the tensor of a name.
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        let own = self.located(&[name.to_owned()]);
        own.first().map(|(path, _)| *path)
    }

    /// Locations of the tensors whose names begin with one of `prefixes`, in file order.
    fn located(&self, prefixes: &[String]) -> Vec<(&Path, Range<usize>)> {
        let is_own = |name: &&str| prefixes.iter().any(|prefix| name.starts_with(prefix));
        let mut all: Vec<_> = match self {
            Self::Gguf(file) => {
                let own = file.tensors().map(|tensor| tensor.name()).filter(is_own);
                own.filter_map(|name| file.location(name)).collect()
            }
            Self::Hf(folder) => {
                let own = folder.names().filter(is_own);
                own.filter_map(|name| folder.location(name)).collect()
            }
        };
        all.sort_by_key(|(file, range)| (*file, range.start));
        all
    }
}
