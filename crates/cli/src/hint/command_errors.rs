//! Hints for errors of the commands themselves.

use crate::error::Error;

/// The hint for an error.
pub(super) fn hint(error: &Error) -> Option<String> {
    Some(match error {
        Error::ReaderGone | Error::Interrupted => return None,
        Error::NoAgent { program } => {
            format!("npm install -g {} installs it", program.package())
        }
        Error::NoServer { .. } => {
            "start it in another terminal: paceline up --model MODEL; with --url for another place"
                .into()
        }
        Error::Param(_) => "`paceline run --help` explains the options".into(),
        Error::NoPrompt => {
            "put the prompt after MODEL, pipe it in, or chat from a terminal".to_owned()
        }
        Error::NoEncoder { .. } => "all-MiniLM-L6-v2 is one".into(),
        Error::OfDecoders { option } => format!("leave out {option}"),
        Error::NotInChat { .. } => "put the prompt after MODEL, or pipe it in".into(),
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
        Error::CannotChat { .. } => "give it a text to continue: paceline run MODEL TEXT".into(),
        Error::NoSystem { .. } => "leave out --system and put its text into the prompt".into(),
        Error::Grid {
            tensor, pipeline, ..
        } => format!(
            "add --nodes {}, or leave out --split to have it chosen",
            tensor * pipeline
        ),
        Error::Engines { .. } | Error::ClassOfOther { .. } | Error::MixedStage { .. } => {
            "--engine, --class, --nodes and --split have to fit each other".into()
        }
        Error::Shares { got, nodes } if *nodes == 1 => {
            format!("add --nodes {got}: one node has no shares")
        }
        Error::Shares { nodes, .. } => {
            format!("give {nodes} numbers, as in --shares {}", example(*nodes))
        }
        Error::Plaintext { .. } => {
            "--plaintext allows it, for cables and networks that you trust".into()
        }
        Error::CpuOnly { option } => format!("leave out {option} or --engine"),
        Error::DraftOf { .. } => "give one MODEL, and leave out --drafts 0 or --draft".into(),
        Error::AdapterOfSeveral | Error::AdapterAlone | Error::SameName { .. } => {
            of_several(error).into()
        }
        Error::Needed { name } => format!("give it on the command line: {name}"),
        Error::OutputThere { .. } => "choose another place, or move away what is there".into(),
        Error::WorkerByHand => "`paceline run MODEL --nodes 2` starts two of them".into(),
        Error::NoMlx { build, .. } if build != "MLX" => {
            "leave out --build for the one that fits this machine".into()
        }
        Error::NoMlx { .. } => "the cpu engine needs nothing and is always there".into(),
        Error::NotComputed { .. } => {
            "`paceline models --fits` shows names of models that it computes".into()
        }
        Error::Selftest { .. } => {
            "their rows say why; `paceline doctor` shows what is missing here".into()
        }
        Error::NoHome => "set PACELINE_HOME to a folder for models".into(),
        Error::UnknownCpu { .. } | Error::CpuLacks { .. } => {
            "unset PACELINE_CPU to have the fastest that this machine can".into()
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_is_too_long_gets_advice_that_helps() {
        for (tokens, context, trained, in_chat, advice) in [
            (
                9000,
                8192,
                32768,
                false,
                "shorten the prompt, or give room with --context N, up to 32768 for this model",
            ),
            (
                9000,
                8192,
                8192,
                true,
                "/clear forgets the conversation: the model was trained for 8192 positions",
            ),
            (
                40000,
                8192,
                32768,
                false,
                "shorten the prompt: the model was trained for 32768 positions",
            ),
        ] {
            assert_eq!(more_context(tokens, context, trained, in_chat), advice);
        }
    }
}
