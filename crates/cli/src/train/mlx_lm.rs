//! Options from a configuration of `mlx_lm.lora`.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, anyhow};
use clap::Parser;
use paceline_train::mlx_lm;

use super::Args;
use crate::error::{Error, misused};
use crate::log::LogArgs;
use crate::output::print_err;

/// The command line once more, behind the options of a configuration: the last word counts.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, args_override_self = true)]
struct ReparsedArgs {
    #[command(flatten)]
    args: Args,
    #[command(flatten)]
    _log: LogArgs,
}

/// A required argument, from the command line or a configuration.
pub(super) fn needed<'a, T>(value: Option<&'a T>, name: &'static str) -> Result<&'a T, Error> {
    let missing = || {
        misused(
            format!("{name} is given neither here nor in the configuration"),
            format!("give it on the command line: {name}"),
        )
    };
    value.ok_or_else(missing)
}

/// The arguments, merged over those of the configuration at `path`.
pub(super) fn merged(args: &Args, path: &Path) -> anyhow::Result<Args> {
    let named = || path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(named)?;
    let config = mlx_lm::Config::read(&text).with_context(named)?;
    for ignored in &config.ignored {
        print_err(format_args!("{}: {ignored}", path.display()));
    }
    let mut words: Vec<OsString> = Vec::new();
    for (option, value) in config.options {
        match option {
            "MODEL" if args.model.is_some() => {}
            "MODEL" => words.push(value.into()),
            // `--epochs` replaces the number of steps.
            "--steps" if args.epochs.is_some() => {}
            option => words.push(format!("{option}={value}").into()),
        }
    }
    let given = std::env::args_os()
        .skip_while(|word| word != "train")
        .skip(1);
    words.extend(given);
    let again =
        ReparsedArgs::try_parse_from(words).map_err(|error| anyhow!("{error}").context(named()))?;
    Ok(again.args)
}
