//! Placement spread: placements of several replicas over the live nodes, with predictions, within
//! the memory of all of them together.
//!
//! A replica has `--nodes N` nodes, or an equal share of the named ones. The forecast for the first
//! group gives the bytes per node; [`assignment`](super::deal) assigns nodes by them. Loaded
//! weights count as used memory.

use std::collections::BTreeMap;
use std::path::Path;

use paceline_base::{Bytes, CallbackError};
use paceline_cluster::nodes::NodeId;
use paceline_fleet::{NODES_MAX, specs};
use paceline_model::{Config, ModelSource};

use super::preview::{COUNT_MAX, Proposal, unnamed_record};
use super::{Error, Inner, LoadRequest, encoders};
use crate::context_size::needed_positions;
use crate::forecast::Forecast;
use paceline_fleet::assignment::{Need, Short, check, deal, share_out};
use paceline_fleet::memory::room;

/// The nodes of each replica, and the prediction for them.
type ReplicaPlacement = (Vec<Vec<NodeId>>, Proposal);

/// Nodes available to replicas.
enum NodePool {
    /// The groups that the user named.
    Named(Vec<Vec<NodeId>>),
    /// All live nodes, best first.
    Any(Vec<NodeId>),
}

impl NodePool {
    /// A group of `each` nodes, to measure and predict with.
    fn first(&self, each: usize) -> &[NodeId] {
        match self {
            Self::Named(groups) => &groups[0],
            Self::Any(order) => &order[..each],
        }
    }
}

impl Inner {
    pub(super) fn spread(&self, ask: &LoadRequest) -> Result<Vec<Vec<NodeId>>, Error> {
        let (pool, each) = (self.pool(ask)?, ask.count.unwrap_or(1));
        if matches!(pool, NodePool::Any(_)) && !(1..=NODES_MAX).contains(&each) {
            return Err(Error::nodes(each));
        }
        let (proposals, mut notes) = self.spread_over(ask, &pool, each..=each)?;
        let best = proposals.into_iter().next();
        best.map(|(groups, _)| groups)
            .ok_or_else(|| notes.pop().unwrap_or_else(|| NO_WAY.to_owned()).into())
    }

    /// As [`preview`](Self::preview), for several replicas.
    pub(super) fn preview_spread(
        &self,
        ask: &LoadRequest,
    ) -> Result<(Vec<Proposal>, Vec<String>), Error> {
        let pool = self.pool(ask)?;
        let most = match &pool {
            NodePool::Named(groups) => groups[0].len(),
            NodePool::Any(order) => order.len().min(COUNT_MAX),
        };
        let each = match ask.count {
            None | Some(0) => 1..=most,
            Some(count) => count..=count,
        };
        let (proposals, notes) = self.spread_over(ask, &pool, each)?;
        Ok((proposals.into_iter().map(|it| it.1).collect(), notes))
    }

    /// Groups of nodes with their predictions, fastest first, for replicas of any of these numbers
    /// of nodes. Also returns why others were refused.
    fn spread_over(
        &self,
        ask: &LoadRequest,
        pool: &NodePool,
        each: std::ops::RangeInclusive<usize>,
    ) -> Result<(Vec<ReplicaPlacement>, Vec<String>), Error> {
        let path = self.copies.of_user(&ask.model)?;
        let (source, config, forecast) = self.opened(ask, &path)?;
        let each = match pool {
            NodePool::Named(groups) => groups[0].len()..=groups[0].len(),
            NodePool::Any(_) => each,
        };
        let (mut proposals, mut notes) = (Vec::new(), Vec::new());
        for each in each {
            let first = pool.first(each);
            self.measure_unknown(first);
            let machines = self.machines(first);
            let engines = self.engine_choice(ask, first)?;
            let wishes = (ask.split, &engines);
            let model = (&source, &config, &forecast);
            let (nodes, like) = ((first, &machines[..]), unnamed_record(ask, &source));
            let (said, reasons) = self.proposals(model, wishes, nodes, (None, &like));
            let placed = said.into_iter().map(|said| self.place(ask, pool, said));
            for placed in placed.chain(reasons.into_iter().map(Err)) {
                match placed {
                    Ok(placed) => proposals.push(placed),
                    Err(reason) if notes.contains(&reason) => {}
                    Err(reason) => notes.push(reason),
                }
            }
        }
        proposals.sort_by(|(_, a), (_, b)| b.decode_tok_s.total_cmp(&a.decode_tok_s));
        Ok((proposals, notes))
    }

    /// The model's shape, with the context that it needs, and its forecast.
    fn opened(
        &self,
        ask: &LoadRequest,
        path: &Path,
    ) -> Result<(ModelSource, Config, Forecast), Error> {
        if encoders::is_encoder(path) {
            let model = ask.model.clone();
            return Err(Error::EncoderReplicas { model });
        }
        let source = ModelSource::open(path).map_err(crate::Error::from)?;
        let mut config = Config::read(&source).map_err(crate::Error::from)?;
        self.measure_disk(ask, path);
        let of = (self.threads(ask), ask.options.memory);
        let forecast = self.forecast(&source, &config, of)?;
        config.context = needed_positions(&config, &ask.options);
        Ok((source, config, forecast))
    }

    /// The nodes available to the replicas.
    fn pool(&self, ask: &LoadRequest) -> Result<NodePool, Error> {
        if !ask.nodes.is_empty() {
            let named = self.named(ask)?;
            self.check_alike(&named)?;
            let groups = share_out(&named, usize::from(ask.replicas));
            return Ok(NodePool::Named(groups.map_err(CallbackError::from)?));
        }
        let (mut order, notes) = self.ranked();
        let count = ask.count.unwrap_or(1);
        if count > 1 {
            order = self.broken_now(&order).group(&order);
        }
        if order.len() < count.max(1) {
            return Err(Error::too_few(count, order.len(), notes));
        }
        Ok(NodePool::Any(order))
    }

    /// Checks that nodes have equal numerics, so that an answer continues at another replica with
    /// the same bits.
    fn check_alike(&self, named: &[NodeId]) -> Result<(), Error> {
        let mut views = self.agent.nodes();
        views.retain(|view| named.contains(&view.id));
        let Some((first, others)) = views.split_first() else {
            return Ok(());
        };
        let kind = |at: usize| views[at].facts.kind();
        match (1..=others.len()).find(|at| kind(*at) != kind(0)) {
            None => Ok(()),
            Some(at) => Err(Error::UnlikeNodes {
                a: first.facts.name.clone(),
                kind_a: kind(0),
                b: views[at].facts.name.clone(),
                kind_b: kind(at),
            }),
        }
    }

    /// Assigns nodes to replicas; `said` is the prediction for the first group.
    fn place(
        &self,
        ask: &LoadRequest,
        pool: &NodePool,
        said: Proposal,
    ) -> Result<ReplicaPlacement, String> {
        let need = Need {
            replicas: usize::from(ask.replicas),
            each: said.nodes.len(),
            bytes: said.bytes.iter().copied().max().unwrap_or(0),
        };
        let rooms = self.rooms(said.is_on_mlx(0));
        let room = |id: &NodeId| (*id, rooms.get(id).copied().unwrap_or(0));
        let groups = match pool {
            NodePool::Named(groups) => {
                let nodes: Vec<_> = groups.iter().flatten().map(room).collect();
                check(groups, &nodes, need).map(|()| groups.clone())
            }
            NodePool::Any(order) => deal(&order.iter().map(room).collect::<Vec<_>>(), need),
        };
        let groups = groups.map_err(|short| self.told_short(ask, need, &short))?;
        let proposal = self.of_groups(said, &groups);
        Ok((groups, proposal))
    }

    /// Bytes that a further model may have on each node, on MLX or on the CPU.
    pub(super) fn rooms(&self, is_on_mlx: bool) -> BTreeMap<NodeId, u64> {
        let map = self.agent.map();
        let records: Vec<_> = specs(&map).map(|(.., wanted)| wanted).collect();
        let views = self.agent.nodes().into_iter();
        views
            .map(|view| (view.id, room(&view, is_on_mlx, &records)))
            .collect()
    }

    /// The proposal for all groups; `said` is that of one group.
    fn of_groups(&self, said: Proposal, groups: &[Vec<NodeId>]) -> Proposal {
        let names = |group: &Vec<NodeId>| group.iter().map(|id| self.name(*id)).collect();
        let replicas: Vec<Vec<String>> = groups.iter().map(names).collect();
        Proposal {
            nodes: replicas.concat(),
            fits: true,
            bytes: said.bytes.repeat(groups.len()),
            from_disk: said.from_disk.repeat(groups.len()),
            paths: groups.iter().flat_map(|it| self.ways_told(it)).collect(),
            replicas,
            ..said
        }
    }

    fn told_short(&self, ask: &LoadRequest, need: Need, short: &Short) -> String {
        let lacks =
            |(id, bytes): &(NodeId, u64)| format!("; {} lacks {}", self.name(*id), Bytes(*bytes));
        let lacking: String = short.lacking.iter().map(lacks).collect();
        let (model, each) = (&ask.model, need.each);
        let nodes = if each == 1 { "node" } else { "nodes" };
        format!(
            "{model}: replica {} of {} has no {each} {nodes} with {} to spare{lacking}",
            short.number,
            need.replicas,
            Bytes(need.bytes)
        )
    }
}

/// Default reason when there is no proposal.
const NO_WAY: &str = "no split fits the model and so many nodes";
