//! Adapters of a served model: one copy of the weights, several names.

use std::path::Path;

use paceline_base::SplitMix64;
use serde_json::{Map, Value, json};

use super::server::{NodeServer, chat};
use super::tiny::{FAMILIES, TinyModelSpec};
use super::{TestHome, alone, finish, http, text};
use crate::common::home::object;

/// Inner dimension of the adapters.
const RANK: usize = 2;

/// Width and feed-forward of the tiny models.
const SIZES: [usize; 2] = [256, 512];

/// Writes an adapter of the queries, the attention's output and down, in PEFT's form.
pub(crate) fn write_adapter(tiny: TinyModelSpec, folder: &Path, seed: u64) {
    let [width, ffn] = SIZES;
    let heads = tiny.heads * tiny.head_dim;
    let mut random = SplitMix64::new(seed);
    let (mut header, mut bytes) = (Map::new(), Vec::new());
    for layer in 0..tiny.layers {
        for (name, out, inputs) in [
            ("self_attn.q_proj", heads, width),
            ("self_attn.o_proj", width, heads),
            ("mlp.down_proj", width, ffn),
        ] {
            for (half, shape) in [("A", [RANK, inputs]), ("B", [out, RANK])] {
                let begin = bytes.len();
                for _ in 0..shape[0] * shape[1] {
                    let unit = random.below(2001) as f32 / 1000.0 - 1.0;
                    bytes.extend((0.3 * unit).to_le_bytes());
                }
                let range = [begin, bytes.len()];
                header.insert(
                    format!("base_model.model.model.layers.{layer}.{name}.lora_{half}.weight"),
                    json!({"dtype": "F32", "shape": shape, "data_offsets": range}),
                );
            }
        }
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(bytes);
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("adapter_model.safetensors"), file).unwrap();
    let config = json!({"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK});
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

fn answer(server: &NodeServer, model: &str) -> String {
    let body = chat(model, "hi", &json!({"max_tokens": 16}));
    let answer = http::ask(server.port, "/v1/chat/completions", Some(&body));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let text = &answer.body["choices"][0]["message"]["content"];
    text.as_str().unwrap().to_owned()
}

#[test]
fn one_copy_of_the_weights_answers_with_each_adapter_over_any_split() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    write_adapter(FAMILIES[0], &world.path("models/poet"), 1);
    write_adapter(FAMILIES[0], &world.path("models/cook"), 2);
    let names = ["llama", "poet", "cook", "llama:poet"];
    let told = |nodes: &str| {
        let args = "--adapter poet=poet --adapter cook=cook --threads 1 --nodes";
        let args: Vec<&str> = args.split(' ').chain([nodes]).collect();
        let server = NodeServer::start(&world, &model, &args);
        let list = http::ask(server.port, "/v1/models", None).body;
        let list = list["data"].as_array().unwrap().iter();
        let ids: Vec<&str> = list.map(|model| model["id"].as_str().unwrap()).collect();
        assert_eq!(ids, names[..3]);
        let told = names.map(|name| answer(&server, name));
        server.stop(nodes.parse().unwrap());
        told
    };
    let one = told("1");
    let [base, poet, cook, again] = &one;
    assert!(base != poet && base != cook && poet != cook, "{one:?}");
    assert_eq!(poet, again);
    assert_eq!(told("3"), one);

    // Without a name it answers in place of the model, and `run` says the same.
    let server = NodeServer::start(&world, &model, &["--adapter", "poet", "--threads", "1"]);
    assert_eq!(answer(&server, "llama"), *poet);
    server.stop(1);
    let run = ["run", &model, "hi", "--adapter", "poet", "--json"];
    let more = ["--temperature", "0", "--max-tokens", "16", "--nodes", "2"];
    let ran = finish(&mut world.paceline(run.into_iter().chain(more)));
    assert_eq!(object(&ran)["text"], poet.as_str());
    assert!(!world.path("home/fused").exists(), "no copy of the model");
}

#[test]
fn adapters_that_do_not_fit_are_refused_before_anything_is_loaded() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    write_adapter(FAMILIES[0], &world.path("models/poet"), 1);
    let refused = |args: &[&str]| {
        let up = ["up", "--no-beacons", "--port", "0", &model].into_iter();
        let output = finish(&mut world.paceline(up.chain(args.iter().copied())));
        assert!(!output.status.success());
        text(&output.stderr)
    };
    let same = ["--adapter", "llama=poet"];
    assert!(refused(&same).contains("hint: give an adapter a name of its own"));
    let missing = refused(&["--adapter", "poet=missing"]);
    assert!(missing.contains("missing"), "{missing}");
    let tiny = TinyModelSpec {
        layers: 5,
        ..FAMILIES[0]
    };
    write_adapter(tiny, &world.path("models/long"), 1);
    let long = refused(&["--adapter", "long=long"]);
    assert!(
        long.contains("adapter long: layer 4, Down: the model has no such matrix"),
        "{long}"
    );
}
