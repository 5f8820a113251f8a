//! `/metrics` of the instances that a node owns, and of its process.

use std::collections::BTreeSet;
use std::sync::Arc;

use paceline_cluster::machine::peak_memory_bytes;
use paceline_engine::DraftCounts;
use paceline_model::ExpertUses;
use paceline_node::Instance;
use paceline_node::fleet::InstanceView;
use paceline_serve::MetricSample;

use crate::label::label;

/// Metrics of instances as their node sees them, grouped by name. With several, each has its model
/// as a label. Waits for the workers' reports.
pub(crate) fn facts(instances: &[(InstanceView, Arc<Instance>)]) -> Vec<MetricSample> {
    let own = |(view, instance): &(InstanceView, Arc<Instance>)| {
        let (model, mut facts) = (&view.model, of_instance(instance));
        facts.extend(of_placement(view));
        for fact in facts.iter_mut().filter(|_| instances.len() > 1) {
            let rest = match fact.labels.is_empty() {
                true => String::new(),
                false => format!(",{}", fact.labels),
            };
            fact.labels = label("model", model) + &rest;
        }
        facts
    };
    let mut facts: Vec<MetricSample> = instances.iter().flat_map(own).collect();
    let order: Vec<&str> = facts.iter().map(|fact| fact.name).collect();
    let first = |name: &str| order.iter().position(|other| *other == name);
    facts.sort_by_key(|fact| first(fact.name));
    facts.extend(peak_memory_bytes().map(|bytes| MetricSample {
        name: "peak_memory_bytes",
        help: "Most memory that the node's own process has had",
        labels: String::new(),
        value: bytes as f64,
    }));
    facts
}

/// The nodes that compute an instance's ranks now, and whether nodes are missing.
fn of_placement(view: &InstanceView) -> Vec<MetricSample> {
    let now = match view.computing.is_empty() {
        true => &view.nodes,
        false => &view.computing,
    };
    let names: BTreeSet<&String> = now.iter().chain(&view.nodes).collect();
    let ranks = names.into_iter().map(|name| MetricSample {
        name: "instance_ranks",
        help: "Ranks of the instance that the node computes now; 0 for one that others stand in for",
        labels: label("node", name),
        value: now.iter().filter(|node| *node == name).count() as f64,
    });
    let is_degraded = view.reason.is_some() || !view.stand_ins.is_empty();
    let degraded = MetricSample {
        name: "instance_degraded",
        help: "Whether the instance answers without nodes that it is for",
        labels: String::new(),
        value: f64::from(u8::from(is_degraded)),
    };
    ranks.chain([degraded]).collect()
}

fn of_instance(instance: &Instance) -> Vec<MetricSample> {
    let mut facts = vec![
        MetricSample {
            name: "nodes",
            help: "Nodes that compute the model together",
            labels: String::new(),
            value: f64::from(instance.split().ranks()),
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
    facts.extend(instance.moved().map(|moved| MetricSample {
        name: "wire_sent_bytes",
        help: "Bytes that the workers have sent to one another since they started",
        labels: String::new(),
        value: moved.sent.0 as f64,
    }));
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
fn guesses(guesses: DraftCounts) -> [MetricSample; 4] {
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
            "guess_drafts",
            "Drafts that steps checked since the workers started last",
            guesses.steps,
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
