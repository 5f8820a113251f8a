//! A conversation on a terminal.

use paceline_engine::RequestFailure;
use paceline_formats::chat::ChatMessage;

use super::lines::{ChatLine, LineReader};
use super::session::RunSession;
use super::{Args, end_answer, shown, start_of_chat};
use crate::error::Error;
use crate::hint;
use crate::interrupt::Signals;
use crate::output::print_err;

const HELP: &str = "Ctrl-C stops an answer, /clear forgets the conversation, \
                    /exit or Ctrl-D ends the chat.";

/// A parsed line of a chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChatInput<'a> {
    Nothing,
    Help,
    Clear,
    Exit,
    Say(&'a str),
}

impl<'a> ChatInput<'a> {
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
/// [`Error::CannotChat`], failed input or output, or a lost node. Errors of one question are
/// printed, and the chat continues.
pub(super) fn chat(args: &Args, session: &mut RunSession, signals: &Signals) -> anyhow::Result<()> {
    if !session.has_template() {
        let model = args.model.clone();
        return Err(Error::CannotChat { model }.into());
    }
    print_err(format_args!("Chat with {}. {HELP}", args.model));
    let (mut messages, mut lines) = (start_of_chat(args), LineReader::new());
    let mut dropped = false;
    loop {
        let line = match lines.next()? {
            ChatLine::Line(line) => line,
            ChatLine::NoText => {
                print_err("the line was dropped: it is not UTF-8 text");
                continue;
            }
            ChatLine::Dropped if dropped => break,
            ChatLine::Dropped => {
                print_err("another Ctrl-C, Ctrl-D or /exit ends the chat");
                dropped = true;
                continue;
            }
            ChatLine::End => break,
        };
        dropped = false;
        match ChatInput::of(&line) {
            ChatInput::Nothing => {}
            ChatInput::Help => print_err(HELP),
            ChatInput::Clear => messages = start_of_chat(args),
            ChatInput::Exit => break,
            ChatInput::Say(text) => {
                messages.push(ChatMessage::new("user", text));
                answer(session, &mut messages, signals)?;
            }
        }
    }
    Ok(())
}

/// Answers the last of `messages` and appends the answer; removes a question that cannot be
/// answered, so that another can follow.
fn answer(
    session: &mut RunSession,
    messages: &mut Vec<ChatMessage>,
    signals: &Signals,
) -> anyhow::Result<()> {
    let tokens = session.encode_chat(messages).map_err(anyhow::Error::new);
    let outcome =
        tokens.and_then(|tokens| signals.stoppable(|cancel| shown(session, tokens, Some(cancel))));
    match outcome {
        Ok(figures) if figures.tokens.is_empty() => {
            messages.pop(); // stopped before the answer began
            end_answer(&figures)?;
        }
        Ok(figures) => {
            end_answer(&figures)?;
            messages.push(ChatMessage::new("assistant", figures.text));
        }
        Err(error) if is_last(&error) => return Err(error),
        Err(error) => {
            messages.pop();
            hint::report(&error);
        }
    }
    Ok(())
}

/// Whether the error ends the chat.
fn is_last(error: &anyhow::Error) -> bool {
    let failure = error.downcast_ref();
    matches!(error.downcast_ref(), Some(Error::ReaderGone))
        || matches!(
            failure,
            Some(RequestFailure::Lost { .. } | RequestFailure::Unavailable { .. })
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_words_are_commands() {
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
        ] {
            assert_eq!(ChatInput::of(line), input, "{line:?}");
        }
    }
}
