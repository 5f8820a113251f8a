//! `paceline adapter`: shows, converts and fuses adapters.

use std::path::{Path, PathBuf};

use paceline_base::KernelClass;
use paceline_board::adapters::{base, facts, fused, text};
use paceline_model::adapter::files::{Adapter, Form, base_name};
use paceline_store::ResolvedModel;
use paceline_tensor::Kernels;
use paceline_train::fuse::fuse;

pub(crate) use paceline_board::adapters::name_of;

use crate::compute::{self, EngineArgs};
use crate::error::{Error, failed};
use crate::interrupt::Signals;
use crate::output::{print, print_err};
use crate::{home, load, pull};

/// What to do with adapters.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// What an adapter is
    Show(ShowArgs),
    /// Write an adapter in PEFT's, MLX's or GGUF's form
    Convert(ConvertArgs),
    /// Write a model with an adapter in its matrices
    Fuse(FuseArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// Folder of an adapter, or its file of weights
    adapter: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ConvertArgs {
    /// Folder of an adapter, or its file of weights
    adapter: PathBuf,
    /// The form: peft, mlx or gguf
    #[arg(long, value_name = "FORM", value_enum)]
    to: FormName,
    /// The model that the adapter is for: GGUF files have its architecture and order of rows
    #[arg(long, value_name = "MODEL", required_if_eq("to", "gguf"))]
    base: Option<String>,
    /// Folder for its files
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct FuseArgs {
    /// Alias (`smollm2`), GGUF file, folder of safetensors, or hub id `owner/name[:quantisation]`
    model: String,
    /// Folder of an adapter, or its file of weights
    #[arg(long, value_name = "FILE")]
    adapter: PathBuf,
    /// Where the model goes: a folder for a folder, a file for a GGUF file
    #[arg(long, value_name = "PATH")]
    output: PathBuf,
}

/// Forms by name.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum FormName {
    /// Hugging Face's
    Peft,
    /// That of `mlx_lm.lora`
    Mlx,
    /// That of llama.cpp
    Gguf,
}

pub(crate) fn run(command: &Command, signals: &Signals) -> anyhow::Result<()> {
    match command {
        Command::Show(args) => show(args),
        Command::Convert(args) => {
            let found = match &args.base {
                Some(model) => Some(pull::ensure(model, signals)?),
                None => None,
            };
            let base = found.as_ref().map(|found| base(&found.path)).transpose()?;
            let named = found.as_ref().map(name_of_base).transpose()?;
            let (mut adapter, _) = Adapter::read_for(&args.adapter, base)?;
            adapter.base = named.flatten().or(adapter.base);
            if adapter.base_with_weights().is_none() {
                print_err(UNNAMED);
            }
            match (args.to, base) {
                (FormName::Gguf, Some(base)) => adapter.write_gguf(&args.output, base)?,
                (FormName::Mlx, _) => adapter.write(&args.output, Form::Mlx)?,
                (FormName::Peft | FormName::Gguf, _) => {
                    adapter.write(&args.output, Form::Peft)?;
                }
            }
            print(&args.output.display().to_string())
        }
        Command::Fuse(args) => {
            let found = pull::ensure(&args.model, signals)?;
            if args.output.exists() {
                let text = format!("{} is there already", args.output.display());
                let hint = "choose another place, or move away what is there";
                return Err(failed(text, hint).into());
            }
            let (adapter, _) = Adapter::read_for(&args.adapter, Some(base(&found.path)?))?;
            let (adapter, kernels) = ((&adapter, &*args.adapter), kernels()?);
            fuse(&found.path, adapter, &args.output, &kernels)?;
            print(&args.output.display().to_string())
        }
    }
}

fn show(args: &ShowArgs) -> anyhow::Result<()> {
    let (adapter, form) = Adapter::read(&args.adapter)?;
    if let Err(reason) = adapter.beside("", &args.adapter) {
        print_err(format!("warning: run, up and fuse refuse it: {reason}"));
    }
    print(&match args.json {
        true => facts(&adapter, form).to_string(),
        false => text(&adapter, form),
    })
}

/// Kernels on all cores.
fn kernels() -> anyhow::Result<Kernels> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    load::free_kernels(threads)
}

/// Hint for an adapter whose files do not name their model.
pub(crate) const UNNAMED: &str = "hint: the adapter's files name no base: give PEFT the base's folder \
                                  or hub id, or write it as base_model_name_or_path";

/// The model's name for PEFT: a hub repository or a folder.
pub(crate) fn name_of_base(found: &ResolvedModel) -> Result<Option<String>, paceline_model::Error> {
    match found.weights() {
        Some(repository) => Ok(Some(repository.to_owned())),
        None => base_name(&std::path::absolute(&found.path).unwrap_or_else(|_| found.path.clone())),
    }
}

/// Whether nodes apply adapters at run time. With MLX they are fused first.
///
/// # Errors
/// An engine and a class that contradict each other.
pub(crate) fn beside(
    (engine, class): (EngineArgs, Option<KernelClass>),
    nodes: u32,
) -> Result<bool, Error> {
    Ok(compute::classes(engine, class, nodes)?.on_cpu())
}

/// Parses `NAME=FILE`: a name, and a local adapter's path.
pub(crate) fn named(text: &str) -> Result<(String, PathBuf), String> {
    let named = text.split_once('=').filter(|(name, _)| !name.is_empty());
    let (name, path) = named.ok_or("expected NAME=FILE")?;
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    Ok((name.to_owned(), path))
}

/// The model to open: with `adapter` fused in, if given.
pub(crate) fn applied(model: PathBuf, adapter: Option<&Path>) -> anyhow::Result<PathBuf> {
    let Some(adapter) = adapter else {
        return Ok(model);
    };
    let home = home::folder()?;
    fused(&home, (&model, adapter), kernels, &|line| print_err(line))
}
