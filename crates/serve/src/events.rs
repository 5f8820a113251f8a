//! The event log of a node: typed, numbered, kept in a bounded ring.
//!
//! ```text
//! membership, instances, requests --put--> ring of EVENTS_MAX --after(seq)--> SSE, JSON lines
//! ```
//!
//! Writers never block: a full ring drops its oldest event. A reader polls for events after its
//! last number, so it needs no queue. A gap in the numbers shows dropped events.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::watch;

use crate::clock::TimeSource;

/// Events that a node keeps. At 300 bytes each they take 1.2 MB at most.
pub const EVENTS_MAX: usize = 4096;

/// Longest text of an event in bytes; longer ones are cut.
const TEXT_BYTES_MAX: usize = 300;

/// An event of this node or its cluster.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Kind {
    /// A node of the cluster is alive.
    NodeCame { node: String },
    /// A node is unreachable at the moment.
    NodeSilent { node: String },
    /// A node is dead, or was removed from the cluster.
    NodeWent { node: String },
    /// A node answers pings, but late.
    NodeSlow {
        node: String,
        /// Seconds of its last answer to a ping.
        answer_s: f64,
    },
    /// A slow node answers in time again.
    NodeSteady { node: String },
    /// The network path between two nodes changed, or its measured latency or bandwidth.
    LinkChanged {
        /// Name of the source node.
        from: String,
        /// Name of the target node.
        to: String,
        /// Before the change; absent where no path worked.
        #[serde(skip_serializing_if = "Option::is_none")]
        before: Option<LinkReport>,
        /// After the change; absent while no path works.
        #[serde(skip_serializing_if = "Option::is_none")]
        now: Option<LinkReport>,
    },
    /// An instance changed its state.
    Instance {
        id: String,
        model: String,
        /// `waiting`, `fetching`, `loading`, `ready`, `recovering`, `failed` or `unloaded`.
        state: String,
        /// Why it failed or recovers.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        nodes: Vec<String>,
    },
    /// An instance's split was changed, or the change failed.
    SplitChanged { model: String, text: String },
    /// A worker or a link failed.
    Fault {
        /// The failure in words.
        text: String,
    },
    /// Tokens are sent although no other node has a copy, or the client cannot resume the stream.
    Unprotected {
        /// Why that is so.
        reason: String,
    },
    /// A client used a key; reported once a minute.
    KeyUsed {
        /// The key's id.
        key: String,
        /// The client's address.
        client: String,
        /// Number since the last report.
        times: u64,
    },
    /// A client was rejected for lack of rights or permits; reported once a minute. Rejections at
    /// the control port, of nodes and joins, are reported once an hour.
    Refused {
        /// The error code of the API, or one that begins with `node_` or `join_`.
        code: &'static str,
        /// The address of the client or node, or `others` for many.
        client: String,
        /// Number since the last report.
        times: u64,
    },
    /// A user or a member changed who may do what, or removed a model.
    Managed {
        /// `invited`, `paired`, `node_revoked`, `key_made`, `key_revoked`, `key_allowed` or
        /// `model_removed`.
        action: &'static str,
        /// The node, the key's id or the model; empty for an invitation.
        subject: String,
        /// The node or address on whose behalf; absent for this node's user.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// A choice was submitted to the engine.
    RequestStarted {
        /// Number of the choice, from 1.
        request: u64,
        model: String,
        prompt_tokens: u64,
    },
    /// A choice got its first token.
    FirstToken {
        /// Number of the choice.
        request: u64,
        /// Seconds since the request's headers.
        ttft_s: f64,
    },
    /// A choice is over.
    RequestEnded {
        /// Number of the choice.
        request: u64,
        model: String,
        /// `complete`, `failed`, or `stopped` by the client or a limit.
        outcome: &'static str,
        tokens: u64,
        /// Tokens a second after the first; absent below two tokens.
        #[serde(skip_serializing_if = "Option::is_none")]
        tok_s: Option<f64>,
    },
}

/// The measured network path between two nodes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkReport {
    /// Name or address of the outgoing interface.
    pub interface: String,
    /// Round-trip time in seconds.
    pub latency_s: f64,
    /// Bytes a second; absent before they are measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<u64>,
}

/// An event with its number and time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// Counts from 1, without gaps at its node.
    pub seq: u64,
    /// Milliseconds since 1970, UTC.
    pub unix_ms: u64,
    #[serde(flatten)]
    pub kind: Kind,
}

/// The event log of a node. Clones share one ring; all methods are thread-safe and take
/// microseconds.
#[derive(Clone, derive_more::Debug)]
#[debug("Events(newest {})", self.newest())]
pub struct EventLog(Arc<EventRing>);

struct EventRing {
    now: fn() -> Instant,
    begun: (Instant, Duration),
    ring: Mutex<VecDeque<Event>>,
    /// Number of the newest event; readers await changes.
    newest: watch::Sender<u64>,
}

impl EventLog {
    /// An empty ring.
    pub fn new(clock: TimeSource) -> Self {
        let unix = Duration::from_secs((clock.unix_s)());
        Self(Arc::new(EventRing {
            now: clock.now,
            begun: ((clock.now)(), unix),
            ring: Mutex::default(),
            newest: watch::channel(0).0,
        }))
    }

    /// Adds an event; drops the oldest when the ring is full.
    pub fn put(&self, kind: Kind) {
        kind.log();
        let unix_ms = self.unix_ms();
        let mut ring = self.0.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let seq = *self.0.newest.borrow() + 1;
        if ring.len() == EVENTS_MAX {
            ring.pop_front();
        }
        let kind = kind.cut();
        ring.push_back(Event { seq, unix_ms, kind });
        self.0.newest.send_replace(seq);
    }

    /// Milliseconds since 1970, monotonic even when the system's clock is set.
    pub(crate) fn unix_ms(&self) -> u64 {
        let (start, unix) = self.0.begun;
        let since = (self.0.now)().saturating_duration_since(start);
        (unix + since).as_millis() as u64
    }

    /// The kept events with a number above `seq`, oldest first, at most `limit`.
    pub fn after(&self, seq: u64, limit: usize) -> Vec<Event> {
        let ring = self.0.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let first = ring.front().map_or(0, |event| event.seq);
        let skip = (seq + 1).saturating_sub(first) as usize;
        ring.iter().skip(skip).take(limit).cloned().collect()
    }

    /// The number of the newest event, 0 before the first.
    pub fn newest(&self) -> u64 {
        *self.0.newest.borrow()
    }

    /// Notifies of newer events.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.newest.subscribe()
    }
}

/// For people: `eth1, 0.12 ms, 940 MB/s`.
impl fmt::Display for LinkReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {:.2} ms", self.interface, self.latency_s * 1e3)?;
        match self.bytes_per_s {
            Some(rate) => write!(f, ", {:.0} MB/s", rate as f64 / 1e6),
            None => Ok(()),
        }
    }
}

impl Kind {
    /// Whether the audit log records it: joins, rejections, key use, loads and unloads, changes of
    /// rights, removed models. The audit log has no prompts and no single requests.
    pub const fn is_audited(&self) -> bool {
        match self {
            Self::NodeCame { .. }
            | Self::NodeWent { .. }
            | Self::Instance { .. }
            | Self::KeyUsed { .. }
            | Self::Refused { .. }
            | Self::Managed { .. } => true,
            Self::NodeSilent { .. }
            | Self::NodeSlow { .. }
            | Self::NodeSteady { .. }
            | Self::LinkChanged { .. }
            | Self::SplitChanged { .. }
            | Self::Fault { .. }
            | Self::Unprotected { .. }
            | Self::RequestStarted { .. }
            | Self::FirstToken { .. }
            | Self::RequestEnded { .. } => false,
        }
    }

    /// Truncates long texts.
    fn cut(mut self) -> Self {
        match &mut self {
            Self::NodeCame { node }
            | Self::NodeSilent { node }
            | Self::NodeWent { node }
            | Self::NodeSlow { node, .. }
            | Self::NodeSteady { node } => cut(node),
            Self::LinkChanged {
                from,
                to,
                before,
                now,
            } => {
                cut(from);
                cut(to);
                let links = before.iter_mut().chain(now);
                links.for_each(|link| cut(&mut link.interface));
            }
            Self::Instance {
                model,
                reason,
                nodes,
                ..
            } => {
                cut(model);
                reason.as_mut().into_iter().for_each(cut);
                nodes.truncate(64);
                nodes.iter_mut().for_each(cut);
            }
            Self::SplitChanged { model, text } => {
                cut(model);
                cut(text);
            }
            Self::KeyUsed { key, client, .. } => {
                cut(key);
                cut(client);
            }
            Self::Refused { client, .. } => cut(client),
            Self::Managed { subject, by, .. } => {
                cut(subject);
                by.as_mut().into_iter().for_each(cut);
            }
            Self::Fault { text } | Self::Unprotected { reason: text } => cut(text),
            Self::RequestStarted { model, .. } | Self::RequestEnded { model, .. } => cut(model),
            Self::FirstToken { .. } => {}
        }
        self
    }
}

fn cut(text: &mut String) {
    if text.len() > TEXT_BYTES_MAX {
        let end = text.floor_char_boundary(TEXT_BYTES_MAX);
        text.truncate(end);
        text.push('…');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events() -> EventLog {
        EventLog::new(TimeSource {
            now: Instant::now,
            unix_s: || 1_790_000_000,
        })
    }

    fn fault(text: &str) -> Kind {
        let text = text.to_owned();
        Kind::Fault { text }
    }

    #[test]
    fn a_changed_link_tells_both_states() {
        let events = events();
        let now = LinkReport {
            interface: "e".repeat(400),
            latency_s: 0.0009,
            bytes_per_s: None,
        };
        events.put(Kind::LinkChanged {
            from: "a".into(),
            to: "b".into(),
            before: None,
            now: Some(now),
        });
        let json = serde_json::to_value(&events.after(0, 1)[0]).unwrap();
        assert_eq!(json["kind"], "link_changed");
        assert_eq!(json["from"], "a");
        assert_eq!(json["to"], "b");
        assert_eq!(json["now"]["latency_s"], 0.0009);
        let interface = json["now"]["interface"].as_str().unwrap();
        assert!(interface.len() <= TEXT_BYTES_MAX + 3);
        assert!(json.get("before").is_none() && json["now"].get("bytes_per_s").is_none());
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let events = events();
        events.put(fault(&"é".repeat(400)));
        let Kind::Fault { text } = &events.after(0, 1)[0].kind else {
            panic!("another kind");
        };
        assert!(text.len() <= TEXT_BYTES_MAX + 3 && text.ends_with('…'));
    }
}
