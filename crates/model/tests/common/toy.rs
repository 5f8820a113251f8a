//! A toy family whose layers all differ. It has full attention, a window over heads of other sizes,
//! two layers that use the cache of one before them, and states that decay.

use paceline_base::BlockType;
use paceline_model::{Config, Error, LayerCache, ModelSource};
use paceline_tensor::{HeadRows, Recurrence, storage::random::random_row};
use paceline_weights::gguf::{Gguf, testing::GgufWriter};

/// The name in `general.name`.
const NAME: &str = "toy";
const WIDTH: usize = 64;
const TYPE: BlockType = BlockType::Q8_0;

/// Linear attention: S = S / 2 + sum of k v^T at the end of a page. A row's output is o = q S + sum
/// of (q k) v.
#[derive(Debug)]
struct Decay;

impl Recurrence for Decay {
    fn name(&self) -> &'static str {
        "decay"
    }

    fn state_len(&self, head_dim: usize, value_dim: usize) -> usize {
        head_dim * value_dim
    }

    fn advance(&self, state: &mut [f32], rows: HeadRows<'_>) {
        state.iter_mut().for_each(|x| *x *= 0.5);
        for (key, value) in rows.each() {
            for (row, k) in state.chunks_exact_mut(value.len()).zip(key) {
                row.iter_mut().zip(value).for_each(|(s, v)| *s += k * v);
            }
        }
    }

    fn read(&self, state: &[f32], rows: HeadRows<'_>, query: &[f32], out: &mut [f32]) {
        out.fill(0.0);
        for (row, q) in state.chunks_exact(out.len()).zip(query) {
            out.iter_mut().zip(row).for_each(|(o, s)| *o += 0.1 * q * s);
        }
        for (key, value) in rows.each() {
            let score: f32 = query.iter().zip(key).map(|(q, k)| q * k).sum();
            out.iter_mut()
                .zip(value)
                .for_each(|(o, v)| *o += 0.1 * score * v);
        }
    }
}

/// Cache and window; heads, KV heads, sizes of a key and of a value, width of the feed-forward.
type Layer = (LayerCache, Option<usize>, [usize; 5]);

const LAYERS: [Layer; 5] = [
    (LayerCache::Rows, None, [8, 2, 16, 16, 512]),
    (LayerCache::Of(0), None, [8, 2, 16, 16, 512]),
    (LayerCache::Rows, Some(70), [4, 1, 32, 48, 256]),
    (LayerCache::Of(2), Some(40), [4, 1, 32, 48, 512]),
    (LayerCache::State(&Decay), None, [8, 4, 16, 32, 512]),
];

/// The configuration of a file: of a toy, its own.
pub(crate) fn config_of(source: &ModelSource) -> Result<Config, Error> {
    let mut config = Config::read(source)?;
    let is_toy = |file: &Gguf| file.metadata().get("general.name") == Some(&NAME.into());
    if matches!(source, ModelSource::Gguf(file) if is_toy(file)) {
        for (layer, (cache, window, sizes)) in config.layers.iter_mut().zip(LAYERS) {
            (layer.cache, layer.window) = (cache, window);
            [layer.heads, layer.kv_heads, ..] = sizes;
            [.., layer.head_dim, layer.value_dim, layer.ffn] = sizes;
        }
    }
    Ok(config)
}

/// A toy with the vocabulary that `file` has.
pub(crate) fn toy(mut file: GgufWriter, vocab: usize) -> GgufWriter {
    file = file
        .meta("general.name", NAME)
        .meta("llama.attention.layer_norm_rms_epsilon", 1e-6f32);
    for (key, value) in [
        ("vocab_size", vocab),
        ("block_count", 5),
        ("embedding_length", WIDTH),
        ("feed_forward_length", 512),
        ("context_length", 4096),
        ("attention.head_count", 8),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
    ] {
        file = file.meta(&format!("llama.{key}"), value as u32);
    }
    let mut seed = 0;
    let mut matrix = |file: GgufWriter, name: &str, rows: usize, cols: usize| {
        seed += 1;
        let row = |i| random_row(TYPE, cols, seed * 10_000 + i);
        let bytes: Vec<u8> = (0..rows as u64).flat_map(row).collect();
        file.tensor(&format!("{name}.weight"), TYPE, &[rows, cols], bytes)
    };
    file = matrix(file, "token_embd", vocab, WIDTH);
    file = matrix(file, "output", vocab, WIDTH);
    file = file.f32s("output_norm.weight", &[WIDTH], &[18.0; WIDTH]);
    for (i, (.., [h, k, d, e, f])) in LAYERS.into_iter().enumerate() {
        for (part, rows, cols) in [
            ("attn_q", h * d, WIDTH),
            ("attn_k", k * d, WIDTH),
            ("attn_v", k * e, WIDTH),
            ("attn_output", WIDTH, h * e),
            ("ffn_gate", f, WIDTH),
            ("ffn_up", f, WIDTH),
            ("ffn_down", WIDTH, f),
        ] {
            file = matrix(file, &format!("blk.{i}.{part}"), rows, cols);
        }
        for norm in ["attn_norm", "ffn_norm"] {
            file = file.f32s(&format!("blk.{i}.{norm}.weight"), &[WIDTH], &[8.0; WIDTH]);
        }
    }
    file
}
