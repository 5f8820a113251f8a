//! Random GGUF models of a few hundred kilobytes, made in the test.

use std::path::Path;

use paceline_base::{BlockType, SplitMix64};
use paceline_model::ModelFamily;
use paceline_tensor::storage::random::random_row;
use paceline_weights::gguf::MetadataValue;
use paceline_weights::gguf::testing::GgufWriter;

use super::gemma4;

/// Of gated delta nets: heads, elements of a head, inputs of the convolution.
pub(crate) const KEY_HEADS: usize = 4;
pub(crate) const VALUE_HEADS: usize = 8;
pub(crate) const STATE: usize = 32;
const TAPS: usize = 4;

/// Blocks of a Nemotron-H: Mamba with a feed-forward, alone, attention and Mamba with experts.
pub(crate) const NEMOTRON: &[u8] = b"M-M*EME";

/// Of families that have them.
const EXPERTS: usize = 7;
const EXPERT_FFN: usize = 256;
/// Experts of the DeepSeek family, in four groups.
const GROUPED: usize = 8;
/// Elements of a query that turn, of DeepSeek's.
const TURNED: usize = 16;
/// Types of files of DeepSeek's that expand keys and values by one matrix.
const JOINED: [BlockType; 2] = [BlockType::Q5_1, BlockType::BF16];

/// Sizes of latent attention: of a query and of a value, and of what both come from.
struct Heads {
    plain: usize,
    value: usize,
    latent: usize,
}

/// The shape of a random model. Every row is whole super-blocks of 256, so that any storage type
/// fits; norms and biases are F32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiny {
    pub(crate) family: ModelFamily,
    pub(crate) block_type: BlockType,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) ffn: usize,
    pub(crate) vocab: usize,
    pub(crate) layers: usize,
    /// Of windowed layers of gemma and gpt-oss.
    pub(crate) window: usize,
    /// Experts to choose from, but for families with groups of them.
    pub(crate) experts: usize,
}

impl Tiny {
    /// The shape that stands for a family. Heads are grouped everywhere. For qwen3 and gemma heads
    /// make up more than the width. For gemma there are enough layers that one is not windowed, and
    /// a window that ends inside of pages.
    pub(crate) const fn new(family: ModelFamily, block_type: BlockType) -> Self {
        let (heads, kv_heads, head_dim, layers) = match family {
            ModelFamily::Llama
            | ModelFamily::Mistral
            | ModelFamily::Granite
            | ModelFamily::Phi3
            | ModelFamily::Mixtral
            | ModelFamily::Dbrx
            | ModelFamily::GptOss => (8, 2, 32, 2),
            ModelFamily::SmolLm3 | ModelFamily::Olmo2 => (8, 4, 32, 4),
            ModelFamily::MiniMaxM2 => (8, 4, 32, 2),
            ModelFamily::Glm4Moe => (8, 2, 32, 3),
            ModelFamily::Qwen2 | ModelFamily::Qwen2Moe => (4, 4, 64, 2),
            ModelFamily::Qwen3 | ModelFamily::Qwen3Moe => (8, 4, 64, 2),
            ModelFamily::Gemma2 => (4, 2, 64, 2),
            ModelFamily::Gemma3 => (4, 1, 128, 6),
            ModelFamily::Gemma4 => (8, 2, 32, 6),
            ModelFamily::DeepSeek => (4, 1, if block_type.len() > 32 { 256 } else { 64 }, 3),
            ModelFamily::Qwen3Next
            | ModelFamily::Qwen35
            | ModelFamily::Qwen35Moe
            | ModelFamily::Qwen4Exp
            | ModelFamily::KimiLinear
            | ModelFamily::MiniMaxM3
            | ModelFamily::DeepSeek4
            | ModelFamily::Glm5Next
            | ModelFamily::Gemma3n => (4, 2, 64, 4),
            ModelFamily::Lfm2 | ModelFamily::Lfm2Moe => (8, 2, 32, 3),
            ModelFamily::NemotronH => (8, 2, 32, NEMOTRON.len()),
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
            experts: EXPERTS,
        }
    }

    /// `n` random ids.
    pub(crate) fn tokens(&self, n: usize, seed: u64) -> Vec<u32> {
        let mut random = SplitMix64::new(seed);
        (0..n).map(|_| random.below(self.vocab) as u32).collect()
    }

    /// Writes the model; the same shape gives the same bytes.
    pub(crate) fn write(&self, path: &Path) {
        self.file().write(path);
    }

    /// The model, to be changed before it is written.
    pub(crate) fn file(&self) -> TinyFile {
        let mut file = TinyFile {
            entries: self.metadata(),
            tensors: Vec::new(),
            block_type: self.block_type,
            random: SplitMix64::new(7),
        };
        file.matrix("token_embd", self.vocab, self.width);
        let norm = match self.family.has_short_convs() {
            true => "token_embd_norm.weight",
            false => "output_norm.weight",
        };
        file.vector(norm, self.width, 1.0);
        file.matrix("output", self.vocab, self.width);
        if self.family == ModelFamily::Gemma4 {
            gemma4::tables(self, &mut file);
        }
        (0..self.layers).for_each(|i| self.layer(&mut file, i));
        file
    }

    /// The entries of `tiny.tsv` for the family, in their order; a later one of a name counts.
    fn metadata(&self) -> Vec<(String, MetadataValue)> {
        let name = self.family.name();
        let tokens: Vec<String> = (0..self.vocab).map(|i| format!("t{i}")).collect();
        let mut entries = vec![
            ("general.architecture".to_owned(), name.into()),
            ("tokenizer.ggml.tokens".to_owned(), tokens.into()),
        ];
        let mut set = |key: &str, value| {
            let key = format!("{name}.{key}");
            entries.retain(|(known, _)| *known != key);
            entries.push((key, value));
        };
        let own = format!("{:?}", self.family);
        for row in include_str!("tiny.tsv").lines().skip(1) {
            let columns: Vec<&str> = row.split('\t').collect();
            let [families, key, kind, text] = columns[..] else {
                panic!("{row:?}");
            };
            let is_meant = match families {
                "*" => true,
                "experts" => self.has_experts(self.layers),
                some => some.split(',').any(|family| family == own),
            };
            if is_meant {
                set(key, self.value(kind, text));
            }
        }
        if self.family == ModelFamily::Gemma4 {
            gemma4::entries(self)
                .into_iter()
                .for_each(|(key, value)| set(key, value));
        }
        entries
    }

    /// A value of `tiny.tsv`, or the size that it names.
    fn value(&self, kind: &str, text: &str) -> MetadataValue {
        let heads = self.latent_heads();
        let of_blocks = |kind: &[u8], n: usize| -> Vec<u32> {
            let size = |block| u32::from(kind.contains(block)) * n as u32;
            NEMOTRON.iter().map(size).collect()
        };
        let kv = self.kv_heads as u32;
        let size = match text {
            "blocks" => self.layers + self.more_blocks(),
            "more_blocks" => self.more_blocks(),
            "width" => self.width,
            "ffn" => self.ffn,
            "heads" => self.heads,
            "kv_heads" => self.kv_heads,
            "head_dim" => self.head_dim,
            "window" => self.window,
            "experts" => self.experts_of(),
            "key_mla" => heads.plain + TURNED,
            "value_mla" => heads.value,
            "latent" => heads.latent,
            "kv_of_attention" => {
                let of = (0..self.layers).map(|i| u32::from(self.attends(i)) * kv);
                return of.collect::<Vec<u32>>().into(); // 0 for layers without attention
            }
            "kv_of_blocks" => return of_blocks(b"*", self.kv_heads).into(),
            "ffn_of_blocks" => return of_blocks(b"-E", self.ffn).into(),
            _ => return value_of(kind, text),
        };
        (size as u32).into()
    }

    /// Blocks behind the layers, for predicting more than one token: their weights are not read.
    fn more_blocks(&self) -> usize {
        usize::from(matches!(
            self.family,
            ModelFamily::Glm4Moe | ModelFamily::DeepSeek | ModelFamily::Qwen35
        ))
    }

    fn experts_of(&self) -> usize {
        match self.family {
            ModelFamily::DeepSeek => GROUPED,
            _ => self.experts,
        }
    }

    /// Sizes of latent attention.
    fn latent_heads(&self) -> Heads {
        let plain = self.head_dim.max(32);
        Heads {
            plain,
            value: (self.head_dim / 4).max(16),
            latent: plain,
        }
    }

    /// Attention of DeepSeek's: keys and values expanded apart, or by one matrix as in old files.
    fn latent(&self, file: &mut TinyFile, name: impl Fn(&str) -> String) {
        let Heads {
            plain,
            value,
            latent,
        } = self.latent_heads();
        file.matrix(&name("attn_q_a"), latent, self.width);
        file.vector(&name("attn_q_a_norm.weight"), latent, 1.5);
        file.matrix(&name("attn_q_b"), self.heads * (plain + TURNED), latent);
        file.matrix(&name("attn_kv_a_mqa"), latent + TURNED, self.width);
        file.vector(&name("attn_kv_a_norm.weight"), latent, 1.5);
        if JOINED.contains(&self.block_type) {
            file.matrix(&name("attn_kv_b"), self.heads * (plain + value), latent);
        } else {
            for (part, shape) in [
                ("attn_k_b", [self.heads, latent, plain]),
                ("attn_v_b", [self.heads, value, latent]),
            ] {
                file.put(&name(&format!("{part}.weight")), self.block_type, &shape);
            }
        }
        file.matrix(&name("attn_output"), self.width, self.heads * value);
    }

    /// Whether layer `i` has experts.
    fn has_experts(&self, i: usize) -> bool {
        let few_attend = [ModelFamily::Qwen35, ModelFamily::Lfm2];
        let dense = ModelFamily::DENSE.contains(&self.family) || few_attend.contains(&self.family);
        let first_is_dense = matches!(
            self.family,
            ModelFamily::Glm4Moe | ModelFamily::DeepSeek | ModelFamily::Lfm2Moe
        );
        !dense && (!first_is_dense || i > 0)
    }

    /// Experts, three for each row, and for qwen2moe and glm4moe a shared one.
    fn experts(&self, file: &mut TinyFile, name: impl Fn(&str) -> String) {
        let (c, f, n) = (self.width, EXPERT_FFN, self.experts_of());
        file.put(&name("ffn_gate_inp.weight"), BlockType::F32, &[n, c]);
        for (part, shape) in [
            ("ffn_gate_exps", [n, f, c]),
            ("ffn_up_exps", [n, f, c]),
            ("ffn_down_exps", [n, c, f]),
        ] {
            file.put(&name(&format!("{part}.weight")), self.block_type, &shape);
        }
        if self.family == ModelFamily::GptOss {
            file.vector(&name("ffn_gate_inp.bias"), n, 0.0);
            for (part, rows) in [
                ("ffn_gate_exps", f),
                ("ffn_up_exps", f),
                ("ffn_down_exps", c),
            ] {
                file.put(&name(&format!("{part}.bias")), BlockType::F32, &[n, rows]);
            }
        }
        if matches!(
            self.family,
            ModelFamily::Glm4Moe
                | ModelFamily::MiniMaxM2
                | ModelFamily::DeepSeek
                | ModelFamily::Lfm2Moe
        ) {
            file.vector(&name("exp_probs_b.bias"), n, 0.0);
        }
        let gated = [
            ModelFamily::Qwen2Moe,
            ModelFamily::Qwen3Next,
            ModelFamily::Qwen35Moe,
        ];
        if gated.contains(&self.family) {
            file.put(&name("ffn_gate_inp_shexp.weight"), BlockType::F32, &[c]);
        }
        let shared = [ModelFamily::Glm4Moe, ModelFamily::DeepSeek];
        if gated.contains(&self.family) || shared.contains(&self.family) {
            let shared = match self.family {
                ModelFamily::Glm4Moe => 2 * EXPERT_FFN,
                ModelFamily::DeepSeek => EXPERT_FFN,
                _ => self.ffn,
            };
            file.matrix(&name("ffn_gate_shexp"), shared, c);
            file.matrix(&name("ffn_up_shexp"), shared, c);
            file.matrix(&name("ffn_down_shexp"), c, shared);
        }
    }

    pub(crate) fn has_delta_nets(&self) -> bool {
        matches!(
            self.family,
            ModelFamily::Qwen3Next | ModelFamily::Qwen35 | ModelFamily::Qwen35Moe
        )
    }

    /// States that outlast some pages.
    fn delta_net(&self, file: &mut TinyFile, name: &impl Fn(&str) -> String) {
        let values = VALUE_HEADS * STATE;
        let channels = 2 * KEY_HEADS * STATE + values;
        file.matrix(&name("attn_qkv"), channels, self.width);
        file.matrix(&name("attn_gate"), values, self.width);
        if self.family == ModelFamily::Qwen3Next {
            file.matrix(&name("ssm_ba"), 2 * VALUE_HEADS, self.width);
        } else {
            file.matrix(&name("ssm_beta"), VALUE_HEADS, self.width);
            file.matrix(&name("ssm_alpha"), VALUE_HEADS, self.width);
        }
        let conv = name("ssm_conv1d.weight");
        file.put(&conv, BlockType::F32, &[channels, TAPS]);
        file.vector(&name("ssm_dt.bias"), VALUE_HEADS, -4.0);
        file.vector(&name("ssm_a"), VALUE_HEADS, -1.0);
        file.vector(&name("ssm_norm.weight"), STATE, 1.0);
        file.matrix(&name("ssm_out"), self.width, values);
    }

    fn nemotron_block(&self, file: &mut TinyFile, i: usize) {
        let name = |part: &str| format!("blk.{i}.{part}");
        let (c, values) = (self.width, VALUE_HEADS * STATE);
        let channels = 2 * KEY_HEADS * STATE + values;
        file.vector(&name("attn_norm.weight"), c, 2.0);
        match NEMOTRON[i] {
            b'M' => {
                file.matrix(&name("ssm_in"), channels + values + VALUE_HEADS, c);
                file.put(
                    &name("ssm_conv1d.weight"),
                    BlockType::F32,
                    &[channels, TAPS],
                );
                file.vector(&name("ssm_conv1d.bias"), channels, 0.0);
                file.vector(&name("ssm_dt.bias"), VALUE_HEADS, -4.0);
                for (part, centre) in [("ssm_a", -1.0), ("ssm_d", 1.0)] {
                    file.vector(&name(part), VALUE_HEADS, centre);
                }
                file.vector(&name("ssm_norm.weight"), values, 1.0);
                file.matrix(&name("ssm_out"), c, values);
            }
            b'*' => self.heads_of(file, &name, false),
            b'-' => {
                file.matrix(&name("ffn_up"), self.ffn, c);
                file.matrix(&name("ffn_down"), c, self.ffn);
            }
            _ => {
                let n = self.experts_of();
                file.put(&name("ffn_gate_inp.weight"), BlockType::F32, &[n, c]);
                file.vector(&name("exp_probs_b.bias"), n, 0.0);
                for (part, shape) in [
                    ("ffn_up_exps.weight", [n, EXPERT_FFN, c]),
                    ("ffn_down_exps.weight", [n, c, EXPERT_FFN]),
                ] {
                    file.put(&name(part), self.block_type, &shape);
                }
                file.matrix(&name("ffn_up_shexp"), self.ffn, c);
                file.matrix(&name("ffn_down_shexp"), c, self.ffn);
            }
        }
    }

    /// Whether layer `i` is attention; in families with short convolutions the second is.
    fn attends(&self, i: usize) -> bool {
        !self.family.has_short_convs() || i == 1
    }

    fn short_conv(&self, file: &mut TinyFile, name: &impl Fn(&str) -> String) {
        file.matrix(&name("shortconv.in_proj"), 3 * self.width, self.width);
        let taps = name("shortconv.conv.weight");
        file.put(&taps, BlockType::F32, &[self.width, TAPS]);
        file.matrix(&name("shortconv.out_proj"), self.width, self.width);
    }

    /// Projections of a layer's attention with heads; `gated`: queries have gates.
    fn heads_of(&self, file: &mut TinyFile, name: &dyn Fn(&str) -> String, gated: bool) {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let q_rows = if gated { 2 * q } else { q };
        if self.family.joins_qkv() {
            file.matrix(&name("attn_qkv"), q + 2 * kv, self.width);
        } else {
            file.matrix(&name("attn_q"), q_rows, self.width);
            file.matrix(&name("attn_k"), kv, self.width);
            file.matrix(&name("attn_v"), kv, self.width);
        }
        file.matrix(&name("attn_output"), self.width, q);
        if gated {
            file.vector(&name("attn_q_norm.weight"), self.head_dim, 1.5);
            file.vector(&name("attn_k_norm.weight"), self.head_dim, 1.5);
        }
    }

    /// A dense feed-forward part.
    fn feed_forward(&self, file: &mut TinyFile, name: impl Fn(&str) -> String) {
        let joined = self.family == ModelFamily::Phi3;
        if !joined {
            file.matrix(&name("ffn_gate"), self.ffn, self.width);
        }
        let up = if joined { 2 * self.ffn } else { self.ffn };
        file.matrix(&name("ffn_up"), up, self.width);
        file.matrix(&name("ffn_down"), self.width, self.ffn);
    }

    fn layer(&self, file: &mut TinyFile, i: usize) {
        if self.family == ModelFamily::Gemma4 {
            gemma4::layer(self, file, i);
            self.experts(file, |part| format!("blk.{i}.{part}"));
            return gemma4::scales(self, file, self.experts, i);
        }
        if self.family == ModelFamily::NemotronH {
            return self.nemotron_block(file, i);
        }
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let name = |part: &str| format!("blk.{i}.{part}");
        let is_olmo = self.family == ModelFamily::Olmo2;
        if !is_olmo {
            // Norm weights around 4 make scores spread, so that attention is not a plain mean.
            file.vector(&name("attn_norm.weight"), self.width, 4.0);
        }
        let has_gates = self.has_delta_nets();
        if has_gates && !(i + 1).is_multiple_of(4) {
            self.delta_net(file, &name);
        } else if !self.attends(i) {
            self.short_conv(file, &name);
        } else if self.family == ModelFamily::DeepSeek {
            self.latent(file, name);
        } else {
            self.heads_of(file, &name, has_gates);
        }
        let second = match self.family {
            ModelFamily::GptOss
            | ModelFamily::Glm4Moe
            | ModelFamily::Qwen3Next
            | ModelFamily::Qwen35
            | ModelFamily::Qwen35Moe => "post_attention_norm.weight",
            ModelFamily::Dbrx => "attn_output_norm.weight",
            _ => "ffn_norm.weight",
        };
        if !is_olmo {
            file.vector(&name(second), self.width, 2.0);
        }
        match self.has_experts(i) {
            true => self.experts(file, name),
            false => self.feed_forward(file, name),
        }
        if self.family == ModelFamily::GptOss {
            file.vector(&name("attn_output.bias"), self.width, 0.0);
            file.vector(&name("attn_sinks.weight"), self.heads, 0.5);
        }
        if is_olmo || self.family == ModelFamily::MiniMaxM2 {
            file.vector(&name("attn_q_norm.weight"), q, 1.5);
            file.vector(&name("attn_k_norm.weight"), kv, 1.5);
        }
        if matches!(
            self.family,
            ModelFamily::Qwen2 | ModelFamily::Qwen2Moe | ModelFamily::GptOss | ModelFamily::Glm4Moe
        ) {
            file.vector(&name("attn_q.bias"), q, 0.0);
            file.vector(&name("attn_k.bias"), kv, 0.0);
            file.vector(&name("attn_v.bias"), kv, 0.0);
        }
        if matches!(
            self.family,
            ModelFamily::Qwen3 | ModelFamily::Qwen3Moe | ModelFamily::Gemma3 | ModelFamily::Glm4Moe
        ) || self.family.has_short_convs() && self.attends(i)
        {
            file.vector(&name("attn_q_norm.weight"), self.head_dim, 1.5);
            file.vector(&name("attn_k_norm.weight"), self.head_dim, 1.5);
        }
        if is_olmo || [ModelFamily::Gemma2, ModelFamily::Gemma3].contains(&self.family) {
            file.vector(&name("post_attention_norm.weight"), self.width, 1.0);
            file.vector(&name("post_ffw_norm.weight"), self.width, 1.0);
        }
    }
}

/// A tensor of a [`TinyFile`].
#[derive(Clone, Debug)]
pub(crate) struct TinyTensor {
    pub(crate) name: String,
    /// Number of the storage type in GGUF files.
    pub(crate) type_id: u32,
    /// Outermost first.
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A GGUF file in parts that a test can change.
#[derive(Clone, Debug)]
pub(crate) struct TinyFile {
    pub(crate) entries: Vec<(String, MetadataValue)>,
    pub(crate) tensors: Vec<TinyTensor>,
    block_type: BlockType,
    random: SplitMix64,
}

impl TinyFile {
    /// Sets a metadata entry; `None` takes it away.
    pub(crate) fn set(&mut self, key: &str, value: Option<MetadataValue>) {
        self.entries.retain(|(k, _)| k != key);
        self.entries
            .extend(value.map(|value| (key.to_owned(), value)));
    }

    /// Adds a tensor, or replaces the one of that name, by random rows.
    pub(crate) fn put(&mut self, name: &str, block_type: BlockType, shape: &[usize]) {
        let (cols, rows) = shape.split_last().unwrap();
        let row = |_| random_row(block_type, *cols, self.random.next());
        let tensor = TinyTensor {
            name: name.to_owned(),
            type_id: block_type.to_gguf().expect("a GGUF type"),
            shape: shape.to_vec(),
            bytes: (0..rows.iter().product()).flat_map(row).collect(),
        };
        self.tensors.retain(|t| t.name != name);
        self.tensors.push(tensor);
    }

    pub(crate) fn write(&self, path: &Path) {
        let mut writer = GgufWriter::new();
        for (key, value) in &self.entries {
            writer = writer.meta(key, value.clone());
        }
        for t in &self.tensors {
            writer = writer.raw_tensor(&t.name, t.type_id, &t.shape, t.bytes.clone());
        }
        writer.write(path);
    }

    /// The weight of `stem`, `(rows, cols)`.
    pub(super) fn matrix(&mut self, stem: &str, rows: usize, cols: usize) {
        self.put(&format!("{stem}.weight"), self.block_type, &[rows, cols]);
    }

    /// `n` values within half of `centre`.
    pub(super) fn vector(&mut self, name: &str, n: usize, centre: f32) {
        let unit = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let value = |_| centre + 0.5 * unit(self.random.next());
        let values: Vec<f32> = (0..n).map(value).collect();
        self.put_f32(name, &values);
    }

    /// Adds a vector.
    pub(crate) fn put_f32(&mut self, name: &str, values: &[f32]) {
        self.tensors.push(TinyTensor {
            name: name.to_owned(),
            type_id: BlockType::F32.to_gguf().expect("a GGUF type"),
            shape: vec![values.len()],
            bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        });
    }
}

/// The value of a metadata entry of a table, of a type of GGUF.
pub(crate) fn value_of(kind: &str, text: &str) -> MetadataValue {
    match kind {
        "u32" => MetadataValue::U32(text.parse().unwrap()),
        "i32" => MetadataValue::I32(text.parse().unwrap()),
        "f32" => MetadataValue::F32(text.parse().unwrap()),
        "f64" => MetadataValue::F64(text.parse().unwrap()),
        "bool" => MetadataValue::Bool(text.parse().unwrap()),
        "str" => text.into(),
        "u32s" => {
            let list = text.split(',').map(|n| n.parse().unwrap());
            list.collect::<Vec<u32>>().into()
        }
        _ => panic!("no type {kind}"),
    }
}
