//! Detects changes between two polls of the cluster, as events.

use std::collections::{BTreeMap, BTreeSet};

use paceline_cluster::nodes::agent::{ClusterAct, NodePaths, NodeView, Refusal};
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::paths::{Path, has_moved};
use paceline_node::InstanceSummary;
use paceline_serve::events::Kind;
use serde_json::Value;

use crate::links::{link, used};
use crate::tables;

/// State of the last poll.
#[derive(Default)]
pub(super) struct ChangeDetector {
    /// Name and life by id.
    nodes: BTreeMap<String, (String, Life)>,
    /// Ids of slow nodes.
    slow: BTreeSet<String>,
    /// The last reported path of each pair of live nodes, by name; `None` if none worked.
    links: BTreeMap<(String, String), Option<Path>>,
    /// State and model by id.
    instances: BTreeMap<String, InstanceSnapshot>,
    /// Number of split changes, and of restarts, by id.
    counts: BTreeMap<String, (usize, u64)>,
}

/// An instance at the last poll.
#[derive(Clone, PartialEq)]
struct InstanceSnapshot {
    model: String,
    state: String,
    reason: Option<String>,
    nodes: Vec<String>,
}

impl ChangeDetector {
    /// Compares with the last poll; returns the changes.
    pub(super) fn observe(
        &mut self,
        nodes: &[NodeView],
        instances: &[Value],
        portraits: &BTreeMap<String, InstanceSummary>,
    ) -> Vec<Kind> {
        let mut news = self.of_nodes(nodes);
        news.extend(self.of_slow(nodes));
        news.extend(self.of_instances(instances));
        news.extend(self.of_splits(portraits));
        news
    }

    fn of_nodes(&mut self, nodes: &[NodeView]) -> Vec<Kind> {
        // A node is reported once it sent its name; before, the name is made from its id.
        let named = nodes.iter().filter(|node| node.has_told());
        let now: BTreeMap<_, _> = named
            .map(|node| (node.id.to_string(), (node.facts.name.clone(), node.state)))
            .collect();
        let mut news = Vec::new();
        for (id, (name, life)) in &now {
            let before = self.nodes.get(id).map(|(_, life)| *life);
            if before == Some(*life) {
                continue;
            }
            let node = name.clone();
            match (life, before) {
                (Life::Alive, _) => news.push(Kind::NodeCame { node }),
                (Life::Suspect, _) => news.push(Kind::NodeSilent { node }),
                // It was dead at the first poll.
                (Life::Dead | Life::Left, None) => {}
                (Life::Dead, Some(Life::Left)) | (Life::Left, Some(Life::Dead)) => {}
                (Life::Dead | Life::Left, Some(_)) => news.push(Kind::NodeWent { node }),
            }
        }
        for (id, (name, life)) in &self.nodes {
            if !now.contains_key(id) && !matches!(life, Life::Dead | Life::Left) {
                let node = name.clone();
                news.push(Kind::NodeWent { node });
            }
        }
        self.nodes = now;
        news
    }

    /// Nodes that became slow or recovered. A dead node has only its own event.
    fn of_slow(&mut self, nodes: &[NodeView]) -> Vec<Kind> {
        let mut news = Vec::new();
        for it in nodes.iter().filter(|it| it.has_told()) {
            let (id, node) = (it.id.to_string(), it.facts.name.clone());
            match (it.slow_ms, self.slow.contains(&id)) {
                (Some(ms), false) => {
                    self.slow.insert(id);
                    let answer_s = ms as f64 / 1e3;
                    news.push(Kind::NodeSlow { node, answer_s });
                }
                (None, true) if it.state == Life::Alive => {
                    self.slow.remove(&id);
                    news.push(Kind::NodeSteady { node });
                }
                _ => {}
            }
        }
        let lives = |id: &String| {
            let node = nodes.iter().find(|node| node.id.to_string() == *id);
            node.is_some_and(|node| matches!(node.state, Life::Alive | Life::Suspect))
        };
        self.slow.retain(lives);
        news
    }

    /// Compares the measured paths between live nodes with those last reported. The first poll of a
    /// pair, also after an absence, reports nothing.
    pub(super) fn observe_links(&mut self, nodes: &[NodePaths]) -> Vec<Kind> {
        let now = used(nodes);
        let mut news = Vec::new();
        self.links.retain(|pair, _| now.contains_key(pair));
        for ((from, to), now) in now {
            let pair = (from, to);
            let Some(told) = self.links.get_mut(&pair) else {
                self.links.insert(pair, now);
                continue;
            };
            let has_changed = match (&*told, &now) {
                (Some(before), Some(now)) => has_moved(before, now),
                (before, now) => before.is_some() != now.is_some(),
            };
            if !has_changed {
                complete(told, now.as_ref());
                continue;
            }
            let before = std::mem::replace(told, now.clone());
            let (from, to) = pair;
            news.push(Kind::LinkChanged {
                from,
                to,
                before: before.as_ref().map(link),
                now: now.as_ref().map(link),
            });
        }
        news
    }

    fn of_instances(&mut self, instances: &[Value]) -> Vec<Kind> {
        let now: BTreeMap<String, InstanceSnapshot> = instances.iter().map(seen).collect();
        let changed = now
            .iter()
            .filter(|(id, seen)| self.instances.get(*id) != Some(seen))
            .map(|(id, seen)| event(id, seen));
        let gone = self
            .instances
            .iter()
            .filter(|(id, _)| !now.contains_key(*id))
            .map(|(id, last)| {
                let state = "unloaded".to_owned();
                let reason = None;
                let seen = InstanceSnapshot {
                    state,
                    reason,
                    ..last.clone()
                };
                event(id, &seen)
            });
        let news = changed.chain(gone).collect();
        self.instances = now;
        news
    }

    fn of_splits(&mut self, portraits: &BTreeMap<String, InstanceSummary>) -> Vec<Kind> {
        let mut news = Vec::new();
        for (id, it) in portraits {
            let model = self.instances.get(id).map(|seen| seen.model.clone());
            let model = model.unwrap_or_else(|| id.clone());
            let now = (it.n_changes, it.restarts);
            let before = self.counts.insert(id.clone(), now).unwrap_or(now);
            let new = now.0.saturating_sub(before.0).min(it.changes.len());
            for text in &it.changes[it.changes.len() - new..] {
                let (model, text) = (model.clone(), text.clone());
                news.push(Kind::SplitChanged { model, text });
            }
            if now.1 > before.1 {
                let text = format!("{model}: its workers were started again after a failure");
                news.push(Kind::Fault { text });
            }
        }
        self.counts.retain(|id, _| portraits.contains_key(id));
        news
    }
}

/// The event for a rejection at the control port, in the form of the API's rejections.
pub(super) fn refused(refusal: Refusal) -> Kind {
    let from = refusal.from.map(|from| from.to_string());
    Kind::Refused {
        code: refusal.cause,
        client: from.unwrap_or_else(|| "others".to_owned()),
        times: refusal.times,
    }
}

/// The event for an act of a user or a member.
pub(super) fn managed(act: ClusterAct) -> Kind {
    let (action, subject, by) = match act {
        ClusterAct::Invited => ("invited", String::new(), None),
        ClusterAct::Paired(from) => ("paired", String::new(), Some(from.to_string())),
        ClusterAct::Revoked(node) => ("node_revoked", node, None),
        ClusterAct::KeyMade(id) => ("key_made", id, None),
        ClusterAct::KeyRevoked(id) => ("key_revoked", id, None),
        ClusterAct::KeyAllowed(id) => ("key_allowed", id, None),
        ClusterAct::Removed { name, by } => ("model_removed", name, by),
    };
    Kind::Managed {
        action,
        subject,
        by,
    }
}

/// Adds a bandwidth measured after the path was reported.
fn complete(told: &mut Option<Path>, now: Option<&Path>) {
    if let (Some(told), Some(now)) = (told, now)
        && told.bytes_per_s.is_none()
    {
        told.bytes_per_s = now.bytes_per_s;
    }
}

fn seen(it: &Value) -> (String, InstanceSnapshot) {
    let text = |name: &str| it[name].as_str().unwrap_or_default().to_owned();
    let nodes = tables::computing(it).into_iter();
    let seen = InstanceSnapshot {
        model: text("model"),
        state: text("state"),
        reason: it["reason"].as_str().map(str::to_owned),
        nodes: nodes.map(str::to_owned).collect(),
    };
    (text("id"), seen)
}

fn event(id: &str, seen: &InstanceSnapshot) -> Kind {
    Kind::Instance {
        id: id.to_owned(),
        model: seen.model.clone(),
        state: seen.state.clone(),
        reason: seen.reason.clone(),
        nodes: seen.nodes.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_cluster::nodes::NodeId;
    use paceline_cluster::nodes::agent::NodeFacts;
    use serde_json::json;

    use crate::links::tests::ways;

    /// A node with a name, or without one if empty.
    fn node(number: u8, name: &str, state: Life) -> NodeView {
        let (name, protocol) = match name {
            "" => ("node-03030303".to_owned(), 0),
            name => (name.to_owned(), 1),
        };
        NodeView {
            id: NodeId([number; 16]),
            state,
            found_by: "beacon".into(),
            heard_by: Vec::new(),
            linked: true,
            slow_ms: None,
            facts: NodeFacts {
                name,
                protocol,
                ..NodeFacts::default()
            },
        }
    }

    fn kinds(news: &[Kind]) -> Vec<String> {
        let kind = |kind: &Kind| json!(kind)["kind"].as_str().unwrap().to_owned();
        news.iter().map(kind).collect()
    }

    #[test]
    fn refusals_of_the_control_port_are_audited_as_those_of_the_api() {
        let from = Some(std::net::Ipv4Addr::LOCALHOST.into());
        for (from, client) in [(from, "127.0.0.1"), (None, "others")] {
            let kind = refused(Refusal {
                cause: "node_revoked",
                from,
                times: 3,
            });
            assert!(kind.is_audited());
            let expected = json!({
                "kind": "refused", "code": "node_revoked", "client": client, "times": 3
            });
            assert_eq!(json!(kind), expected);
        }
    }

    #[test]
    fn acts_of_users_and_members_are_audited() {
        let removed = ClusterAct::Removed {
            name: "m".to_owned(),
            by: Some("mini".to_owned()),
        };
        for (act, expected) in [
            (ClusterAct::Invited, json!(["invited", "", null])),
            (removed, json!(["model_removed", "m", "mini"])),
            (
                ClusterAct::KeyMade("k".to_owned()),
                json!(["key_made", "k", null]),
            ),
        ] {
            let kind = managed(act);
            assert!(kind.is_audited());
            let told = json!(kind);
            let told = json!([told["action"], told["subject"], told["by"]]);
            assert_eq!(told, expected);
        }
    }

    #[test]
    fn nodes_come_fall_silent_and_go() {
        let mut changes = ChangeDetector::default();
        let mut see = |nodes: &[NodeView]| kinds(&changes.observe(nodes, &[], &BTreeMap::new()));
        let own = || node(1, "a", Life::Alive);
        assert_eq!(see(&[own(), node(2, "old", Life::Dead)]), ["node_came"]);
        assert_eq!(see(&[own(), node(2, "old", Life::Dead)]), [""; 0]);
        assert_eq!(see(&[own(), node(3, "", Life::Alive)]), [""; 0]);
        assert_eq!(see(&[own(), node(3, "b", Life::Alive)]), ["node_came"]);
        assert_eq!(see(&[own(), node(3, "b", Life::Suspect)]), ["node_silent"]);
        assert_eq!(see(&[own(), node(3, "b", Life::Dead)]), ["node_went"]);
        assert_eq!(see(&[own(), node(3, "b", Life::Alive)]), ["node_came"]);
        assert_eq!(see(&[own()]), ["node_went"]);
    }

    #[test]
    fn a_slow_node_is_told_once_and_once_more_when_it_is_over() {
        let mut changes = ChangeDetector::default();
        let mut see = |slow_ms: Option<u64>, state: Life| {
            let view = NodeView {
                slow_ms,
                ..node(2, "b", state)
            };
            kinds(&changes.observe(&[view], &[], &BTreeMap::new()))
        };
        assert_eq!(see(None, Life::Alive), ["node_came"]);
        assert_eq!(see(Some(150), Life::Alive), ["node_slow"]);
        assert_eq!(see(Some(170), Life::Alive), [""; 0]);
        assert_eq!(see(None, Life::Alive), ["node_steady"]);
        assert_eq!(see(Some(150), Life::Alive), ["node_slow"]);
        assert_eq!(see(None, Life::Dead), ["node_went"], "not steady");
        assert_eq!(see(None, Life::Alive), ["node_came"]);
    }

    #[test]
    fn links_change_by_their_way_and_by_a_factor() {
        let mut changes = ChangeDetector::default();
        let pair = |latency_us| {
            [
                ways((1, "a"), (2, "b"), latency_us),
                ways((2, "b"), (1, "a"), 300),
            ]
        };
        assert_eq!(changes.observe_links(&pair(300)), [], "the first look");
        assert_eq!(changes.observe_links(&pair(450)), []);
        let news = json!(changes.observe_links(&pair(1000)));
        assert_eq!(news.as_array().map(Vec::len), Some(1), "{news}");
        assert_eq!(news[0]["from"], "a");
        assert_eq!(news[0]["to"], "b");
        assert_eq!(
            news[0]["before"]["latency_s"], 0.0003,
            "as it was told last"
        );
        assert_eq!(news[0]["now"]["latency_s"], 0.001);
        let mut lost = pair(1000);
        lost[0].paths[0].path.up = false;
        let news = json!(changes.observe_links(&lost));
        assert_eq!(news[0].get("now"), None, "{news}");
        assert_eq!(changes.observe_links(&lost), []);
        let news = json!(changes.observe_links(&pair(1000)));
        assert_eq!(news[0].get("before"), None, "{news}");
        // The first measured bandwidth is no change, half of it is.
        let mut measured = pair(1000);
        measured[0].paths[0].path.bytes_per_s = Some(100);
        assert_eq!(changes.observe_links(&measured), []);
        measured[0].paths[0].path.bytes_per_s = Some(49);
        assert_eq!(changes.observe_links(&measured).len(), 1);
        // The event of a dead node covers its links.
        let mut gone = pair(1000);
        gone[1].node.state = Life::Dead;
        gone[0].paths[0].path.up = false;
        assert_eq!(changes.observe_links(&gone), []);
        assert_eq!(changes.observe_links(&pair(5000)), []);
    }

    #[test]
    fn instances_change_state_and_are_unloaded() {
        let mut changes = ChangeDetector::default();
        let it =
            |state: &str| json!({"id": "7", "model": "m", "state": state, "nodes": ["a", "b"]});
        let mut see = |all: &[Value]| changes.observe(&[], all, &BTreeMap::new());
        assert_eq!(kinds(&see(&[it("loading")])), ["instance"]);
        assert_eq!(see(&[it("loading")]), []);
        let news = see(&[it("ready")]);
        assert_eq!(json!(news[0])["state"], "ready");
        let mut lost = it("ready");
        lost["computing"] = json!(["a", "a"]);
        let news = see(&[lost]);
        assert_eq!(json!(news[0])["nodes"], json!(["a", "a"]), "who computes");
        let news = see(&[]);
        assert_eq!(json!(news[0])["state"], "unloaded");
        assert_eq!(json!(news[0])["model"], "m");
    }

    #[test]
    fn restarts_and_changes_of_the_split_are_told_once() {
        let portrait = |n_changes: usize, restarts| InstanceSummary {
            split: "tensor".into(),
            predicted_tok_s: None,
            measured_tok_s: None,
            drafts: None,
            restarts,
            n_changes,
            changes: (0..n_changes.min(8)).map(|n| n.to_string()).collect(),
            shards: Vec::new(),
            prompts: None,
        };
        let mut changes = ChangeDetector::default();
        let mut see = |n, restarts| {
            let all = BTreeMap::from([("7".to_owned(), portrait(n, restarts))]);
            kinds(&changes.observe(&[], &[], &all))
        };
        assert_eq!(see(1, 2), [""; 0]);
        assert_eq!(see(3, 2), ["split_changed", "split_changed"]);
        assert_eq!(see(3, 3), ["fault"]);
        assert_eq!(see(3, 3), [""; 0]);
    }
}
