//! Downloads several files of a model at once.
//!
//! ```text
//!  connection 0 ─┐
//!  connection 1 ─┼─ events ─► pulling thread ─► progress: each file, and the sum
//!  connection N ─┘
//! ```
//! Each connection takes the next file and calls [`fetch`], so files are resumed and verified as
//! single ones are. The first error ends the others; their partial files stay.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use crate::Error;
use crate::download::{DownloadSpec, PullContext, fetch};
use crate::http::HttpClient;
use crate::index::{FileRecord, PARTIAL_SUFFIX};
use crate::options::PullOptions;
use crate::progress::{Cancel, FileProgress, PullProgress};

/// Files downloaded at the same time. The hub's storage limits each connection; browsers open at
/// most six to one host.
const CONNECTIONS: usize = 4;
/// Interval of the pulling thread's cancel checks.
const POLL: Duration = Duration::from_millis(50);
/// Buffered events. A connection that is ahead of the progress display waits.
const EVENTS: usize = 64;

/// A report of a connection about its current file.
struct Event {
    connection: usize,
    /// Index of the file.
    file: usize,
    kind: EventKind,
}

enum EventKind {
    Started {
        label: String,
        total: Option<u64>,
        done: u64,
    },
    Advanced(u64),
    Message(String),
    Ended(Result<FileRecord, Error>),
}

/// Downloads `files`, [`CONNECTIONS`] at a time; records in the order of `files`.
///
/// # Errors
/// The first error of a file; [`Error::Cancelled`].
pub(crate) fn fetch_all(
    client: &HttpClient,
    files: &[DownloadSpec],
    ctx: &mut PullContext<'_>,
) -> Result<Vec<FileRecord>, Error> {
    let stop = Cancel::default();
    let queue = DownloadQueue {
        files,
        next: AtomicUsize::new(0),
        options: ctx.options,
        stop: &stop,
    };
    let (events, inbox) = sync_channel(EVENTS);
    let connections = CONNECTIONS.min(files.len());
    thread::scope(|scope| {
        let spawned = (0..connections).try_for_each(|connection| {
            let (mut client, events, queue) = (client.clone(), events.clone(), &queue);
            let builder = thread::Builder::new().name("store-file".into());
            let work = move || queue.work(connection, &mut client, &events);
            let spawned = builder.spawn_scoped(scope, work);
            spawned.map(drop)
        });
        if spawned.is_err() {
            stop.cancel();
        }
        drop(events);
        let fetched = Transfer::new(files, connections).watch(&inbox, &stop, ctx);
        let spawned =
            spawned.map_err(|error| Error::io("start a thread for", &files[0].dir, error));
        spawned.and(fetched)
    })
}

/// The files that connections take from.
struct DownloadQueue<'a> {
    files: &'a [DownloadSpec],
    next: AtomicUsize,
    options: &'a PullOptions,
    stop: &'a Cancel,
}

impl DownloadQueue<'_> {
    /// Downloads the next files until none is left or `stop` is set.
    fn work(&self, connection: usize, client: &mut HttpClient, events: &SyncSender<Event>) {
        while !self.stop.is_cancelled() {
            let file = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(wanted) = self.files.get(file) else {
                return;
            };
            let mut progress = ConnectionProgress {
                connection,
                file,
                events,
            };
            let mut ctx = PullContext {
                options: self.options,
                cancel: self.stop,
                progress: &mut progress,
            };
            let ended = fetch(client, wanted, &mut ctx);
            progress.send(EventKind::Ended(ended));
        }
    }
}

/// Sends progress to the pulling thread.
struct ConnectionProgress<'a> {
    connection: usize,
    file: usize,
    events: &'a SyncSender<Event>,
}

impl ConnectionProgress<'_> {
    fn send(&self, kind: EventKind) {
        let (connection, file) = (self.connection, self.file);
        // The pulling thread receives until all connections have ended.
        let _ = self.events.send(Event {
            connection,
            file,
            kind,
        });
    }
}

impl PullProgress for ConnectionProgress<'_> {
    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        let label = label.to_owned();
        self.send(EventKind::Started { label, total, done });
    }

    fn advance(&mut self, bytes: u64) {
        self.send(EventKind::Advanced(bytes));
    }

    fn message(&mut self, text: &str) {
        self.send(EventKind::Message(text.to_owned()));
    }

    fn finish(&mut self) {}
}

/// The state of all files, for the pulling thread.
struct Transfer<'a> {
    files: &'a [DownloadSpec],
    /// Present bytes of each file.
    present: Vec<u64>,
    /// The sum of `present` that was reported.
    reported: u64,
    /// An entry for each connection.
    current: Vec<FileProgress>,
    records: Vec<Option<FileRecord>>,
    failure: Option<Error>,
}

impl<'a> Transfer<'a> {
    fn new(files: &'a [DownloadSpec], connections: usize) -> Self {
        Self {
            files,
            present: files.iter().map(present_bytes).collect(),
            reported: 0,
            current: vec![FileProgress::default(); connections],
            records: vec![None; files.len()],
            failure: None,
        }
    }

    /// Receives until all connections have ended.
    fn watch(
        mut self,
        inbox: &Receiver<Event>,
        stop: &Cancel,
        ctx: &mut PullContext<'_>,
    ) -> Result<Vec<FileRecord>, Error> {
        self.restart(ctx.progress);
        loop {
            match inbox.recv_timeout(POLL) {
                Ok(event) => self.take(event, ctx.progress),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.failure.is_some() || ctx.cancel.is_cancelled() {
                stop.cancel();
            }
        }
        ctx.progress.finish();
        match self.failure {
            Some(error) => Err(error),
            // Without a failure, only `ctx.cancel` stops a connection.
            None => self
                .records
                .into_iter()
                .map(|it| it.ok_or(Error::Cancelled))
                .collect(),
        }
    }

    fn take(&mut self, event: Event, progress: &mut dyn PullProgress) {
        let (current, file) = (&mut self.current[event.connection], event.file);
        match event.kind {
            EventKind::Started { label, total, done } => {
                // Else present bytes are being hashed.
                if label == self.files[file].file {
                    self.present[file] = done;
                }
                *current = FileProgress { label, total, done };
            }
            EventKind::Advanced(bytes) => {
                current.done += bytes;
                if current.label == self.files[file].file {
                    self.present[file] += bytes;
                }
            }
            EventKind::Message(text) => return progress.message(&text),
            EventKind::Ended(ended) => {
                *current = FileProgress::default();
                match ended {
                    Ok(record) => {
                        self.present[file] = record.bytes;
                        self.records[file] = Some(record);
                    }
                    Err(error) => {
                        self.failure.get_or_insert(error);
                    }
                }
            }
        }
        self.report(progress);
    }

    /// Reports the sum: new bytes as progress, a smaller sum as a new start.
    fn report(&mut self, progress: &mut dyn PullProgress) {
        let sum: u64 = self.present.iter().sum();
        if sum < self.reported {
            return self.restart(progress);
        }
        progress.files(&self.current);
        progress.advance(sum - self.reported);
        self.reported = sum;
    }

    fn restart(&mut self, progress: &mut dyn PullProgress) {
        self.reported = self.present.iter().sum();
        let total = self.files.iter().map(|file| file.bytes).sum();
        progress.files(&self.current);
        let label = format!("{} files", self.files.len());
        progress.start(&label, total, self.reported);
    }
}

/// Bytes of an earlier download, complete or partial, before they are verified.
fn present_bytes(wanted: &DownloadSpec) -> u64 {
    let partial = format!("{}{PARTIAL_SUFFIX}", wanted.file);
    let length = |name: &str| fs::symlink_metadata(wanted.dir.join(name)).map(|meta| meta.len());
    let present = length(&wanted.file).or_else(|_| length(&partial));
    let most = wanted.bytes.unwrap_or(u64::MAX);
    present.unwrap_or(0).min(most)
}
