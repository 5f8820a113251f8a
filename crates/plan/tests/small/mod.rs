//! Small clusters and models that tests of the planner share.
#![allow(dead_code, reason = "each program uses its own part")]

use paceline_base::Bytes;
use paceline_plan::cluster::Rates;
use paceline_plan::{
    AttentionKind, Backend, Bits, Caches, Cluster, ClusterNode, LinkTransport, ModelShape,
    NodeLink, Workload,
};

/// A dense model of `layers` layers.
pub(crate) fn model(layers: u32) -> ModelShape {
    ModelShape {
        name: "small".into(),
        layers,
        width: 1024,
        vocab: 8192,
        tied: false,
        attention: AttentionKind::Gqa {
            heads: 12,
            kv_heads: 12,
            head_dim: 64,
        },
        sliding: None,
        indexer: None,
        caches: Caches::default(),
        ffn: 4096,
        moe: None,
        bits: Bits::uniform(8.0),
    }
}

/// A node with memory for `layers` layers of [`model`], without embeddings and head.
pub(crate) fn node(index: usize, layers: f64, bandwidth: f64) -> ClusterNode {
    let one = model(1);
    ClusterNode {
        name: format!("n{index}"),
        kind: "box".into(),
        // Program and buffers first, then the layers; embeddings and head take some of it.
        memory: Bytes((290e6 + layers * one.layer_bytes(0)) as u64),
        usable: 1.0,
        bandwidth,
        measured: true,
        rates: Some(Rates::uniform(bandwidth * 20.0)),
        disk: None,
        idle_w: Some(10.0),
        load_w: Some(100.0),
        price_usd: Some(1000.0),
        backend: Backend::Cpu,
        engine: "paceline-cpu".into(),
    }
}

/// A link by sockets.
pub(crate) fn link(a: usize, b: usize, alpha: f64, beta: f64) -> NodeLink {
    NodeLink {
        a,
        b,
        kind: "wire".into(),
        transport: LinkTransport::Tcp,
        alpha,
        beta,
        shared: false,
    }
}

/// All nodes joined, each pair as `of` says: latency in seconds, bytes a second.
pub(crate) fn mesh(nodes: Vec<ClusterNode>, of: impl Fn(usize, usize) -> (f64, f64)) -> Cluster {
    let mut links = Vec::new();
    for a in 0..nodes.len() {
        for b in a + 1..nodes.len() {
            let (alpha, beta) = of(a, b);
            links.push(link(a, b, alpha, beta));
        }
    }
    Cluster {
        name: "mesh".into(),
        nodes,
        links,
    }
}

/// A short request.
pub(crate) const WORK: Workload = Workload {
    prompt: 32,
    output: 16,
    concurrency: 1,
    context: 64,
};
