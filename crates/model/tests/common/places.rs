//! The ranks of a split as threads of a test.

use std::time::Duration;

use paceline_base::Rank;
use paceline_comm::local;
use paceline_model::{Config, Links, Split};

/// Longest wait of a test for another rank.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The part of a split that a thread's rank holds.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) split: Split,
    pub(crate) rank: Rank,
    pub(crate) links: Option<Links>,
}

/// The places of all ranks, in rank order.
pub(crate) fn places(config: &Config, split: &Split) -> Vec<Place> {
    let worlds = local::ranks(split.ranks());
    let ranks = || (0..split.ranks()).map(Rank);
    let mut stages = Vec::new();
    for rank in ranks() {
        let members = split.shard(config, rank).stage_ranks();
        if members.start == rank.0 {
            stages.extend(local::ranks(members.len() as u32));
        }
    }
    let links = worlds.into_iter().zip(stages);
    let links = links.map(|(world, stage)| Links::new(Box::new(world), Box::new(stage), PATIENCE));
    let place = |(rank, links)| Place {
        split: split.clone(),
        rank,
        links: Some(links),
    };
    ranks().zip(links).map(place).collect()
}
