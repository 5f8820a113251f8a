//! A random model of two layers with a byte-level vocabulary of 32 tokens, built in the test.

use std::path::PathBuf;
use std::sync::Arc;

use paceline_base::{KernelClass, Rank};
use paceline_model::testing::{
    FFN, HEAD_DIM, HEADS, KV_HEADS, LAYERS, WIDTH, ends, matrix, spell, tiny_llama,
};
use paceline_model::{
    Adapter, AdapterId, AdapterPair, LayerRole, LoadOptions, Model, ModelSource, Split,
};
use paceline_model_mlx::{MlxModel, MlxOptions, MlxPlaces};
use paceline_tensor::{InstructionSet, Kernels};
use paceline_text::tokenizer::{Specials, Tokenizer};
use paceline_weights::gguf::testing::GgufWriter;

#[path = "../../../../model/tests/common/toy.rs"]
mod toy;

use toy::{config_of, toy};

use crate::{Engine, EngineConfig};

/// Token ids: letters, a space, two characters of three and four bytes, and a token that ends the
/// answer. The characters' bytes and pieces of them are tokens too, so that characters and stop
/// strings are often cut.
const TOKENS: [&[u8]; 31] = [
    b"a",
    b"b",
    b"c",
    b"d",
    b"e",
    b"f",
    b"g",
    b"h",
    b"i",
    b"j",
    b"k",
    b"l",
    b"m",
    b" ",
    b"\xe4",
    b"\xb8",
    b"\xad",
    b"\xf0",
    b"\x9f",
    b"\x91",
    b"\xa8",
    b"ab",
    b"cd",
    b"abc",
    b" d",
    b"e ",
    b"\xe4\xb8",
    b"\xe4\xb8\xad",
    b"\xf0\x9f",
    b"\x91\xa8",
    b"\xf0\x9f\x91\xa8",
];

/// Pairs that make up the longer tokens.
const MERGES: [[&[u8]; 2]; 10] = [
    [b"a", b"b"],
    [b"c", b"d"],
    [b"ab", b"c"],
    [b" ", b"d"],
    [b"e", b" "],
    [b"\xe4", b"\xb8"],
    [b"\xe4\xb8", b"\xad"],
    [b"\xf0", b"\x9f"],
    [b"\x91", b"\xa8"],
    [b"\xf0\x9f", b"\x91\xa8"],
];

/// The token that ends an answer.
pub(super) const END: u32 = TOKENS.len() as u32;

/// Rows of the embedding: the last two have no token.
pub(super) const VOCAB: usize = TOKENS.len() + 3;

/// A model with its tokenizer.
#[derive(Clone, Debug)]
pub(crate) struct TinyModel {
    pub(super) model: Arc<Model>,
    pub(super) tokenizer: Arc<Tokenizer>,
}

impl TinyModel {
    /// On `threads` threads of the fastest instruction set.
    pub(crate) fn new(threads: usize) -> Self {
        Self::with_set(*InstructionSet::available().last().unwrap(), threads)
    }

    /// A model whose layers all differ.
    pub(super) fn toy(threads: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("toy.gguf");
        toy(letters(), VOCAB).write(&path);
        let kernels = Arc::new(Kernels::new(threads).unwrap());
        Self::open(&ModelSource::open(&path).unwrap(), kernels)
    }

    /// A model whose layers are a gated delta net and attention.
    pub(super) fn delta_net(threads: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("delta.gguf");
        delta_net().write(&path);
        let kernels = Arc::new(Kernels::new(threads).unwrap());
        Self::open(&ModelSource::open(&path).unwrap(), kernels)
    }

    pub(super) fn with_set(set: InstructionSet, threads: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.gguf");
        tiny_llama(letters(), VOCAB, 4096).write(&path);
        let kernels = Arc::new(Kernels::with_set(set, threads).unwrap());
        Self::open(&ModelSource::open(&path).unwrap(), kernels)
    }

    /// The same weights on MLX, by the library at `mlxc`; captures the first layer's input.
    pub(super) fn on_mlx(mlxc: PathBuf) -> MlxModel {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.gguf");
        tiny_llama(letters(), VOCAB, 4096).write(&path);
        let source = Arc::new(ModelSource::open(&path).unwrap());
        let split = Split::whole(&config_of(&source).unwrap());
        let kernels = Arc::new(Kernels::new(1).unwrap());
        let options = MlxOptions {
            places: MlxPlaces {
                explicit: Some(mlxc),
                ..MlxPlaces::default()
            },
            class: KernelClass::MlxF32,
            positions: 256,
            rows: 128,
            sequences: 1,
            kv: None,
            captures: vec![0],
            memory: None,
            patience: MlxOptions::PATIENCE,
            last_words: MlxOptions::LAST_WORDS,
        };
        MlxModel::load(source, &split, Rank(0), (options, None), kernels, |_, _| {}).unwrap()
    }

    /// As [`new`](Self::new), with adapters called `a` and `b`.
    pub(super) fn adapted(threads: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.gguf");
        tiny_llama(letters(), VOCAB, 4096).write(&path);
        let (source, kernels) = (
            ModelSource::open(&path).unwrap(),
            Arc::new(Kernels::new(threads).unwrap()),
        );
        let tiny = Self::open(&source, kernels);
        let model = Arc::into_inner(tiny.model).unwrap();
        let model = model.with_adapters(&source, &[adapter("a"), adapter("b")]);
        Self {
            model: Arc::new(model.unwrap()),
            tokenizer: tiny.tokenizer,
        }
    }

    /// The model and tokenizer of any GGUF file.
    pub(super) fn open(source: &ModelSource, kernels: Arc<Kernels>) -> Self {
        Self::open_as(source, kernels, LoadOptions::default())
    }

    pub(super) fn open_as(
        source: &ModelSource,
        kernels: Arc<Kernels>,
        options: LoadOptions,
    ) -> Self {
        let config = config_of(source).unwrap();
        let ModelSource::Gguf(file) = source else {
            panic!("not a GGUF file");
        };
        let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
        let split = Split::whole(&config);
        let load = Model::load_config;
        let model = load(source, config, &split, Rank(0), options, kernels, |_, _| {}).unwrap();
        Self {
            model: Arc::new(model),
            tokenizer: Arc::new(tokenizer),
        }
    }

    pub(crate) fn engine(&self, config: EngineConfig) -> Engine {
        let (model, tokenizer) = (Arc::clone(&self.model), Arc::clone(&self.tokenizer));
        Engine::new(model, tokenizer, config).unwrap()
    }

    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        self.tokenizer
            .encode(text, Specials::AsText, false)
            .unwrap()
    }
}

/// An adapter with values derived from its name.
fn adapter(name: &str) -> Adapter {
    let seed = name.as_bytes()[0];
    let values = |n: usize, by: f32| {
        let value = |i: usize| (i as f32 * by + f32::from(seed)).sin() * 0.5;
        (0..n).map(value).collect()
    };
    let pair = |layer, part, out: usize, inputs: usize| AdapterPair {
        layer,
        part,
        rank: 2,
        a: values(2 * inputs, 1.3),
        b: values(2 * out, 0.7),
    };
    let pairs = (0..LAYERS).flat_map(|layer| {
        [
            pair(layer, LayerRole::Query, HEADS * HEAD_DIM, WIDTH),
            pair(layer, LayerRole::Down, WIDTH, FFN),
        ]
    });
    Adapter {
        id: AdapterId {
            name: name.to_owned(),
            digest: [seed; 32],
        },
        scale: 1.0,
        pairs: pairs.collect(),
    }
}

/// A tokenizer of the 256 bytes, an end token, and `controls`.
pub(crate) fn byte_tokenizer(controls: &[&str]) -> Tokenizer {
    let mut tokens: Vec<String> = (0..=255).map(|byte| spell(&[byte])).collect();
    tokens.push("<|im_end|>".to_owned());
    tokens.extend(controls.iter().map(|name| (*name).to_owned()));
    let kinds = (0..tokens.len()).map(|i| if i < 256 { 1 } else { 3 });
    let kinds: Vec<i32> = kinds.collect();
    tokenizer_of(vocabulary(tokens, kinds).meta("tokenizer.ggml.eos_token_id", 256u32))
}

/// A tokenizer of letters without an end token.
pub(crate) fn endless_tokenizer() -> Tokenizer {
    let tokens: Vec<String> = ('a'..='e').map(String::from).collect();
    let kinds = vec![1; tokens.len()];
    tokenizer_of(vocabulary(tokens, kinds))
}

fn vocabulary(tokens: Vec<String>, kinds: Vec<i32>) -> GgufWriter {
    GgufWriter::new()
        .meta("general.architecture", "llama")
        .meta("tokenizer.ggml.model", "gpt2")
        .meta("tokenizer.ggml.pre", "smollm")
        .meta("tokenizer.ggml.tokens", tokens)
        .meta("tokenizer.ggml.token_type", kinds)
        .meta("tokenizer.ggml.merges", Vec::<String>::new())
}

fn tokenizer_of(file: GgufWriter) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vocabulary.gguf");
    file.write(&path);
    let file = paceline_weights::gguf::Gguf::open(&path).unwrap();
    Tokenizer::from_gguf(file.metadata()).unwrap()
}

/// A file with the vocabulary alone.
fn letters() -> GgufWriter {
    letters_of("llama")
}

fn letters_of(architecture: &str) -> GgufWriter {
    let mut tokens = TOKENS.map(spell).to_vec();
    tokens.push("<|im_end|>".to_owned());
    let merges: Vec<String> = MERGES
        .iter()
        .map(|pair| pair.map(spell).join(" "))
        .collect();
    let mut kinds = vec![1; tokens.len()];
    kinds[END as usize] = 3; // a control token
    GgufWriter::new()
        .meta("general.architecture", architecture)
        .meta("tokenizer.ggml.model", "gpt2")
        .meta("tokenizer.ggml.pre", "smollm")
        .meta("tokenizer.ggml.tokens", tokens)
        .meta("tokenizer.ggml.token_type", kinds)
        .meta("tokenizer.ggml.merges", merges)
        .meta("tokenizer.ggml.eos_token_id", END)
}

/// Qwen 3.5 of two layers. The first one keeps states that outlast several pages.
fn delta_net() -> GgufWriter {
    const NAME: &str = "qwen35";
    const STATE: usize = 16;
    let mut file =
        letters_of(NAME).meta(&format!("{NAME}.attention.layer_norm_rms_epsilon"), 1e-6f32);
    for (key, value) in [
        ("vocab_size", VOCAB),
        ("block_count", LAYERS),
        ("embedding_length", WIDTH),
        ("feed_forward_length", FFN),
        ("context_length", 4096),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("attention.key_length", HEAD_DIM),
        ("full_attention_interval", LAYERS),
        ("rope.dimension_count", 8),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", STATE),
        ("ssm.group_count", KV_HEADS),
        ("ssm.time_step_rank", HEADS),
        ("ssm.inner_size", HEADS * STATE),
    ] {
        file = file.meta(&format!("{NAME}.{key}"), value as u32);
    }
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let (keys, values) = (KV_HEADS * STATE, HEADS * STATE);
    let channels = 2 * keys + values;
    let mixers: [&[(&str, usize, usize)]; LAYERS] = [
        &[
            ("attn_qkv", channels, WIDTH),
            ("attn_gate", values, WIDTH),
            ("ssm_beta", HEADS, WIDTH),
            ("ssm_alpha", HEADS, WIDTH),
            ("ssm_out", WIDTH, values),
        ],
        &[
            ("attn_q", 2 * q, WIDTH),
            ("attn_k", kv, WIDTH),
            ("attn_v", kv, WIDTH),
            ("attn_output", WIDTH, q),
        ],
    ];
    file = ends(file, VOCAB);
    for (i, mixer) in mixers.into_iter().enumerate() {
        let name = |part: &str| format!("blk.{i}.{part}");
        let ffn = [
            ("ffn_gate", FFN, WIDTH),
            ("ffn_up", FFN, WIDTH),
            ("ffn_down", WIDTH, FFN),
        ];
        for (part, rows, cols) in mixer.iter().copied().chain(ffn) {
            file = matrix(file, &name(part), rows, cols);
        }
        for norm in ["attn_norm.weight", "post_attention_norm.weight"] {
            file = file.f32s(&name(norm), &[WIDTH], &[8.0; WIDTH]);
        }
    }
    for norm in ["blk.1.attn_q_norm.weight", "blk.1.attn_k_norm.weight"] {
        file = file.f32s(norm, &[HEAD_DIM], &[1.0; HEAD_DIM]);
    }
    let taps: Vec<f32> = (0..channels * 4).map(|i| (i as f32 * 0.7).sin()).collect();
    file.f32s("blk.0.ssm_conv1d.weight", &[channels, 4], &taps)
        .f32s("blk.0.ssm_dt.bias", &[HEADS], &[-5.0; HEADS])
        .f32s("blk.0.ssm_a", &[HEADS], &[-1.0; HEADS])
        .f32s("blk.0.ssm_norm.weight", &[STATE], &[1.0; STATE])
}
