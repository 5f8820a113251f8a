//! A random model of two layers with a token per byte, and its text side alone.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use paceline_base::BlockType;
use paceline_engine::{Engine, EngineConfig, Runner, SamplingParams};
use paceline_formats::chat::ChatTemplate;
use paceline_formats::gguf::testing::Writer;
use paceline_formats::tokenizer::Tokenizer;
use paceline_model::{LoadOptions, Source};
use paceline_serve::{About, Model};
use paceline_tensor::Kernels;
use paceline_tensor::stored::random::random_row;

pub(crate) const CONTEXT: usize = 256;

/// Room for a coding agent.
const LONG: usize = 1 << 16;

/// Ends a message. Tokens are one per byte, whose id is the byte, then the two of the template.
const END: u32 = 257;

const WIDTH: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const FFN: usize = 128;
const LAYERS: usize = 2;

const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'tool' and not m.tool_call_id %}\
    {{ raise_exception('a tool result needs its call') }}{% endif %}\
    {{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

const TOOL_TEMPLATE: &str = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}\
    {% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
    {% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>\n\n' }}{% endif %}\
    {{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '\n<tool_call>\n{\"name\": \"' \
    + c.function.name + '\", \"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}\
    {% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// The text side; made once, since every test wants it.
pub(crate) fn model() -> Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| describe(&source(CONTEXT))).clone()
}

/// The text side with another template.
pub(crate) fn model_with(template: &str) -> Model {
    Model {
        template: Some(Arc::new(ChatTemplate::new(template).unwrap())),
        context: LONG,
        ..model()
    }
}

/// The text side of a model that thinks and calls tools in the form of Qwen 3.
pub(crate) fn tool_model() -> Model {
    model_with(TOOL_TEMPLATE)
}

/// The text side of a model whose tokens 258 to 260 fill a hole. They stand before the text in
/// front of it, before the text behind it, and before what is filled in.
pub(crate) fn hole_model() -> Model {
    let names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
    describe(&opened(&file(CONTEXT, &names)))
}

/// A model with its weights, on a thread.
pub(crate) fn runner(max_waiting: usize) -> (Runner, Model) {
    run(&source(CONTEXT), max_waiting, CONTEXT)
}

/// A model that thinks and calls tools, with room for a coding agent's prompt.
pub(crate) fn tool_runner() -> (Runner, Model) {
    let (runner, model) = run(&source(LONG), 8, LONG);
    let template = tool_model().template;
    (runner, Model { template, ..model })
}

fn run(source: &Source, max_waiting: usize, context: usize) -> (Runner, Model) {
    let model = Model {
        context,
        ..describe(source)
    };
    let kernels = Arc::new(Kernels::new(1).unwrap());
    let options = LoadOptions::default();
    let weights = paceline_model::Model::load(source, options, kernels, |_, _| {}).unwrap();
    let config = EngineConfig {
        cache_positions: 4 * context,
        max_running: 4,
        max_waiting,
        ..EngineConfig::single("tiny", context)
    };
    let tokenizer = Arc::clone(&model.tokenizer);
    let engine = Engine::new(Arc::new(weights), tokenizer, config).unwrap();
    (Runner::start(engine, Instant::now), model)
}

fn describe(source: &Source) -> Model {
    let Source::Gguf(file) = source else {
        panic!("not a GGUF file");
    };
    let template = ChatTemplate::from_gguf(file.metadata()).unwrap();
    Model {
        id: "tiny".into(),
        aliases: vec!["org/tiny".into()],
        created_unix_s: 1_700_000_000,
        fingerprint: "cpu-tiny".into(),
        tokenizer: Arc::new(Tokenizer::from_gguf(file.metadata()).unwrap()),
        template: Some(Arc::new(template)),
        context: CONTEXT,
        sampling: SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        },
        about: About {
            architecture: "llama".into(),
            bytes: 1 << 20,
            parameters: 135_000_000,
            quantization: "Q8_0".into(),
        },
    }
}

fn source(context: usize) -> Source {
    opened(&file(context, &[]))
}

fn opened(file: &Writer) -> Source {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    file.write(&path);
    Source::open(&path).unwrap()
}

/// The byte as a byte-level vocabulary spells it: what is no printable Latin-1 character is moved
/// behind it (`bytes_to_unicode` of GPT-2).
fn spell(byte: u8) -> String {
    let is_printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let moved = 256 + (0..byte).filter(|b| !is_printable(*b)).count() as u32;
    let code = if is_printable(byte) {
        byte.into()
    } else {
        moved
    };
    char::from_u32(code).unwrap().to_string()
}

/// The file, with the control tokens `more` behind those of the template.
fn file(context: usize, more: &[&str]) -> Writer {
    let mut tokens: Vec<String> = (0..=255).map(spell).collect();
    tokens.extend(["<|im_start|>".to_owned(), "<|im_end|>".to_owned()]);
    tokens.extend(more.iter().map(|name| (*name).to_owned()));
    let vocab = tokens.len();
    let mut kinds = vec![1; vocab];
    kinds[256..].fill(3); // control tokens
    let mut file = Writer::new()
        .meta("general.architecture", "llama")
        .meta("llama.vocab_size", vocab as u32)
        .meta("llama.attention.layer_norm_rms_epsilon", 1e-6f32)
        .meta("tokenizer.ggml.model", "gpt2")
        .meta("tokenizer.ggml.pre", "smollm")
        .meta("tokenizer.ggml.tokens", tokens)
        .meta("tokenizer.ggml.token_type", kinds)
        .meta("tokenizer.ggml.merges", Vec::<String>::new())
        .meta("tokenizer.ggml.eos_token_id", END)
        .meta("tokenizer.chat_template", TEMPLATE);
    for (key, value) in [
        ("block_count", LAYERS),
        ("embedding_length", WIDTH),
        ("feed_forward_length", FFN),
        ("context_length", context),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("attention.key_length", HEAD_DIM),
    ] {
        file = file.meta(&format!("llama.{key}"), value as u32);
    }
    // Logits of a standard deviation near 3: some tokens are likely, many possible.
    file = matrix(file, "token_embd", vocab, WIDTH);
    file = file.f32s("output_norm.weight", &[WIDTH], &[18.0; WIDTH]);
    file = matrix(file, "output", vocab, WIDTH);
    (0..LAYERS).fold(file, layer)
}

fn layer(file: Writer, i: usize) -> Writer {
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let name = |part: &str| format!("blk.{i}.{part}");
    let norms = ["attn_norm.weight", "ffn_norm.weight"];
    let file = norms.iter().fold(file, |file, norm| {
        file.f32s(&name(norm), &[WIDTH], &[8.0; WIDTH])
    });
    let matrices = [
        ("attn_q", q, WIDTH),
        ("attn_k", kv, WIDTH),
        ("attn_v", kv, WIDTH),
        ("attn_output", WIDTH, q),
        ("ffn_gate", FFN, WIDTH),
        ("ffn_up", FFN, WIDTH),
        ("ffn_down", WIDTH, FFN),
    ];
    let add =
        |file, (part, rows, cols): (&str, usize, usize)| matrix(file, &name(part), rows, cols);
    matrices.into_iter().fold(file, add)
}

/// A random matrix whose values follow from its name.
fn matrix(file: Writer, name: &str, rows: usize, cols: usize) -> Writer {
    let seed = name
        .bytes()
        .fold(0u64, |seed, byte| seed * 31 + u64::from(byte));
    let row = |i| {
        random_row(
            BlockType::Q8_0,
            cols,
            seed.wrapping_mul(1000).wrapping_add(i),
        )
    };
    let bytes: Vec<u8> = (0..rows as u64).flat_map(row).collect();
    file.tensor(
        &format!("{name}.weight"),
        BlockType::Q8_0,
        &[rows, cols],
        bytes,
    )
}
