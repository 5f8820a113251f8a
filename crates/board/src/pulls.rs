//! Models that clients of the API, and people, have fetched into the store.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

use paceline_base::Bytes;
use paceline_serve::{PullStep, Puller};
use paceline_store::{
    Cancel, Entry, EntryName, Error, Found, Home, Kind, Plan, Progress, PullOptions, Pulled,
    Resolved, check_used, fetch_pinned, list, origin, pull, resolve, usual_name, verify,
};
use serde_json::{Value, json};

use crate::Tell;

/// Time between two steps of a file that clients are told.
const STEP_EVERY: Duration = Duration::from_millis(200);

/// How a model came to be on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// It was fetched just now.
    Fetched,
    /// It was there, and its bytes were fetched by another process or an earlier one.
    InStore,
    /// It was there, and its bytes were checked.
    Checked,
    /// It was there with wrong bytes, and was fetched again.
    Mended,
    /// It is no model of the store.
    Own,
}

impl Came {
    /// In words.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Fetched => "pulled",
            Self::InStore => "already in the store",
            Self::Checked => "already in the store, checked",
            Self::Mended => "was damaged, fetched again",
            Self::Own => "your own file, nothing to pull",
        }
    }
}

/// A store, and how it is filled.
#[expect(
    missing_debug_implementations,
    reason = "what shows progress says nothing"
)]
pub struct Pulls<'a> {
    pub home: &'a Home,
    /// Hub, pip, retries, deadlines.
    pub options: &'a PullOptions,
    /// Ends what is under way.
    pub cancel: &'a Cancel,
    /// Makes what shows how far a file is.
    pub progress: &'a dyn Fn() -> Box<dyn Progress>,
    /// Takes lines for people.
    pub tell: &'a dyn Fn(&str),
}

impl Pulls<'_> {
    /// The model that `spec` means, fetched or checked, and how it came to be here. One with wrong
    /// bytes is fetched again where its record says from where.
    ///
    /// # Errors
    /// As of [`resolve`], [`pull`] and [`verify`]; [`Error::Damaged`].
    pub fn fetch_or_verify(&self, spec: &str) -> Result<(Found, Came), Error> {
        let found = match resolve(self.home, spec)? {
            Resolved::Path(found) => found,
            Resolved::NeedsDownload(plan) => {
                let pulled = self.fetch(spec, &plan)?;
                let came = if pulled.fetched {
                    Came::Fetched
                } else {
                    Came::InStore
                };
                return Ok((pulled.found, came));
            }
        };
        let Some(name) = &found.name else {
            return Ok((found, Came::Own));
        };
        let checked = verify(self.home, name, self.cancel, &mut *(self.progress)());
        match checked {
            Ok(()) => Ok((found, Came::Checked)),
            Err(error @ Error::HashMismatch { .. }) => {
                self.mend(name, &found, error)?;
                Ok((found, Came::Mended))
            }
            Err(error) => Err(error),
        }
    }

    /// Fetches the file of a stored model again; `error` says how it is damaged.
    fn mend(&self, name: &EntryName, found: &Found, error: Error) -> Result<(), Error> {
        let error = damaged(name.as_str(), error);
        let place = (found.path.parent(), found.path.file_name());
        let (Some(pinned), (Some(folder), Some(file))) = (origin(self.home, &found.path), place)
        else {
            return Err(error); // of several files, or from nowhere known
        };
        (self.tell)(&format!("warning: {error}; fetching it again"));
        let (file, mut progress) = (file.to_string_lossy(), (self.progress)());
        let to = (folder, &*file);
        match fetch_pinned(&pinned, to, self.options, self.cancel, &mut *progress) {
            Ok(()) => verify(self.home, name, self.cancel, &mut *progress),
            Err(Error::Cancelled) => Err(Error::Cancelled),
            Err(failed) => {
                (self.tell)(&format!("warning: cannot fetch {name} again: {failed}"));
                Err(error)
            }
        }
    }

    /// The model that `spec` means, fetched if need be, and noted as used now. `may` refuses one
    /// that would be fetched in vain.
    ///
    /// # Errors
    /// As of [`resolve`] and [`pull`]; [`Error::Damaged`]; that of `may`.
    pub fn ensure<E: From<Error>>(
        &self,
        spec: &str,
        may: impl FnOnce() -> Result<(), E>,
    ) -> Result<Found, E> {
        let found = match resolve(self.home, spec)? {
            Resolved::Path(found) => found,
            Resolved::NeedsDownload(plan) => {
                may()?;
                self.fetch(spec, &plan)?.found
            }
        };
        if let Some(name) = &found.name {
            let (now, mut progress) = (SystemTime::now(), (self.progress)());
            match check_used(self.home, name, now, self.cancel, &mut *progress) {
                Ok(()) => {}
                Err(error @ (Error::HashMismatch { .. } | Error::Cancelled)) => {
                    return Err(damaged(name.as_str(), error).into());
                }
                // A store that cannot be written to is no reason not to run the model.
                Err(error) => {
                    (self.tell)(&format!("warning: cannot note the use of {name}: {error}"))
                }
            }
        }
        Ok(found)
    }

    fn fetch(&self, spec: &str, plan: &Plan) -> Result<Pulled, Error> {
        if let Some(usual) = usual_name(spec) {
            let mark = if usual.checked.is_none() {
                ", not verified here"
            } else {
                ""
            };
            (self.tell)(&format!("{spec} means {}{mark}", usual.hub));
            if let Some(architecture) = &usual.uncomputed {
                (self.tell)(&format!(
                    "warning: this version does not compute {architecture} models"
                ));
            }
        }
        if let Some(model) = plan.catalogue_model() {
            let (alias, about, bytes) = (model.alias, model.about, model.bytes);
            (self.tell)(&format!("{alias}: {about}, {bytes}"));
            (self.tell)(&format!(
                "licence: {}, {}",
                model.licence, model.licence_url
            ));
        }
        let (mut progress, now) = ((self.progress)(), SystemTime::now());
        pull(
            self.home,
            plan,
            self.options,
            self.cancel,
            &mut *progress,
            now,
        )
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

/// Size of a model of the store, or of a single file; `None` of a folder elsewhere.
///
/// # Errors
/// A file that is gone, a store that cannot be read.
pub fn size(home: &Home, found: &Found) -> Result<Option<Bytes>, Error> {
    let Some(name) = &found.name else {
        if found.kind != Kind::Gguf {
            return Ok(None);
        }
        let bytes = std::fs::metadata(&found.path).map(|facts| Bytes(facts.len()));
        return bytes.map(Some).map_err(|cause| Error::Io {
            action: "look at",
            path: found.path.clone(),
            cause,
        });
    };
    let entries = list(home)?;
    Ok(entries
        .iter()
        .find(|entry| entry.name == *name)
        .map(Entry::file_bytes))
}

/// A model of this machine as one object.
pub fn object(found: &Found, bytes: Option<Bytes>, came: Came) -> Value {
    json!({
        "name": found.name.as_ref().map(EntryName::as_str),
        "path": found.path.to_string_lossy(),
        "type": found.kind,
        "bytes": bytes.map(|bytes| bytes.0),
        "fetched": matches!(came, Came::Fetched | Came::Mended),
    })
}

/// Fetches models for clients of the API, who name no paths. `smollm2:latest` is `smollm2`.
pub fn puller(home: Home, options: PullOptions, say: Tell) -> Puller {
    let pull = move |name: &str, tell: &mut dyn FnMut(PullStep) -> bool, over: &Arc<AtomicBool>| {
        let name = name.strip_suffix(":latest").unwrap_or(name);
        if Path::new(name).exists() {
            return Ok(false);
        }
        let plan = match resolve(&home, name) {
            Ok(Resolved::Path(_)) => return Ok(true),
            Ok(Resolved::NeedsDownload(plan)) => plan,
            // Which files this machine has is not the clients' business.
            Err(Error::UnknownModel { .. } | Error::NoSuchPath { .. }) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        };
        let cancel = Cancel::from_flag(Arc::clone(over));
        let mut steps = Steps::new(tell, &say, cancel.clone());
        let now = SystemTime::now();
        let pulled = pull(&home, &plan, &options, &cancel, &mut steps, now);
        pulled.map(|_| true).map_err(|error| error.to_string())
    };
    Puller(Arc::new(pull))
}

/// Tells a client how far a pull is, and ends it when the client has left.
struct Steps<'a> {
    tell: &'a mut dyn FnMut(PullStep) -> bool,
    say: &'a Tell,
    cancel: Cancel,
    step: PullStep,
    told: Instant,
}

impl<'a> Steps<'a> {
    fn new(tell: &'a mut dyn FnMut(PullStep) -> bool, say: &'a Tell, cancel: Cancel) -> Self {
        let step = PullStep {
            part: String::new(),
            total: None,
            done: 0,
        };
        let told = Instant::now();
        Self {
            tell,
            say,
            cancel,
            step,
            told,
        }
    }

    fn step(&mut self) {
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
        self.step();
    }

    fn advance(&mut self, bytes: u64) {
        self.step.done += bytes;
        if self.told.elapsed() >= STEP_EVERY {
            self.step();
        }
    }

    fn message(&mut self, text: &str) {
        (self.say)(text);
    }

    fn finish(&mut self) {
        self.step();
    }
}
