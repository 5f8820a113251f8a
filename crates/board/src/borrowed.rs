//! An instance that a program has for as long as it runs.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_cluster::nodes::agent::local;
use serde_json::Value;

/// Longest silence of a node that loads: it says how far it is five times a second.
const SILENCE: Duration = Duration::from_secs(60);

/// An instance that is unloaded when this is dropped, or when this process ends in any other way.
#[derive(Debug)]
pub struct Borrowed {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Borrowed {
    /// Has the node of `home` load what `ask` says. What it tells comes from the receiver: how the
    /// instance is, until it answers.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn new(home: PathBuf, ask: Value) -> io::Result<(Receiver<Told>, Self)> {
        let over = Arc::new(AtomicBool::new(false));
        let (sender, told) = channel();
        let own = Arc::clone(&over);
        let run = move || hold(&home, ask, &own, &sender);
        let thread = std::thread::Builder::new().name("borrow".to_owned());
        let thread = thread.spawn(run)?;
        let borrowed = Self {
            over,
            thread: Some(thread),
        };
        Ok((told, borrowed))
    }
}

/// A node's report on an instance, or why no more of them come.
pub type Told = Result<Value, local::Error>;

/// Keeps the connection that the loan lasts as long as; reports until the instance answers.
fn hold(home: &Path, ask: Value, over: &AtomicBool, sender: &Sender<Told>) {
    let outcome = local::ask_while(home, "borrow", ask, SILENCE, |view| {
        let _ = sender.send(Ok(view)); // nobody waits for it any more
        !over.load(Ordering::SeqCst)
    });
    let _ = sender.send(outcome);
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has no result; it sees the end at the next report
        }
    }
}
