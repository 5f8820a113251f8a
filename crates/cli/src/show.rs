//! `paceline show`: facts about a model.

use std::time::Duration;

use paceline_board::model_facts::ModelFacts;
use paceline_store::{Home, Resolution, ResolvedModel, StoreEntry, list, resolve};
use paceline_worker::texts;
use serde_json::json;

use crate::output::print;
use crate::plan::shape_of;
use crate::process::template_program;
use crate::{home, member};

/// Time for the other machines' inventories. A node that answers takes milliseconds.
const INVENTORY_LIMIT: Duration = Duration::from_secs(3);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Alias (`smollm2`), usual name (`qwen3:8b`), GGUF file, folder of safetensors, or hub id
    model: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Describes a local model, or its download.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let home = home::home()?;
    let facts = match resolve(&home, &args.model)? {
        Resolution::Path(found) => {
            let mut facts = here(&found, entry(&home, &found)?.as_ref())?;
            // Without a node, or one that manages no models, there is no cluster.
            if let Ok(inventory) = member::ask_within("stores", json!({}), INVENTORY_LIMIT) {
                facts.add_machines(&inventory, &args.model);
            }
            facts
        }
        Resolution::NeedsDownload(plan) => {
            let mut facts = ModelFacts::new(&plan.name());
            facts.add_download(plan.bytes());
            facts
        }
    };
    let facts = facts.with_names(&args.model);
    if args.json {
        return print(&facts.json().to_string());
    }
    print(&facts.text())
}

/// A model's name in the store; the path of the user's own files.
pub(crate) fn name(found: &ResolvedModel) -> String {
    match &found.name {
        Some(name) => name.to_string(),
        None => found.path.display().to_string(),
    }
}

/// The store's entry of a local model, if any.
pub(crate) fn entry(home: &Home, found: &ResolvedModel) -> anyhow::Result<Option<StoreEntry>> {
    let mut entries = list(home)?.into_iter();
    Ok(entries.find(|entry| Some(&entry.name) == found.name.as_ref()))
}

fn here(found: &ResolvedModel, entry: Option<&StoreEntry>) -> anyhow::Result<ModelFacts> {
    let mut facts = ModelFacts::new(&name(found));
    facts.add_files(found, entry);
    let source = crate::load::open(&found.path)?;
    facts.add_size(source.file_bytes());
    facts.add_shape(&shape_of(&found.path)?);
    facts.add_config(&source);
    facts.add_template(texts::template(&source, &template_program()?));
    Ok(facts)
}
