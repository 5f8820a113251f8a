//! Routes of an ingress to the owner of its instance: directly, or through a third node.
//!
//! ```text
//! entry == Through(instance) ==> node that reaches both == Instance(instance) ==> owner
//! ```
//! The third node passes messages on unchanged, and uses no fourth one.

use std::sync::Arc;

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::NodeView;
use paceline_cluster::nodes::member::Life;
use paceline_fleet::rules::route::api_of;
use paceline_fleet::{InstanceId, InstanceSpec, specs};

use super::ingress::{self, LOOK_EVERY, ToOwner};
use super::{ANSWERS, Inner, NodeConnection, OWNER_LIMIT};
use crate::workers::connection::{MessageConnection, send_message};

/// Third nodes that are tried before the next look.
const TRIES: usize = 2;

impl Inner {
    /// Opens a connection to the owner of an instance, which may be this node, and names the
    /// instance.
    pub(super) fn reach_owner(
        self: &Arc<Self>,
        id: InstanceId,
    ) -> Option<Arc<dyn MessageConnection>> {
        let (wanted, owner) = self.owner_of(id)?;
        let first = ToOwner::Instance(id.0);
        if owner == self.agent.id() {
            let line = ingress::here(self)?;
            return send_message(&*line, &first).is_ok().then_some(line);
        }
        // A frozen machine still accepts connections: a request would cost the whole limit while
        // its successor gets ready.
        if !matches!(self.agent.life(owner), Life::Alive | Life::Suspect) {
            return None;
        }
        let between = match self.is_cut_off(owner) {
            true => self.between(owner, &wanted),
            false => Vec::new(),
        };
        let mut between = between.into_iter();
        let through = between.find_map(|node| self.ask(node, &ToOwner::Through(id.0)));
        through.or_else(|| self.ask(owner, &first))
    }

    /// Passes the messages of an ingress on to the owner, and back, until either closes.
    pub(super) fn pass_on(self: &Arc<Self>, line: &Arc<dyn MessageConnection>, id: InstanceId) {
        let owner = self.owner_of(id).map(|(_, owner)| owner);
        let onward = owner.and_then(|owner| self.ask(owner, &ToOwner::Instance(id.0)));
        if let Some(onward) = onward {
            std::thread::scope(|scope| {
                scope.spawn(|| self.copy(&**line, &*onward));
                self.copy(&*onward, &**line);
            });
        }
        line.close();
    }

    /// Copies messages until either end closes, then closes both.
    fn copy(&self, from: &dyn MessageConnection, to: &dyn MessageConnection) {
        while let Ok(message) = from.receive(LOOK_EVERY) {
            let sent = message.map_or(Ok(()), |message| to.send(&message));
            if sent.is_err() || self.is_over() {
                break;
            }
        }
        from.close();
        to.close();
    }

    /// Why requests do not reach the owner of an instance although it lives; `None` if they may.
    pub(super) fn why_cut_off(&self, id: InstanceId) -> Option<String> {
        let (wanted, owner) = self.owner_of(id)?;
        let is_away = owner != self.agent.id() && self.agent.life(owner) == Life::Alive;
        let name = (is_away && self.is_cut_off(owner)).then(|| self.name(owner))?;
        let reason = format!("no path from this node to {name}, which owns the model, answers");
        let at: Vec<String> = api_of(&self.agent.nodes(), &wanted)
            .iter()
            .map(|at| format!("http://{at}"))
            .collect();
        Some(match at.is_empty() {
            true => reason,
            false => format!("{reason}; {name} answers at {}", at.join(", ")),
        })
    }

    /// Whether this node does not reach another one that lives.
    fn is_cut_off(&self, owner: NodeId) -> bool {
        let views = self.agent.nodes();
        let is_linked = views.iter().any(|view| view.id == owner && view.linked);
        !is_linked && self.is_apart(self.agent.id(), owner)
    }

    fn owner_of(&self, id: InstanceId) -> Option<(InstanceSpec, NodeId)> {
        let map = self.agent.map();
        let (.., wanted) = specs(&map).find(|(other, ..)| *other == id)?;
        let owner = *wanted.nodes.first()?;
        Some((wanted, owner))
    }

    /// Live nodes that reach this one and the owner of an instance; those of the instance first.
    fn between(&self, owner: NodeId, wanted: &InstanceSpec) -> Vec<NodeId> {
        let own = self.agent.id();
        let reaches = |view: &NodeView| {
            let is_third = view.id != own && view.id != owner && view.state == Life::Alive;
            is_third && !self.is_apart(view.id, owner) && !self.is_apart(own, view.id)
        };
        let views = self.agent.nodes().into_iter();
        let mut all: Vec<NodeId> = views.filter(reaches).map(|view| view.id).collect();
        all.sort_by_key(|id| !wanted.nodes.contains(id));
        all.truncate(TRIES);
        all
    }

    /// Opens a connection to a node's instances with a first message.
    fn ask(&self, node: NodeId, first: &ToOwner) -> Option<Arc<dyn MessageConnection>> {
        let line = NodeConnection(self.agent.open(node, ANSWERS, OWNER_LIMIT).ok()?);
        send_message(&line, first).ok()?;
        Some(Arc::new(line))
    }
}
