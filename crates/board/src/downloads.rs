//! Downloads started on the dashboard, with progress.

use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use paceline_base::CallbackError;
use paceline_base::lock;
use paceline_store::{Cancel, Error, Home, PullOptions, PullProgress, Resolution, pull, resolve};
use serde::Serialize;

use crate::{CommandError, chain};

/// Maximum concurrent downloads: more would share the same link.
const RUNNING_MAX: usize = 2;

/// Maximum listed downloads, the newest ones.
const TOLD_MAX: usize = 8;

/// Supplies the store's folder and the pull settings, called for each download.
pub type PullSource = Arc<dyn Fn() -> Result<(Home, PullOptions), CallbackError> + Send + Sync>;

/// Downloads of this node. Clones share them.
#[derive(Clone)]
pub(super) struct Downloads {
    all: Arc<Mutex<Vec<Download>>>,
    source: PullSource,
}

/// A download's reported state.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Download {
    model: String,
    /// `running`, `done`, `cancelled` or `failed`.
    state: &'static str,
    /// Present and total bytes of the current part.
    done: u64,
    of: Option<u64>,
    /// Why it failed.
    reason: Option<String>,
    #[serde(skip)]
    cancel: Cancel,
}

impl Downloads {
    pub(super) fn new(source: PullSource) -> Self {
        let all = Arc::default();
        Self { all, source }
    }

    /// The last downloads, oldest first.
    pub(super) fn recent(&self) -> Vec<Download> {
        lock(&self.all).clone()
    }

    /// Starts a download on a thread of its own.
    ///
    /// # Errors
    /// An invalid name, a model that is here already, too many downloads.
    pub(super) fn start(&self, model: &str) -> Result<(), CommandError> {
        let (home, options) = self.store()?;
        let plan = match resolve(&home, model).map_err(CommandError::Store)? {
            Resolution::Path(_) => {
                let model = model.to_owned();
                return Err(CommandError::OnMachine { model });
            }
            Resolution::NeedsDownload(plan) => plan,
        };
        let cancel = self.begin(model)?;
        let (own, name) = (self.clone(), model.to_owned());
        let run = move || {
            let mut watch = DownloadProgress(own.clone(), name.clone());
            let now = SystemTime::now();
            let pulled = pull(&home, &plan, &options, &cancel, &mut watch, now);
            own.change(&name, |it| match pulled {
                Ok(_) => it.state = "done",
                Err(Error::Cancelled) => it.state = "cancelled",
                Err(error) => {
                    it.state = "failed";
                    it.reason = Some(reason(&error));
                }
            });
        };
        let thread = std::thread::Builder::new().name("download".to_owned());
        let thread = thread.spawn(run).map(drop);
        thread.map_err(CommandError::other)
    }

    /// The store's folder and the settings of downloads.
    pub(super) fn store(&self) -> Result<(Home, PullOptions), CallbackError> {
        (self.source)()
    }

    /// Cancels a running download; removes another one from the list.
    pub(super) fn end(&self, model: &str) {
        lock(&self.all).retain(|it| {
            let is_running = it.state == "running";
            if is_running && it.model == model {
                it.cancel.cancel();
            }
            is_running || it.model != model
        });
    }

    pub(super) fn cancel_all(&self) {
        lock(&self.all).iter().for_each(|it| it.cancel.cancel());
    }

    /// Registers a download, unless there are too many or it already runs.
    fn begin(&self, model: &str) -> Result<Cancel, CommandError> {
        let mut all = lock(&self.all);
        let running = || all.iter().filter(|it| it.state == "running");
        if running().any(|it| it.model == model) {
            let model = model.to_owned();
            return Err(CommandError::Downloading { model });
        }
        if running().count() >= RUNNING_MAX {
            let limit = RUNNING_MAX;
            return Err(CommandError::TooManyDownloads { limit });
        }
        all.retain(|it| it.model != model);
        if all.len() == TOLD_MAX {
            let oldest = all.iter().position(|it| it.state != "running");
            all.remove(oldest.unwrap_or(0));
        }
        let cancel = Cancel::default();
        all.push(Download {
            model: model.to_owned(),
            state: "running",
            done: 0,
            of: None,
            reason: None,
            cancel: cancel.clone(),
        });
        Ok(cancel)
    }

    fn change(&self, model: &str, change: impl FnOnce(&mut Download)) {
        let mut all = lock(&self.all);
        if let Some(it) = all.iter_mut().find(|it| it.model == model) {
            change(it);
        }
    }
}

/// A store's error for people, with the known names that are like an unknown one.
pub(super) fn reason(error: &Error) -> String {
    match error {
        Error::UnknownModel { close, .. } if !close.is_empty() => {
            format!("{error}; did you mean {}?", close.join(", "))
        }
        other => chain(other),
    }
}

/// Counts the bytes of a download.
struct DownloadProgress(Downloads, String);

impl PullProgress for DownloadProgress {
    fn start(&mut self, _label: &str, total: Option<u64>, done: u64) {
        self.0
            .change(&self.1, |it| (it.done, it.of) = (done, total));
    }

    fn advance(&mut self, bytes: u64) {
        self.0.change(&self.1, |it| it.done += bytes);
    }

    fn message(&mut self, _text: &str) {}

    fn finish(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downloads_are_bounded_and_the_last_are_told() {
        let all = Downloads::new(Arc::new(|| Err("nothing is fetched here".into())));
        let cancel = all.begin("a").unwrap();
        assert_eq!(
            all.begin("a").unwrap_err().to_string(),
            "a is being fetched"
        );
        all.end("a");
        assert!(cancel.is_cancelled());
        assert_eq!(all.recent().len(), 1, "it is there until its thread ends");
        all.begin("b").unwrap();
        assert!(all.begin("c").unwrap_err().to_string().contains("2 models"));
        let mut watch = DownloadProgress(all.clone(), "a".to_owned());
        watch.start("file", Some(100), 10);
        watch.advance(5);
        assert_eq!((all.recent()[0].done, all.recent()[0].of), (15, Some(100)));
        for i in 0..20 {
            all.change("b", |it| it.state = "done");
            all.change(&format!("m{i}"), |it| it.state = "failed");
            all.begin(&format!("m{}", i + 1)).unwrap();
        }
        let told = all.recent();
        assert_eq!(told.len(), TOLD_MAX);
        assert_eq!(told[0].model, "a", "one that runs stays");
        all.end("m19");
        assert!(all.recent().iter().all(|it| it.model != "m19"));
        let home = Home::new("/nonexistent");
        let unknown = reason(&resolve(&home, "smolm2").unwrap_err());
        assert!(unknown.ends_with("did you mean smollm2?"), "{unknown}");
    }
}
