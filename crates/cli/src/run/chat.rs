//! A conversation on a terminal.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use anyhow::Context;
use paceline_engine::RequestFailure;
use paceline_text::chat::ChatMessage;

use super::chat_input::{COMMANDS, ChatInput, set, settings};
use super::lines::{ChatLine, LineReader};
use super::session::RunSession;
use super::{Args, end_answer, shown};
use crate::error::{Error, PROMPT_BYTES_MAX, failed};
use crate::interrupt::Signals;
use crate::output::print_err;
use crate::{hint, home};

const HELP: &str = "Ctrl-C stops an answer, /clear forgets the conversation, /help shows all \
                    commands, /exit or Ctrl-D ends the chat.";

/// The turns of a chat.
#[derive(Debug, Default)]
struct Conversation {
    system: Option<String>,
    turns: Vec<ChatMessage>,
}

impl Conversation {
    /// All of it, for the chat template.
    fn messages(&self) -> Vec<ChatMessage> {
        let system = self.system.iter();
        let system = system.map(|text| ChatMessage::new("system", text));
        system.chain(self.turns.iter().cloned()).collect()
    }

    /// Writes it to a file for this user alone. Only a file of an earlier conversation is replaced.
    fn save(&self, path: &str) -> anyhow::Result<()> {
        if std::fs::exists(path).is_ok_and(|exists| exists) {
            Self::load(path)?;
        }
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let text = serde_json::to_vec_pretty(&self.messages())?;
        let written = options
            .open(path)
            .and_then(|mut file| file.write_all(&text));
        written.with_context(|| format!("cannot write {path}"))
    }

    /// Reads what [`save`](Self::save) wrote.
    fn load(path: &str) -> anyhow::Result<Self> {
        let mut text = Vec::new();
        let read =
            File::open(path).and_then(|file| file.take(PROMPT_BYTES_MAX).read_to_end(&mut text));
        read.with_context(|| format!("cannot read {path}"))?;
        let turns = serde_json::from_slice::<Vec<ChatMessage>>(&text);
        let mut turns = turns.with_context(|| format!("{path} has no conversation"))?;
        let has_system = turns.first().is_some_and(|first| first.role == "system");
        let system = has_system.then(|| turns.remove(0).content);
        Ok(Self { system, turns })
    }
}

/// Reads lines and answers them until the input ends.
pub(super) fn chat(args: &Args, mut session: RunSession, signals: &Signals) -> anyhow::Result<()> {
    check(args, &session)?;
    print_err(format_args!("Chat with {}. {HELP}", args.model));
    let mut args = args.clone();
    let mut conversation = Conversation {
        system: args.system.clone(),
        turns: Vec::new(),
    };
    let mut lines = LineReader::new(home::folder().ok());
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
            ChatInput::Exit => break,
            ChatInput::History(on) => lines.keep(on),
            ChatInput::Model(name) => session = switched(&mut args, session, name, signals)?,
            ChatInput::Say(text) => {
                conversation.turns.push(ChatMessage::new("user", text));
                answer(&mut session, &mut conversation, signals)?;
            }
            input => {
                if let Err(error) = obey(input, &mut session, &mut conversation) {
                    hint::report(&error);
                }
            }
        }
    }
    Ok(())
}

/// Rejects a model without a chat template.
fn check(args: &Args, session: &RunSession) -> Result<(), Error> {
    match session.template.is_some() {
        true => Ok(()),
        false => Err(failed(
            format!(
                "{} has no chat template: it completes text and cannot chat",
                args.model
            ),
            "give it a text to continue: paceline run MODEL TEXT",
        )),
    }
}

/// Executes a command about the conversation or its settings.
fn obey(
    input: ChatInput<'_>,
    session: &mut RunSession,
    conversation: &mut Conversation,
) -> anyhow::Result<()> {
    match input {
        ChatInput::Help => print_err(COMMANDS),
        ChatInput::Clear => conversation.turns.clear(),
        ChatInput::System(text) => {
            conversation.system = (!text.is_empty()).then(|| text.to_owned());
        }
        ChatInput::Settings => {
            let options = &session.options;
            print_err(settings(&options.sampling, options.max_tokens));
        }
        ChatInput::Set { name, value } => {
            let options = &mut session.options;
            set(
                (&mut options.sampling, &mut options.max_tokens),
                name,
                value,
            )?;
        }
        ChatInput::Save(path) => conversation.save(path)?,
        ChatInput::Load(path) => {
            *conversation = Conversation::load(path)?;
            let turns = conversation.turns.len();
            print_err(format_args!("{path} has {turns} messages"));
        }
        ChatInput::Unknown(word) => {
            let text = format!("the chat has no command {word}, or it needs an argument");
            return Err(failed(text, "/help shows all commands").into());
        }
        ChatInput::Nothing
        | ChatInput::Exit
        | ChatInput::History(_)
        | ChatInput::Model(_)
        | ChatInput::Say(_) => {}
    }
    Ok(())
}

/// A session with the model `name`, with the settings of `session`; that of the earlier model where
/// the other cannot chat. The earlier one is freed first: both may not fit memory.
fn switched(
    args: &mut Args,
    session: RunSession,
    name: &str,
    signals: &Signals,
) -> anyhow::Result<RunSession> {
    let options = session.options.clone();
    drop(session);
    let other = Args {
        model: name.to_owned(),
        adapter: None,
        draft: None,
        ..args.clone()
    };
    let begin = |args: &Args| -> anyhow::Result<RunSession> {
        let mut session = super::begin(args, options.sampling.clone(), signals)?;
        check(args, &session)?;
        session.options.max_tokens = options.max_tokens;
        Ok(session)
    };
    match begin(&other) {
        Ok(session) => {
            *args = other;
            print_err(format_args!("Chat with {name}."));
            Ok(session)
        }
        Err(error) => {
            hint::report(&error);
            print_err(format_args!("Chat with {}.", args.model));
            begin(args)
        }
    }
}

/// Answers the last of the conversation and appends the answer; removes a question that cannot be
/// answered, so that another can follow.
fn answer(
    session: &mut RunSession,
    conversation: &mut Conversation,
    signals: &Signals,
) -> anyhow::Result<()> {
    let tokens = session.encode_chat(&conversation.messages());
    let tokens = tokens.map_err(anyhow::Error::new);
    let messages = &mut conversation.turns;
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
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_conversation_is_saved_for_its_user_and_loaded_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk.json");
        let path = path.to_str().unwrap();
        let said = Conversation {
            system: Some("be brief".to_owned()),
            turns: vec![ChatMessage::new("user", "hi")],
        };
        said.save(path).unwrap();
        let mode = std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let again = Conversation::load(path).unwrap();
        assert_eq!(again.messages(), said.messages());
        again.save(path).unwrap();
        std::fs::write(path, "my letter").unwrap();
        assert!(said.save(path).is_err());
        assert_eq!(std::fs::read_to_string(path).unwrap(), "my letter");
    }
}
