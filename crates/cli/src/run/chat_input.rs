//! Lines of a chat: what to say, or a command that begins with a slash.

use paceline_engine::SamplingParams;

use crate::error::{Error, failed};

pub(super) const COMMANDS: &str = "\
/clear forgets the conversation
/system TEXT       another system message; without TEXT none
/set               shows the settings; /set temperature 0 changes one
/set history off   writes no more lines to the history file
/model MODEL       continues with another model
/save FILE, /load FILE   the conversation, as JSON
/exit or Ctrl-D ends the chat, Ctrl-C stops an answer";

/// A parsed line of a chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChatInput<'a> {
    Nothing,
    Help,
    Clear,
    Exit,
    Settings,
    Set {
        name: &'a str,
        value: &'a str,
    },
    /// Whether lines go to the history file.
    History(bool),
    /// Empty: none.
    System(&'a str),
    Model(&'a str),
    Save(&'a str),
    Load(&'a str),
    /// No command, or one without its argument.
    Unknown(&'a str),
    Say(&'a str),
}

impl<'a> ChatInput<'a> {
    /// Parses a line. `/etc/passwd` is no command.
    pub(super) fn of(line: &'a str) -> Self {
        let text = line.trim();
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        match (word, rest) {
            ("", _) => Self::Nothing,
            ("/help" | "/?", "") => Self::Help,
            ("/clear", "") => Self::Clear,
            ("/exit" | "/quit" | "/bye", "") => Self::Exit,
            ("/set", rest) => Self::of_set(rest),
            ("/system", rest) => Self::System(rest),
            ("/model", name) if !name.is_empty() => Self::Model(name),
            ("/save", file) if !file.is_empty() => Self::Save(file),
            ("/load", file) if !file.is_empty() => Self::Load(file),
            (word, _) if is_command(word) => Self::Unknown(word),
            _ => Self::Say(text),
        }
    }

    /// `NAME VALUE`, `NAME=VALUE`, and Ollama's `parameter NAME VALUE` and `system TEXT`.
    fn of_set(rest: &'a str) -> Self {
        let rest = rest.strip_prefix("parameter ").unwrap_or(rest).trim();
        let parts = rest.split_once(|c: char| c.is_whitespace() || c == '=');
        match parts.map(|(name, value)| (name, value.trim())) {
            Some(("system", text)) => Self::System(text),
            Some(("history", "on")) => Self::History(true),
            Some(("history", "off")) => Self::History(false),
            Some((name, value)) => Self::Set { name, value },
            None if rest.is_empty() => Self::Settings,
            None => Self::Set {
                name: rest,
                value: "",
            },
        }
    }
}

/// Whether a first word can only be meant as a command.
fn is_command(word: &str) -> bool {
    let name = word.strip_prefix('/');
    name.is_some_and(|name| !name.is_empty() && name.chars().all(char::is_alphabetic))
}

const SHOW_SETTINGS: &str = "/set shows all settings; /set temperature 0 changes one";

/// Changes a setting.
pub(super) fn set(
    (sampling, max_tokens): (&mut SamplingParams, &mut usize),
    name: &str,
    value: &str,
) -> Result<(), Error> {
    fn parsed<T: std::str::FromStr>(name: &str, value: &str) -> Result<T, Error> {
        let text = format!("{name} is {value:?}, expected a number");
        value.parse().map_err(|_| failed(text, SHOW_SETTINGS))
    }
    let mut new = sampling.clone();
    match name.replace('-', "_").as_str() {
        "temperature" => new.temperature = parsed(name, value)?,
        "top_k" => new.top_k = parsed(name, value)?,
        "top_p" => new.top_p = parsed(name, value)?,
        "min_p" => new.min_p = parsed(name, value)?,
        // Ollama's names are the second ones.
        "repetition_penalty" | "repeat_penalty" => new.repetition_penalty = parsed(name, value)?,
        "presence_penalty" => new.presence_penalty = parsed(name, value)?,
        "frequency_penalty" => new.frequency_penalty = parsed(name, value)?,
        "seed" => new.seed = parsed(name, value)?,
        "max_tokens" | "num_predict" => *max_tokens = parsed(name, value)?,
        _ => {
            let text = format!("there is no setting {name:?}");
            return Err(failed(text, SHOW_SETTINGS));
        }
    }
    new.check().map_err(Error::Param)?;
    *sampling = new;
    Ok(())
}

/// The settings, a line each.
pub(super) fn settings(sampling: &SamplingParams, max_tokens: usize) -> String {
    let most = match max_tokens {
        usize::MAX => "none".to_owned(),
        most => most.to_string(),
    };
    format!(
        "temperature {}\ntop_k {}\ntop_p {}\nmin_p {}\nrepetition_penalty {}\npresence_penalty \
         {}\nfrequency_penalty {}\nseed {}\nmax_tokens {most}",
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.seed,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_and_a_word_are_a_command_or_refused() {
        let set = |name, value| ChatInput::Set { name, value };
        for (line, input) in [
            ("\n", ChatInput::Nothing),
            (" \t\n", ChatInput::Nothing),
            ("/clear\n", ChatInput::Clear),
            (" /exit ", ChatInput::Exit),
            ("/?\n", ChatInput::Help),
            (
                "/etc/passwd holds what?\n",
                ChatInput::Say("/etc/passwd holds what?"),
            ),
            ("exit\n", ChatInput::Say("exit")),
            ("/ is a slash", ChatInput::Say("/ is a slash")),
            ("/foo\n", ChatInput::Unknown("/foo")),
            ("/model", ChatInput::Unknown("/model")),
            ("/model qwen3:8b", ChatInput::Model("qwen3:8b")),
            ("/system be brief", ChatInput::System("be brief")),
            ("/set", ChatInput::Settings),
            ("/set temperature 0", set("temperature", "0")),
            ("/set top-k=5", set("top-k", "5")),
            ("/set parameter seed 1", set("seed", "1")),
            ("/set system be brief", ChatInput::System("be brief")),
            ("/set history off", ChatInput::History(false)),
            ("/save a b.json", ChatInput::Save("a b.json")),
            ("/load x", ChatInput::Load("x")),
        ] {
            assert_eq!(ChatInput::of(line), input, "{line:?}");
        }
    }

    #[test]
    fn settings_change_within_their_ranges() {
        let (mut sampling, mut most) = (SamplingParams::default(), usize::MAX);
        let mut change = |name: &str, value: &str| set((&mut sampling, &mut most), name, value);
        change("temperature", "0").unwrap();
        change("top-k", "7").unwrap();
        change("max_tokens", "9").unwrap();
        assert!(matches!(change("top_p", "3"), Err(Error::Param(_))));
        let mut told = |name, value| change(name, value).unwrap_err().to_string();
        assert_eq!(told("seed", "x"), "seed is \"x\", expected a number");
        assert_eq!(told("colour", "1"), "there is no setting \"colour\"");
        let told = settings(&sampling, most);
        assert!(told.starts_with("temperature 0\ntop_k 7\n"), "{told}");
        assert!(told.ends_with("max_tokens 9"), "{told}");
    }
}
