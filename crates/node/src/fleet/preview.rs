//! Where a model would lie before it is loaded.

use std::path::Path;
use std::sync::Arc;

use paceline_model::{Config, Source, Split};
use serde::Serialize;

use super::{Ask, Inner};

/// Memory that weights may take of a machine: the rest is for keys and values, buffers and the
/// system.
const SHARE_MAX: f64 = 0.8;

/// Where a model would lie.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Preview {
    /// How it would be cut.
    pub split: String,
    /// Bytes of the model's files.
    pub bytes: u64,
    /// Parts in rank order.
    pub parts: Vec<Planned>,
    /// Whether every machine has room for its part.
    pub fits: bool,
}

/// A machine's part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Planned {
    /// Name of the machine.
    pub node: String,
    /// First layer of its stage.
    pub first_layer: usize,
    /// Layer after the last one of its stage.
    pub end_layer: usize,
    /// Its share of these layers, 0 to 1.
    pub share: f64,
    /// Bytes of weights, about: its share of the files.
    pub weight_bytes: u64,
    /// Bytes of the machine's memory; 0 where it does not say.
    pub memory_bytes: u64,
    /// Whether the weights leave room there.
    pub fits: bool,
}

/// Where a model would lie, without loading it.
pub(super) fn preview(inner: &Arc<Inner>, ask: &Ask) -> Result<Preview, String> {
    let ids = inner.choose(ask)?;
    let path = inner.copies.of_user(&ask.model)?;
    let source = Source::open(&path).map_err(|error| error.to_string())?;
    let config = Config::read(&source).map_err(|error| error.to_string())?;
    let nodes = inner.agent.nodes();
    let memory = |id| nodes.iter().find(|node| node.id == id);
    let machines: Vec<(String, u64)> = ids
        .iter()
        .map(|id| {
            (
                inner.name(*id),
                memory(*id).map_or(0, |node| node.facts.memory_bytes),
            )
        })
        .collect();
    let split = Split::plan(&config, ask.split, ids.len() as u32, &[]);
    let split = split.map_err(|error| error.to_string())?;
    Ok(of(&split, config.layers.len(), bytes_at(&path), &machines))
}

fn of(split: &Split, layers: usize, bytes: u64, machines: &[(String, u64)]) -> Preview {
    let ranks = split.each_stage().flat_map(|(stage, shares)| {
        let all: u32 = shares.iter().sum();
        let of = move |share: &u32| f64::from(*share) / f64::from(all.max(1));
        shares.iter().map(move |share| (stage.clone(), of(share)))
    });
    let parts = ranks
        .zip(machines)
        .map(|((stage, share), (node, memory_bytes))| {
            let weight = bytes as f64 * share * stage.len() as f64 / layers.max(1) as f64;
            Planned {
                node: node.clone(),
                first_layer: stage.start,
                end_layer: stage.end,
                share,
                weight_bytes: weight as u64,
                memory_bytes: *memory_bytes,
                fits: *memory_bytes == 0 || weight <= SHARE_MAX * *memory_bytes as f64,
            }
        });
    let parts: Vec<Planned> = parts.collect();
    Preview {
        split: split.to_string(),
        bytes,
        fits: parts.iter().all(|part| part.fits),
        parts,
    }
}

fn bytes_at(path: &Path) -> u64 {
    let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |facts| facts.len());
    match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| bytes(&entry.path())).sum(),
        Err(_) => bytes(path),
    }
}
