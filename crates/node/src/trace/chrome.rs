//! A timeline in Chrome's trace format, which Perfetto and `chrome://tracing` read: an array of
//! events with times in microseconds. A rank is a process, its second half a thread.
//!
//! Source: "Trace Event Format", Google, 2016.

use paceline_model::trace::Kind;
use serde_json::{Value, json};

use super::intervals::Interval;
use super::{Aligned, RankLine, Timeline};

impl Timeline {
    /// The timeline for Perfetto: one object.
    pub fn json(&self) -> Value {
        let mut events = vec![
            name("process_name", 0, "request"),
            event("prompt", "request", 0, 0, (0, self.first), json!({})),
            event(
                "answer",
                "request",
                0,
                0,
                (self.first, self.whole),
                json!({}),
            ),
        ];
        for (rank, line) in self.ranks.iter().enumerate() {
            line.tell(rank, &mut events);
        }
        json!({
            "displayTimeUnit": "ms",
            "otherData": { "split": self.split, "ranks": self.ranks.len() },
            "traceEvents": events,
        })
    }
}

impl RankLine {
    fn tell(&self, rank: usize, events: &mut Vec<Value>) {
        let pid = rank + 1;
        let leads = if self.leads { ", leads" } else { "" };
        let title = format!("rank {rank}: {}{leads}", self.name);
        events.push(name("process_name", pid, &title));
        for span in &self.spans {
            let (args, at) = (json!({ "step": span.step }), (span.begin, span.end));
            let tid = usize::from(span.lane);
            let title = span.title();
            if !span.kind.is_exchange() {
                events.push(event(&title, span.category(), pid, tid, at, args));
                continue;
            }
            let parts = [
                ("wait", (span.begin, span.met)),
                ("exchange", (span.met, span.end)),
            ];
            for (part, at) in parts.into_iter().filter(|(_, (a, b))| a < b) {
                let title = format!("{part}: {title}");
                events.push(event(&title, part, pid, tid, at, args.clone()));
            }
        }
        for at in self.shares.compute.iter() {
            events.push(event("compute", "compute", pid, 2, at, json!({})));
        }
    }
}

impl Aligned {
    fn title(&self) -> String {
        match self.kind {
            Kind::Schedule => "schedule".to_owned(),
            Kind::Step if self.n == 0 => format!("step {}", self.step),
            Kind::Step => format!("step {}, {} rows", self.step, self.n),
            Kind::Choose => "choose a token".to_owned(),
            Kind::Between => "replies".to_owned(),
            Kind::Plan => "plan of the step".to_owned(),
            Kind::Sum => format!("sum in layer {}", self.n),
            Kind::Receive => "residual of the stage before".to_owned(),
            Kind::Send => "residual to the next stage".to_owned(),
            Kind::Logits => "logits".to_owned(),
            Kind::Half => format!("half of {} rows", self.n),
            Kind::Turn => "other half's turn".to_owned(),
        }
    }

    const fn category(&self) -> &'static str {
        match self.kind {
            Kind::Step | Kind::Half => "step",
            Kind::Choose => "choose",
            Kind::Turn => "turn",
            _ => "plan",
        }
    }
}

/// Names a process.
fn name(what: &str, pid: usize, name: &str) -> Value {
    json!({ "ph": "M", "name": what, "pid": pid, "args": { "name": name } })
}

/// A complete event with a duration.
fn event(
    name: &str,
    category: &str,
    pid: usize,
    tid: usize,
    (begin, end): Interval,
    args: Value,
) -> Value {
    let us = |ns: i64| ns as f64 / 1e3;
    json!({
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid,
        "ts": us(begin), "dur": us(end - begin), "args": args,
    })
}
