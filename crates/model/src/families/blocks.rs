//! Blocks of Nemotron-H in files, read without the configuration: `source` needs them for the names
//! of weights.
//!
//! A file has blocks of one kind each. A layer is a block of Mamba or attention with the block
//! after it, if that is a feed-forward or experts.

use paceline_weights::gguf::Gguf;
use serde_json::Value;

/// A layer's blocks in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Block of Mamba or attention.
    pub(crate) mixer: usize,
    pub(crate) is_mamba: bool,
    /// Whether the feed-forward in the block after `mixer` has experts; `None` without one.
    pub(crate) feed_forward: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockKind {
    Mamba,
    Attention,
    FeedForward { experts: bool },
}

/// Layers of a GGUF file: blocks without KV heads and without a feed-forward are Mamba, as in
/// llama.cpp. `None` if the file lacks the lists, or if feed-forwards follow each other.
pub(crate) fn of_gguf(file: &Gguf, architecture: &str) -> Option<Vec<Blocks>> {
    let metadata = file.metadata();
    let list = |key: &str| metadata.u64s(&format!("{architecture}.{key}")).ok();
    let heads = list("attention.head_count_kv")?;
    let ffns = list("feed_forward_length")?;
    let has_experts = |i: usize| {
        let parts = ["ffn_gate_inp", "ffn_up_exps", "ffn_down_exps"];
        let mut names = parts.iter().map(|part| format!("blk.{i}.{part}.weight"));
        names.any(|name| file.has(&name))
    };
    let kind = |(i, (heads, ffn)): (usize, (&u64, &u64))| match (heads, has_experts(i)) {
        (_, experts) if experts || *ffn > 0 => BlockKind::FeedForward { experts },
        (0, _) => BlockKind::Mamba,
        _ => BlockKind::Attention,
    };
    let kinds = heads.iter().zip(&ffns).enumerate().map(kind);
    layers_of(&kinds.collect::<Vec<_>>()).filter(|_| heads.len() == ffns.len())
}

/// Layers by the pattern or the list of `config.json`. `None` if it has neither, or another kind.
pub(crate) fn of_config(config: &Value) -> Option<Vec<Blocks>> {
    let kinds: Option<Vec<BlockKind>> = match config.get("hybrid_override_pattern") {
        Some(pattern) => {
            let letters = pattern.as_str()?.chars();
            letters
                .map(|c| kind_of(c.encode_utf8(&mut [0; 4])))
                .collect()
        }
        None => {
            let mut lists = ["layers_block_type", "layer_types"].iter();
            let list = lists.find_map(|name| config.get(name)?.as_array())?;
            list.iter().map(|kind| kind_of(kind.as_str()?)).collect()
        }
    };
    layers_of(&kinds?)
}

fn kind_of(name: &str) -> Option<BlockKind> {
    Some(match name {
        "M" | "linear_attention" | "mamba" => BlockKind::Mamba,
        "*" | "full_attention" | "attention" => BlockKind::Attention,
        "-" | "mlp" => BlockKind::FeedForward { experts: false },
        "E" | "moe" => BlockKind::FeedForward { experts: true },
        _ => return None,
    })
}

/// Joins blocks to layers. `None` if a feed-forward does not follow Mamba or attention.
fn layers_of(kinds: &[BlockKind]) -> Option<Vec<Blocks>> {
    let mut layers: Vec<Blocks> = Vec::new();
    for (mixer, kind) in kinds.iter().enumerate() {
        match *kind {
            BlockKind::FeedForward { experts } => {
                let last = layers
                    .last_mut()
                    .filter(|last| last.feed_forward.is_none())?;
                last.feed_forward = Some(experts);
            }
            kind => layers.push(Blocks {
                mixer,
                is_mamba: kind == BlockKind::Mamba,
                feed_forward: None,
            }),
        }
    }
    Some(layers).filter(|layers| !layers.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_joined_to_layers() {
        let of =
            |pattern: &str| of_config(&serde_json::json!({ "hybrid_override_pattern": pattern }));
        let layer = |mixer, is_mamba, feed_forward| Blocks {
            mixer,
            is_mamba,
            feed_forward,
        };
        let expected = vec![
            layer(0, true, None),
            layer(1, false, Some(false)),
            layer(3, true, Some(true)),
        ];
        assert_eq!(of("M*-ME"), Some(expected.clone()));
        let list = ["mamba", "attention", "mlp", "linear_attention", "moe"];
        let listed = of_config(&serde_json::json!({ "layers_block_type": list }));
        assert_eq!(listed, Some(expected));
        for wrong in ["", "-M", "M-E", "MX"] {
            assert_eq!(of(wrong), None, "{wrong:?}");
        }
    }
}
