//! Random GGUF models of a few hundred kilobytes, made in the test.

use std::path::Path;

use paceline_base::BlockType;
use paceline_formats::gguf::testing::Writer;
use paceline_model::Family;
use paceline_tensor::stored::testing::random_row;

/// A generator of test data: SplitMix64 (Steele, Lea and Flood 2014).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// In `-1.0..1.0`.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Brings `list` into random order.
    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.below(i + 1));
        }
    }
}

/// The shape of a random model. Every row is whole super-blocks of 256, so that any storage type
/// fits; norms and biases are F32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiny {
    pub(crate) family: Family,
    pub(crate) block_type: BlockType,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) ffn: usize,
    pub(crate) vocab: usize,
    pub(crate) layers: usize,
    /// Of gemma's windowed layers.
    pub(crate) window: usize,
}

impl Tiny {
    /// The shape that stands for a family: grouped heads everywhere; heads that make up more than
    /// the width for qwen3 and gemma; for gemma enough layers that one is not windowed, and a
    /// window that ends inside of pages.
    pub(crate) const fn new(family: Family, block_type: BlockType) -> Self {
        let (heads, kv_heads, head_dim, layers) = match family {
            Family::Llama => (8, 2, 32, 2),
            Family::Qwen2 => (4, 4, 64, 2),
            Family::Qwen3 => (8, 4, 64, 2),
            Family::Gemma3 => (4, 1, 128, 6),
        };
        let (width, ffn, vocab, window) = (256, 512, 300, 70);
        Self {
            family,
            block_type,
            width,
            heads,
            kv_heads,
            head_dim,
            ffn,
            vocab,
            layers,
            window,
        }
    }

    /// `n` random ids.
    pub(crate) fn tokens(&self, n: usize, seed: u64) -> Vec<u32> {
        let mut random = Random(seed);
        (0..n).map(|_| random.below(self.vocab) as u32).collect()
    }

    /// Writes the model; the same shape gives the same bytes.
    pub(crate) fn write(&self, path: &Path) {
        self.writer().write(path);
    }

    /// The model, to be changed before it is written.
    pub(crate) fn writer(&self) -> Writer {
        let mut file = Weights {
            file: self.metadata(),
            block_type: self.block_type,
            random: Random(7),
        };
        file.matrix("token_embd", self.vocab, self.width);
        file.vector("output_norm.weight", self.width, 1.0);
        file.matrix("output", self.vocab, self.width);
        (0..self.layers).for_each(|i| self.layer(&mut file, i));
        file.file
    }

    fn metadata(&self) -> Writer {
        let name = self.family.name();
        let tokens: Vec<String> = (0..self.vocab).map(|i| format!("t{i}")).collect();
        let mut file = Writer::new()
            .meta("general.architecture", name)
            .meta("tokenizer.ggml.tokens", tokens);
        for (key, value) in [
            ("block_count", self.layers),
            ("embedding_length", self.width),
            ("feed_forward_length", self.ffn),
            ("context_length", 4096),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
        ] {
            file = file.meta(&format!("{name}.{key}"), value as u32);
        }
        if self.family == Family::Gemma3 {
            file = file.meta("gemma3.attention.sliding_window", self.window as u32);
        }
        file.meta(&format!("{name}.attention.layer_norm_rms_epsilon"), 1e-6f32)
            .meta(&format!("{name}.rope.freq_base"), 1e4f32)
    }

    fn layer(&self, file: &mut Weights, i: usize) {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let name = |part: &str| format!("blk.{i}.{part}");
        // Norm weights around 4 make scores spread, so that attention is not a plain mean.
        file.vector(&name("attn_norm.weight"), self.width, 4.0);
        file.matrix(&name("attn_q"), q, self.width);
        file.matrix(&name("attn_k"), kv, self.width);
        file.matrix(&name("attn_v"), kv, self.width);
        file.matrix(&name("attn_output"), self.width, q);
        file.vector(&name("ffn_norm.weight"), self.width, 2.0);
        file.matrix(&name("ffn_gate"), self.ffn, self.width);
        file.matrix(&name("ffn_up"), self.ffn, self.width);
        file.matrix(&name("ffn_down"), self.width, self.ffn);
        if self.family == Family::Qwen2 {
            file.vector(&name("attn_q.bias"), q, 0.0);
            file.vector(&name("attn_k.bias"), kv, 0.0);
            file.vector(&name("attn_v.bias"), kv, 0.0);
        }
        if matches!(self.family, Family::Qwen3 | Family::Gemma3) {
            file.vector(&name("attn_q_norm.weight"), self.head_dim, 1.5);
            file.vector(&name("attn_k_norm.weight"), self.head_dim, 1.5);
        }
        if self.family == Family::Gemma3 {
            file.vector(&name("post_attention_norm.weight"), self.width, 1.0);
            file.vector(&name("post_ffw_norm.weight"), self.width, 1.0);
        }
    }
}

/// A file that is being filled with random weights.
struct Weights {
    file: Writer,
    block_type: BlockType,
    random: Random,
}

impl Weights {
    /// The weight of `stem`, `(rows, cols)`.
    fn matrix(&mut self, stem: &str, rows: usize, cols: usize) {
        let row = |_| random_row(self.block_type, cols, self.random.next());
        let bytes: Vec<u8> = (0..rows).flat_map(row).collect();
        self.add(|file, block_type| {
            file.tensor(&format!("{stem}.weight"), block_type, &[rows, cols], bytes)
        });
    }

    /// `n` values within half of `centre` and another half.
    fn vector(&mut self, name: &str, n: usize, centre: f32) {
        let values: Vec<f32> = (0..n).map(|_| centre + 0.5 * self.random.unit()).collect();
        self.add(|file, _| file.f32s(name, &[n], &values));
    }

    fn add(&mut self, add: impl FnOnce(Writer, BlockType) -> Writer) {
        self.file = add(std::mem::take(&mut self.file), self.block_type);
    }
}
