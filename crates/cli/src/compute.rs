//! What computes, and how: `--engine`, `--class`, `--threads`, `--kv`, `--pin`.

use std::fmt;
use std::str::FromStr;

use paceline_base::KernelClass;
use paceline_tensor::{KvType, Pinning};

use crate::error::Error;

/// Options of every command that computes.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct ComputeArgs {
    /// Threads to compute with [default: all cores]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// How numbers are computed. On the CPU: cpu [default], cpu-q8 (less exact; reads prompts of
    /// BF16 models faster, of most others slower) or cpu-f32 (slow, four to eight times the
    /// memory); on MLX: mlx [default], mlx-f32 or mlx-exact (the same bits over all batches and
    /// splits, slower)
    #[arg(long, value_name = "CLASS")]
    pub(crate) class: Option<KernelClass>,
    /// How keys and values are kept: f16, f32 or q8_0 (about half of f16's memory, less exact)
    /// [default: f16, with class cpu-f32 f32]
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv: Option<KvType>,
    /// Keep each thread on a core of its own: for a machine that does nothing else
    #[arg(long)]
    pub(crate) pin: bool,
}

impl ComputeArgs {
    /// Whether nodes that compute as `classes` can do all that was asked for.
    ///
    /// # Errors
    /// [`Error::CpuOnly`].
    pub(crate) fn check(self, classes: &Classes) -> Result<(), Error> {
        let given = [("--kv", self.kv.is_some()), ("--pin", self.pin)];
        match given.into_iter().find(|(_, given)| *given) {
            Some((option, _)) if !classes.on_cpu() => Err(Error::CpuOnly { option }),
            _ => Ok(()),
        }
    }

    /// How positions are kept in main memory; `None` where `engine` keeps them in a device's.
    pub(crate) fn in_memory(self, engine: EngineArgs) -> Option<KvType> {
        let class = self.class.unwrap_or_default();
        let elsewhere = class.is_mlx() || engine.engine.is_some_and(|engines| engines.mlx != 0);
        (!elsewhere).then(|| self.kv.unwrap_or(KvType::of(class)))
    }

    /// Where the threads of a single node stay.
    pub(crate) const fn pinning(self) -> Pinning {
        match self.pin {
            true => Pinning::Cores { first: 0 },
            false => Pinning::Free,
        }
    }

    /// How nodes on the CPU keep keys and values; `None` where there is none.
    pub(crate) fn kv_type(self, classes: &Classes) -> Option<KvType> {
        let class = classes.each().iter().find(|class| !class.is_mlx())?;
        Some(self.kv.unwrap_or(KvType::of(*class)))
    }
}

/// Options of commands that compute with a model.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct EngineArgs {
    /// What computes: cpu, or mlx (Metal, CUDA); one for each node as in cpu,mlx, where stages of
    /// a pipeline may differ [default: cpu, or that of --class]
    #[arg(long, value_name = "ENGINE")]
    pub(crate) engine: Option<Engines>,
}

/// An engine for each node, or one for all. At most 64, as there are nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Engines {
    /// Bit i: node i computes on MLX.
    mlx: u64,
    count: u32,
}

/// Not a list of engines.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown engine {0:?}, expected cpu or mlx")]
pub(crate) struct UnknownEngine(String);

impl FromStr for Engines {
    type Err = UnknownEngine;

    fn from_str(text: &str) -> Result<Self, UnknownEngine> {
        let mut engines = Self { mlx: 0, count: 0 };
        for name in text.split(',') {
            let mlx = match name {
                "cpu" => 0,
                "mlx" => 1,
                _ => return Err(UnknownEngine(name.to_owned())),
            };
            if engines.count == u64::BITS {
                return Err(UnknownEngine(format!("{name} beyond {} nodes", u64::BITS)));
            }
            engines.mlx |= mlx << engines.count;
            engines.count += 1;
        }
        Ok(engines)
    }
}

impl Engines {
    const fn is_mlx(self, node: u32) -> bool {
        let node = if self.count == 1 { 0 } else { node };
        self.mlx >> node & 1 == 1
    }
}

/// The kernel class of each node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Classes(Vec<KernelClass>);

impl Classes {
    /// Of `nodes` nodes.
    ///
    /// # Errors
    /// [`Error::Engines`] for a list of another length, [`Error::ClassOfOther`] when no node
    /// computes in the class that was asked for.
    pub(crate) fn new(
        engine: Option<Engines>,
        class: Option<KernelClass>,
        nodes: u32,
    ) -> Result<Self, Error> {
        let wanted = class.unwrap_or_default();
        let engines = engine.unwrap_or(Engines {
            mlx: wanted.is_mlx().into(),
            count: 1,
        });
        if engines.count != 1 && engines.count != nodes {
            let got = engines.count;
            return Err(Error::Engines { got, nodes });
        }
        let of = |node| match (engines.is_mlx(node), class) {
            (mlx, Some(class)) if mlx == class.is_mlx() => class,
            (true, _) => KernelClass::Mlx,
            (false, _) => KernelClass::Cpu,
        };
        let classes: Vec<KernelClass> = (0..nodes).map(of).collect();
        match class.filter(|class| !classes.contains(class)) {
            Some(class) => Err(Error::ClassOfOther { class }),
            None => Ok(Self(classes)),
        }
    }

    /// By node.
    pub(crate) fn each(&self) -> &[KernelClass] {
        &self.0
    }

    /// Of the first node.
    pub(crate) fn first(&self) -> KernelClass {
        self.0[0]
    }

    /// Whether every node uses our own kernels, whose speed is known.
    pub(crate) fn on_cpu(&self) -> bool {
        self.0.iter().all(|class| !class.is_mlx())
    }
}

/// Each different one once, as `cpu+mlx`.
impl fmt::Display for Classes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<&str> = Vec::new();
        for class in &self.0 {
            if !names.contains(&class.name()) {
                names.push(class.name());
            }
        }
        f.write_str(&names.join("+"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use KernelClass::{Cpu, CpuF32, Mlx, MlxF32};

    fn classes(
        engine: Option<&str>,
        class: Option<KernelClass>,
        nodes: u32,
    ) -> Result<Vec<KernelClass>, String> {
        let engine = engine.map(|text| text.parse().unwrap());
        let classes = Classes::new(engine, class, nodes);
        classes.map(|c| c.0).map_err(|error| error.to_string())
    }

    #[test]
    fn engines_and_classes_agree() {
        assert_eq!(classes(None, None, 2), Ok(vec![Cpu, Cpu]));
        assert_eq!(classes(Some("mlx"), None, 2), Ok(vec![Mlx, Mlx]));
        assert_eq!(classes(Some("cpu,mlx"), None, 2), Ok(vec![Cpu, Mlx]));
        assert_eq!(classes(None, Some(MlxF32), 1), Ok(vec![MlxF32]));
        assert_eq!(classes(Some("mlx"), Some(MlxF32), 1), Ok(vec![MlxF32]));
        let mixed = classes(Some("cpu,mlx"), Some(CpuF32), 2);
        assert_eq!(mixed, Ok(vec![CpuF32, Mlx]));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let error = classes(Some("cpu"), Some(Mlx), 1).unwrap_err();
        assert!(error.contains("--class mlx"), "{error}");
        let error = classes(Some("cpu,mlx"), None, 3).unwrap_err();
        assert!(error.contains("--engine has 2"), "{error}");
        let error = "gpu".parse::<Engines>().unwrap_err().to_string();
        assert_eq!(error, "unknown engine \"gpu\", expected cpu or mlx");
        assert!("mlx,".repeat(64).parse::<Engines>().is_err());
        assert!("mlx,,cpu".parse::<Engines>().is_err());
    }

    #[test]
    fn names_are_told_once() {
        let classes = Classes(vec![Cpu, Mlx, Cpu]);
        assert_eq!(classes.to_string(), "cpu+mlx");
    }
}
