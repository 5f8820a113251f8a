//! Hints for errors of the commands themselves.

use crate::error::Error;

pub(super) fn hint(error: &Error) -> Option<String> {
    Some(match error {
        Error::ReaderGone | Error::Interrupted => return None,
        Error::NoAgent { program } => {
            format!("npm install -g {} installs it", program.package())
        }
        Error::NoServer { .. }
        | Error::NotReady { .. }
        | Error::NotTrusted { .. }
        | Error::KeyRefused { .. } => return of_client(error),
        Error::Param(_) => "`paceline run --help` explains the options".into(),
        Error::NoReleaseSource => "name it: paceline upgrade FOLDER".into(),
        Error::NoPrompt => {
            "put the prompt after MODEL, pipe it in, or chat from a terminal".to_owned()
        }
        Error::NoEncoder { .. } => "all-MiniLM-L6-v2 is one".into(),
        Error::OfDecoders { option } => format!("leave out {option}"),
        Error::NoChatCommand { .. }
        | Error::NoSetting { .. }
        | Error::SettingValue { .. }
        | Error::NotInChat { .. }
        | Error::CannotChat { .. }
        | Error::NoSystem { .. } => return Some(of_chats(error)?.to_owned()),
        Error::PromptNotUtf8 { .. } => {
            "convert it, for example with `iconv -f latin1 -t utf-8`".into()
        }
        Error::PromptTooLarge => "is it the right file? A prompt is text of some pages".into(),
        Error::PromptTooLong {
            tokens,
            context,
            trained,
            in_chat,
        } => more_context(*tokens, *context, *trained, *in_chat),
        Error::Grid { .. } | Error::Shares { .. } => return of_splits(error),
        Error::Engines { .. }
        | Error::ClassOfOther { .. }
        | Error::MixedStage { .. }
        | Error::CpuOnly { .. }
        | Error::NoMlx { .. }
        | Error::DevicesLate { .. }
        | Error::UnknownCpu { .. }
        | Error::CpuLacks { .. } => return of_engines(error),
        Error::Plaintext { .. } => {
            "--plaintext allows it, for cables and networks that you trust".into()
        }
        Error::DraftOf { .. } => "give one MODEL, and leave out --drafts 0 or --draft".into(),
        Error::AdapterOfSeveral | Error::AdapterAlone | Error::SameName { .. } => {
            of_several(error).into()
        }
        Error::Needed { name } => format!("give it on the command line: {name}"),
        Error::TooLarge { .. }
        | Error::TooFewNodes { .. }
        | Error::NoMachine { .. }
        | Error::NotPaired { .. }
        | Error::Loaded { .. } => return of_machines(error),
        Error::OutputThere { .. } => "choose another place, or move away what is there".into(),
        Error::WorkerByHand => "`paceline run MODEL --nodes 2` starts two of them".into(),
        Error::NotComputed { .. } => {
            "`paceline models --fits` shows names of models that it computes".into()
        }
        Error::Selftest { .. } => {
            "their rows say why; `paceline doctor` shows what is missing here".into()
        }
        Error::NoHome => "set PACELINE_HOME to a folder for models".into(),
    })
}

fn of_splits(error: &Error) -> Option<String> {
    Some(match error {
        Error::Grid {
            tensor, pipeline, ..
        } => format!(
            "add --nodes {}, or leave out --split to have it chosen",
            tensor * pipeline
        ),
        Error::Shares { got, nodes } if *nodes == 1 => {
            format!("add --nodes {got}: one node has no shares")
        }
        Error::Shares { nodes, .. } => {
            format!("give {nodes} numbers, as in --shares {}", example(*nodes))
        }
        _ => return None,
    })
}

const fn of_chats(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::NoChatCommand { .. } => "/help shows all commands",
        Error::NoSetting { .. } | Error::SettingValue { .. } => {
            "/set shows all settings; /set temperature 0 changes one"
        }
        Error::NotInChat { .. } => "put the prompt after MODEL, or pipe it in",
        Error::CannotChat { .. } => "give it a text to continue: paceline run MODEL TEXT",
        Error::NoSystem { .. } => "leave out --system and put its text into the prompt",
        _ => return None,
    })
}

/// The hint for an error of engines, kernel classes and instruction sets.
fn of_engines(error: &Error) -> Option<String> {
    Some(match error {
        Error::CpuOnly { option } => format!("leave out {option} or --engine"),
        Error::NoMlx { build, .. } if build != "MLX" => {
            "leave out --build for the one that fits this machine".into()
        }
        Error::NoMlx { .. } => "the cpu engine needs nothing and is always there".into(),
        Error::DevicesLate { .. } => {
            "end other users of the GPU, or restart the machine; --limit waits longer".into()
        }
        Error::UnknownCpu { .. } | Error::CpuLacks { .. } => {
            "unset PACELINE_CPU to have the fastest that this machine can".into()
        }
        Error::Engines { .. } | Error::ClassOfOther { .. } | Error::MixedStage { .. } => {
            "--engine, --class, --nodes and --split have to fit each other".into()
        }
        _ => return None,
    })
}

/// The hint for an error of a request to a server.
fn of_client(error: &Error) -> Option<String> {
    Some(match error {
        Error::NoServer { .. } => {
            "start it in another terminal: paceline up MODEL; with --url for another place".into()
        }
        Error::NotReady { .. } => {
            "`paceline ps` there says whether one loads; paceline load MODEL loads one".into()
        }
        Error::NotTrusted { .. } => {
            "copy tls/cert.pem of the server's PACELINE_HOME here: SSL_CERT_FILE=cert.pem".into()
        }
        Error::KeyRefused { has_key, .. } => {
            let wrong = if *has_key {
                "is not a key of it"
            } else {
                "is not set"
            };
            format!(
                "PACELINE_API_KEY {wrong}: `paceline key api new NAME` makes one on a machine of \
                 the cluster"
            )
        }
        _ => return None,
    })
}

/// The hint for an error of the cluster's machines and what they have loaded.
fn of_machines(error: &Error) -> Option<String> {
    Some(match error {
        Error::TooLarge { model, .. } => format!(
            "`paceline models --fits` shows what fits; `paceline pull {model}` fetches it all the \
             same"
        ),
        Error::TooFewNodes { living, .. } => format!(
            "take --nodes {}, or let machines in: `paceline nodes invite`",
            living.len()
        ),
        Error::NoMachine { name, known } => match near(name, known) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("`paceline nodes` lists them: {}", known.join(", ")),
        },
        Error::NotPaired { .. } => "a code counts once: `paceline nodes invite` shows a new one; \
                                    --peer HOST finds its machine where multicast does not"
            .into(),
        Error::Loaded { model, .. } => {
            format!("`paceline unload {model}` comes first; --force removes its files all the same")
        }
        _ => return None,
    })
}

/// The hint for errors of several models and their adapters.
const fn of_several(error: &Error) -> &'static str {
    match error {
        Error::SameName { .. } => "give an adapter a name of its own: --adapter NAME=FILE",
        Error::AdapterAlone => "name its model: paceline up MODEL --adapter FILE",
        _ => {
            "`paceline adapter fuse` writes a model with its adapter in it, to serve beside others"
        }
    }
}

/// The known name that differs least from `name`, if it differs in a third of its letters at most.
fn near<'a>(name: &str, known: &'a [String]) -> Option<&'a String> {
    let distance = |other: &&String| strsim::damerau_levenshtein(name, other);
    let nearest = known.iter().min_by_key(distance)?;
    (distance(&nearest) <= (name.chars().count() / 3).max(1)).then_some(nearest)
}

/// Example shares of `nodes` nodes, the first with the most.
fn example(nodes: u32) -> String {
    let ones = (1..nodes).map(|_| ",1");
    std::iter::once("2").chain(ones).collect()
}

fn more_context(tokens: usize, context: usize, trained: usize, in_chat: bool) -> String {
    let shorter = if in_chat {
        "/clear forgets the conversation"
    } else {
        "shorten the prompt"
    };
    if tokens < trained && context < trained {
        format!("{shorter}, or give room with --context N, up to {trained} for this model")
    } else {
        format!("{shorter}: the model was trained for {trained} positions")
    }
}
