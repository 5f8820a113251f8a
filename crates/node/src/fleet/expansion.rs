//! Evaluation of another placement of an instance, which predicts its speed. The owner writes it as
//! the next record if its user asked for more nodes, or the gain is at least [`GAIN`].
//!
//! The previous instance answers until the new one does. So a request waits for one handover and
//! not for a load, and both need memory at the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use paceline_base::lock;
use paceline_cluster::nodes::NodeId;
use paceline_engine::{Service, State};
use paceline_fleet::memory::own_part;
use paceline_fleet::{InstanceId, InstanceSpec};
use paceline_model::{Config, ModelSource, SplitKind};

use super::owner::{self, OwnedInstance};
use super::preview::Proposal;
use super::proposals::{Wishes, predictions};
use super::{Inner, proposals};
use crate::Instance;
use crate::classes::EngineChoice;
use crate::forecast::Forecast;

/// Minimum predicted speedup: predictions are off by as much.
const GAIN: f64 = 1.15;

/// Why an instance stays where it is.
#[derive(Debug)]
enum ExpansionRefusal {
    /// The predicted speed on the other nodes, as a multiple of that now.
    Gain(f64),
    /// It may be possible soon.
    NotYet(String),
}

/// A ready instance and alternative nodes for it.
struct Chance {
    owned: OwnedInstance,
    instance: Arc<Instance>,
    nodes: Vec<NodeId>,
    /// Whether it moves although requests are open.
    in_use: bool,
}

impl Chance {
    /// Whether its user asked for more nodes than compute now, and these are more.
    fn is_asked(&self) -> bool {
        let count = |nodes: &[NodeId]| nodes.iter().collect::<BTreeSet<_>>().len();
        let (now, then) = (count(&self.owned.nodes_now()), count(&self.nodes));
        now < then && now < usize::from(self.owned.wanted.width.unwrap_or(0))
    }
}

impl Inner {
    /// Evaluates another placement of an instance on its own thread, since predictions take
    /// measurements.
    pub(super) fn evaluate(
        self: &Arc<Self>,
        (id, epoch): (InstanceId, u64),
        nodes: Vec<NodeId>,
        in_use: bool,
    ) {
        let mut state = lock(&self.state);
        let running = state.owned.get(&id).filter(|it| it.owned.epoch == epoch);
        let Some((owned, instance)) =
            running.and_then(|it| Some((it.owned.clone(), it.own_instance()?)))
        else {
            return;
        };
        state.is_evaluating = true;
        state.slower.remove(&id);
        drop(state);
        let chance = Chance {
            owned,
            instance,
            nodes,
            in_use,
        };
        let inner = Arc::clone(self);
        let run = move || {
            let refused = inner.try_take(&chance).err();
            let is_slower = matches!(refused, Some(ExpansionRefusal::Gain(_)));
            inner.tell_refusal(&chance, refused);
            let mut state = lock(&inner.state);
            state.is_evaluating = false;
            if is_slower {
                state.slower.insert(id);
            }
        };
        if !self.spawn("widen", run) {
            lock(&self.state).is_evaluating = false;
        }
    }

    fn tell_refusal(&self, chance: &Chance, refused: Option<ExpansionRefusal>) {
        let names: Vec<String> = chance.nodes.iter().map(|id| self.name(*id)).collect();
        let told = refused.map(|refusal| {
            let reason = match refusal {
                ExpansionRefusal::Gain(gain) => format!("predicted {gain:.2} times as fast"),
                ExpansionRefusal::NotYet(reason) => reason,
            };
            format!("it does not move to {}: {reason}", names.join(", "))
        });
        if chance.owned.unused.refuse(told.clone())
            && let Some(told) = told
        {
            (self.spec.tell)(&format!("{}: {told}", chance.owned.wanted.model));
        }
    }

    /// Writes the next record if its user asked for the nodes, or the gain is sufficient.
    fn try_take(&self, chance: &Chance) -> Result<(), ExpansionRefusal> {
        let (owned, nodes) = (&chance.owned, &chance.nodes);
        let (now, then) = self
            .predicted(owned, nodes)
            .map_err(ExpansionRefusal::NotYet)?;
        let gain = now.map(|now| then[0].decode_tok_s / now.max(f64::MIN_POSITIVE));
        match gain {
            _ if chance.is_asked() => {}
            Ok(gain) if gain >= GAIN => {}
            Ok(gain) => return Err(ExpansionRefusal::Gain(gain)),
            Err(reason) => return Err(ExpansionRefusal::NotYet(reason)),
        }
        if !chance.in_use && open(&chance.instance) > 0 {
            return Err(ExpansionRefusal::NotYet("it is in use".to_owned()));
        }
        let next = next_record(&owned.wanted, nodes, &then);
        let written = self.want(owned.id, owned.epoch + 1, Some(&next));
        written.map_err(|error| ExpansionRefusal::NotYet(error.to_string()))?;
        let names: Vec<String> = nodes.iter().map(|id| self.name(*id)).collect();
        let (model, names) = (&owned.wanted.model, names.join(", "));
        let gain = gain.map_or(String::new(), |gain| {
            format!(": {gain:.1} times as fast, as predicted")
        });
        (self.spec.tell)(&format!("{model} moves to {names}{gain}"));
        Ok(())
    }

    /// The predicted speed of an instance as it is, and its splits on `nodes`, fastest first. At
    /// least one, and one of each kind where its user left the split open.
    fn predicted(
        &self,
        owned: &OwnedInstance,
        nodes: &[NodeId],
    ) -> Result<(Result<f64, String>, Vec<Proposal>), String> {
        let wanted = &owned.wanted;
        let path = owner::path_of(self, wanted)?;
        let (source, config) = open_model(&path)?;
        let at = owned.nodes_now();
        let all: BTreeSet<NodeId> = nodes.iter().chain(&at).copied().collect();
        let all: Vec<NodeId> = all.into_iter().collect();
        self.measure_unknown(&all);
        let threads = usize::from(wanted.threads.max(1));
        let of = (threads, wanted.options.memory);
        let forecast = self.forecast(&source, &config, of);
        let forecast = forecast.map_err(|error| error.to_string())?;
        let machines = self.machines(&all);
        let kind = wanted.split.parse().unwrap_or(SplitKind::Auto);
        let best = |ranks: &[NodeId], kind| {
            let class = |id: &NodeId| wanted.class_of(*id).parse().unwrap_or_default();
            let engines = EngineChoice::Given(ranks.iter().map(class).collect());
            let model = (&source, &config, &forecast);
            let like = (Some(owned.id), wanted);
            self.fastest(model, (kind, &engines), (ranks, &machines), like)
        };
        let then = match wanted.predicted.is_empty() {
            true => best(nodes, kind)?,
            false => best(nodes, SplitKind::Auto)?,
        };
        let rooms = self.rooms_beside(Some(owned.id), wanted);
        for (id, bytes) in nodes.iter().zip(&then[0].bytes) {
            let homes = wanted.nodes.iter().zip(&at).filter(|(_, at)| *at == id);
            let held: u64 = homes.map(|(home, _)| own_part(wanted, *home)).sum();
            let room = rooms.get(id).map(|room| room.saturating_sub(held));
            if room.is_some_and(|room| room < *bytes) {
                let name = self.name(*id);
                return Err(format!("{name} has no memory for both placements"));
            }
        }
        Ok((best(&at, kind).map(|now| now[0].decode_tok_s), then))
    }

    /// The predictions for splits over `nodes`, the fastest that fits first.
    fn fastest(
        &self,
        model: (&ModelSource, &Config, &Forecast),
        wishes: Wishes<'_>,
        nodes: proposals::Nodes<'_>,
        like: proposals::Like<'_>,
    ) -> Result<Vec<Proposal>, String> {
        let (proposals, mut reasons) = self.proposals(model, wishes, nodes, like);
        match proposals.first().is_some_and(|first| first.fits) {
            true => Ok(proposals),
            false => Err(reasons.pop().unwrap_or_else(|| "no split fits".to_owned())),
        }
    }
}

/// Open requests of an instance; `usize::MAX` if it does not answer.
fn open(instance: &Instance) -> usize {
    let status = instance.status();
    match status.state {
        State::Ready => status.running + status.waiting,
        _ => usize::MAX,
    }
}

pub(super) fn open_model(path: &Path) -> Result<(ModelSource, Config), String> {
    let source = ModelSource::open(path).map_err(|error| error.to_string())?;
    let config = Config::read(&source).map_err(|error| error.to_string())?;
    Ok((source, config))
}

/// The spec with these nodes and the first split of `then`; its former owners and successors come
/// first.
fn next_record(wanted: &InstanceSpec, nodes: &[NodeId], then: &[Proposal]) -> InstanceSpec {
    let mut next = wanted.clone();
    next.split.clone_from(&then[0].split);
    if !wanted.predicted.is_empty() {
        next.predicted = predictions(then);
    }
    next.shares = then[0].shares_of(nodes);
    next.needs = BTreeMap::new(); // of the former split
    let new = nodes[1..]
        .iter()
        .filter(|id| !wanted.successors.contains(id));
    next.successors.extend(new.copied());
    next.nodes = nodes.to_vec();
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    #[test]
    fn an_open_split_is_chosen_again_for_other_nodes() {
        let of = |split: &str, tok_s| Proposal {
            split: split.to_owned(),
            decode_tok_s: tok_s,
            fits: true,
            ..Proposal::default()
        };
        let then = [of("pipeline", 6.25), of("tensor", 0.5)];
        let mut wanted = InstanceSpec {
            split: "tensor".to_owned(),
            nodes: vec![node(1), node(2)],
            ..InstanceSpec::default()
        };
        let nodes = [1, 2, 3].map(node);
        let named = next_record(&wanted, &nodes, &then[1..]);
        assert_eq!((&*named.split, named.predicted.len()), ("tensor", 0));
        wanted.predicted.insert("tensor".to_owned(), 20_000);
        let next = next_record(&wanted, &nodes, &then);
        let predicted = [("pipeline".to_owned(), 6250), ("tensor".to_owned(), 500)];
        assert_eq!((&*next.split, next.nodes), ("pipeline", nodes.to_vec()));
        assert_eq!(next.predicted, predicted.into());
    }
}
