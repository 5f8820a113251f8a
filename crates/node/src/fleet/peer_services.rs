//! The services that a node answers other nodes with, and the start of its instances.

use std::sync::Arc;

use paceline_base::lock;
use paceline_cluster::nodes::agent::ServiceChannel;
use paceline_fleet::InstanceId;

use super::hosts::NodeConnection;
use super::owner::OwnedInstance;
use super::running::RunningInstance;
use super::{
    ANSWERS, CREW, FETCH, FILE, Inner, PIECES, SPEED, STAGES, STORES, TRACE, answer_traces,
    ingress, journals, stores,
};
use crate::Instance;
use crate::workers::connection::{MessageConnection, send_message};
use crate::workers::host::host;

impl Inner {
    /// Starts the services for other nodes.
    pub(super) fn serve(self: &Arc<Self>) {
        let serve = |name: &str, run: fn(&Arc<Self>, ServiceChannel)| {
            let weak = Arc::downgrade(self);
            self.agent.serve(name, move |channel| {
                if let Some(inner) = weak.upgrade() {
                    run(&inner, channel);
                }
            });
        };
        serve(CREW, |inner, channel| {
            // The owner sees how it ended at its end of the connection.
            let _: Result<(), _> = host(&NodeConnection(channel), &inner.host);
        });
        serve(FETCH, |inner, channel| {
            inner.copies.answer_fetch(&inner.agent, &channel);
        });
        serve(FILE, |inner, channel| inner.copies.answer_file(&channel));
        serve(PIECES, |inner, channel| {
            inner.copies.answer_pieces(&inner.agent, &channel);
        });
        serve(STORES, |inner, channel| {
            let peer = channel.peer();
            stores::answer(inner, &NodeConnection(channel), peer);
        });
        serve(SPEED, |inner, channel| {
            // Optional: the planning node estimates the speed without an answer.
            let _: Result<(), _> = send_message(&NodeConnection(channel), &inner.own_speed());
        });
        serve(ANSWERS, |inner, channel| {
            let line: Arc<dyn MessageConnection> = Arc::new(NodeConnection(channel));
            ingress::answer(inner, &line);
        });
        serve(TRACE, |inner, channel| {
            answer_traces::answer(inner, &NodeConnection(channel));
        });
        serve(STAGES, |inner, channel| {
            answer_traces::answer_stages(inner, &NodeConnection(channel));
        });
        serve(journals::KEEP, |inner, channel| {
            journals::answer_keep(inner, &NodeConnection(channel));
        });
        serve(journals::JOURNAL, |inner, channel| {
            journals::answer_journal(inner, &NodeConnection(channel));
        });
    }

    /// Starts an instance on its own thread, once for each record.
    pub(super) fn begin(self: &Arc<Self>, mut owned: OwnedInstance) {
        let mut state = lock(&self.state);
        let all = &mut state.owned;
        let epoch = owned.epoch;
        let is_same = |it: &RunningInstance| it.owned.epoch == epoch;
        if all.get(&owned.id).is_some_and(is_same) {
            return;
        }
        let running = RunningInstance {
            owned: owned.clone(),
            answers: None,
            former: None,
        };
        let before = all.insert(owned.id, running);
        let former = before.and_then(|it| it.answers.or(it.former));
        // If the previous one answers, it continues when this one cannot start.
        owned.goes_on &= former.is_none();
        if let Some(it) = all.get_mut(&owned.id) {
            it.former = former;
        }
        drop(state);
        let inner = Arc::clone(self);
        let run = move || {
            let answers = owned.start(&inner);
            let mut state = lock(&inner.state);
            let own = state.owned.get_mut(&owned.id);
            let own = own.filter(|it| it.owned.epoch == epoch);
            let (mut goes_on, mut unused) = (false, None);
            match (own, answers) {
                (Some(it), Some(answers)) => {
                    it.answers = Some(answers);
                    unused = it.former.take();
                }
                (Some(it), None) => goes_on = it.former.is_some(),
                (None, answers) => unused = answers,
            }
            drop(state);
            drop(unused); // ends its workers, which takes a moment
            // A draining node must learn that its part was not taken over.
            let leaves = || inner.agent.nodes().iter().any(|node| node.facts.leaving);
            if goes_on && !leaves() {
                owned.go_on_as_before(&inner);
            }
        };
        self.spawn("owner", run);
    }

    /// Whether this node starts or runs an instance of this record.
    pub(super) fn has_begun(&self, id: InstanceId, epoch: u64) -> bool {
        let state = lock(&self.state);
        let is_it = |it: &RunningInstance| it.owned.epoch == epoch;
        state.owned.get(&id).is_some_and(is_it) && !self.is_over()
    }

    /// The instance of this node, once it answers.
    pub(super) fn ready_instance(&self, id: InstanceId) -> Option<Arc<Instance>> {
        lock(&self.state).owned.get(&id)?.any_instance()
    }

    /// Whether this instance is still the one that answers on this node.
    pub(super) fn answers_with(&self, id: InstanceId, instance: &Arc<Instance>) -> bool {
        let current = self.ready_instance(id);
        current.is_some_and(|current| Arc::ptr_eq(&current, instance))
    }
}
