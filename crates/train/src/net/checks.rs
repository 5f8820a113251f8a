//! Which models can be trained, and with which options.

use paceline_model::adapter::files::TARGETS;
use paceline_model::{Config, LayerCache, LayerShape, ModelFamily, Selection};

use super::Trained;
use crate::class::TrainingClass;
use crate::error::Error;
use crate::params::Lora;
use crate::weights::{EXPERTS, Method};

pub(super) fn option<T>(
    option: &'static str,
    got: impl ToString,
    expected: String,
) -> Result<T, Error> {
    let got = got.to_string();
    Err(Error::Option {
        option,
        got,
        expected,
    })
}

impl Trained {
    pub(super) fn check(&self) -> Result<(), Error> {
        if !(self.balance.is_finite() && self.balance >= 0.0) {
            return option("--router-aux", self.balance, "0 or more".to_owned());
        }
        if self.method == Method::Full {
            return Ok(());
        }
        let Lora { rank, alpha } = self.lora;
        if rank == 0 || rank > 1024 {
            return option("--rank", rank, "1 to 1024".to_owned());
        }
        if !(alpha.is_finite() && alpha > 0.0) {
            return option("--alpha", alpha, "a number above 0".to_owned());
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return option(
                "--dropout",
                self.dropout,
                "0 or more, and below 1".to_owned(),
            );
        }
        let known =
            |name: &String| name == EXPERTS || TARGETS.iter().any(|(_, _, target)| target == name);
        let names = TARGETS.map(|(_, _, name)| name).join(", ") + ", experts";
        match self.targets.iter().find(|name| !known(name)) {
            Some(bad) => option("--targets", bad, format!("some of {names}")),
            None if self.targets.is_empty() => {
                option("--targets", "empty", format!("some of {names}"))
            }
            None => Ok(()),
        }
    }
}

/// Families with gradients.
pub const FAMILIES: [ModelFamily; 11] = [
    ModelFamily::Llama,
    ModelFamily::Mixtral,
    ModelFamily::Qwen2,
    ModelFamily::Qwen2Moe,
    ModelFamily::Qwen3,
    ModelFamily::Qwen3Moe,
    ModelFamily::Gemma3,
    ModelFamily::GptOss,
    ModelFamily::DeepSeek,
    ModelFamily::Qwen35,
    ModelFamily::Qwen35Moe,
];

/// Whether there are experts, which adapters are asked for.
pub(super) fn check_experts(config: &Config) -> Result<(), Error> {
    if config.layers.iter().any(|layer| layer.experts.is_some()) {
        return Ok(());
    }
    let expected = "others: the model has no experts";
    option("--targets", EXPERTS, expected.to_owned())
}

pub(super) fn check_family(config: &Config, class: TrainingClass) -> Result<(), Error> {
    let refused = |why| {
        let family = format!("{:?}", config.family).to_lowercase();
        Err(Error::Family { family, why })
    };
    if !FAMILIES.contains(&config.family) {
        let why = "its gradients are to come; llama, mixtral, qwen2, qwen2moe, qwen3, qwen3moe, \
                   gemma3, gpt-oss, deepseek, qwen35 and qwen35moe have them";
        return refused(why);
    }
    let has_experts = config.layers.iter().any(|layer| layer.experts.is_some());
    if has_experts && class != TrainingClass::Cpu {
        return refused("experts have gradients with --class cpu alone");
    }
    let latents = || config.layers.iter().filter_map(|layer| layer.latent);
    if latents().next().is_some() && class != TrainingClass::Cpu {
        return refused("latent attention has gradients with --class cpu alone");
    }
    if latents().any(|latent| latent.selection != Selection::All) {
        return refused("an indexer chooses the positions that its rows attend to");
    }
    if config.bidirectional {
        return refused("its positions attend to later ones");
    }
    if config.ropes.iter().any(|rope| rope.long.is_some()) {
        return refused("its rotations depend on the served context");
    }
    let is_net = |layer: &LayerShape| matches!(layer.cache, LayerCache::Delta(_));
    if config.layers.iter().any(is_net) && class != TrainingClass::Cpu {
        return refused("gated delta nets have gradients with --class cpu alone");
    }
    let rows = |layer: &LayerShape| layer.cache == LayerCache::Rows || is_net(layer);
    if !config.layers.iter().all(rows) {
        return refused("it has layers without keys and values of their own");
    }
    Ok(())
}
