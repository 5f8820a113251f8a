//! A random model of two layers with a token per byte, and its text side alone.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use paceline_engine::{Engine, EngineConfig, Runner, SamplingParams};
use paceline_model::testing::{spell, tiny_llama};
use paceline_model::{LoadOptions, ModelSource};
use paceline_serve::{ModelDetails, ServedModel};
use paceline_tensor::Kernels;
use paceline_text::chat::ChatTemplate;
use paceline_text::tokenizer::Tokenizer;
use paceline_weights::gguf::testing::GgufWriter;

pub(crate) const CONTEXT: usize = 256;

/// Room for a coding agent.
const LONG: usize = 1 << 16;

/// Ends a message. Tokens are one per byte, whose id is the byte, then the two of the template.
const END: u32 = 257;

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
pub(crate) fn model() -> ServedModel {
    static MODEL: OnceLock<ServedModel> = OnceLock::new();
    MODEL.get_or_init(|| describe(&source())).clone()
}

/// The text side with another template.
pub(crate) fn model_with(template: &str) -> ServedModel {
    ServedModel {
        template: Some(Arc::new(ChatTemplate::new(template).unwrap())),
        context: LONG,
        ..model()
    }
}

/// The text side of a model that thinks and calls tools in the form of Qwen 3.
pub(crate) fn tool_model() -> ServedModel {
    model_with(TOOL_TEMPLATE)
}

/// The text side of a model whose tokens 258 to 260 fill a hole. They stand before the text in
/// front of it, before the text behind it, and before what is filled in.
pub(crate) fn hole_model() -> ServedModel {
    let names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
    describe(&opened(&file(&names)))
}

/// A model with its weights, on a thread.
pub(crate) fn runner() -> (Runner, ServedModel) {
    let source = source();
    let model = describe(&source);
    let kernels = Arc::new(Kernels::new(1).unwrap());
    let options = LoadOptions::default();
    let weights = paceline_model::Model::load(&source, options, kernels, |_, _| {}).unwrap();
    let config = EngineConfig {
        cache_positions: 4 * CONTEXT,
        max_running: 4,
        max_waiting: 8,
        ..EngineConfig::single("tiny", CONTEXT)
    };
    let tokenizer = Arc::clone(&model.tokenizer);
    let engine = Engine::new(Arc::new(weights), tokenizer, config).unwrap();
    (Runner::start(engine, Instant::now), model)
}

fn describe(source: &ModelSource) -> ServedModel {
    let ModelSource::Gguf(file) = source else {
        panic!("not a GGUF file");
    };
    let template = ChatTemplate::from_gguf(file.metadata()).unwrap();
    ServedModel {
        id: "tiny".into(),
        aliases: vec!["org/tiny".into()],
        created_unix_s: 1_700_000_000,
        fingerprint: "cpu-tiny".into(),
        classes: "cpu".into(),
        tokenizer: Arc::new(Tokenizer::from_gguf(file.metadata()).unwrap()),
        template: Some(Arc::new(template)),
        context: CONTEXT,
        sampling: SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        },
        about: ModelDetails {
            architecture: "llama".into(),
            bytes: 1 << 20,
            parameters: 135_000_000,
            quantization: "Q8_0".into(),
        },
    }
}

fn source() -> ModelSource {
    opened(&file(&[]))
}

fn opened(file: &GgufWriter) -> ModelSource {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    file.write(&path);
    ModelSource::open(&path).unwrap()
}

/// The file, with the control tokens `more` behind those of the template.
fn file(more: &[&str]) -> GgufWriter {
    let mut tokens: Vec<String> = (0..=255).map(|byte| spell(&[byte])).collect();
    tokens.extend(["<|im_start|>".to_owned(), "<|im_end|>".to_owned()]);
    tokens.extend(more.iter().map(|name| (*name).to_owned()));
    let vocab = tokens.len();
    let mut kinds = vec![1; vocab];
    kinds[256..].fill(3); // control tokens
    let file = GgufWriter::new()
        .meta("general.architecture", "llama")
        .meta("tokenizer.ggml.model", "gpt2")
        .meta("tokenizer.ggml.pre", "smollm")
        .meta("tokenizer.ggml.tokens", tokens)
        .meta("tokenizer.ggml.token_type", kinds)
        .meta("tokenizer.ggml.merges", Vec::<String>::new())
        .meta("tokenizer.ggml.eos_token_id", END)
        .meta("tokenizer.chat_template", TEMPLATE);
    tiny_llama(file, vocab, CONTEXT)
}
