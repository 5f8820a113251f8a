//! A conversation on a terminal.

use std::io::{BufRead, Write};

use anyhow::Context;
use paceline_engine::Failure;
use paceline_formats::chat::Message;

use super::session::Session;
use super::{Args, end_answer, shown, start_of_chat};
use crate::error::Error;
use crate::hint;
use crate::output::tell;

const HELP: &str = "/clear forgets the conversation, /exit or Ctrl-D ends the chat.";

/// What a line asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Input<'a> {
    Nothing,
    Help,
    Clear,
    Exit,
    Say(&'a str),
}

impl<'a> Input<'a> {
    fn of(line: &'a str) -> Self {
        match line.trim() {
            "" => Self::Nothing,
            "/help" | "/?" => Self::Help,
            "/clear" => Self::Clear,
            "/exit" | "/quit" | "/bye" => Self::Exit,
            text => Self::Say(text),
        }
    }
}

/// Reads lines and answers them until the input ends.
///
/// # Errors
/// [`Error::CannotChat`], when input or output fail, and when a node is lost. What is wrong with
/// one question is told, and the chat goes on.
pub(super) fn chat(args: &Args, session: &mut Session) -> anyhow::Result<()> {
    if !session.has_template() {
        let model = args.model.clone();
        return Err(Error::CannotChat { model }.into());
    }
    tell(format_args!("Chat with {}. {HELP}", args.model));
    let mut messages = start_of_chat(args);
    while let Some(line) = read_line()? {
        match Input::of(&line) {
            Input::Nothing => {}
            Input::Help => tell(HELP),
            Input::Clear => messages = start_of_chat(args),
            Input::Exit => break,
            Input::Say(text) => {
                messages.push(Message::new("user", text));
                answer(session, &mut messages)?;
            }
        }
    }
    Ok(())
}

/// Answers the last of `messages` and adds the answer; a question that cannot be answered is taken
/// back, so that another one can be asked.
fn answer(session: &mut Session, messages: &mut Vec<Message>) -> anyhow::Result<()> {
    let tokens = session.encode_chat(messages);
    let outcome = tokens.and_then(|tokens| shown(session, tokens, true));
    match outcome {
        Ok(figures) => {
            end_answer(&figures)?;
            messages.push(Message::new("assistant", figures.text));
        }
        Err(error) if is_last(&error) => return Err(error),
        Err(error) => {
            messages.pop();
            hint::report(&error);
        }
    }
    Ok(())
}

/// Whether no other question can be answered either.
fn is_last(error: &anyhow::Error) -> bool {
    let failure = error.downcast_ref();
    matches!(error.downcast_ref(), Some(Error::ReaderGone))
        || matches!(
            failure,
            Some(Failure::Lost { .. } | Failure::Unavailable { .. })
        )
}

/// The next line of standard input, `None` at its end. Bytes that are no text are replaced: a slip
/// of the terminal should not end a chat.
fn read_line() -> anyhow::Result<Option<String>> {
    let mut prompt = std::io::stderr().lock();
    // Nobody sees the prompt where this fails.
    let _ = prompt.write_all(b"> ").and_then(|()| prompt.flush());
    drop(prompt);
    let mut line = Vec::new();
    let read = std::io::stdin().lock().read_until(b'\n', &mut line);
    if read.context("cannot read your input")? == 0 {
        tell("");
        return Ok(None);
    }
    Ok(Some(String::from_utf8_lossy(&line).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_words_are_commands() {
        for (line, input) in [
            ("\n", Input::Nothing),
            (" \t\n", Input::Nothing),
            ("/clear\n", Input::Clear),
            (" /exit ", Input::Exit),
            ("/?\n", Input::Help),
            (
                "/etc/passwd holds what?\n",
                Input::Say("/etc/passwd holds what?"),
            ),
            ("exit\n", Input::Say("exit")),
        ] {
            assert_eq!(Input::of(line), input, "{line:?}");
        }
    }
}
