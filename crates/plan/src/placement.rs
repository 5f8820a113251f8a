//! Placements: which nodes compute which layers.
//!
//! A placement is one or more *replicas*; a replica is a pipeline of *stages*. A stage is a range
//! of layers on one node, or on a group that splits each layer. Example, four nodes, 94 layers:
//!
//! ```text
//!  stage 0: layers 0..47 on {a, b}, tensor 50/50      stage 1: layers 47..94 on {c, d}, tensor
//!           embedding                                          output head
//! ```

use std::ops::Range;

use crate::{Error, ModelShape};

/// Split of a stage's layers among its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Split {
    /// A single node has the layers whole.
    Whole,
    /// Every matrix is cut by heads or columns: two exchanges a layer.
    Tensor,
    /// Attention and router on every member, experts dealt out: one exchange a mixture layer.
    Expert,
}

/// A node's part of a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct StageMember {
    /// Index of the node.
    pub node: usize,
    /// Share of each layer's split weights, above 0; shares of a stage add up to 1.
    pub share: f64,
    /// Layers of the stage that this node reads from disk for every token; only where it has the
    /// layers whole.
    pub streamed: u32,
}

/// Consecutive layers and the nodes that have them.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineStage {
    pub layers: Range<u32>,
    pub split: Split,
    /// Members; the first sends and receives for the group.
    pub members: Vec<StageMember>,
}

/// A pipeline that answers requests by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Pipeline {
    /// In order of layers.
    pub stages: Vec<PipelineStage>,
}

/// Everything that is decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// Copies of the model; requests are dealt to them evenly.
    pub replicas: Vec<Pipeline>,
    /// Disaggregated prefill: the pipeline that computes prompts, when not the replica itself. Keys
    /// and values are sent layer by layer while it runs.
    pub prefill: Option<Pipeline>,
    /// The period in which it is executed, from 1; a later one replaces it. 0 for one that is not.
    pub epoch: u64,
    /// Nodes that own it after the node that does is lost, the first that lives. Empty: it ends
    /// with its owner.
    pub successors: Vec<usize>,
}

impl PipelineStage {
    pub fn whole(layers: Range<u32>, node: usize) -> Self {
        let member = StageMember {
            node,
            share: 1.0,
            streamed: 0,
        };
        Self {
            layers,
            split: Split::Whole,
            members: vec![member],
        }
    }

    /// A stage shared evenly.
    pub fn even(layers: Range<u32>, split: Split, nodes: &[usize]) -> Self {
        let share = 1.0 / nodes.len() as f64;
        let members = nodes.iter().map(|&node| StageMember {
            node,
            share,
            streamed: 0,
        });
        Self {
            layers,
            split: if nodes.len() == 1 {
                Split::Whole
            } else {
                split
            },
            members: members.collect(),
        }
    }

    /// The nodes, in order.
    pub fn nodes(&self) -> Vec<usize> {
        self.members.iter().map(|member| member.node).collect()
    }

    pub fn n_layers(&self) -> u32 {
        self.layers.end - self.layers.start
    }
}

impl Pipeline {
    /// Layers `0..n` dealt to `nodes` as evenly as may be, the longer stages first.
    pub fn even(n_layers: u32, nodes: &[usize]) -> Self {
        let n = u32::try_from(nodes.len()).unwrap_or(u32::MAX).max(1);
        let mut start = 0;
        let stages = nodes.iter().zip(0..n).map(|(&node, i)| {
            let end = start + n_layers / n + u32::from(i < n_layers % n);
            let stage = PipelineStage::whole(start..end, node);
            start = end;
            stage
        });
        Self {
            stages: stages.collect(),
        }
    }

    pub fn group(n_layers: u32, split: Split, nodes: &[usize]) -> Self {
        Self {
            stages: vec![PipelineStage::even(0..n_layers, split, nodes)],
        }
    }

    /// The nodes, stage by stage.
    pub fn nodes(&self) -> Vec<usize> {
        self.stages.iter().flat_map(PipelineStage::nodes).collect()
    }
}

impl Placement {
    /// Copies, and where prompts are computed if not there; not executed yet, and without
    /// successors.
    pub const fn new(replicas: Vec<Pipeline>, prefill: Option<Pipeline>) -> Self {
        Self {
            replicas,
            prefill,
            epoch: 0,
            successors: Vec::new(),
        }
    }

    /// A single copy, prompts included.
    pub fn single(pipeline: Pipeline) -> Self {
        Self::new(vec![pipeline], None)
    }

    /// Every node that does something, ascending, once.
    pub fn nodes(&self) -> Vec<usize> {
        let mut nodes: Vec<usize> = self.replicas.iter().flat_map(Pipeline::nodes).collect();
        nodes.extend(self.prefill.iter().flat_map(Pipeline::nodes));
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Checks that each pipeline has every layer once, in order, on nodes that are there, with
    /// shares that add up. No node may serve two pipelines or stages. Successors must be nodes,
    /// each once.
    ///
    /// # Errors
    /// [`Error::Placement`] with the first fault.
    pub fn check(&self, model: &ModelShape, n_nodes: usize) -> Result<(), Error> {
        let fault = |problem: String| Err(Error::Placement { problem });
        let mut used = vec![false; n_nodes];
        for pipeline in self.replicas.iter().chain(&self.prefill) {
            let mut next = 0;
            for stage in &pipeline.stages {
                if stage.layers.start != next || stage.layers.end <= next {
                    return fault(format!("layers {:?} after layer {next}", stage.layers));
                }
                if !model.can_cut(next) {
                    return fault(format!(
                        "a stage from layer {next} on parts layers from caches"
                    ));
                }
                next = stage.layers.end;
                stage.check(&mut used)?;
            }
            if next != model.layers {
                return fault(format!("{next} layers of {}", model.layers));
            }
        }
        if self.replicas.is_empty() {
            return fault("no replica".to_owned());
        }
        self.check_successors(n_nodes)
    }

    fn check_successors(&self, n_nodes: usize) -> Result<(), Error> {
        let mut named = vec![false; n_nodes];
        for node in &self.successors {
            let problem = match named.get_mut(*node) {
                None => format!("no node {node} to succeed"),
                Some(true) => format!("node {node} succeeds twice"),
                Some(free) => {
                    *free = true;
                    continue;
                }
            };
            return Err(Error::Placement { problem });
        }
        Ok(())
    }
}

impl PipelineStage {
    fn check(&self, used: &mut [bool]) -> Result<(), Error> {
        let fault = |problem: String| Err(Error::Placement { problem });
        let mut total = 0.0;
        for member in &self.members {
            match used.get_mut(member.node) {
                None => return fault(format!("no node {}", member.node)),
                Some(true) => return fault(format!("node {} twice", member.node)),
                Some(free) => *free = true,
            }
            if !(member.share > 0.0 && member.share <= 1.0) {
                return fault(format!("a share of {}", member.share));
            }
            if member.streamed > self.n_layers() {
                return fault(format!("{} streamed layers", member.streamed));
            }
            total += member.share;
        }
        if (total - 1.0).abs() > 1e-6 {
            return fault(format!("shares that add up to {total}"));
        }
        let alone = self.members.len() == 1;
        if alone != (self.split == Split::Whole) {
            return fault(format!(
                "{:?} over {} nodes",
                self.split,
                self.members.len()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn successors_are_nodes_and_each_is_named_once() {
        let with = |successors: &[usize]| {
            let placement = Placement {
                successors: successors.to_vec(),
                ..Placement::single(Pipeline::even(4, &[0, 1]))
            };
            placement.check_successors(3).map_err(|e| e.to_string())
        };
        assert_eq!(with(&[]), Ok(()));
        assert_eq!(with(&[2, 0]), Ok(()));
        assert!(with(&[3]).is_err_and(|error| error.contains("no node 3")));
        assert!(with(&[1, 0, 1]).is_err_and(|error| error.contains("node 1 succeeds twice")));
    }
}
