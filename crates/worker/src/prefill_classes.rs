//! Kernel classes of disaggregated prefill: which may read prompts for which, and how their pages
//! travel.
//!
//! Ranks of one class give each other their own pages. Between other classes keys and values are
//! converted, and an answer is near that of the class that decodes: it names both. Its pages are
//! neither shared with other answers nor kept on disk.

use paceline_base::KernelClass;
use paceline_model::{Config, LayerCache};
use paceline_tensor::KvType;
use serde::{Deserialize, Serialize};

use crate::Error;

/// Unlike classes of prefill and decode ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnlikePrefill {
    /// Name of the class that reads prompts.
    pub from: String,
    /// Name of the class that decodes.
    pub to: String,
    /// Name of the type of keys and values on the way.
    pub kv: String,
}

/// Type of keys and values in the pages of a class: f32 of MLX's, which holds all its types.
pub const fn page_type(class: KernelClass) -> KvType {
    match class.is_mlx() {
        true => KvType::F32,
        false => KvType::of(class),
    }
}

/// Type of keys and values on the way: that of a rank on the CPU, of the sender first.
fn between(from: KernelClass, to: KernelClass, kv: Option<KvType>) -> KvType {
    match (from.is_mlx(), to.is_mlx()) {
        (false, _) => kv.unwrap_or(page_type(from)),
        (true, false) => kv.unwrap_or(page_type(to)),
        (true, true) => page_type(from),
    }
}

impl UnlikePrefill {
    /// Checks that ranks of class `reading`, else of the others' class, can read prompts for ranks
    /// of the classes `decoding`. Returns the class that reads. All keep keys and values as `kv`,
    /// if not as their class does; `strict` ones allow no other bits.
    ///
    /// # Errors
    /// [`Error::MixedPrompts`], [`Error::PromptsNear`], [`Error::PromptStates`],
    /// [`Error::PromptsQuantised`].
    pub fn of(
        (reading, decoding): (Option<KernelClass>, &[KernelClass]),
        (kv, is_strict): (Option<KvType>, bool),
        config: &Config,
    ) -> Result<(KernelClass, Option<Self>), Error> {
        let to = decoding[0];
        if let Some(b) = decoding.iter().copied().find(|b| *b != to) {
            return Err(Error::MixedPrompts { a: to, b });
        }
        let from = reading.unwrap_or(to);
        let unlike = Self::between(from, to, kv, config)?;
        match unlike.is_some() && is_strict {
            true => Err(Error::PromptsNear { from, to }),
            false => Ok((from, unlike)),
        }
    }

    /// As [`of`](Self::of), for two classes. `None` for equal ones.
    fn between(
        from: KernelClass,
        to: KernelClass,
        kv: Option<KvType>,
        config: &Config,
    ) -> Result<Option<Self>, Error> {
        let is_state = |cache| {
            use LayerCache::{Compressed, Delta, State};
            matches!(cache, State(_) | Delta(_) | Compressed(_))
        };
        let has_states = config.layers.iter().any(|layer| is_state(layer.cache));
        if has_states && (from != to || to.is_mlx()) {
            return Err(Error::PromptStates { from, to });
        }
        if from == to {
            return Ok(None);
        }
        if kv.is_some_and(KvType::is_quantised) {
            return Err(Error::PromptsQuantised { from, to });
        }
        Ok(Some(Self {
            from: from.name().to_owned(),
            to: to.name().to_owned(),
            kv: between(from, to, kv).name().to_owned(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use KernelClass::{Cpu, CpuF32, Mlx, MlxF32};

    #[test]
    fn keys_and_values_travel_in_the_type_of_a_cpu() {
        for (from, to, name) in [
            (Mlx, Cpu, "f16"),
            (MlxF32, CpuF32, "f32"),
            (Cpu, Mlx, "f16"),
            (CpuF32, Cpu, "f32"),
            (Mlx, MlxF32, "f32"),
        ] {
            assert_eq!(between(from, to, None).name(), name, "{from}>{to}");
        }
    }
}
