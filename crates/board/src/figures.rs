//! `/metrics` of an instance and its owner process.

use paceline_cluster::machine::peak_memory_bytes;
use paceline_engine::DraftCounts;
use paceline_model::ExpertUses;
use paceline_node::Instance;
use paceline_serve::MetricSample;

/// Metrics of an instance over `nodes` workers. Waits for the workers' reports.
pub fn facts(instance: &Instance, nodes: u32) -> Vec<MetricSample> {
    let mut facts = vec![
        MetricSample {
            name: "nodes",
            help: "Nodes that compute the model together",
            labels: String::new(),
            value: f64::from(nodes),
        },
        MetricSample {
            name: "worker_restarts",
            help: "Times that the workers were started again after one failed",
            labels: String::new(),
            value: instance.restarts() as f64,
        },
        MetricSample {
            name: "answers_continued",
            help: "Answers that continued after a failure with numbers near the ones before",
            labels: String::new(),
            value: instance.continued() as f64,
        },
    ];
    facts.push(MetricSample {
        name: "split_changes",
        help: "Times that the split was changed because another one was faster, or was to be",
        labels: String::new(),
        value: f64::from(instance.n_changes()),
    });
    let (predicted, measured) = (instance.predicted(), instance.measured());
    for (known, name, help) in [
        (
            predicted,
            "decode_tok_s_predicted",
            "Tokens a second of an answer alone, as predicted",
        ),
        (
            measured,
            "decode_tok_s_measured",
            "Tokens a second of the last answers that were alone",
        ),
    ] {
        facts.extend(known.map(|value| MetricSample {
            name,
            help,
            labels: String::new(),
            value,
        }));
    }
    facts.extend(instance.predicted_together().iter().map(together));
    let memory = peak_memory_bytes().map(|bytes| ("peak_memory_bytes", bytes));
    let sent = instance
        .moved()
        .map(|moved| ("wire_sent_bytes", moved.sent.0));
    let help = [
        "Most memory that the node's own process has had",
        "Bytes that the workers have sent to one another since they started",
    ];
    for (known, help) in [memory, sent].into_iter().zip(help) {
        facts.extend(known.map(|(name, value)| MetricSample {
            name,
            help,
            labels: String::new(),
            value: value as f64,
        }));
    }
    facts.extend(guesses(instance.guesses()));
    facts.extend(instance.expert_uses().iter().flat_map(uses_of_layer));
    facts
}

/// The predicted total speed of a number of concurrent answers.
fn together((answers, tok_s): &(u32, f64)) -> MetricSample {
    MetricSample {
        name: "decode_tok_s_predicted_together",
        help: "Tokens a second of so many answers together, as predicted",
        labels: format!("answers=\"{answers}\""),
        value: *tok_s,
    }
}

/// Verified and accepted draft tokens, and pipelined verification windows.
fn guesses(guesses: DraftCounts) -> [MetricSample; 3] {
    let fact = |name, help, value: u64| MetricSample {
        name,
        help,
        labels: String::new(),
        value: value as f64,
    };
    [
        fact(
            "guesses_checked",
            "Guessed tokens that steps checked since the workers started last",
            guesses.checked,
        ),
        fact(
            "guesses_right",
            "Guessed tokens that became tokens of answers since the workers started last",
            guesses.right,
        ),
        fact(
            "guess_windows",
            "Steps of guesses that followed others of the same answer while those were under way",
            guesses.windows,
        ),
    ]
}

/// Routing counts of a layer's experts.
fn uses_of_layer(uses: &ExpertUses) -> impl Iterator<Item = MetricSample> {
    let of = |(expert, rows): (usize, &u64)| MetricSample {
        name: "expert_rows",
        help: "Rows that chose the expert of the layer since the weights were loaded",
        labels: format!("layer=\"{}\",expert=\"{expert}\"", uses.layer),
        value: *rows as f64,
    };
    uses.rows.iter().enumerate().map(of)
}
