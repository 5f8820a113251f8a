//! On any cluster, better facts never predict a worse result, and nothing beats physics.
//!
//! Random models (dense, experts, low ranks) on random machines, in every placement mode that a row
//! of published numbers can have.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use crate::small::{mesh, node};
use paceline_plan::{
    AttentionKind, Bits, Caches, Calibration, Cluster, ClusterNode, Costs, ModelShape, Moe,
    Pipeline, Placement, Prediction, Sliding, Split, Workload, predict,
};
use proptest::prelude::*;

fn attention() -> impl Strategy<Value = AttentionKind> {
    let grouped = (0u32..4, prop::sample::select(vec![64, 128])).prop_map(|(kv, head_dim)| {
        AttentionKind::Gqa {
            heads: 16,
            kv_heads: 2 << kv,
            head_dim,
        }
    });
    let low_rank = (0u32..2).prop_map(|queries| AttentionKind::Mla {
        heads: 16,
        q_rank: 768 * queries,
        kv_rank: 512,
        nope_dim: 128,
        rope_dim: 64,
        value_dim: 128,
    });
    prop_oneof![2 => grouped, 1 => low_rank]
}

fn shape() -> impl Strategy<Value = ModelShape> {
    let moe =
        (3u32..8, 1u32..8, 0u32..2, 0u32..3).prop_map(|(experts, active, shared, dense)| Moe {
            experts: 1 << experts,
            active,
            shared,
            ffn: 1024,
            dense_layers: dense,
            every: 1,
            groups: 1,
        });
    let sliding = (1u32..4, 64u32..2048).prop_map(|(layers, window)| Sliding { layers, window });
    let halves = (prop::option::of(moe), prop::option::of(sliding));
    (attention(), halves, 3u32..12, 2.5f64..16.0).prop_map(
        |(attention, (moe, sliding), layers, bits)| ModelShape {
            name: "any".into(),
            layers,
            width: 2048,
            vocab: 32_768,
            tied: false,
            attention,
            sliding,
            indexer: None,
            caches: Caches::default(),
            ffn: 8192,
            moe,
            bits: Bits::uniform(bits),
        },
    )
}

/// Placement of a model on two to four nodes that a row of published numbers may have.
#[derive(Clone, Copy, Debug)]
enum PlacementMode {
    Alone,
    Pipeline,
    Tensor,
    Experts,
}

#[derive(Clone, Debug)]
struct Case {
    model: ModelShape,
    nodes: usize,
    way: PlacementMode,
    engine: &'static str,
    bandwidth: f64,
    /// Operations per byte of memory bandwidth.
    balance: f64,
    alpha: f64,
    beta: f64,
    work: Workload,
}

fn case() -> impl Strategy<Value = Case> {
    let way = prop::sample::select(vec![
        PlacementMode::Alone,
        PlacementMode::Pipeline,
        PlacementMode::Tensor,
        PlacementMode::Experts,
    ]);
    let engine = prop::sample::select(vec![
        "generic",
        "exo-0",
        "exo-1",
        "mlx",
        "llama.cpp",
        "llama.cpp-rpc",
        "distributed-llama-cpu",
        "paceline-cpu",
    ]);
    let machine = (
        2usize..5,
        1e10f64..4e12,
        5.0f64..500.0,
        1e-6f64..1e-2,
        1e8f64..1e11,
    );
    let work = (1u32..9000, 1u32..500, 1u32..65);
    (shape(), way, engine, machine, work).prop_map(|(model, way, engine, machine, work)| {
        let (nodes, bandwidth, balance, alpha, beta) = machine;
        let (prompt, output, concurrency) = work;
        Case {
            model,
            nodes,
            way,
            engine,
            bandwidth,
            balance,
            alpha,
            beta,
            work: Workload {
                prompt,
                output,
                concurrency,
                context: prompt + output,
            },
        }
    })
}

impl Case {
    fn cluster(&self) -> Cluster {
        let one = |index| ClusterNode {
            engine: self.engine.into(),
            rates: Some(paceline_plan::Rates::uniform(self.bandwidth * self.balance)),
            ..node(index, 1.0, self.bandwidth)
        };
        mesh((0..self.nodes).map(one).collect(), |_, _| {
            (self.alpha, self.beta)
        })
    }

    fn placement(&self) -> Placement {
        let (n, nodes) = (self.model.layers, (0..self.nodes).collect::<Vec<_>>());
        Placement::single(match self.way {
            PlacementMode::Alone => Pipeline::group(n, Split::Whole, &[0]),
            PlacementMode::Pipeline => Pipeline::even(n, &nodes[..nodes.len().min(n as usize)]),
            PlacementMode::Tensor => Pipeline::group(n, Split::Tensor, &nodes),
            PlacementMode::Experts if self.model.moe.is_some() => {
                Pipeline::group(n, Split::Expert, &nodes)
            }
            PlacementMode::Experts => Pipeline::group(n, Split::Tensor, &nodes),
        })
    }

    fn said(&self) -> Prediction {
        let (cluster, calibration) = (self.cluster(), Calibration::builtin().unwrap());
        let costs = Costs::new(&cluster, &self.model, self.work, &calibration).unwrap();
        predict(&costs, &self.placement()).unwrap()
    }

    fn changed(&self, change: impl FnOnce(&mut Self)) -> Prediction {
        let mut other = self.clone();
        change(&mut other);
        other.said()
    }
}

/// `better` answers at least as fast as `worse` in everything.
fn at_least(better: &Prediction, worse: &Prediction, what: &str) -> Result<(), TestCaseError> {
    const ROUNDING: f64 = 1.0 + 1e-9;
    let (a, b) = (better.decode_tok_s, worse.decode_tok_s);
    prop_assert!(a * ROUNDING >= b, "{what}: decode {a} against {b}");
    let (a, b) = (better.throughput_tok_s, worse.throughput_tok_s);
    prop_assert!(a * ROUNDING >= b, "{what}: all requests {a} against {b}");
    let (a, b) = (better.ttft_s.unwrap(), worse.ttft_s.unwrap());
    prop_assert!(a <= b * ROUNDING, "{what}: first token {a} against {b}");
    let (a, b) = (better.request_s, worse.request_s);
    prop_assert!(a <= b * ROUNDING, "{what}: request {a} against {b}");
    Ok(())
}

fn needed(said: &Prediction) -> f64 {
    said.nodes.iter().map(|node| node.usage.total()).sum()
}

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(400)
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn faster_parts_never_answer_slower(case in case(), by in 1.0f64..8.0) {
        let now = case.said();
        // Operations a second stay what they are.
        let memory = case.changed(|c| {
            c.bandwidth *= by;
            c.balance /= by;
        });
        at_least(&memory, &now, "memory")?;
        at_least(&case.changed(|c| c.balance *= by), &now, "arithmetic")?;
        at_least(&case.changed(|c| c.alpha /= by), &now, "latency")?;
        at_least(&case.changed(|c| c.beta *= by), &now, "bandwidth of links")?;
    }

    #[test]
    fn a_larger_question_never_takes_less(case in case(), more in 1u32..4000) {
        let now = case.said();
        let longer = case.changed(|c| {
            c.work.prompt += more;
            c.work.context += more;
        });
        prop_assert!(longer.decode_tok_s <= now.decode_tok_s * (1.0 + 1e-9));
        prop_assert!(longer.ttft_s.unwrap() * (1.0 + 1e-9) >= now.ttft_s.unwrap());
        prop_assert!(needed(&longer) >= needed(&now));
        let bits = case.changed(|c| c.model.bits = Bits::uniform(c.model.bits.rest + 1.0));
        at_least(&now, &bits, "bits")?;
        prop_assert!(needed(&bits) > needed(&now));
        let reserved = case.changed(|c| c.work.context += more);
        prop_assert!(needed(&reserved) > needed(&now));
        prop_assert_eq!(reserved.decode_tok_s, now.decode_tok_s);
    }

    /// More requests at a time get more tokens together, and none of them gets more than alone.
    #[test]
    fn requests_share_but_do_not_slow_the_whole(case in case(), more in 1u32..32) {
        let now = case.said();
        let many = case.changed(|c| c.work.concurrency += more);
        let (a, b) = (many.throughput_tok_s, now.throughput_tok_s);
        // A mixture's rows fill tiles: one more row may begin another tile of each expert.
        let tiles = if case.model.moe.is_some() { 2.0 } else { 1.0 + 1e-9 };
        prop_assert!(a * tiles >= b, "{a} tok/s of more, {b} of fewer");
        for (said, n) in [(&now, case.work.concurrency), (&many, case.work.concurrency + more)] {
            let each = said.throughput_tok_s / f64::from(n);
            let alone = said.decode_tok_s;
            prop_assert!(each <= alone * (1.0 + 1e-9), "{each} of {alone}");
        }
    }

    /// A token's bytes pass some memory; a mixture is charged for what it touches, not for what it
    /// has.
    #[test]
    fn nothing_beats_all_memories_together(case in case()) {
        let said = case.said();
        let nodes = said.nodes.len() as f64;
        let touched = case.model.active_params() * case.model.bits.rest / 8.0;
        let limit = nodes * case.bandwidth / touched;
        prop_assert!(said.decode_tok_s <= limit, "{} of at most {limit}", said.decode_tok_s);
        let Some(moe) = case.model.moe else { return Ok(()) };
        if moe.active < moe.experts {
            let more = Moe { active: moe.active + 1, ..moe };
            let busier = case.changed(|c| c.model.moe = Some(more));
            prop_assert!(busier.decode_tok_s < said.decode_tok_s * (1.0 + 1e-9));
            prop_assert!(needed(&busier) >= needed(&said));
        }
    }

    /// Behind its window a layer does not get slower.
    #[test]
    fn windows_end_what_a_key_costs(case in case(), window in 1u32..500) {
        let with = |sliding, prompt| 1.0 / case.changed(|c| {
            (c.work.prompt, c.work.context) = (prompt, prompt + c.work.output);
            c.model.sliding = sliding;
        }).decode_tok_s;
        let all = Sliding { layers: case.model.layers, window };
        let [near, far] = [500, 8000].map(|prompt| with(Some(all), prompt));
        prop_assert_eq!(near, far);
        let some = with(Some(Sliding { layers: 1, ..all }), 8000);
        prop_assert!(far < some && some < with(None, 8000));
    }

    /// A latent cache is one vector for all heads: less to keep and to read than keys and values.
    #[test]
    fn low_ranks_keep_less_than_heads(case in case(), prompt in 1000u32..8000) {
        let heads = AttentionKind::Gqa { heads: 16, kv_heads: 16, head_dim: 128 };
        let ranks = AttentionKind::Mla {
            heads: 16, q_rank: 0, kv_rank: 512, nope_dim: 128, rope_dim: 64, value_dim: 128,
        };
        let with = |attention, prompt| case.changed(|c| {
            // Behind a window neither grows.
            (c.model.attention, c.model.sliding) = (attention, None);
            (c.work.prompt, c.work.context) = (prompt, prompt + c.work.output);
            c.way = PlacementMode::Alone;
        });
        let cache = |said: &Prediction| said.nodes.iter().map(|n| n.usage.cache).sum::<f64>();
        let grown = |attention| {
            let [short, long] = [1, prompt].map(|p| with(attention, p));
            (cache(&long) - cache(&short), 1.0 / long.decode_tok_s - 1.0 / short.decode_tok_s)
        };
        let (heads, ranks) = (grown(heads), grown(ranks));
        prop_assert!(ranks.0 < heads.0, "{ranks:?} {heads:?}");
        // With memory as the limit; absorbed queries compute more.
        if case.balance > 400.0 {
            prop_assert!(ranks.1 < heads.1, "{ranks:?} {heads:?}");
        }
    }
}

/// Stages compute different micro-batches at the same time, one per step in flight. Where rows cost
/// as much together as one by one, the speed is that multiple of one request's.
#[test]
fn a_pipeline_is_as_full_as_steps_are_under_way() {
    let case = |nodes: usize, concurrency| Case {
        model: ModelShape {
            name: "even".into(),
            layers: 36,
            width: 4096,
            vocab: 256,
            tied: false,
            attention: AttentionKind::Gqa {
                heads: 32,
                kv_heads: 4,
                head_dim: 128,
            },
            sliding: None,
            indexer: None,
            caches: Caches::default(),
            ffn: 16_384,
            moe: None,
            bits: Bits::uniform(2.5),
        },
        nodes,
        way: PlacementMode::Pipeline,
        engine: "paceline-cpu",
        bandwidth: 1e10,
        balance: 5.0, // one row computes for longer than its weights are read
        alpha: 1e-6,
        beta: 1e11,
        work: Workload {
            prompt: 1,
            output: 1,
            concurrency,
            context: 2,
        },
    };
    // 12 rows in 9 micro-batches pass 12 stages in the time of 16 rows in one.
    for (nodes, concurrency, times) in [(1, 4, 1.0), (4, 4, 4.0), (4, 16, 4.0), (12, 12, 9.0)] {
        let said = case(nodes, concurrency).said();
        let got = said.throughput_tok_s / said.decode_tok_s;
        assert!(
            (got / times - 1.0).abs() < 0.05,
            "{concurrency} over {nodes}: {got} times one request, expected {times}"
        );
    }
}
