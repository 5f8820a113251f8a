//! `paceline adapter`: files of adapters, shown, converted, and fused into models.

use std::path::{Path, PathBuf};

use anyhow::Context;
use paceline_base::KernelClass;
use paceline_model::{Config, Source};
use paceline_train::adapter::{Adapter, Base, Form};
use paceline_train::fuse::fuse;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::compute::{self, EngineArgs};
use crate::error::Error;
use crate::interrupt::Signals;
use crate::output::{print, tell};
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

/// Arguments of `paceline adapter show`.
#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// Folder of an adapter, or its file of weights
    adapter: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `paceline adapter convert`.
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

/// Arguments of `paceline adapter fuse`.
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

/// Does it.
///
/// # Errors
/// What is wrong with the adapter or the model.
pub(crate) fn run(command: &Command, signals: &Signals) -> anyhow::Result<()> {
    match command {
        Command::Show(args) => show(args),
        Command::Convert(args) => {
            let base = args.base.as_deref();
            let base = base.map(|model| base_of(model, signals)).transpose()?;
            let (adapter, _) = Adapter::read_for(&args.adapter, base)?;
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
                return Err(Error::OutputThere {
                    path: args.output.clone(),
                }
                .into());
            }
            let base = base_at(&found.path)?;
            let (adapter, _) = Adapter::read_for(&args.adapter, Some(base))?;
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let kernels = load::free_kernels(threads)?;
            fuse(
                &found.path,
                (&adapter, &args.adapter),
                &args.output,
                &kernels,
            )?;
            print(&args.output.display().to_string())
        }
    }
}

/// The parts of a model that an adapter's GGUF file depends on.
fn base_of(model: &str, signals: &Signals) -> anyhow::Result<Base> {
    base_at(&pull::ensure(model, signals)?.path)
}

/// The same of the model at a path.
fn base_at(path: &Path) -> anyhow::Result<Base> {
    Ok(Base::of(&Config::read(&Source::open(path)?)?))
}

fn show(args: &ShowArgs) -> anyhow::Result<()> {
    let (adapter, form) = Adapter::read(&args.adapter)?;
    let form = match form {
        Form::Peft => "peft",
        Form::Mlx => "mlx",
        Form::Gguf => "gguf",
    };
    let (targets, scale) = (adapter.targets(), adapter.scale());
    let matrices = adapter.pairs().len();
    if args.json {
        let facts = json!({
            "form": form,
            "base": adapter.base,
            "rank": adapter.rank,
            "alpha": adapter.alpha,
            "scale": scale,
            "targets": targets,
            "matrices": matrices,
            "numbers": adapter.numbers(),
        });
        return print(&facts.to_string());
    }
    let base = adapter.base.as_deref().unwrap_or("not said");
    print(&format!(
        "form      {form}\nbase      {base}\nrank      {}\nalpha     {} (scale {scale})\n\
         targets   {}\nmatrices  {matrices}\nnumbers   {}",
        adapter.rank,
        adapter.alpha,
        targets.join(", "),
        adapter.numbers()
    ))
}

/// Whether nodes compute with adapters beside a model. Where MLX computes, they are fused first.
///
/// # Errors
/// An engine and a class that do not fit each other.
pub(crate) fn beside(
    engine: EngineArgs,
    class: Option<KernelClass>,
    nodes: u32,
) -> Result<bool, Error> {
    Ok(compute::classes(engine, class, nodes)?.on_cpu())
}

/// The name of an adapter that was given none: that of its folder or file.
pub(crate) fn name_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// Reads `NAME=FILE`: a name, and where this machine has the adapter.
pub(crate) fn named(text: &str) -> Result<(String, PathBuf), String> {
    let named = text.split_once('=').filter(|(name, _)| !name.is_empty());
    let (name, path) = named.ok_or("expected NAME=FILE")?;
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    Ok((name.to_owned(), path))
}

/// The model to open: with an adapter in its matrices, if there is one.
///
/// # Errors
/// As [`fused`].
pub(crate) fn applied(model: PathBuf, adapter: Option<&Path>) -> anyhow::Result<PathBuf> {
    adapter.map_or(Ok(model.clone()), |adapter| fused(&model, adapter))
}

/// The model at `model` with an adapter in it: fused once, and kept below paceline's home.
///
/// # Errors
/// What is wrong with either; what the system refuses.
fn fused(model: &Path, adapter: &Path) -> anyhow::Result<PathBuf> {
    let (read, _) = Adapter::read_for(adapter, Some(base_at(model)?))?;
    let mut hash = Sha256::new();
    let changed = paceline_board::served::changed_unix_s(model);
    let absolute = std::path::absolute(model)?;
    hash.update(format!(
        "{}\0{changed}\0{}\0",
        absolute.display(),
        read.scale()
    ));
    for pair in read.pairs() {
        hash.update(pair.matrix);
        [pair.a, pair.b]
            .into_iter()
            .flatten()
            .for_each(|x| hash.update(x.to_le_bytes()));
    }
    let name: String = hash
        .finalize()
        .iter()
        .take(16)
        .map(|b| format!("{b:02x}"))
        .collect();
    let folder = home::home()?.root().join("fused");
    let ending = if model.is_dir() { "" } else { ".gguf" };
    let path = folder.join(format!("{name}{ending}"));
    if path.exists() {
        return Ok(path);
    }
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    tell(format_args!(
        "putting the adapter into the model, once: {}",
        path.display()
    ));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let own = folder.join(format!(".{name}-{}{ending}", std::process::id()));
    fuse(model, (&read, adapter), &own, &load::free_kernels(threads)?)?;
    if let Err(error) = std::fs::rename(&own, &path)
        && !path.exists()
    {
        return Err(error).with_context(|| path.display().to_string());
    }
    Ok(path)
}
