//! Rounds of nodes: what each observes, and the actions that [`reconcile`] decides.

use std::collections::BTreeSet;
use std::time::Duration;

use paceline_cluster::nodes::agent::{NodeFacts, NodeView};
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::{NodeId, RegisterKey};
use paceline_fleet::rules::drain::{self, DrainStep};
use paceline_fleet::{
    Action, InstanceId, InstanceSpec, Observed, Record, Specs, WriteReason, reconcile, specs,
};

use crate::world::{PATIENCE, SimRun, SimWorld};

/// Time before the end of a run in which no instance moves to more nodes.
const LAST_WRITE: Duration = Duration::from_secs(5);

impl SimWorld {
    /// The node takes the next step of its drain for all its instances.
    pub(crate) fn hand_on(&mut self, node: usize) {
        let Some((observed, specs)) = self.observe(node) else {
            return;
        };
        let mut open = std::mem::take(&mut self.nodes[node].hands_over);
        open.extend(drain::work(&observed, &specs).into_keys());
        let mut records = Vec::new();
        open.retain(|id| {
            let record = specs.get(*id);
            let step = drain::step(&observed, record);
            if let (DrainStep::Homeless, Some(record)) = (step, record) {
                records.extend(handed_over(&observed, *id, record));
            }
            !matches!(step, DrainStep::Moved | DrainStep::Stuck)
        });
        self.nodes[node].hands_over = open;
        for (id, epoch, wanted) in records {
            self.moves += 1;
            self.write_record(node, id, epoch, Some(&wanted));
        }
    }

    /// A node's own map and lives, the paths as they are, and the reports of owners as soon as they
    /// are made. `None` if it does not run.
    pub(crate) fn observe(&self, node: usize) -> Option<(Observed, Specs)> {
        let own = &self.nodes[node];
        let (member, serving) = (own.member.as_ref()?, self.serving.as_ref()?);
        let record = |(id, epoch, spec): (InstanceId, u64, InstanceSpec)| {
            let report = serving.report(id, epoch, self.index(spec.nodes[0]));
            let record = Record {
                epoch,
                spec,
                report,
            };
            (id, record)
        };
        let mut observed = Observed::new(own.id);
        observed.is_leaving = own.leaves;
        let is_cut = self.split != 0 || !self.deaf.is_empty();
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        order.rotate_left(node);
        for number in order {
            let id = self.nodes[number].id;
            let facts = member.map().get(&RegisterKey::Node(id));
            let facts: Option<NodeFacts> = facts.and_then(|it| serde_json::from_str(it).ok());
            let Some(facts) = facts else { continue };
            let state = member.life(id);
            if state == Life::Alive && !facts.leaving {
                observed.ranked.push(id);
            }
            observed.lives.insert(id, state);
            observed.nodes.push(view(id, state, facts));
            let speaks = |other| self.passes(number, other) && self.passes(other, number);
            let silent = (0..number).filter(|other| is_cut && !speaks(*other));
            silent.for_each(|other| observed.broken.insert(id, self.nodes[other].id));
        }
        let runs = own.runs.iter();
        observed.owned = runs
            .map(|(id, run)| (*id, serving.observed(node, *id, run, &self.nodes)))
            .collect();
        Some((observed, specs(member.map()).map(record).collect()))
    }

    /// Reconciles a node, as `fleet` decides.
    pub(crate) fn round(&mut self, node: usize) {
        let own = &self.nodes[node];
        let has_records = own
            .member
            .as_ref()
            .is_some_and(|it| specs(it.map()).next().is_some());
        let is_early = self.now < own.started + PATIENCE && own.life > 1;
        if is_early || !(has_records || own.leaves || !own.runs.is_empty()) {
            return;
        }
        let Some((observed, specs)) = self.observe(node) else {
            return;
        };
        let Some(mut history) = self.nodes[node].history.take() else {
            return;
        };
        let actions = reconcile(&observed, &specs, self.origin + self.now, &mut history);
        self.nodes[node].history = Some(history);
        let writes = self.perform(node, actions, &observed);
        let runs = self.nodes[node].runs.clone();
        self.serve(|serving, net, later| serving.owns(node, &runs, net, later));
        for (id, epoch, spec) in writes {
            self.write_record(node, id, epoch, Some(&spec));
        }
        if self.nodes[node].leaves {
            self.hand_on(node);
        }
    }

    /// Performs the actions of a round; returns the records to write.
    fn perform(
        &mut self,
        node: usize,
        actions: Vec<Action>,
        observed: &Observed,
    ) -> Vec<(InstanceId, u64, InstanceSpec)> {
        let mut writes = Vec::new();
        for action in actions {
            match action {
                Action::Start {
                    id,
                    epoch,
                    spec,
                    resumes,
                } => {
                    self.check_epoch(node, id, epoch);
                    let run = SimRun {
                        epoch,
                        spec,
                        resumes,
                    };
                    self.nodes[node].runs.insert(id, run);
                }
                Action::Stop { id, .. } => drop(self.nodes[node].runs.remove(&id)),
                Action::Write {
                    id,
                    epoch,
                    spec,
                    reason,
                } => {
                    self.takeovers += u64::from(reason == WriteReason::OwnerLost);
                    writes.push((id, epoch, spec));
                }
                // Predictions are not simulated: it moves where its user asked for more nodes. Not
                // at the end, when the record must have arrived everywhere.
                Action::Evaluate {
                    id, epoch, nodes, ..
                } => {
                    let it = &observed.owned[&id];
                    let count = |nodes: &[NodeId]| nodes.iter().collect::<BTreeSet<_>>().len();
                    let is_late = self.now + LAST_WRITE >= self.length();
                    if count(&it.nodes_now()) < count(&nodes) && !is_late {
                        self.widened += 1;
                        writes.push((id, epoch + 1, widened(&it.spec, nodes)));
                    }
                }
                Action::KeepPlacement { .. }
                | Action::Readmit { .. }
                | Action::Collect { .. }
                | Action::Open { .. }
                | Action::Route { .. }
                | Action::Close { .. }
                | Action::TellUnserved { .. }
                | Action::Sign { .. } => {}
                Action::Load { .. }
                | Action::Unload { .. }
                | Action::Drain
                | Action::Strand
                | Action::Resume { .. } => {
                    self.violations.push(format!("node {node}: {action:?}"));
                }
            }
        }
        writes
    }

    fn check_epoch(&mut self, node: usize, id: InstanceId, epoch: u64) {
        let highest = self.nodes[node].highest.entry(id).or_default();
        if epoch < *highest {
            let said = format!("node {node} runs {id} of epoch {epoch} after {highest}");
            self.violations.push(said);
        }
        *highest = (*highest).max(epoch);
    }
}

/// The next record of an instance that a node hands over, and its epoch.
fn handed_over(
    observed: &Observed,
    id: InstanceId,
    record: &Record,
) -> Option<(InstanceId, u64, InstanceSpec)> {
    let spec = &record.spec;
    let heirs = drain::heirs(observed, spec);
    let owner = match heirs.contains(&spec.nodes[0]) {
        true => spec.nodes[0],
        // Every node can get the model.
        false => {
            *drain::by_preference(heirs.clone(), &spec.successors, &BTreeSet::new()).first()?
        }
    };
    let next = drain::handed_over(observed.own, spec.clone(), &heirs, owner)?;
    Some((id, record.epoch + 1, next))
}

fn widened(spec: &InstanceSpec, nodes: Vec<NodeId>) -> InstanceSpec {
    let mut next = spec.clone();
    let new = nodes
        .iter()
        .skip(1)
        .filter(|id| !spec.successors.contains(id));
    next.successors.extend(new.copied());
    next.nodes = nodes;
    next
}

fn view(id: NodeId, state: Life, facts: NodeFacts) -> NodeView {
    NodeView {
        id,
        state,
        found_by: String::new(),
        heard_by: Vec::new(),
        linked: true,
        slow_ms: None,
        facts,
    }
}
