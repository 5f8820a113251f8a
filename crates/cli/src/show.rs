//! `paceline show`: facts about a model.

use paceline_board::model_facts::ModelFacts;
use paceline_node::texts;
use paceline_store::{Resolution, ResolvedModel, StoreEntry, list, resolve};

use crate::home;
use crate::output::print;
use crate::plan::shape_of;
use crate::process::template_program;

/// Arguments of `paceline show`.
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
            let entries = list(&home)?;
            let of_name = |entry: &&StoreEntry| Some(&entry.name) == found.name.as_ref();
            here(&found, entries.iter().find(of_name))?
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

/// Facts of a local model.
fn here(found: &ResolvedModel, entry: Option<&StoreEntry>) -> anyhow::Result<ModelFacts> {
    let name = match &found.name {
        Some(name) => name.to_string(),
        None => found.path.display().to_string(),
    };
    let mut facts = ModelFacts::new(&name);
    facts.add_files(found, entry);
    let source = crate::load::open(&found.path)?;
    facts.add_size(source.file_bytes());
    facts.add_shape(&shape_of(&found.path)?);
    facts.add_config(&source);
    facts.add_template(texts::template(&source, &template_program()?));
    Ok(facts)
}
