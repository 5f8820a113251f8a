//! The engine that computes on each node and, with it, the kernel class.

use std::fmt;
use std::str::FromStr;

use paceline_base::KernelClass;
use serde::{Deserialize, Serialize};

/// An engine for each node, or one for all. At most 64, as there are nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Engines {
    /// Bit i: node i computes on MLX.
    mlx: u64,
    count: u32,
}

/// Not a list of engines.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown engine {0:?}, expected cpu or mlx")]
pub struct UnknownEngine(String);

/// Why engines and class do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A list of engines of another length than there are nodes.
    #[error("{got} engines for {nodes} nodes, expected one or one for each")]
    Engines {
        /// Engines in the list.
        got: u32,
        nodes: u32,
    },
    /// A class of an engine that no node has.
    #[error("no node computes as {class}")]
    ClassOfOther { class: KernelClass },
}

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

impl TryFrom<String> for Engines {
    type Error = UnknownEngine;

    fn try_from(text: String) -> Result<Self, UnknownEngine> {
        text.parse()
    }
}

impl From<Engines> for String {
    fn from(engines: Engines) -> Self {
        let name = |node| if engines.is_mlx(node) { "mlx" } else { "cpu" };
        (0..engines.count).map(name).collect::<Vec<_>>().join(",")
    }
}

impl Engines {
    /// Whether any node computes on MLX.
    pub const fn has_mlx(self) -> bool {
        self.mlx != 0
    }

    /// Whether every node computes on MLX.
    pub const fn is_all_mlx(self) -> bool {
        self.mlx.count_ones() == self.count
    }

    const fn is_mlx(self, node: u32) -> bool {
        let node = if self.count == 1 { 0 } else { node };
        self.mlx >> node & 1 == 1
    }
}

/// The kernel class of each node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classes(Vec<KernelClass>);

impl Classes {
    /// Of `nodes` nodes.
    ///
    /// # Errors
    /// [`Error::Engines`] for a list of another length, [`Error::ClassOfOther`] when no node
    /// computes in the class that was asked for.
    pub fn new(
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

    /// These classes, by node.
    pub const fn of(classes: Vec<KernelClass>) -> Self {
        Self(classes)
    }

    /// One class on `nodes` nodes.
    pub fn same(class: KernelClass, nodes: u32) -> Self {
        Self(vec![class; nodes as usize])
    }

    /// By node.
    pub fn each(&self) -> &[KernelClass] {
        &self.0
    }

    /// Of the first node.
    pub fn first(&self) -> KernelClass {
        self.0[0]
    }

    /// Whether every node uses our own kernels, whose speed is known.
    pub fn on_cpu(&self) -> bool {
        self.0.iter().all(|class| !class.is_mlx())
    }
}

/// The engines of an instance's ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EngineChoice {
    /// On each machine the one that is expected to be fastest.
    Fastest,
    /// The class of each rank.
    Given(Vec<KernelClass>),
}

impl EngineChoice {
    /// Whether a class in 32 bits is among them.
    pub(crate) fn is_wide(&self) -> bool {
        matches!(self, Self::Given(classes) if classes.contains(&KernelClass::MlxF32))
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
        assert!(error.contains("as mlx"), "{error}");
        let error = classes(Some("cpu,mlx"), None, 3).unwrap_err();
        assert!(error.contains("2 engines for 3 nodes"), "{error}");
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
