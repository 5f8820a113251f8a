//! Shell completions and man pages, generated from the definitions of the commands.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::output::{print, show};

const PLACES: &str = "\
Where shells look for it:
  bash        paceline completions bash > ~/.local/share/bash-completion/completions/paceline
  zsh         paceline completions zsh > \"${fpath[1]}/_paceline\"
  fish        paceline completions fish > ~/.config/fish/completions/paceline.fish
  elvish      paceline completions elvish > ~/.config/elvish/lib/paceline.elv
  powershell  paceline completions powershell >> $PROFILE";

#[derive(Debug, clap::Args)]
#[command(after_help = PLACES)]
pub(crate) struct CompletionArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// Folder for a page of every command, instead of printing paceline(1)
    #[arg(long, short, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Prints a completion script.
pub(crate) fn completions(args: &CompletionArgs) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "paceline", &mut script);
    show(&String::from_utf8_lossy(&script))
}

/// Prints a page, or writes all of them.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let Some(folder) = &args.output else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page)?;
        return show(&String::from_utf8_lossy(&page));
    };
    let wrote =
        fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    wrote.with_context(|| folder.display().to_string())?;
    let pages = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    print(&format!("{} pages in {}", pages.count(), folder.display()))
}
