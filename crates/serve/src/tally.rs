//! Rate-limited events about key use and rejections. The first of a kind is reported at once,
//! further ones within a minute as a count. So no client can flood the audit log.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::http::Response;

use crate::events::{EventLog, Kind};
use crate::rejection::Rejection;

/// Minimum time between reports of the same use or rejection, in milliseconds.
const EVERY_MS: u64 = 60_000;

/// Maximum distinct pairs of client and action; further clients share a row.
const ROWS_MAX: usize = 256;

/// The client of the row that further clients share.
const OTHERS: &str = "others";

/// A client, and its key use or rejection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct TallyKey {
    client: String,
    what: ClientEvent,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ClientEvent {
    /// Used the key with this id.
    Key(String),
    /// Was rejected with this code.
    Refusal(&'static str),
}

/// Time of the last report, and the count since.
#[derive(Debug)]
struct TallyCount {
    at_ms: u64,
    since: u64,
}

/// Rate limiter of these events.
#[derive(Debug)]
pub(crate) struct EventTally {
    events: EventLog,
    rows: Mutex<HashMap<TallyKey, TallyCount>>,
}

impl EventTally {
    pub(crate) fn new(events: EventLog) -> Self {
        Self {
            events,
            rows: Mutex::default(),
        }
    }

    pub(crate) fn key_used(&self, client: String, key: &str) {
        let what = ClientEvent::Key(key.to_owned());
        self.note(TallyKey { client, what }, self.events.unix_ms());
    }

    fn refused(&self, client: String, code: &'static str) {
        let what = ClientEvent::Refusal(code);
        self.note(TallyKey { client, what }, self.events.unix_ms());
    }

    /// Records a response that rejects a client for lack of rights or permits.
    pub(crate) fn answered(&self, client: String, response: &Response<Body>) {
        let refusal = response.extensions().get::<Arc<Rejection>>();
        if let Some(code) = refusal.and_then(|refusal| refusal.audited()) {
            self.refused(client, code);
        }
    }

    fn note(&self, mut row: TallyKey, now_ms: u64) {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = |told: &TallyCount| now_ms.saturating_sub(told.at_ms) >= EVERY_MS;
        if !rows.contains_key(&row) && rows.len() >= ROWS_MAX {
            // Evicts expired rows, after reporting their counts.
            for (row, told) in rows.extract_if(|_, told| is_old(told)) {
                if told.since > 0 {
                    self.events.put(row.kind(told.since));
                }
            }
            if rows.len() >= ROWS_MAX {
                row.client = OTHERS.to_owned();
            }
        }
        let told = rows.get_mut(&row);
        let times = match told {
            Some(told) if !is_old(told) => {
                told.since += 1;
                return;
            }
            Some(told) => told.since + 1,
            None => 1,
        };
        let told = TallyCount {
            at_ms: now_ms,
            since: 0,
        };
        rows.insert(row.clone(), told);
        drop(rows);
        self.events.put(row.kind(times));
    }
}

impl TallyKey {
    fn kind(self, times: u64) -> Kind {
        let client = self.client;
        match self.what {
            ClientEvent::Key(key) => Kind::KeyUsed { key, client, times },
            ClientEvent::Refusal(code) => Kind::Refused {
                code,
                client,
                times,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::clock::TimeSource;

    fn tally() -> EventTally {
        EventTally::new(EventLog::new(TimeSource {
            now: Instant::now,
            unix_s: || 0,
        }))
    }

    fn told(tally: &EventTally) -> Vec<(String, u64)> {
        let events = tally.events.after(0, usize::MAX);
        let pair = |kind: &Kind| match kind {
            Kind::KeyUsed { key, times, .. } => (key.clone(), *times),
            Kind::Refused { client, times, .. } => (client.clone(), *times),
            other => panic!("{other:?}"),
        };
        events.iter().map(|event| pair(&event.kind)).collect()
    }

    fn row(client: &str) -> TallyKey {
        TallyKey {
            client: client.to_owned(),
            what: ClientEvent::Refusal("invalid_api_key"),
        }
    }

    #[test]
    fn a_flood_is_told_as_a_number() {
        let tally = tally();
        for ms in 0..1000 {
            tally.note(row("a"), ms);
        }
        tally.note(row("b"), 1000);
        tally.note(row("a"), EVERY_MS);
        let expected = [("a", 1), ("b", 1), ("a", 1000)];
        assert_eq!(told(&tally), expected.map(|(who, n)| (who.to_owned(), n)));
    }

    #[test]
    fn many_clients_take_bounded_memory() {
        let tally = tally();
        for client in 0..100_000 {
            tally.note(row(&client.to_string()), 5);
        }
        assert!(tally.rows.lock().unwrap().len() <= ROWS_MAX + 1);
        assert_eq!(told(&tally).len(), ROWS_MAX + 1);
        assert_eq!(told(&tally).last().unwrap().0, OTHERS);
    }

    #[test]
    fn old_rows_make_room_and_tell_what_they_counted() {
        let tally = tally();
        for client in 0..ROWS_MAX {
            tally.note(row(&client.to_string()), 0);
            tally.note(row(&client.to_string()), 1);
        }
        tally.note(row("new"), EVERY_MS + 1);
        let told = told(&tally);
        assert_eq!(told.len(), 2 * ROWS_MAX + 1);
        assert_eq!(told.last().unwrap(), &("new".to_owned(), 1));
    }

    #[test]
    fn a_key_is_told_by_its_id() {
        let tally = tally();
        tally.key_used("127.0.0.1".to_owned(), "k1");
        tally.key_used("127.0.0.1".to_owned(), "k1");
        assert_eq!(told(&tally), [("k1".to_owned(), 1)]);
    }
}
