//! Catalogue entries for machines and links.

use paceline_base::Bytes;
use serde::Deserialize;

use crate::{Backend, ClusterNode, Error, LinkTransport, NodeLink, Rates};

/// A kind of machine. A missing number is not known.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct HardwareEntry {
    pub kind: String,
    /// Built-in memory for weights, GB of 10^9 bytes.
    pub memory_gb: Option<f64>,
    /// Quoted or measured bandwidth, GB/s.
    pub memory_bandwidth_gb_s: Option<f64>,
    /// The same with one thread, where that was measured.
    pub thread_bandwidth_gb_s: Option<f64>,
    /// Quoted dense 16-bit matrix rate, TFLOPS; for processors the 8-bit peak of all cores.
    pub fp16_tflops: Option<f64>,
    /// Rate for attention over long prompts where it differs.
    pub attention_tflops: Option<f64>,
    /// Rate for routed experts where it differs.
    pub expert_tflops: Option<f64>,
    /// Cores, for processors.
    pub cores: Option<u32>,
    /// Share of memory that a model may use.
    pub usable_fraction: Option<f64>,
    /// Reading weights from disk, GB/s.
    pub disk_gb_s: Option<f64>,
    /// Watts idle.
    pub idle_w: Option<f64>,
    /// Watts under load.
    pub load_w: Option<f64>,
    /// Dollars.
    pub price_usd: Option<f64>,
    /// Month of the price, `2026-05`.
    pub price_date: Option<String>,
    /// `metal`, `cuda`, `gpu` or `cpu`; guessed from the name when missing.
    pub backend: Option<String>,
    /// Engine whose constants apply when nothing else is said.
    pub engine: Option<String>,
    #[serde(default)]
    pub source: String,
}

impl HardwareEntry {
    /// Fills what is missing from `other`.
    pub(crate) fn complete(&mut self, other: &Self) {
        let fill = |own: &mut Option<f64>, theirs: Option<f64>| *own = own.or(theirs);
        fill(&mut self.memory_gb, other.memory_gb);
        fill(&mut self.memory_bandwidth_gb_s, other.memory_bandwidth_gb_s);
        fill(&mut self.thread_bandwidth_gb_s, other.thread_bandwidth_gb_s);
        fill(&mut self.fp16_tflops, other.fp16_tflops);
        fill(&mut self.attention_tflops, other.attention_tflops);
        fill(&mut self.expert_tflops, other.expert_tflops);
        fill(&mut self.usable_fraction, other.usable_fraction);
        fill(&mut self.disk_gb_s, other.disk_gb_s);
        fill(&mut self.idle_w, other.idle_w);
        fill(&mut self.load_w, other.load_w);
        fill(&mut self.price_usd, other.price_usd);
        self.price_date = self.price_date.take().or_else(|| other.price_date.clone());
        self.cores = self.cores.or(other.cores);
        self.backend = self.backend.take().or_else(|| other.backend.clone());
        self.engine = self.engine.take().or_else(|| other.engine.clone());
    }

    /// The backend that computes on it: stated, or derived from the name.
    ///
    /// # Errors
    /// [`Error::Unknown`] for a backend of another name.
    pub fn backend(&self) -> Result<Backend, Error> {
        let kind = self.kind.to_lowercase();
        let has = |parts: &[&str]| parts.iter().any(|part| kind.contains(part));
        Ok(match self.backend.as_deref() {
            Some("metal") => Backend::Metal,
            Some("cuda") => Backend::Cuda,
            Some("gpu") => Backend::Gpu,
            Some("cpu") => Backend::Cpu,
            Some(other) => {
                return Err(Error::Unknown {
                    kind: "backend",
                    name: other.to_owned(),
                    nearest: "metal, cuda, gpu, cpu".to_owned(),
                });
            }
            None if has(&["mac"]) => Backend::Metal,
            None if has(&["raspberry", "xeon", "epyc", "nuc", "phone", "vm-", "cpu"]) => {
                Backend::Cpu
            }
            None if has(&[
                "rtx", "h100", "h200", "a100", "b200", "spark", "cuda", "gb10",
            ]) =>
            {
                Backend::Cuda
            }
            None => Backend::Gpu,
        })
    }

    /// Share of memory that a model may use. On macOS a GPU may wire about three quarters of the
    /// memory of machines above 36 GB, and two thirds below. `iogpu.wired_limit_mb` raises it; the
    /// defaults are from users' reports. Discrete cards lose some hundred MB to the driver; on
    /// processors the system needs its share.
    fn usable(&self, backend: Backend) -> f64 {
        self.usable_fraction.unwrap_or(match backend {
            Backend::Metal if self.memory_gb.unwrap_or(0.0) > 36.0 => 0.75,
            Backend::Metal => 0.67,
            Backend::Cuda | Backend::Gpu => 0.92,
            Backend::Cpu => 0.85,
        })
    }

    /// The engine people run there, where neither entry nor user names one.
    fn default_engine(&self, backend: Backend) -> String {
        let engine = match backend {
            Backend::Metal => "exo-1",
            Backend::Cuda | Backend::Gpu => "llama.cpp",
            Backend::Cpu => "paceline-cpu",
        };
        self.engine.clone().unwrap_or_else(|| engine.to_owned())
    }

    /// A node of this kind; `threads` limits processors.
    ///
    /// # Errors
    /// [`Error::MissingFact`] without memory or bandwidth; [`Error::Unknown`] for its backend.
    pub fn node(&self, name: &str, threads: Option<u32>) -> Result<ClusterNode, Error> {
        let missing = |fact| Error::MissingFact {
            node: self.kind.clone(),
            fact,
        };
        let backend = self.backend()?;
        let memory = self
            .memory_gb
            .filter(|gb| *gb != 0.0)
            .ok_or_else(|| missing("memory"))?;
        let bandwidth = self
            .memory_bandwidth_gb_s
            .ok_or_else(|| missing("memory bandwidth"))?;
        let used = threads
            .zip(self.cores)
            .map(|(t, cores)| (t.min(cores), cores));
        let bandwidth = match (used, self.thread_bandwidth_gb_s) {
            (Some((t, _)), Some(one)) => (one * f64::from(t)).min(bandwidth),
            _ => bandwidth,
        };
        let share = used.map_or(1.0, |(t, cores)| f64::from(t) / f64::from(cores));
        let rates = self.fp16_tflops.map(|all| Rates {
            matmul: all * share * 1e12,
            expert: self.expert_tflops.unwrap_or(all) * share * 1e12,
            attention: self.attention_tflops.unwrap_or(all) * share * 1e12,
        });
        Ok(ClusterNode {
            name: name.to_owned(),
            kind: self.kind.clone(),
            memory: Bytes(bytes(&self.kind, memory)?),
            usable: self.usable(backend),
            bandwidth: bandwidth * 1e9,
            measured: self.source.starts_with("own measurement"),
            rates,
            disk: self.disk_gb_s.map(|gb| gb * 1e9),
            idle_w: self.idle_w,
            load_w: self.load_w,
            price_usd: self.price_usd,
            backend,
            engine: self.default_engine(backend),
        })
    }
}

fn bytes(kind: &str, gb: f64) -> Result<u64, Error> {
    crate::check::finite_in(kind, "memory_gb", gb, 1e-3, 1e6, "0.001 to 1000000")?;
    Ok((gb * 1e9) as u64)
}

/// A kind of link. Latencies are one way; low and high span published readings.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub struct LinkKind {
    pub kind: String,
    /// The lowest reading, µs.
    pub latency_us_low: Option<f64>,
    /// The highest reading.
    pub latency_us_high: Option<f64>,
    /// The one to plan with, where a reading is better than the middle.
    pub latency_us: Option<f64>,
    /// Effective Gbit/s, lowest reading.
    pub bandwidth_gbit_s_effective_low: Option<f64>,
    /// Effective Gbit/s, highest reading.
    pub bandwidth_gbit_s_effective_high: Option<f64>,
    /// Gbit/s of the standard.
    pub bandwidth_gbit_s_theoretical: Option<f64>,
    /// Whether all nodes share one medium.
    #[serde(default)]
    pub shared: bool,
    /// `fabric`, `rdma`, `tcp` or `shm`; derived from the name when missing.
    pub transport: Option<String>,
    #[serde(default)]
    pub source: String,
}

impl LinkKind {
    pub fn transport(&self) -> LinkTransport {
        let name = self.transport.as_deref().unwrap_or(&self.kind);
        let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        if has(&["nvlink", "fabric"]) {
            LinkTransport::Fabric
        } else if has(&["rdma", "roce", "infiniband"]) {
            LinkTransport::Rdma
        } else if has(&["shm"]) {
            LinkTransport::Shm
        } else {
            LinkTransport::Tcp
        }
    }

    /// Seconds for a small message, one way: the stated one, else the geometric middle of the
    /// readings, which span orders of magnitude.
    pub fn alpha(&self) -> f64 {
        let (low, high) = (self.latency_us_low, self.latency_us_high);
        let middle = match (low.or(high), high.or(low)) {
            (Some(low), Some(high)) if low > 0.0 => (low * high).sqrt(),
            (Some(low), Some(high)) => (low + high) / 2.0,
            _ => 100.0,
        };
        self.latency_us.unwrap_or(middle) * 1e-6
    }

    /// Bytes a second, one way: the middle of the readings, else three quarters of the standard.
    /// Where nothing is stated, gigabit Ethernet.
    pub fn beta(&self) -> f64 {
        let low = self.bandwidth_gbit_s_effective_low;
        let high = self.bandwidth_gbit_s_effective_high;
        let gbit = match (low.or(high), high.or(low)) {
            (Some(low), Some(high)) => (low + high) / 2.0,
            _ => self
                .bandwidth_gbit_s_theoretical
                .map_or(0.94, |all| 0.75 * all),
        };
        gbit * 1e9 / 8.0
    }

    /// A link of this kind between two nodes.
    pub fn between(&self, a: usize, b: usize) -> NodeLink {
        NodeLink {
            a,
            b,
            kind: self.kind.clone(),
            transport: self.transport(),
            alpha: self.alpha(),
            beta: self.beta(),
            shared: self.shared,
        }
    }
}
