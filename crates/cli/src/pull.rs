//! `paceline pull`, and the same for every command that needs a model.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

use paceline_base::Bytes;
use paceline_serve::{PullStep, Puller};
use paceline_store::{
    Cancel, Entry, Error, Found, Kind, Plan, Progress, Pulled, Resolved, check_used, list, pull,
    resolve, usual_name, verify,
};
use serde_json::json;

use crate::error::Error as CommandError;
use crate::home::Settings;
use crate::interrupt::Signals;
use crate::output::{print, tell};
use crate::progress::on_stderr;
use crate::{member, stores};

/// How a model that was not here before is reported.
const PULLED: &str = "pulled";

/// Arguments of `paceline pull`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Alias (`smollm2`), GGUF file, folder of safetensors, or hub id `owner/name[:quantisation]`
    model: String,
    /// Then have these machines of the cluster get it from this one and from each other, by their
    /// names; `all`: all that live
    #[arg(long, value_name = "A,B,..", value_delimiter = ',')]
    to: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Fetches a model, or checks one that is there already against its hash.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let settings = Settings::from_env()?;
    if !args.to.is_empty() {
        member::ask("ps", json!({}))?; // before anything is fetched
    }
    let (found, state) =
        signals.orderly(|cancel| fetch_or_verify(&args.model, &settings, cancel))?;
    let bytes = size(&settings, &found)?;
    if args.json {
        print(&to_json(&found, bytes, state == PULLED).to_string())?;
    } else {
        let size = bytes.map_or(String::new(), |bytes| format!(" ({bytes})"));
        let path = found.path.display();
        print(&format!("{}: {state}: {path}{size}", args.model))?;
    }
    match args.to.is_empty() {
        true => Ok(()),
        false => stores::send(&args.model, &args.to, args.json),
    }
}

/// The model that `spec` means, and how it came to be here.
fn fetch_or_verify(
    spec: &str,
    settings: &Settings,
    cancel: &Cancel,
) -> anyhow::Result<(Found, &'static str)> {
    let found = match resolve(&settings.home, spec)? {
        Resolved::Path(found) => found,
        Resolved::NeedsDownload(plan) => {
            let pulled = fetch(spec, &plan, settings, cancel)?;
            let state = if pulled.fetched {
                PULLED
            } else {
                "already in the store"
            };
            return Ok((pulled.found, state));
        }
    };
    let Some(name) = &found.name else {
        return Ok((found, "your own file, nothing to pull"));
    };
    let checked = verify(&settings.home, name, cancel, &mut *on_stderr());
    checked.map_err(|error| damaged(name.as_str(), error))?;
    Ok((found, "already in the store, checked"))
}

/// The model that `spec` means, fetched if need be, and noted as used now. For the commands that
/// run models.
///
/// # Errors
/// As of [`resolve`] and [`pull`]; [`CommandError::NotComputed`] instead of fetching in vain.
pub(crate) fn ensure(spec: &str, signals: &Signals) -> anyhow::Result<Found> {
    let settings = Settings::from_env()?;
    signals.orderly(|cancel| fetch_to_run(spec, &settings, cancel))
}

fn fetch_to_run(spec: &str, settings: &Settings, cancel: &Cancel) -> anyhow::Result<Found> {
    let found = match resolve(&settings.home, spec)? {
        Resolved::Path(found) => found,
        Resolved::NeedsDownload(plan) => {
            check_computed(spec)?;
            fetch(spec, &plan, settings, cancel)?.found
        }
    };
    if let Some(name) = &found.name {
        let (now, mut progress) = (SystemTime::now(), on_stderr());
        match check_used(&settings.home, name, now, cancel, &mut *progress) {
            Ok(()) => {}
            Err(error @ (Error::HashMismatch { .. } | Error::Cancelled)) => {
                return Err(damaged(name.as_str(), error).into());
            }
            // A store that cannot be written to is no reason not to run the model.
            Err(error) => tell(format_args!(
                "warning: cannot note the use of {name}: {error}"
            )),
        }
    }
    Ok(found)
}

/// Refuses a model that would be fetched in vain.
fn check_computed(spec: &str) -> Result<(), CommandError> {
    match usual_name(spec).and_then(|usual| usual.uncomputed.clone()) {
        Some(architecture) => Err(CommandError::NotComputed {
            model: spec.to_owned(),
            architecture,
        }),
        None => Ok(()),
    }
}

fn fetch(spec: &str, plan: &Plan, settings: &Settings, cancel: &Cancel) -> Result<Pulled, Error> {
    if let Some(usual) = usual_name(spec) {
        let mark = if usual.checked.is_none() {
            ", not verified here"
        } else {
            ""
        };
        tell(format_args!("{spec} means {}{mark}", usual.hub));
        if let Some(architecture) = &usual.uncomputed {
            tell(format_args!(
                "warning: this version does not compute {architecture} models"
            ));
        }
    }
    if let Some(model) = plan.catalogue_model() {
        let (alias, about, bytes) = (model.alias, model.about, model.bytes);
        tell(format_args!("{alias}: {about}, {bytes}"));
        tell(format_args!(
            "licence: {}, {}",
            model.licence, model.licence_url
        ));
    }
    let mut progress = on_stderr();
    pull(
        &settings.home,
        plan,
        &settings.options,
        cancel,
        &mut *progress,
        SystemTime::now(),
    )
}

/// Fetches models for clients of the API, who name no paths. `smollm2:latest` is `smollm2`.
///
/// # Errors
/// Settings that cannot be read.
pub(crate) fn for_clients() -> anyhow::Result<Puller> {
    let settings = Settings::from_env()?;
    let pull = move |name: &str, tell: &mut dyn FnMut(PullStep) -> bool, over: &Arc<AtomicBool>| {
        let name = name.strip_suffix(":latest").unwrap_or(name);
        if Path::new(name).exists() {
            return Ok(false);
        }
        let plan = match resolve(&settings.home, name) {
            Ok(Resolved::Path(_)) => return Ok(true),
            Ok(Resolved::NeedsDownload(plan)) => plan,
            // Which files this machine has is not the clients' business.
            Err(Error::UnknownModel { .. } | Error::NoSuchPath { .. }) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        };
        let cancel = Cancel::from_flag(Arc::clone(over));
        let mut steps = Steps::new(tell, cancel.clone());
        let now = SystemTime::now();
        let pulled = pull(
            &settings.home,
            &plan,
            &settings.options,
            &cancel,
            &mut steps,
            now,
        );
        pulled.map(|_| true).map_err(|error| error.to_string())
    };
    Ok(Puller(Arc::new(pull)))
}

/// Time between two steps of a file that clients are told.
const STEP_EVERY: Duration = Duration::from_millis(200);

/// Tells a client how far a pull is, and ends it when the client has left.
struct Steps<'a> {
    tell: &'a mut dyn FnMut(PullStep) -> bool,
    cancel: Cancel,
    step: PullStep,
    told: Instant,
}

impl<'a> Steps<'a> {
    fn new(tell: &'a mut dyn FnMut(PullStep) -> bool, cancel: Cancel) -> Self {
        let step = PullStep {
            part: String::new(),
            total: None,
            done: 0,
        };
        let told = Instant::now();
        Self {
            tell,
            cancel,
            step,
            told,
        }
    }

    fn say(&mut self) {
        self.told = Instant::now();
        if !(self.tell)(self.step.clone()) {
            self.cancel.cancel();
        }
    }
}

impl Progress for Steps<'_> {
    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        self.step = PullStep {
            part: label.to_owned(),
            total,
            done,
        };
        self.say();
    }

    fn advance(&mut self, bytes: u64) {
        self.step.done += bytes;
        if self.told.elapsed() >= STEP_EVERY {
            self.say();
        }
    }

    fn message(&mut self, text: &str) {
        tell(text);
    }

    fn finish(&mut self) {
        self.say();
    }
}

/// A stored file with wrong bytes is damage to the store, not a download that was refused.
fn damaged(name: &str, error: Error) -> Error {
    match error {
        Error::HashMismatch { .. } => Error::Damaged {
            name: name.to_owned(),
            reason: error.to_string(),
        },
        other => other,
    }
}

/// Size of a model of the store, or of a single file.
fn size(settings: &Settings, found: &Found) -> anyhow::Result<Option<Bytes>> {
    let Some(name) = &found.name else {
        let own = found.kind == Kind::Gguf;
        return Ok(own
            .then(|| std::fs::metadata(&found.path))
            .transpose()?
            .map(|m| Bytes(m.len())));
    };
    let entries = list(&settings.home)?;
    Ok(entries
        .iter()
        .find(|entry| entry.name == *name)
        .map(Entry::file_bytes))
}

fn to_json(found: &Found, bytes: Option<Bytes>, fetched: bool) -> serde_json::Value {
    json!({
        "name": found.name.as_ref().map(paceline_store::EntryName::as_str),
        "path": found.path.to_string_lossy(),
        "type": found.kind,
        "bytes": bytes.map(|bytes| bytes.0),
        "fetched": fetched,
    })
}
