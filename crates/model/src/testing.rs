//! Entry points for fuzz targets and tests. They are the parser of other ranks' plans, the leader's
//! gathered logits, and a tiny model for tests of `engine` and `serve`.

use std::ops::Range;

use paceline_base::BlockType;
use paceline_tensor::storage::random::random_row;
use paceline_weights::gguf::testing::GgufWriter;

use crate::TopLogits;
use crate::candidates::{self, LogitExtent};

/// Parses `words` as a plan of the leader; must never panic. An accepted plan has at most this
/// rank's maximum of rows.
pub fn parse_plan(words: &[u32]) {
    crate::plan::parse(words);
}

/// The leader's copy of a row of logits, `(vocabulary,)`, gathered from a tensor split with
/// [`Logits::Top`](crate::Logits::Top). `parts` are the consecutive columns of the ranks, the
/// leader's first.
///
/// # Panics
/// If the parts are not within the row.
pub fn gathered(row: &[f32], parts: &[Range<usize>], top: TopLogits) -> Vec<f32> {
    candidates::gathered(row, parts, LogitExtent::Top(top))
}

/// Sizes of [`tiny_llama`].
pub const WIDTH: usize = 64;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD_DIM: usize = 16;
pub const FFN: usize = 128;
pub const LAYERS: usize = 2;

/// A llama of two layers with random weights behind `vocabulary`, whose architecture is llama.
///
/// Logits have a standard deviation near 3: some of the `vocab` tokens are likely, many possible.
/// The weights follow from the tensors' names.
pub fn tiny_llama(vocabulary: GgufWriter, vocab: usize, context: usize) -> GgufWriter {
    let file = vocabulary.meta("llama.attention.layer_norm_rms_epsilon", 1e-6f32);
    let sizes = [
        ("vocab_size", vocab),
        ("block_count", LAYERS),
        ("embedding_length", WIDTH),
        ("feed_forward_length", FFN),
        ("context_length", context),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("attention.key_length", HEAD_DIM),
    ];
    let add = |file: GgufWriter, (key, value)| file.meta(&format!("llama.{key}"), value as u32);
    let file = sizes.into_iter().fold(file, add);
    (0..LAYERS).fold(ends(file, vocab), layer)
}

/// Adds the embedding, the last norm and the output.
pub fn ends(file: GgufWriter, vocab: usize) -> GgufWriter {
    let file = matrix(file, "token_embd", vocab, WIDTH);
    let file = file.f32s("output_norm.weight", &[WIDTH], &[18.0; WIDTH]);
    matrix(file, "output", vocab, WIDTH)
}

fn layer(file: GgufWriter, i: usize) -> GgufWriter {
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let name = |part: &str| format!("blk.{i}.{part}");
    // Scores spread, so that attention is not a plain mean.
    let norm = |file: GgufWriter, part| file.f32s(&name(part), &[WIDTH], &[8.0; WIDTH]);
    let file = ["attn_norm.weight", "ffn_norm.weight"]
        .into_iter()
        .fold(file, norm);
    let matrices = [
        ("attn_q", q, WIDTH),
        ("attn_k", kv, WIDTH),
        ("attn_v", kv, WIDTH),
        ("attn_output", WIDTH, q),
        ("ffn_gate", FFN, WIDTH),
        ("ffn_up", FFN, WIDTH),
        ("ffn_down", WIDTH, FFN),
    ];
    let add = |file, (part, rows, cols)| matrix(file, &name(part), rows, cols);
    matrices.into_iter().fold(file, add)
}

/// Adds a random matrix `(rows, cols)` whose values follow from its name.
pub fn matrix(file: GgufWriter, name: &str, rows: usize, cols: usize) -> GgufWriter {
    let add = |seed: u64, byte: u8| seed.wrapping_mul(31).wrapping_add(u64::from(byte));
    let seed = name.bytes().fold(0, add);
    let row = |i| {
        let seed = seed.wrapping_mul(1000).wrapping_add(i);
        random_row(BlockType::Q8_0, cols, seed)
    };
    let bytes: Vec<u8> = (0..rows as u64).flat_map(row).collect();
    let name = format!("{name}.weight");
    file.tensor(&name, BlockType::Q8_0, &[rows, cols], bytes)
}

/// The bytes as a byte-level vocabulary spells them: a byte that is no printable Latin-1 character
/// is moved behind it (`bytes_to_unicode` of GPT-2).
pub fn spell(bytes: &[u8]) -> String {
    let is_printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let moved = |b: u8| 256 + (0..b).filter(|b| !is_printable(*b)).count() as u32;
    let code = |b: u8| if is_printable(b) { b.into() } else { moved(b) };
    let char = |b: &u8| char::from_u32(code(*b)).expect("Latin-1 and what is moved behind it");
    bytes.iter().map(char).collect()
}
