//! Requests in progress, for the dashboard.
//!
//! A [`Row`] is updated with atomics where replies leave the engine, so readers cost the engine
//! nothing. Rows of finished choices are removed at once; their events stay.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::events::{EventLog, Kind};

/// Maximum rows returned; by default the server allows far fewer requests.
const TOLD_MAX: usize = 256;

/// The running choices of a node, with their events. Clones share them.
#[derive(Clone, Debug)]
pub struct LiveRequests {
    events: EventLog,
    rows: Arc<ChoiceTable>,
}

#[derive(Debug, Default)]
struct ChoiceTable {
    last: AtomicU64,
    running: Mutex<Vec<Arc<ChoiceProgress>>>,
}

#[derive(Debug)]
struct ChoiceProgress {
    request: u64,
    model: String,
    prompt_tokens: u64,
    asked: Instant,
    tokens: AtomicU64,
    /// Microseconds from `asked` to the first and last token; 0 before the first.
    first_us: AtomicU64,
    last_us: AtomicU64,
}

/// A snapshot of a running choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunningChoice {
    /// Number of the choice, from 1.
    pub request: u64,
    pub model: String,
    pub prompt_tokens: u64,
    /// Tokens generated so far.
    pub tokens: u64,
    /// Seconds since the request's headers.
    pub age_s: f64,
    /// Seconds to the first token; absent before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_s: Option<f64>,
    /// Tokens a second after the first; absent below two tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tok_s: Option<f64>,
}

impl LiveRequests {
    /// Without requests.
    pub fn new(events: EventLog) -> Self {
        let rows = Arc::default();
        Self { events, rows }
    }

    /// The event log of the requests.
    pub fn events(&self) -> &EventLog {
        &self.events
    }

    /// Running choices at `now`, oldest first, at most 256.
    pub fn running(&self, now: Instant) -> Vec<RunningChoice> {
        let running = self.rows.running.lock();
        let running = running.unwrap_or_else(PoisonError::into_inner);
        let told = running.iter().take(TOLD_MAX);
        told.map(|row| row.told(now)).collect()
    }

    /// Registers a choice submitted to the engine.
    pub(crate) fn begin(&self, model: &str, asked: Instant, prompt_tokens: u64) -> ProgressUpdater {
        let row = Arc::new(ChoiceProgress {
            request: self.rows.last.fetch_add(1, Relaxed) + 1,
            model: model.to_owned(),
            prompt_tokens,
            asked,
            tokens: AtomicU64::new(0),
            first_us: AtomicU64::new(0),
            last_us: AtomicU64::new(0),
        });
        let mut running = self.lock();
        running.push(Arc::clone(&row));
        drop(running);
        self.events.put(Kind::RequestStarted {
            request: row.request,
            model: row.model.clone(),
            prompt_tokens,
        });
        ProgressUpdater {
            live: self.clone(),
            row,
            outcome: "stopped",
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<ChoiceProgress>>> {
        let running = self.rows.running.lock();
        running.unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChoiceProgress {
    fn told(&self, now: Instant) -> RunningChoice {
        let (tokens, first) = (self.tokens.load(Relaxed), self.first_us.load(Relaxed));
        RunningChoice {
            request: self.request,
            model: self.model.clone(),
            prompt_tokens: self.prompt_tokens,
            tokens,
            age_s: now.saturating_duration_since(self.asked).as_secs_f64(),
            ttft_s: (first > 0).then(|| Duration::from_micros(first).as_secs_f64()),
            tok_s: self.tok_s(tokens, first),
        }
    }

    fn tok_s(&self, tokens: u64, first_us: u64) -> Option<f64> {
        let took = self.last_us.load(Relaxed).saturating_sub(first_us);
        let is_known = tokens > 1 && took > 0;
        is_known.then(|| (tokens - 1) as f64 * 1e6 / took as f64)
    }
}

/// Updates a row; dropping it removes the row.
#[derive(Debug)]
pub(crate) struct ProgressUpdater {
    live: LiveRequests,
    row: Arc<ChoiceProgress>,
    outcome: &'static str,
}

impl ProgressUpdater {
    pub(crate) fn token(&self, now: Instant) {
        let row = &self.row;
        let since = now.saturating_duration_since(row.asked);
        let us = (since.as_micros() as u64).max(1);
        row.last_us.store(us, Relaxed);
        if row.tokens.fetch_add(1, Relaxed) == 0 {
            row.first_us.store(us, Relaxed);
            self.live.events.put(Kind::FirstToken {
                request: row.request,
                ttft_s: since.as_secs_f64(),
            });
        }
    }

    /// Records how the choice ended.
    pub(crate) fn end(&mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for ProgressUpdater {
    fn drop(&mut self) {
        let row = &self.row;
        self.live
            .lock()
            .retain(|other| other.request != row.request);
        let (tokens, first) = (row.tokens.load(Relaxed), row.first_us.load(Relaxed));
        self.live.events.put(Kind::RequestEnded {
            request: row.request,
            model: row.model.clone(),
            outcome: self.outcome,
            tokens,
            tok_s: row.tok_s(tokens, first),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::TimeSource;

    #[test]
    fn a_request_is_told_while_it_runs_and_its_events_stay() {
        let clock = TimeSource {
            now: Instant::now,
            unix_s: || 0,
        };
        let live = LiveRequests::new(EventLog::new(clock));
        let asked = Instant::now();
        let at = |ms| asked + Duration::from_millis(ms);
        let mut watched = live.begin("tiny", asked, 7);
        assert_eq!(live.running(at(5))[0].ttft_s, None);
        for ms in [100, 150, 200] {
            watched.token(at(ms));
        }
        let row = &live.running(at(300))[0];
        assert_eq!((row.tokens, row.prompt_tokens), (3, 7));
        assert_eq!((row.ttft_s, row.tok_s), (Some(0.1), Some(20.0)));
        assert_eq!(row.age_s, 0.3);
        watched.end("complete");
        drop(watched);
        assert_eq!(live.running(at(300)), []);
        let kinds = live.events().after(0, 10);
        assert_eq!(kinds.len(), 3);
        assert_eq!(
            kinds[2].kind,
            Kind::RequestEnded {
                request: 1,
                model: "tiny".into(),
                outcome: "complete",
                tokens: 3,
                tok_s: Some(20.0),
            }
        );
    }
}
