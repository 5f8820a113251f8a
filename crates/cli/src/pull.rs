//! `paceline pull`, and downloads for other commands.

use std::sync::Arc;

use paceline_base::Bytes;
use paceline_board::lookup::weights;
use paceline_board::model_facts::ModelFacts;
use paceline_board::previews::USABLE;
use paceline_board::pulls::{MEND, StorePulls, object, puller, size};
use paceline_cluster::machine;
use paceline_cluster::nodes::agent::local;
use paceline_node::fleet::{MendedFile, StoredFile};
use paceline_serve::Puller;
use paceline_store::{Cancel, Resolution, ResolvedModel, preview, resolve, usual_name};
use serde_json::json;

use crate::error::{Error as CommandError, failed};
use crate::home::StoreSettings;
use crate::interrupt::Signals;
use crate::output::{print, print_err};
use crate::progress::on_stderr;
use crate::stores::SILENCE;
use crate::{home, member, show, stores};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Alias (`smollm2`), GGUF file, folder of safetensors, or hub id `owner/name[:quantisation]`
    model: String,
    /// Then have these machines of the cluster get it from this one and from each other, by their
    /// names; `all`: all that live. Copies that they have are checked to the last byte, and
    /// damaged blocks fetched again
    #[arg(long, value_name = "A,B,..", value_delimiter = ',')]
    to: Vec<String>,
    /// Show files, size, licence, and whether it fits this machine; download nothing
    #[arg(long, conflicts_with = "to")]
    dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Downloads a model, or verifies a present one by hash.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let settings = StoreSettings::from_env()?;
    if args.dry_run {
        let facts = signals.orderly(|cancel| describe(&settings, &args.model, cancel))?;
        return print(&match args.json {
            true => facts.json().to_string(),
            false => facts.text(),
        });
    }
    if !args.to.is_empty() {
        member::ask("ps", json!({}))?; // before anything is fetched
    }
    let (found, came) = signals.orderly(|cancel| {
        let pulls = pulls(&settings, cancel);
        Ok(pulls.fetch_or_verify(&args.model)?)
    })?;
    let bytes = size(&settings.home, &found)?;
    if args.json {
        print(&object(&found, bytes, came).to_string())?;
    } else {
        let size = bytes.map_or(String::new(), |bytes| format!(" ({bytes})"));
        let path = found.path.display();
        print(&format!("{}: {}: {path}{size}", args.model, came.text()))?;
    }
    match args.to.is_empty() {
        true => Ok(()),
        false => stores::send(&args.model, &args.to, args.json),
    }
}

/// Describes what `pull` would download, or the stored files.
fn describe(settings: &StoreSettings, model: &str, cancel: &Cancel) -> anyhow::Result<ModelFacts> {
    let facts = match resolve(&settings.home, model)? {
        Resolution::Path(found) => {
            let mut facts = ModelFacts::new(&show::name(&found));
            facts.add_files(&found, show::entry(&settings.home, &found)?.as_ref());
            facts
        }
        Resolution::NeedsDownload(plan) => {
            let selected = preview(&plan, &settings.options, cancel)?;
            let mut facts = ModelFacts::new(selected.name.as_str());
            facts.add_preview(&selected, machine::memory());
            facts
        }
    };
    Ok(facts.with_names(model))
}

fn pulls<'a>(settings: &'a StoreSettings, cancel: &'a Cancel) -> StorePulls<'a> {
    StorePulls {
        home: &settings.home,
        options: &settings.options,
        cancel,
        progress: &on_stderr,
        tell: &|line| print_err(line),
        peers: &mend,
    }
}

/// Has this machine's node repair a file from other machines.
fn mend(file: &StoredFile) -> Option<MendedFile> {
    let arguments = serde_json::to_value(file).ok()?;
    let mended = local::ask(&home::folder().ok()?, MEND, arguments, SILENCE, |_| ()).ok()?;
    serde_json::from_value(mended).ok()
}

/// Finds the model `spec`, downloads it if needed, and records its use. For commands that run
/// models on this machine.
pub(crate) fn ensure(spec: &str, signals: &Signals) -> anyhow::Result<ResolvedModel> {
    let memory = || {
        let cards = machine::nvidia()
            .iter()
            .map(|card| card.memory.0)
            .sum::<u64>();
        let own = machine::memory()?.total;
        Some(Bytes(own.0 + cards))
    };
    ensure_within(spec, memory, signals)
}

/// As [`ensure`], for machines that have `memory` together. It is asked for before a download only.
pub(crate) fn ensure_within(
    spec: &str,
    memory: impl FnOnce() -> Option<Bytes>,
    signals: &Signals,
) -> anyhow::Result<ResolvedModel> {
    let settings = StoreSettings::from_env()?;
    let may = || -> anyhow::Result<()> {
        check_computed(spec)?;
        Ok(check_memory(spec, memory())?)
    };
    signals.orderly(|cancel| pulls(&settings, cancel).ensure(spec, may))
}

/// Rejects unsupported models before a download.
fn check_computed(spec: &str) -> Result<(), CommandError> {
    match usual_name(spec).and_then(|usual| usual.uncomputed.clone()) {
        Some(architecture) => Err(failed(
            format!("{spec} is a {architecture} model, which this version does not compute"),
            "`paceline models --fits` shows names of models that it computes",
        )),
        None => Ok(()),
    }
}

/// Rejects a model of known size before a download that no placement on these machines fits.
fn check_memory(spec: &str, memory: Option<Bytes>) -> Result<(), CommandError> {
    match (weights(spec), memory) {
        (Some(weights), Some(memory)) if weights.0 as f64 > memory.0 as f64 * USABLE => {
            Err(failed(
                format!("{spec} has {weights} of weights, too large for {memory} of memory"),
                format!(
                    "`paceline models --fits` shows what fits; `paceline pull {spec}` fetches it \
                     all the same"
                ),
            ))
        }
        _ => Ok(()),
    }
}

/// Downloads models for API clients.
pub(crate) fn for_clients() -> anyhow::Result<Puller> {
    let StoreSettings { home, options } = StoreSettings::from_env()?;
    Ok(puller(home, options, Arc::new(|line| print_err(line))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_no_memory_is_known_before_a_download() {
        let gib = |n: u64| Some(Bytes(n << 30));
        assert!(check_memory("qwen3:8b", gib(8)).is_ok());
        let error = check_memory("llama3.3:70b", gib(24)).unwrap_err();
        let told = error.to_string();
        assert!(
            told.starts_with("llama3.3:70b has ") && told.contains("too large"),
            "{told}"
        );
        assert!(check_memory("own/unknown", gib(1)).is_ok());
        assert!(check_memory("llama3.3:70b", None).is_ok());
    }
}
