//! `paceline models --families`: what is supported for each model family, from its code.

use paceline_board::tables::aligned;
use paceline_model::ModelFamily;
use serde::Serialize;

use crate::output::print;

/// A family, and what works with it.
#[derive(Debug, Serialize)]
struct FamilyRow {
    names: Vec<&'static str>,
    models: &'static str,
    engines: Vec<&'static str>,
    splits: Vec<&'static str>,
    drafts: bool,
    training: bool,
    pictures: bool,
    /// Program that computes the same log-probabilities.
    checked: &'static str,
}

/// Encoders, by `model_type` and by what they are.
const ENCODERS: [(&[&str], &str); 3] = [
    (&["bert"], "BERT, as an encoder"),
    (
        &["roberta", "xlm-roberta", "camembert"],
        "RoBERTa, as an encoder",
    ),
    (
        &["qwen3", "gemma-embedding"],
        "Qwen3 Embedding, EmbeddingGemma",
    ),
];

/// Prints the table, or one JSON object.
pub(crate) fn run(json: bool) -> anyhow::Result<()> {
    let rows: Vec<FamilyRow> = rows().collect();
    if json {
        return print(&serde_json::json!({ "families": rows }).to_string());
    }
    print(&text(&rows))
}

fn rows() -> impl Iterator<Item = FamilyRow> {
    let decoders = ModelFamily::ALL.into_iter().map(|family| FamilyRow {
        names: family.stored_names(),
        models: family.models(),
        engines: vec!["cpu", "mlx"],
        splits: family.splits().to_vec(),
        drafts: true,
        training: paceline_train::FAMILIES.contains(&family),
        pictures: false,
        checked: match family {
            ModelFamily::DeepSeek4 | ModelFamily::KimiLinear => "transformers, mlx-lm",
            _ => "transformers",
        },
    });
    let encoders = ENCODERS.into_iter().map(|(names, models)| FamilyRow {
        names: names.to_vec(),
        models,
        engines: vec!["cpu"],
        splits: Vec::new(),
        drafts: false,
        training: false,
        pictures: false,
        checked: "transformers",
    });
    decoders.chain(encoders)
}

fn text(rows: &[FamilyRow]) -> String {
    let yes = |is: bool| if is { "yes" } else { "-" };
    let list = |words: &[&str]| match words {
        [] => "-".to_owned(),
        words => words.join(", "),
    };
    let cells = |row: &FamilyRow| {
        [
            row.models.to_owned(),
            list(&row.engines),
            list(&row.splits),
            yes(row.drafts).to_owned(),
            yes(row.training).to_owned(),
            yes(row.pictures).to_owned(),
            row.checked.to_owned(),
            list(&row.names),
        ]
    };
    const TITLES: [&str; 8] = [
        "models",
        "engines",
        "splits",
        "drafts",
        "training",
        "pictures",
        "checked by",
        "names",
    ];
    let titles = TITLES.map(str::to_owned);
    let table: Vec<_> = [titles].into_iter().chain(rows.iter().map(cells)).collect();
    aligned(&table).join("\n")
}
