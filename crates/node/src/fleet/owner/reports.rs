//! Reports of an instance's owner: in the shared map, to its log, and of measurements.

use std::sync::Arc;
use std::time::Instant;

use paceline_base::lock;
use paceline_cluster::nodes::RegisterKey;
use paceline_fleet::{Report, State};
use paceline_model::Config;
use paceline_worker::messages::RankFacts;

use super::super::Inner;
use super::super::hosts::RunningFacts;
use super::{OwnedInstance, TELL_EVERY};
use crate::instance::numbers;
use crate::supervisor::Notice;
use crate::worker_notices::lines;

impl OwnedInstance {
    /// The observer that publishes the workers' events to the cluster.
    pub(in crate::fleet) fn observer(
        &self,
        inner: &Arc<Inner>,
        shape: (Config, usize),
    ) -> crate::Observer {
        let (own, inner) = (self.clone(), Arc::downgrade(inner));
        let mut is_told = false;
        let mut last = Instant::now();
        let mut after_failure = match self.goes_on {
            true => State::Recovering,
            false => State::Loading,
        };
        let classes = self.classes().unwrap_or_default();
        Box::new(move |notice, cuts| {
            let Some(inner) = inner.upgrade() else { return };
            if let Notice::Ready { way, facts, .. } = notice {
                after_failure = State::Recovering;
                let split = &cuts[*way].split;
                let mut running = lock(&own.running);
                running.numbers = numbers(split, &classes, facts);
                running.split = Some(split.to_string());
                drop(running);
                own.tell_wires(&inner, facts);
            }
            match notice {
                Notice::Loading { done, of, .. } if last.elapsed() >= TELL_EVERY => {
                    last = Instant::now();
                    let progress = (*done as u64, *of as u64);
                    own.report(&inner, State::Loading, Some(progress), None);
                }
                Notice::Ready { again: true, .. } | Notice::Changed(_) => {
                    own.report(&inner, State::Ready, None, own.left_out(&inner));
                }
                Notice::Failed { rank, reason, .. } => {
                    own.flaps.lost(*rank, Instant::now());
                    own.report(&inner, after_failure, None, Some(reason.clone()));
                }
                _ => {}
            }
            // A split change has its own line.
            let is_known = matches!(notice, Notice::Ready { again: false, .. })
                && std::mem::replace(&mut is_told, true);
            let lines = match own.wanted.on_one_machine() {
                Some(_) if is_known => Vec::new(),
                Some(_) => lines(notice, cuts, (&shape.0, shape.1)),
                None => own.line(&inner, notice).into_iter().collect(),
            };
            lines.iter().for_each(|line| (inner.spec.tell)(line));
        })
    }

    /// A notice of workers on several machines as a line; their parts are shown by others.
    pub(super) fn line(&self, inner: &Inner, notice: &Notice) -> Option<String> {
        let model = self.wanted.id();
        Some(match notice {
            Notice::Ready { again: true, .. } => {
                let without = self.left_out(inner);
                let note = without.map_or(String::new(), |it| format!(", {it}"));
                format!("{model} answers again{note}")
            }
            Notice::Failed { reason, .. } => format!("error: {model}: {reason}"),
            Notice::Changed(change) => change.line(),
            Notice::Prompts(news) => news.line(),
            Notice::Continued { answers } => format!("{model}: {}", Notice::continued(*answers)),
            Notice::Loading { .. } | Notice::Ready { .. } => return None,
        })
    }

    /// Tells the transports between ranks with RDMA cables, where they have changed.
    fn tell_wires(&self, inner: &Inner, facts: &[RankFacts]) {
        let mut running = lock(&self.running);
        let told = running.cables.told(|id| inner.name(id), facts);
        let before = std::mem::replace(&mut running.wires, told.clone());
        drop(running);
        if let Some(told) = told.filter(|told| before.as_ref() != Some(told)) {
            (inner.spec.tell)(&format!("{}: {told}", self.wanted.model));
        }
    }

    /// Reports that the previous record's instance keeps answering, because this one cannot start.
    pub(in crate::fleet) fn go_on_as_before(&self, inner: &Inner) {
        let reason = "the last placement could not start, the one before answers".to_owned();
        self.unused.refuse(Some(reason));
        self.report(inner, State::Ready, None, self.left_out(inner));
    }

    pub(in crate::fleet) fn report(
        &self,
        inner: &Inner,
        state: State,
        progress: Option<(u64, u64)>,
        reason: Option<String>,
    ) {
        let (running, computing) = match state {
            State::Ready => (lock(&self.running).clone(), self.computing()),
            _ => (RunningFacts::default(), Vec::new()),
        };
        let is_open = !self.wanted.predicted.is_empty();
        let is_other = |name: &String| is_open && *name != self.wanted.split;
        let report = Report {
            epoch: self.epoch,
            state,
            progress,
            reason,
            computing,
            context: running.context,
            numbers: running.numbers,
            wires: running.wires,
            split: running.split.filter(is_other),
        };
        let text = serde_json::to_string(&report).expect("a report is JSON");
        // Fails if the map is full or this node is no longer the owner: the report is dropped.
        let _: Result<(), _> =
            inner
                .agent
                .write(RegisterKey::Report(self.id), self.epoch, Some(text));
    }
}
