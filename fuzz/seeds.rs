//! Writes small valid files into `corpus/` of the working folder, from which the fuzzer starts.
//!
//! A target like the others, so that one build makes all: it ends before its first input.
#![no_main]

use std::path::Path;

use paceline_weights::gguf::Array;
use paceline_weights::gguf::testing::GgufWriter;

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
    GgufWriter::new()
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

/// Texts from which the readers of texts start, by target.
const TEXTS: [(&str, &str); 39] = [
    ("cluster_children/lines", "{\"Say\":1}\n\nplain\r\n"),
    (
        "cluster_nodes/wanted",
        r#"{"model":"a","nodes":[],"epoch":1}"#,
    ),
    (
        "engine_states/reply",
        r#"{"Token":{"token":7,"text":"a","logprobs":{"logprob":-0.5,"top":[[1,-0.5]]}}}"#,
    ),
    (
        "engine_states/failed",
        r#"{"Failed":{"Lost":{"reason":"x"}}}"#,
    ),
    (
        "grammar/schema",
        r#"s{"type":"object","properties":{"a":{"type":"integer","minimum":0}},"required":["a"]}"#,
    ),
    ("grammar/pattern", "r[a-z]+(foo|bar)?"),
    ("grammar/lark", "lstart: \"a\" b*\nb: /[0-9]/\n"),
    ("grammar/choice", "cyes\nno\n"),
    (
        "http/chat",
        "\x00{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"stream\":true}",
    ),
    (
        "http/completion",
        "\x01{\"model\":\"tiny\",\"prompt\":\"hi\",\"logprobs\":2,\"echo\":true}",
    ),
    (
        "http/response",
        "\x02{\"model\":\"tiny\",\"input\":\"hi\",\"tools\":[{\"type\":\"function\",\"name\":\"f\"}]}",
    ),
    (
        "http/message",
        "\x03{\"model\":\"tiny\",\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
    ),
    (
        "http/count",
        "\x04{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}",
    ),
    (
        "http/ollama",
        "\x05{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"options\":{\"top_k\":3}}",
    ),
    (
        "http/generate",
        "\x06{\"model\":\"tiny\",\"prompt\":\"hi\",\"format\":\"json\"}",
    ),
    (
        "http/infill",
        "\x08{\"input_prefix\":\"a\",\"input_suffix\":\"b\"}",
    ),
    (
        "http/tokenize",
        "\x09{\"content\":\"hi\",\"with_pieces\":true}",
    ),
    (
        "http/raw",
        "\x7fGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ),
    (
        "http/chunked",
        "\x7fPOST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
      Transfer-Encoding: chunked\r\n\r\ne\r\n{\"content\":\"a\"\r\n1\r\n}\r\n0\r\n\r\n",
    ),
    (
        "launch_hosts/hosts",
        r#"[{"ssh":"a","ips":["10.0.0.1"]},{"ssh":"b","ips":[]}]"#,
    ),
    (
        "launch_hosts/linux",
        "\x1etoken ip\n2: eth0    inet 10.0.0.2/24 brd 10.0.0.255 scope global eth0\n\
      \x1etoken route\ndefault via 10.0.0.1 dev eth0\n\x1etoken end\n",
    ),
    (
        "launch_hosts/mac",
        "\x1etoken profiler\n{\"SPThunderboltDataType\":[{\"domain_uuid_key\":\"A\",\
      \"receptacle_1_tag\":{\"receptacle_id_key\":\"1\"},\"_items\":[{\"domain_uuid_key\":\"B\"}]}]}\n\
      \x1etoken hardware\nHardware Port: Thunderbolt 1\nDevice: en2\n",
    ),
    (
        "launch_hosts/frames",
        "\x01\n\0\0\0{\"port\":1}\x04\x02\0\0\0no",
    ),
    ("launch_hosts/output", "ready\n\x1etoken 7\nplain\r\n"),
    (
        "markdown/parts",
        "# A\n*b* **c** `d`\n```rust\ne\n```\n> 3. f\n   - [x] [g](https://a)\n\n|h|\n|-:|\n|<i>|\n",
    ),
    (
        "node_messages/worker",
        r#"{"Submit":{"ticket":1,"request":{"prompt":[1],"max_tokens":2}}}"#,
    ),
    (
        "node_messages/reply",
        r#"{"Reply":{"ticket":1,"reply":{"Token":{"token":7,"text":"a","logprobs":null}}}}"#,
    ),
    (
        "node_messages/manifest",
        concat!(
            r#"{"paceline_manifest":1,"files":[{"name":"m.safetensors","bytes":9,"sha256":""#,
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            r#"","header":8,"root":""#,
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            r#""}],"inline":{"config.json":"{}"}}"#,
        ),
    ),
    ("node_messages/piece", "{\"id\":\"a\",\"at\":0}\nbytes"),
    (
        "load_events/two",
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\n",
    ),
    (
        "serve_kept/journal",
        "{\"id\":\"a\",\"endpoint\":\"Chat\",\"body\":\"{}\",\"seed\":1,\"unix_s\":1,\
      \"model\":\"m\",\"key\":null,\"earlier\":null}\n[0,{\"PromptRead\":{\"reused\":0}}]\n",
    ),
    (
        "store_hub/list",
        r#"{"sha":"ab810cf68114990406fdf996510dd3d3c6adbdf5","siblings":[{"rfilename":"model-Q4_K_M.gguf","size":7}]}"#,
    ),
    ("store_hub/range", "bytes 7-8/9"),
    (
        "train_line/file",
        "f\x0b\0\0\0\x03\0\0\0\0\0\0\x001/ad\x03\0\0\0abc",
    ),
    (
        "train_line/message",
        "m\x28\0\0\0{\"Compute\":{\"step\":3,\"start\":0,\"end\":2}}",
    ),
    (
        "tools/json",
        "<think>so</think><tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"K\"}}\n</tool_call>",
    ),
    (
        "tools/xml",
        "<tool_call><function=look><parameter=city>K</parameter></function></tool_call>",
    ),
    (
        "tools/harmony",
        "<|channel|>commentary to=functions.look<|message|>{\"city\":\"K\"}<|call|>",
    ),
    (
        "tools/mistral",
        "[TOOL_CALLS][{\"name\": \"look\", \"arguments\": {\"days\": 2}}]",
    ),
];

/// A ClientHello of TLS 1.3, as openssl sends it, cut behind its first extensions.
const HELLO: [u8; 60] = [
    0x16, 3, 1, 0, 0x37, 1, 0, 0, 0x33, 3, 3, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 2, 0x13, 1, 1, 0, 0, 8, 0, 0x2b, 0, 3, 2, 3, 4,
    0,
];

/// A plan of one sequence of one token, as a leader pads it.
fn plan() -> Vec<u8> {
    let mut words = vec![256_u32, 1, 1, 0, 1, 0, 1, 0, 1, 5, 0];
    words.resize(256, 0);
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn write_all() -> std::io::Result<()> {
    let mut safetensors = (SAFETENSORS.len() as u64).to_le_bytes().to_vec();
    safetensors.extend(SAFETENSORS.as_bytes());
    safetensors.extend([7; 20]);
    let seeds = [
        ("gguf/v2", gguf(2)),
        ("gguf/v3", gguf(3)),
        ("safetensors/two", safetensors),
        ("tokenizer_json/bpe", TOKENIZER.into()),
        ("chat_template/chatml", TEMPLATE.into()),
        ("comm_side/two", side()),
        ("rank_plan/one", plan()),
        ("tls/hello", HELLO.to_vec()),
    ];
    let texts = TEXTS.map(|(name, text)| (name, text.as_bytes().to_vec()));
    let corpus = Path::new("corpus");
    for (name, content) in seeds.into_iter().chain(texts) {
        let path = corpus.join(name);
        std::fs::create_dir_all(path.parent().expect("a seed lies in its target's folder"))?;
        std::fs::write(path, content)?;
    }
    Ok(())
}

libfuzzer_sys::fuzz_target!(init: {
    write_all().expect("the working folder can be written to");
    std::process::exit(0);
}, |_bytes: &[u8]| {});
