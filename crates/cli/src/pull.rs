//! `paceline pull`, and downloads for other commands.

use std::sync::Arc;

use paceline_board::model_facts::ModelFacts;
use paceline_board::pulls::{StorePulls, object, puller, size};
use paceline_cluster::machine;
use paceline_serve::Puller;
use paceline_store::{Cancel, Resolution, ResolvedModel, preview, resolve, usual_name};
use serde_json::json;

use crate::error::Error as CommandError;
use crate::home::StoreSettings;
use crate::interrupt::Signals;
use crate::output::{print, print_err};
use crate::progress::on_stderr;
use crate::{member, show, stores};

/// Arguments of `paceline pull`.
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

/// The store of these settings, with progress on stderr.
fn pulls<'a>(settings: &'a StoreSettings, cancel: &'a Cancel) -> StorePulls<'a> {
    StorePulls {
        home: &settings.home,
        options: &settings.options,
        cancel,
        progress: &on_stderr,
        tell: &|line| print_err(line),
    }
}

/// Finds the model `spec`, downloads it if needed, and records its use. For commands that run
/// models.
///
/// # Errors
/// As [`Pulls::ensure`]; [`CommandError::NotComputed`] for an unsupported model.
pub(crate) fn ensure(spec: &str, signals: &Signals) -> anyhow::Result<ResolvedModel> {
    let settings = StoreSettings::from_env()?;
    let may = || -> anyhow::Result<()> { Ok(check_computed(spec)?) };
    signals.orderly(|cancel| pulls(&settings, cancel).ensure(spec, may))
}

/// Rejects unsupported models before a download.
fn check_computed(spec: &str) -> Result<(), CommandError> {
    match usual_name(spec).and_then(|usual| usual.uncomputed.clone()) {
        Some(architecture) => Err(CommandError::NotComputed {
            model: spec.to_owned(),
            architecture,
        }),
        None => Ok(()),
    }
}

/// Downloads models for API clients.
///
/// # Errors
/// Invalid settings.
pub(crate) fn for_clients() -> anyhow::Result<Puller> {
    let StoreSettings { home, options } = StoreSettings::from_env()?;
    Ok(puller(home, options, Arc::new(|line| print_err(line))))
}
