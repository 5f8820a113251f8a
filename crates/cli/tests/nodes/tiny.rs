//! Random models of some hundred kilobytes, of every family, that can be cut in many ways.
//!
//! They never end, since no token means that, and say printable bytes for the most part. The rows
//! of all other tokens in the head are zero, and among a hundred random logits one is above that.

use std::path::Path;

use paceline_base::SplitMix64;
use paceline_weights::gguf::testing::GgufWriter;

use crate::common::vocabulary::{self, FIRST_BYTE, VOCAB};

const WIDTH: usize = 256;
const FFN: usize = 512;
/// Of Q8_0 in GGUF files.
const Q8_0: u32 = 8;
/// 2^-11 as f16: bytes up to 127 times this are up to 1 / sqrt(WIDTH).
const SCALE: [u8; 2] = 0x1000u16.to_le_bytes();

#[derive(Clone, Copy, Debug)]
pub(crate) struct TinyModelSpec {
    pub(crate) family: &'static str,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) layers: usize,
    /// Width of the feed-forward layers.
    pub(crate) ffn: usize,
}

/// A model of each family: grouped heads, heads that make up more than the width, windowed layers.
pub(crate) const FAMILIES: [TinyModelSpec; 4] = [
    TinyModelSpec::new("llama", 8, 2, 32, 4),
    TinyModelSpec::new("qwen2", 4, 4, 64, 4),
    TinyModelSpec::new("qwen3", 8, 4, 64, 4),
    TinyModelSpec::new("gemma3", 4, 1, 128, 6),
];

impl TinyModelSpec {
    const fn new(
        family: &'static str,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        layers: usize,
    ) -> Self {
        Self {
            family,
            heads,
            kv_heads,
            head_dim,
            layers,
            ffn: FFN,
        }
    }

    /// Writes it to `path`; the same shape gives the same bytes.
    pub(crate) fn write(&self, path: &Path) {
        self.write_with(path, (TEMPLATE, 7));
    }

    /// The same with another chat template, and weights of another seed.
    pub(crate) fn write_with(&self, path: &Path, (template, seed): (&str, u64)) {
        let [part] = self.parts((template, seed), 1).try_into().unwrap();
        part.write(path);
    }

    /// Writes the model of [`write`](Self::write) in `count` parts to a folder, under the names of
    /// llama.cpp's splitter. Returns the name of the first.
    pub(crate) fn write_split(&self, folder: &Path, count: u32) -> String {
        let name = |no: u32| format!("m-{:05}-of-{count:05}.gguf", no + 1);
        for (no, part) in (0..count).zip(self.parts((TEMPLATE, 7), count)) {
            part.write(folder.join(name(no)));
        }
        name(0)
    }

    /// The parts of a model, each with every `count`th tensor.
    fn parts(&self, (template, seed): (&str, u64), count: u32) -> Vec<GgufWriter> {
        let part = |no: u32| match no {
            0 => self.metadata(template),
            _ => GgufWriter::new(),
        };
        let mut file = ModelFileWriter {
            parts: (0..count).map(part).collect(),
            tensors: 0,
            random: SplitMix64::new(seed),
        };
        file.matrix("token_embd", VOCAB, WIDTH, |_| true);
        file.vector("output_norm.weight", WIDTH, 1.0);
        let speaks = |token: usize| (FIRST_BYTE + 0x20..FIRST_BYTE + 0x7f).contains(&token);
        file.matrix("output", VOCAB, WIDTH, speaks);
        (0..self.layers).for_each(|i| self.layer(&mut file, i));
        if count == 1 {
            return file.parts;
        }
        let tensors = file.tensors as u32;
        let split = |(no, part): (u32, GgufWriter)| {
            let part = part.meta("split.no", no).meta("split.count", count);
            part.meta("split.tensors.count", tensors)
        };
        (0..).zip(file.parts).map(split).collect()
    }

    fn layer(&self, file: &mut ModelFileWriter, i: usize) {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let name = |part: &str| format!("blk.{i}.{part}");
        file.vector(&name("attn_norm.weight"), WIDTH, 4.0); // scores spread
        file.vector(&name("ffn_norm.weight"), WIDTH, 2.0);
        for (part, rows, cols) in [
            ("attn_q", q, WIDTH),
            ("attn_k", kv, WIDTH),
            ("attn_v", kv, WIDTH),
            ("attn_output", WIDTH, q),
            ("ffn_gate", self.ffn, WIDTH),
            ("ffn_up", self.ffn, WIDTH),
            ("ffn_down", WIDTH, self.ffn),
        ] {
            file.matrix(&name(part), rows, cols, |_| true);
        }
        let more: &[(&str, usize, f32)] = match self.family {
            "qwen2" => &[
                ("attn_q.bias", q, 0.0),
                ("attn_k.bias", kv, 0.0),
                ("attn_v.bias", kv, 0.0),
            ],
            "qwen3" => &[
                ("attn_q_norm.weight", self.head_dim, 1.5),
                ("attn_k_norm.weight", self.head_dim, 1.5),
            ],
            "gemma3" => &[
                ("attn_q_norm.weight", self.head_dim, 1.5),
                ("attn_k_norm.weight", self.head_dim, 1.5),
                ("post_attention_norm.weight", WIDTH, 1.0),
                ("post_ffw_norm.weight", WIDTH, 1.0),
            ],
            _ => &[],
        };
        for (part, n, centre) in more {
            file.vector(&name(part), *n, *centre);
        }
    }

    fn metadata(&self, template: &str) -> GgufWriter {
        let name = self.family;
        let mut file = GgufWriter::new().meta("general.architecture", name);
        for (key, value) in [
            ("block_count", self.layers),
            ("embedding_length", WIDTH),
            ("feed_forward_length", self.ffn),
            ("context_length", 1 << 20),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
        ] {
            file = file.meta(&format!("{name}.{key}"), value as u32);
        }
        if name == "gemma3" {
            file = file.meta("gemma3.attention.sliding_window", 70u32);
        }
        let file = file
            .meta(&format!("{name}.attention.layer_norm_rms_epsilon"), 1e-6f32)
            .meta(&format!("{name}.rope.freq_base"), 1e4f32)
            .meta("tokenizer.chat_template", template);
        vocabulary::write(file, "<turn>", "</turn>")
    }
}

const TEMPLATE: &str = "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}\
                        </turn>\n{% endfor %}<turn>assistant\n";

struct ModelFileWriter {
    parts: Vec<GgufWriter>,
    /// Tensors written so far.
    tensors: usize,
    random: SplitMix64,
}

impl ModelFileWriter {
    /// Random rows; those that `is_set` does not want are zero.
    fn matrix(&mut self, stem: &str, rows: usize, cols: usize, is_set: impl Fn(usize) -> bool) {
        let mut bytes = Vec::with_capacity(rows * cols / 32 * 34);
        for row in 0..rows {
            for _ in 0..cols / 32 {
                bytes.extend(SCALE);
                let random = (0..4).flat_map(|_| self.random.next().to_le_bytes());
                bytes.extend(random.map(|byte| if is_set(row) { byte } else { 0 }));
            }
        }
        let name = format!("{stem}.weight");
        self.with(|writer| writer.raw_tensor(&name, Q8_0, &[rows, cols], bytes));
    }

    /// `n` values within half of `centre`.
    fn vector(&mut self, name: &str, n: usize, centre: f32) {
        let unit = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let value = |_| centre + 0.5 * unit(self.random.next());
        let values: Vec<f32> = (0..n).map(value).collect();
        self.with(|writer| writer.f32s(name, &[n], &values));
    }

    fn with(&mut self, add: impl FnOnce(GgufWriter) -> GgufWriter) {
        let at = self.tensors % self.parts.len();
        self.parts[at] = add(std::mem::take(&mut self.parts[at]));
        self.tensors += 1;
    }
}
