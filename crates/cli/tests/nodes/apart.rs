//! Prompts that nodes of their own read. The answers are the same, also when those nodes are lost.
//! The other nodes compute only the rest of the prompt.

use paceline_base::SplitMix64;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::processes::signal;
use super::server::NodeServer;
use super::tiny::FAMILIES;
use super::{TestHome, alone, finish, http, until};

const TOKENS: u32 = 24;

/// A prompt of `n` tokens: each letter is one.
fn letters(n: usize, seed: u64) -> String {
    let mut random = SplitMix64::new(seed);
    (0..n)
        .map(|_| char::from(b'a' + random.below(26) as u8))
        .collect()
}

/// A request: greedy, or sampled with this seed.
fn request(model: &str, prompt: &str, seed: Option<u64>) -> Value {
    let temperature = if seed.is_some() { 1.0 } else { 0.0 };
    json!({"model": model, "prompt": prompt, "temperature": temperature, "max_tokens": TOKENS,
           "seed": seed.unwrap_or_default(), "logprobs": 2})
}

/// The text with its log-probabilities, and the tokens of the prompt that were not computed by the
/// nodes that decode.
fn answer(port: u16, request: &Value) -> (Value, u64) {
    let answer = http::ask(port, "/v1/completions", Some(request));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let cached = &answer.body["usage"]["prompt_tokens_details"]["cached_tokens"];
    (
        answer.body["choices"][0].clone(),
        cached.as_u64().unwrap_or_default(),
    )
}

/// How often the server has said that nodes of their own read prompts.
fn times_up(server: &NodeServer) -> usize {
    let said = server.running.said();
    said.matches("prompts are read by nodes of their own")
        .count()
}

const OWN: [&str; 4] = ["--context", "1024", "--prefix-cache", "off"];

#[test]
fn prompts_read_apart_give_the_same_answers() {
    let _alone = alone();
    let world = TestHome::new();
    // Grouped heads, and layers with windows.
    let splits: [(usize, &[&str]); 2] = [
        (
            3,
            &["--nodes", "2", "--split", "tensor", "--prefill-nodes", "1"],
        ),
        (
            4,
            &[
                "--nodes",
                "2",
                "--split",
                "pipeline",
                "--prefill-nodes",
                "2",
            ],
        ),
    ];
    for (tiny, (nodes, args)) in [FAMILIES[0], FAMILIES[3]].into_iter().zip(splits) {
        let model = world.write_model(tiny);
        let requests = [
            request(&model, &letters(700, 1), None),
            request(&model, &letters(450, 2), Some(7)),
            request(&model, &letters(40, 3), None),
        ];
        let served = |nodes: usize, args: &[&str]| {
            let args = [&OWN[..], &["--threads", "1"], args].concat();
            let server = NodeServer::start(&world, &model, &args);
            let answers = requests.each_ref().map(|it| answer(server.port, it));
            server.stop(nodes);
            answers
        };
        let plain = served(1, &[]);
        assert_eq!(plain.each_ref().map(|it| it.1), [0, 0, 0]);
        let args = [args, &["--prefill-from", "256"]].concat();
        let apart = served(nodes, &args);
        let texts = |all: &[(Value, u64); 3]| all.each_ref().map(|it| it.0.clone());
        assert_eq!(texts(&apart), texts(&plain), "{tiny:?} {args:?}");
        // All full pages before the last token; a short prompt is not worth the way.
        let read = apart.each_ref().map(|it| it.1);
        assert_eq!(read, [10 * 64, 7 * 64, 0], "{tiny:?} {args:?}");
    }
}

#[test]
fn a_lost_reader_of_prompts_costs_no_answer() {
    let _alone = alone();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let args = [&OWN[..], &["--threads", "1"]].concat();
    let asked = [1, 2].map(|seed| request(&model, &letters(900, seed), None));
    let server = NodeServer::start(&world, &model, &args);
    let expected = asked.each_ref().map(|it| answer(server.port, it).0);
    server.stop(1);
    let args = [
        &args[..],
        &["--prefill-nodes", "1", "--prefill-from", "256"],
    ]
    .concat();
    let server = NodeServer::start(&world, &model, &args);
    until("both groups are connected", || times_up(&server) == 1);
    let reader = server.running.workers(2)[1];
    // It has the prompt and does not get on.
    signal(reader, Signal::STOP);
    let port = server.port;
    let first = std::thread::scope(|scope| {
        let first = scope.spawn(|| answer(port, &asked[0]));
        std::thread::sleep(std::time::Duration::from_millis(200));
        signal(reader, Signal::KILL);
        first.join().unwrap()
    });
    assert_eq!(
        first,
        (expected[0].clone(), 0),
        "computed by the other node"
    );
    let lost = "the nodes for prompts are lost";
    until("people are told", || server.running.said().contains(lost));
    until("it is back", || times_up(&server) == 2);
    let second = answer(port, &asked[1]);
    assert_eq!(second, (expected[1].clone(), 14 * 64));
    server.stop(2);
}

/// Log-probabilities of two answers, up to the first other token.
pub(crate) fn assert_near(got: &Value, expected: &Value, tolerance: f64) {
    let of = |answer: &Value, field| answer["logprobs"][field].as_array().unwrap().clone();
    let tokens = of(got, "tokens").into_iter().zip(of(expected, "tokens"));
    let values = of(got, "token_logprobs")
        .into_iter()
        .zip(of(expected, "token_logprobs"));
    let alike = tokens.zip(values).take_while(|((a, b), _)| a == b);
    let far = alike.map(|(_, (a, b))| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs());
    let far: Vec<f64> = far.collect();
    assert!(!far.is_empty(), "{got} {expected}");
    assert!(far.iter().all(|far| *far <= tolerance), "{far:?}");
}

#[test]
fn near_prompts_are_refused_where_answers_must_be_exact() {
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let refused = |more: &[&str], message: &str| {
        let args = ["run", &model, "hi", "--prefill-nodes", "1"];
        let args = args.iter().chain(more).copied();
        let output = finish(&mut world.paceline(args));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(message), "{said}");
    };
    let near = ["--prefill-class", "cpu-f32"];
    refused(
        &[&near[..], &["--strict"]].concat(),
        "with cpu-f32 reading for cpu, answers would only be near",
    );
    refused(
        &[&near[..], &["--kv", "q8"]].concat(),
        "class cpu-f32 hands no q8 or q4 keys and values to class cpu",
    );
}
