//! Writes small valid files into `corpus/`, from which the fuzzer starts.
//!
//! Run in this folder: `cargo +nightly run --example seeds`.

use std::path::Path;

use paceline_formats::gguf::Array;
use paceline_formats::gguf::testing::Writer;

/// A header of two tensors and its 20 bytes of data.
const SAFETENSORS: &str = r#"{"__metadata__":{"format":"pt"},
"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
"b":{"dtype":"BF16","shape":[3,2],"data_offsets":[8,20]}}"#;

const TOKENIZER: &str = r#"{"version":"1.0","added_tokens":[{"id":3,"content":"<s>",
"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
"normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,
"trim_offsets":true,"use_regex":true},"post_processor":null,"decoder":{"type":"ByteLevel"},
"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}}"#;

const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' \
    + m.content | trim + '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn gguf(version: u32) -> Vec<u8> {
    Writer::new()
        .version(version)
        .alignment(32)
        .meta("general.architecture", "llama")
        .meta("flag", true)
        .meta("eps", 1e-5_f32)
        .meta("tokens", ["a", "bc", ""])
        .meta(
            "nested",
            Array::Array(vec![Array::U8(vec![1]), Array::I64(vec![-1])]),
        )
        .f32s("norm", &[5], &[1.0; 5])
        .raw_tensor("weight", 8, &[2, 32], vec![9; 68])
        .raw_tensor("exotic", 39, &[2, 32], vec![9; 34])
        .to_bytes()
}

/// Two ranks: how many, what their containers' lengths are, and a group and an address of each.
fn side() -> Vec<u8> {
    let mut all = vec![2];
    all.extend([28_u32; 2].map(u32::to_le_bytes).concat());
    for address in ["10.0.0.1:900", "10.0.0.2:900"] {
        all.extend([7; 16]);
        all.extend(address.as_bytes());
    }
    all
}

fn main() -> std::io::Result<()> {
    let mut safetensors = (SAFETENSORS.len() as u64).to_le_bytes().to_vec();
    safetensors.extend(SAFETENSORS.as_bytes());
    safetensors.extend([7; 20]);
    let seeds: [(&str, Vec<u8>); 6] = [
        ("gguf/v2", gguf(2)),
        ("gguf/v3", gguf(3)),
        ("safetensors/two", safetensors),
        ("tokenizer_json/bpe", TOKENIZER.into()),
        ("chat_template/chatml", TEMPLATE.into()),
        ("comm_side/two", side()),
    ];
    let corpus = Path::new("corpus");
    for (name, content) in seeds {
        let path = corpus.join(name);
        std::fs::create_dir_all(path.parent().expect("a seed lies in its target's folder"))?;
        std::fs::write(path, content)?;
    }
    Ok(())
}
