//! Every split assigns each head, column, row and layer to a rank, as the documentation says.

use super::*;
use crate::config::{Activation, Experts, Gating, LayerCache};
use crate::families::ModelFamily;

/// SmolLM2-135M.
pub(crate) fn smollm2() -> Config {
    let layer = LayerShape {
        cache: LayerCache::Rows,
        gated: false,
        window: None,
        rope: 0,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        value_dim: 64,
        query_scale: 0.125,
        ffn: 1536,
        gate_cutoff: None,
        experts: None,
        latent: None,
        pooled: None,
        dense_beside: false,
        value_norm: false,
        keys_as_values: false,
    };
    Config {
        family: ModelFamily::Llama,
        width: 576,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        latent: None,
        indexed: None,
        dense_clamp: None,
        ffn: 1536,
        ffn_leaf: 128,
        vocab: 49152,
        context: 8192,
        norm_eps: 1e-5,
        norm_offset: 0.0,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        query_growth: None,
        tied: Some(true),
        head_norms: Some(false),
        activation: Activation::Silu,
        ropes: Vec::new(),
        layers: vec![layer; 30],
        per_layer: 0,
        per_layer_vocab: 49152,
        ngrams: None,
        attention_cap: None,
        softcap: None,
        clamp_qkv: None,
        bidirectional: false,
        unknown_fields: Vec::new(),
        streams: None,
    }
}

const EXPERTS: Experts = Experts {
    count: 8,
    used: 2,
    width: 256,
    gating: Gating::Softmax,
    normalised: true,
    scale: 1.0,
    corrected: false,
    shared: 0,
    shared_gate: false,
    clamp: None,
    groups: None,
    scaled: false,
    compressed: None,
};

/// SmolLM2 with 8 experts in all layers but the first; each row uses 2.
fn smollm2_of_experts() -> Config {
    let mut config = smollm2();
    for layer in &mut config.layers[1..] {
        layer.experts = Some(EXPERTS);
    }
    config
}

fn shards(config: &Config, split: &Split) -> Vec<Shard> {
    let ranks = (0..split.ranks()).map(Rank);
    ranks.map(|rank| split.shard(config, rank)).collect()
}

fn plan(kind: &str, ranks: u32, shares: &[u32]) -> Result<Split, Error> {
    Split::plan(&smollm2(), kind.parse()?, ranks, shares)
}

/// Asserts that `parts` follow one another and make up `0..n`.
fn check_cover(parts: impl Iterator<Item = Range<usize>>, n: usize, what: &str) {
    let end = parts.fold(0, |end, part| {
        assert_eq!(part.start, end, "{what}");
        part.end
    });
    assert_eq!(end, n, "{what}");
}

#[test]
fn the_example_of_the_documentation_is_true() {
    let config = smollm2();
    let split = plan("3x2", 6, &[]).unwrap();
    let shards = shards(&config, &split);
    let heads = [0..3, 3..6, 6..9];
    for (rank, shard) in shards.iter().enumerate() {
        let last = rank >= 3;
        assert_eq!(shard.layers, if last { 19..30 } else { 0..19 });
        assert_eq!(shard.usual.heads, heads[rank % 3]);
        assert_eq!(shard.usual.kv_heads, rank % 3..rank % 3 + 1);
        assert_eq!(shard.ffn(), rank % 3 * 512..(rank % 3 + 1) * 512);
        let rows = rank % 3 * 16384..(rank % 3 + 1) * 16384;
        assert_eq!(shard.vocab(), if last { rows } else { 0..0 });
        assert_eq!((shard.embeds(), shard.leads()), (!last, rank == 3));
    }
    assert_eq!(split.leader(), Rank(3));
}

#[test]
fn every_split_covers_the_model_once() {
    let config = smollm2();
    for (kind, ranks) in [
        ("tensor", 1..=12),
        ("pipeline", 1..=30),
        ("auto", 1..=30),
        ("2x2", 4..=4),
        ("3x2", 6..=6),
        ("2x4", 8..=8),
    ] {
        for n in ranks {
            let shares: Vec<u32> = (0..n).map(|rank| 1 + rank * 7 % 3).collect();
            for shares in [&[][..], &shares] {
                let Ok(split) = plan(kind, n, shares) else {
                    assert!(n > 9 && !shares.is_empty(), "{kind} {n} {shares:?}");
                    continue;
                };
                let shards = shards(&config, &split);
                let what = format!("{kind} over {n} by {shares:?}");
                let firsts = shards.iter().filter(|s| s.index == 0);
                check_cover(firsts.map(|s| s.layers.clone()), 30, &what);
                for stage in 0..split.stages() {
                    let ranks = || shards.iter().filter(|s| s.stage == stage);
                    check_cover(ranks().map(|s| s.usual.heads.clone()), 9, &what);
                    check_cover(ranks().map(Shard::ffn), 1536, &what);
                }
                let last = shards.iter().filter(|s| s.has_head());
                check_cover(last.map(Shard::vocab), 49152, &what);
            }
        }
    }
}

#[test]
fn kv_heads_are_those_that_the_heads_need() {
    let config = smollm2();
    for ranks in 1..=9 {
        for shard in shards(&config, &plan("tensor", ranks, &[]).unwrap()) {
            let needed: Vec<usize> = shard.usual.heads.clone().map(|head| head / 3).collect();
            assert_eq!(shard.usual.kv_heads.start, needed[0]);
            assert_eq!(shard.usual.kv_heads.end, needed[needed.len() - 1] + 1);
        }
    }
}

#[test]
fn equal_shares_differ_by_one_block_at_most() {
    for n in 1..100 {
        for ranks in 1..=n {
            let sizes: Vec<usize> = cut(n, &vec![1; ranks]).iter().map(Range::len).collect();
            let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
            assert!(most - least <= 1, "{n} over {ranks}: {sizes:?}");
        }
    }
    assert_eq!(cut(12, &[3, 1]), [0..9, 9..12]);
}

#[test]
fn stages_are_balanced_with_the_head() {
    // The head of SmolLM2 weighs as much as 8 of its 30 layers.
    let config = smollm2();
    let layers = |kind, ranks, shares: &[u32]| -> Vec<usize> {
        let shards = shards(&config, &plan(kind, ranks, shares).unwrap());
        shards.iter().map(|s| s.layers.len()).collect()
    };
    assert_eq!(layers("pipeline", 2, &[]), [19, 11]);
    assert_eq!(layers("pipeline", 2, &[3, 1]), [29, 1]);
    assert_eq!(layers("pipeline", 30, &[]), [1; 30]);
}

#[test]
fn what_a_rank_receives_somebody_sends() {
    let config = smollm2();
    let uneven = [(0..10, 2), (10..20, 3), (20..30, 1)];
    let uneven = uneven.map(|(layers, n)| (StageKind::Tensor, layers, vec![1; n]));
    let uneven = Split::of_stages(&config, uneven).unwrap();
    for split in [uneven, plan("3x2", 6, &[]).unwrap()] {
        let shards = shards(&config, &split);
        for shard in &shards {
            let sends = |s: &&Shard| s.targets().any(|t| t == shard.rank);
            let senders = shards.iter().filter(sends);
            let senders: Vec<Rank> = senders.map(|s| s.rank).collect();
            assert_eq!(senders, shard.source().into_iter().collect::<Vec<_>>());
        }
    }
}

/// All ranks have the attention; they share experts, and the feed-forward of dense layers.
#[test]
fn ranks_that_share_experts_have_all_heads() {
    let config = smollm2_of_experts();
    let split = Split::plan(&config, SplitKind::Experts, 3, &[2, 1, 1]).unwrap();
    assert_eq!(split.to_string(), "experts");
    assert_eq!(split.kind(), Some(SplitKind::Experts));
    let told = serde_json::to_string(&split).unwrap();
    assert_eq!(serde_json::from_str::<Split>(&told).unwrap(), split);
    let shards = shards(&config, &split);
    for (index, (shard, experts)) in shards.iter().zip([0..4, 4..6, 6..8]).enumerate() {
        for (layer, cut) in shard.each_layer().enumerate() {
            assert_eq!((cut.heads.clone(), cut.kv_heads.clone()), (0..9, 0..3));
            assert_eq!((cut.attention.all_roots(), cut.heads_place()), (1, 0));
            let dense = 128 * [0, 6, 9][index]..128 * [6, 9, 12][index];
            let own = if layer > 0 { experts.clone() } else { dense };
            assert_eq!(cut.ffn(), own, "rank {index}, layer {layer}");
        }
    }
    // Repeated attention is no exclusive work of a rank.
    let error = Split::plan(&config, SplitKind::Experts, 24, &[]).unwrap_err();
    assert!(matches!(error, Error::NothingLeft { .. }), "{error}");
    // Consecutive stages, as a planner makes them.
    let stages = [0..15, 15..30].map(|layers| (StageKind::Experts, layers, vec![1, 1]));
    let split = Split::of_stages(&config, stages).unwrap();
    let tensor = 2;
    let grid = |pipeline| SplitKind::GridOfExperts { tensor, pipeline };
    let (grid, long) = (grid(2), grid(30));
    assert_eq!(split.to_string(), "2x2-experts");
    assert_eq!(split.kind(), Some(grid));
    assert_eq!("2x2-experts".parse::<SplitKind>(), Ok(grid));
    assert_eq!(grid.to_string(), "2x2-experts");
    let planned = Split::plan(&config, grid, 4, &[]).unwrap();
    assert!(planned.kinds().all(|kind| kind == StageKind::Experts));
    // The first layer has no experts, so that a stage with it alone shares heads too.
    let planned = Split::plan(&config, long, 60, &[]).unwrap();
    let kinds: Vec<StageKind> = planned.kinds().collect();
    assert_eq!(kinds[..2], [StageKind::Tensor, StageKind::Experts]);
    assert_eq!(planned.kind(), None);
}

/// The serialised split has whole numbers, which the other side checks.
#[test]
fn a_split_is_told_with_the_leaves_of_each_rank() {
    let config = smollm2();
    let split = plan("tensor", 2, &[2, 1]).unwrap();
    let mut told = serde_json::to_value(&split).unwrap();
    let dealt = |leaves: usize, first: usize| serde_json::json!({ "leaves": leaves, "ends": [first, leaves] });
    // Leaves of the attention (and blocks of rows), of the feed-forward, and of the vocabulary.
    let expected = [dealt(9, 6), dealt(12, 8), dealt(768, 512)];
    assert_eq!(told["stages"][0]["dealt"], serde_json::json!(expected));
    let read = |told: &serde_json::Value| serde_json::from_value::<Split>(told.clone()).unwrap();
    assert_eq!(read(&told), split);

    // No reader derives cuts from the shares.
    told["stages"][0]["shares"] = serde_json::json!([1, 1]);
    let other = read(&told);
    other.check(&config).unwrap();
    assert_eq!(shards(&config, &other), shards(&config, &split));

    for bad in ["[]", "[12]", "[8, 11]", "[13, 12]", "[8, 12, 12]"] {
        told["stages"][0]["dealt"][1]["ends"] = serde_json::from_str(bad).unwrap();
        let (leaves, ranks) = (12, 2);
        let error = Error::Leaves { leaves, ranks };
        assert_eq!(read(&told).check(&config), Err(error));
    }
    told["stages"][0].as_object_mut().unwrap().remove("dealt");
    let error = read(&told).check(&config);
    assert!(matches!(error, Err(Error::Leaves { .. })));
}

#[test]
fn splits_that_cannot_be_say_why() {
    let nothing = "gets nothing: its stage shares 9 blocks of heads and 12";
    for (kind, ranks, shares, part) in [
        ("tensr", 2, &[][..], "\"tensr\", expected auto"),
        ("2x", 2, &[], "\"2x\""),
        ("0x2", 2, &[], "\"0x2\""),
        ("2-experts", 2, &[], "\"2-experts\""),
        ("2x0-experts", 2, &[], "\"2x0-experts\""),
        ("2x2-experts", 3, &[], "for 4 ranks, there are 3"),
        ("experts", 2, &[], "layers 0..30 have no experts"),
        ("2x2", 3, &[], "for 4 ranks, there are 3"),
        ("tensor", 0, &[], "0 ranks"),
        ("tensor", 4000, &[], "4000 ranks"),
        ("tensor", 2, &[1], "1 shares for 2 ranks"),
        ("tensor", 2, &[1, 0], "share of rank 1 is 0"),
        ("pipeline", 31, &[], "31 pipeline stages for 30 layers"),
        ("tensor", 40, &[], nothing),
        ("tensor", 2, &[100, 1], "rank 1 gets nothing"),
    ] {
        let error = plan(kind, ranks, shares).unwrap_err().to_string();
        assert!(error.contains(part), "{kind} {ranks} {shares:?}: {error}");
    }
}

#[test]
fn auto_shares_layers_as_far_as_there_are_heads() {
    let named = |ranks| plan("auto", ranks, &[]).unwrap().to_string();
    let names = ["none", "tensor", "tensor", "5x2", "6x2"];
    assert_eq!([1, 2, 9, 10, 12].map(named), names);
}

proptest::proptest! {
    #[test]
    fn no_cost_is_better_cut_elsewhere(stages in 1..5usize, layers in 5..9usize, seed in 0..1000u64) {
        let mut config = smollm2();
        config.layers.truncate(layers);
        let shares: Vec<u64> = (0..stages as u64).map(|i| 1 + seed * (i + 3) % 7).collect();
        let worst = |ends: &[usize]| {
            let mut start = 0;
            let mut worst = 0.0f64;
            for (stage, &end) in ends.iter().enumerate() {
                let head = (config.vocab * config.width) as f64;
                let extra = if stage + 1 == stages { head } else { 0.0 };
                let layers = (end - start) as f64 * config.layers[0].parameters(config.width) as f64;
                worst = worst.max((layers + extra) / shares[stage] as f64);
                start = end;
            }
            worst
        };
        let ends = layer_ends(&config, &shares);
        // All other cuts, as combinations of increasing ends.
        let mut best = f64::INFINITY;
        let mut try_ends = |ends: &[usize]| best = best.min(worst(ends));
        fn each(layers: usize, left: usize, ends: &mut Vec<usize>, f: &mut impl FnMut(&[usize])) {
            let start = ends.last().copied().unwrap_or(0);
            if left == 1 {
                ends.push(layers);
                f(ends);
                ends.pop();
                return;
            }
            for end in start + 1..=layers - (left - 1) {
                ends.push(end);
                each(layers, left - 1, ends, f);
                ends.pop();
            }
        }
        each(layers, stages, &mut Vec::new(), &mut try_ends);
        proptest::prop_assert!(worst(&ends) <= best * (1.0 + 1e-12), "{ends:?}");
    }
}
