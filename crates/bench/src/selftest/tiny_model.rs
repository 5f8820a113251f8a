//! A random llama of 190 KB as a GGUF file, made from a seed. So a machine without models has one
//! to compute. MLX's CPU build, the slowest engine, reads 300 tokens of it in 1.5 s.

use std::path::Path;
use std::{fs, io};

use paceline_base::{BlockType, SplitMix64};
use paceline_weights::gguf::testing::GgufWriter;

const WIDTH: usize = 64;
const HEADS: usize = 2;
const KV_HEADS: usize = 2;
/// MLX has its fast attention for this size on every device.
const HEAD_DIM: usize = 64;
const FFN: usize = 64;
/// Layers; the most nodes that can share it.
pub const LAYERS: usize = 3;
const CONTEXT: u32 = 4096;

/// Tokens before those of the 256 bytes: an unknown one.
const FIRST_BYTE: usize = 1;
const VOCAB: usize = FIRST_BYTE + 256;

/// Elements of a block of Q8_0.
const BLOCK: usize = 32;

/// 2^-10 as f16: bytes up to 127 times this are up to `1 / sqrt(WIDTH)`.
const SCALE: [u8; 2] = 0x1400u16.to_le_bytes();

/// Any; the recorded answers belong to it.
const SEED: u64 = 51;

/// Writes the model to `path`.
pub fn write(path: &Path) -> io::Result<()> {
    fs::write(path, file().to_bytes())
}

/// `n` tokens that follow from `seed`.
pub fn prompt(n: usize, seed: u64) -> Vec<u32> {
    let mut random = SplitMix64::new(seed);
    let token = |_| (FIRST_BYTE + random.below(256)) as u32;
    (0..n).map(token).collect()
}

fn file() -> GgufWriter {
    let mut random = SplitMix64::new(SEED);
    let mut file = vocabulary(metadata());
    file = matrix(file, &mut random, "token_embd", VOCAB, WIDTH);
    file = vector(file, &mut random, "output_norm", 1.0);
    file = matrix(file, &mut random, "output", VOCAB, WIDTH);
    (0..LAYERS).fold(file, |file, i| layer(file, &mut random, i))
}

fn metadata() -> GgufWriter {
    let file = GgufWriter::new().meta("general.architecture", "llama");
    let sizes = [
        ("block_count", LAYERS as u32),
        ("embedding_length", WIDTH as u32),
        ("feed_forward_length", FFN as u32),
        ("context_length", CONTEXT),
        ("attention.head_count", HEADS as u32),
        ("attention.head_count_kv", KV_HEADS as u32),
        ("attention.key_length", HEAD_DIM as u32),
        ("attention.value_length", HEAD_DIM as u32),
    ];
    let add = |file: GgufWriter, (key, size)| file.meta(&format!("llama.{key}"), size);
    sizes
        .into_iter()
        .fold(file, add)
        .meta("llama.attention.layer_norm_rms_epsilon", 1e-6f32)
        .meta("llama.rope.freq_base", 1e4f32)
}

/// A token for each byte.
fn vocabulary(file: GgufWriter) -> GgufWriter {
    let mut tokens = vec!["<unk>".to_owned()];
    tokens.extend((0..=255).map(byte_name));
    let mut kinds = vec![1; VOCAB]; // ordinary
    kinds[0] = 2; // unknown
    file.meta("tokenizer.ggml.model", "gpt2")
        .meta("tokenizer.ggml.pre", "default")
        .meta("tokenizer.ggml.tokens", tokens)
        .meta("tokenizer.ggml.token_type", kinds)
        .meta("tokenizer.ggml.merges", Vec::<String>::new())
}

/// The spelling of a byte in a vocabulary of the GPT-2 kind. Bytes that print stand for themselves,
/// the others for characters from U+0100 on (`bytes_to_unicode` of GPT-2's `encoder.py`).
fn byte_name(byte: u8) -> String {
    let prints = |b: &u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if prints(&byte) {
        return char::from(byte).to_string();
    }
    let before = (0..byte).filter(|b| !prints(b)).count() as u32;
    char::from_u32(0x100 + before).map_or_else(String::new, String::from)
}

fn layer(mut file: GgufWriter, random: &mut SplitMix64, i: usize) -> GgufWriter {
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    file = vector(file, random, &format!("blk.{i}.attn_norm"), 4.0); // scores spread
    file = vector(file, random, &format!("blk.{i}.ffn_norm"), 2.0);
    for (part, rows, cols) in [
        ("attn_q", q, WIDTH),
        ("attn_k", kv, WIDTH),
        ("attn_v", kv, WIDTH),
        ("attn_output", WIDTH, q),
        ("ffn_gate", FFN, WIDTH),
        ("ffn_up", FFN, WIDTH),
        ("ffn_down", WIDTH, FFN),
    ] {
        file = matrix(file, random, &format!("blk.{i}.{part}"), rows, cols);
    }
    file
}

/// Random blocks of Q8_0, of shape `(rows, cols)`.
fn matrix(
    file: GgufWriter,
    random: &mut SplitMix64,
    name: &str,
    rows: usize,
    cols: usize,
) -> GgufWriter {
    let blocks = rows * cols / BLOCK;
    let mut bytes = Vec::with_capacity(blocks * (SCALE.len() + BLOCK));
    for _ in 0..blocks {
        bytes.extend(SCALE);
        let values = (0..BLOCK / 8).flat_map(|_| random.next().to_le_bytes());
        bytes.extend(values);
    }
    file.tensor(
        &format!("{name}.weight"),
        BlockType::Q8_0,
        &[rows, cols],
        bytes,
    )
}

/// [`WIDTH`] values within half of `centre`.
fn vector(file: GgufWriter, random: &mut SplitMix64, name: &str, centre: f32) -> GgufWriter {
    let unit = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let value = |_| centre + 0.5 * unit(random.next());
    let values: Vec<f32> = (0..WIDTH).map(value).collect();
    file.f32s(&format!("{name}.weight"), &[WIDTH], &values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_small_and_always_the_same() {
        let bytes = file().to_bytes();
        assert!(bytes.len() < 200_000, "{} bytes", bytes.len());
        assert_eq!(bytes, file().to_bytes());
        assert_eq!(prompt(3, 1), prompt(5, 1)[..3]);
        assert_ne!(prompt(3, 1), prompt(3, 2));
    }
}
