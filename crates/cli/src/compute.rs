//! Compute options: the engine and how it computes, by `--engine`, `--class`, `--threads`, `--kv`,
//! `--pin`.

use paceline_base::{Bytes, KernelClass};
use paceline_fleet::CONTEXT_MAX;
use paceline_node::classes::{self, Classes, Engines};
use paceline_node::context_size::KvMemory;
use paceline_tensor::KvType;

use crate::error::{Error, misused};

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
    /// Type of keys and values: f16, f32, q8 (0.53 of f16's memory) or q4 (0.30, less exact); on
    /// MLX q8 or q4 [default: f16, with class cpu-f32 f32]
    #[arg(long, visible_alias = "kv-type", value_name = "TYPE")]
    pub(crate) kv: Option<KvType>,
    /// Keep each thread on a core of its own: for a machine that does nothing else
    #[arg(long)]
    pub(crate) pin: bool,
}

impl ComputeArgs {
    /// Checks that nodes of these classes support all options.
    pub(crate) fn check(self, classes: &Classes) -> Result<(), Error> {
        let is_float = self.kv.is_some_and(|kv| !kv.is_quantised());
        let given = [("--kv f16 or f32", is_float), ("--pin", self.pin)];
        match given.into_iter().find(|(_, given)| *given) {
            Some((option, _)) if !classes.on_cpu() => Err(misused(
                format!("{option} is for the engine cpu, but --engine is mlx"),
                format!("leave out {option} or --engine"),
            )),
            _ => Ok(()),
        }
    }

    /// Where `engine` has its keys and values, and what programs can have of that memory.
    pub(crate) fn kv_memory(self, engine: EngineArgs) -> (KvMemory, Option<Bytes>) {
        let class = self.class.unwrap_or_default();
        let class = match engine.engine.is_some_and(Engines::has_mlx) {
            true if !class.is_mlx() => KernelClass::Mlx,
            _ => class,
        };
        KvMemory::of_machine(class, self.kv)
    }
}

pub(crate) fn context(text: &str) -> Result<u32, String> {
    match text.parse() {
        _ if text == "max" => Ok(CONTEXT_MAX),
        Ok(n) if (2..CONTEXT_MAX).contains(&n) => Ok(n),
        _ => Err("expected a number from 2 on, or max".to_owned()),
    }
}

/// Options of commands that compute with a model.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct EngineArgs {
    /// What computes: cpu, or mlx (Metal, CUDA); one for each node as in cpu,mlx, where stages of
    /// a pipeline may differ [default: cpu, or that of --class]
    #[arg(long, value_name = "ENGINE")]
    pub(crate) engine: Option<Engines>,
    /// End an answer with an error where it would continue after a failure with other bits, as on
    /// MLX
    #[arg(long)]
    pub(crate) strict: bool,
    /// On Macs, have MLX wait for the GPU without the system. Exchanges of tensor splits cost some
    /// 4 us instead of 150, but GPUs have hung until a restart. It stays off after a hang
    /// [default: where `paceline selftest --fast-sync` has passed]
    #[arg(long)]
    pub(crate) fast_sync: bool,
}

/// Advice for classes that contradict other options.
pub(crate) const FIT_CLASSES: &str =
    "--engine, --class, --nodes and --split have to fit each other";

/// The kernel class of each of `nodes` nodes.
pub(crate) fn classes(
    engine: EngineArgs,
    class: Option<KernelClass>,
    nodes: u32,
) -> Result<Classes, Error> {
    let text = |error| match error {
        classes::Error::Engines { got, nodes } => format!(
            "--engine has {got} engines, but --nodes is {nodes}, expected one, or one for each"
        ),
        classes::Error::ClassOfOther { class } => {
            format!("--class {class} is not one of the engine that --engine names")
        }
    };
    let classes = Classes::new(engine.engine, class, nodes);
    classes.map_err(|error| misused(text(error), FIT_CLASSES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_a_number_or_all() {
        for (text, expected) in [
            ("2", Some(2)),
            ("131072", Some(131_072)),
            ("max", Some(CONTEXT_MAX)),
            ("1", None),
            ("4294967295", None),
            ("most", None),
            ("", None),
        ] {
            assert_eq!(context(text).ok(), expected, "{text:?}");
        }
    }
}
