//! A conversation on a terminal.

use std::process::{Command, Stdio};

use rustix::process::{Signal, kill_process};

use super::tiny::{ALPHABET, TinyChatModel};
use super::{TestHome, finish, pid, text, wait};
use crate::common::terminal::Terminal;

fn chat(world: &TestHome, model: &str, args: &[&str]) -> Terminal {
    let mut terminal = Terminal::start(&mut command(world, model, args));
    terminal.expect("Chat with ");
    terminal.expect("/exit or Ctrl-D ends the chat.\n> ");
    terminal
}

fn command(world: &TestHome, model: &str, args: &[&str]) -> Command {
    let all = ["run", model].into_iter().chain(args.iter().copied());
    world.paceline(all)
}

/// Says `line`, waits for the model's whole answer and returns the tokens of its prompt.
fn ask(terminal: &mut Terminal, line: &str) -> usize {
    terminal.type_keys(&format!("{line}\n"));
    terminal.expect(&format!("{line}\n{ALPHABET}\n[prompt "));
    let n = terminal.expect(" tokens, answer 29 tokens; first token after ");
    terminal.expect(" predicted)]\n> ");
    n.split(' ').next().unwrap().parse().unwrap()
}

/// Tokens of a prompt without the text of its only question, and those that an answered question
/// adds without its text. They are roles and newlines (a token per byte) and control tokens.
const FIRST: usize = "user\n".len() + "\n".len() + "assistant\n".len() + 3;
const TURN: usize = FIRST + ALPHABET.len() + "\n".len() + 1;

#[test]
fn the_model_is_told_the_whole_conversation() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let mut terminal = chat(&world, &model, &[]);
    assert_eq!(ask(&mut terminal, "hi"), FIRST + 2);
    assert_eq!(ask(&mut terminal, "more"), FIRST + 2 + TURN + 4);
    terminal.type_keys("\n   \n");
    terminal.expect("> ");
    terminal.expect("> ");
    terminal.type_keys("/clear\n");
    terminal.expect("> ");
    assert_eq!(ask(&mut terminal, "hi"), FIRST + 2);
    terminal.type_keys("/exit\n");
    assert_eq!(wait(&mut terminal.child).code(), Some(0));
    assert_eq!(terminal.rest(), "/exit\n");
    terminal.assert_usable();
    world.assert_clean();
}

#[test]
fn ctrl_d_ends_a_chat_and_a_system_message_outlives_clear() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let mut terminal = chat(&world, &model, &["--system", "be brief"]);
    let n = ask(&mut terminal, "hi");
    terminal.type_keys("/clear\n");
    terminal.expect("> ");
    assert_eq!(ask(&mut terminal, "hi"), n);
    terminal.type_keys("/?\n");
    terminal.expect("/clear forgets the conversation");
    terminal.expect("> ");
    terminal.type_keys("\x04");
    assert_eq!(wait(&mut terminal.child).code(), Some(0));
    assert_eq!(
        terminal.rest(),
        "\n",
        "the shell's prompt gets a line of its own"
    );
    terminal.assert_usable();
}

#[test]
fn a_chat_survives_a_question_that_does_not_fit() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let mut terminal = chat(&world, &model, &["--context", "60"]);
    assert_eq!(ask(&mut terminal, "hi"), FIRST + 2);
    terminal.type_keys("again\n");
    let needed = FIRST + 2 + TURN + 5;
    terminal.expect(&format!(
        "error: the prompt has {needed} tokens, but the context holds 60\n"
    ));
    terminal
        .expect("hint: /clear forgets the conversation, or give room with --context N, up to 512");
    terminal.expect("\n> ");
    terminal.type_keys("/clear\n");
    terminal.expect("> ");
    assert_eq!(ask(&mut terminal, "again"), FIRST + 5);
    terminal.type_keys("/exit\n");
    assert_eq!(wait(&mut terminal.child).code(), Some(0));
}

#[test]
fn bytes_that_are_no_text_do_not_end_a_chat() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let mut terminal = chat(&world, &model, &[]);
    // A key of a terminal that speaks Latin-1.
    terminal.type_bytes(b"caf\xe9\n");
    terminal.expect("the line was dropped: it is not UTF-8 text\n> ");
    assert_eq!(ask(&mut terminal, "hi"), FIRST + 2);
    terminal.type_keys("/exit\n");
    assert_eq!(wait(&mut terminal.child).code(), Some(0));
}

/// Waits for an answer and returns the tokens of its prompt.
fn answered(terminal: &mut Terminal) -> usize {
    terminal.expect(&format!("\n{ALPHABET}\n[prompt "));
    let n = terminal.expect(" tokens, answer 29 tokens; first token after ");
    terminal.expect(" predicted)]\n> ");
    n.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn arrow_up_brings_the_line_before_back() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let mut terminal = chat(&world, &model, &[]);
    assert_eq!(ask(&mut terminal, "one"), FIRST + 3);
    terminal.type_keys("/clear\n");
    terminal.expect("> ");
    // Up twice, over `/clear`; left over the `e`, and another letter before it.
    terminal.type_keys("\x1b[A\x1b[A\x1b[Dx\n");
    terminal.expect("onxe\n");
    terminal.expect(&format!("{ALPHABET}\n[prompt {} tokens", FIRST + 4));
    terminal.type_keys("/exit\n");
    assert_eq!(wait(&mut terminal.child).code(), Some(0));
    terminal.rest();
    terminal.assert_usable();
    world.assert_clean();
}

#[test]
fn a_pasted_text_is_one_question() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let mut terminal = chat(&world, &model, &[]);
    terminal.type_keys("\x1b[200~one\rtwo\x1b[201~");
    terminal.expect("two");
    terminal.type_keys("\n");
    assert_eq!(answered(&mut terminal), FIRST + "one\ntwo".len());
    terminal.type_keys("/exit\n");
    assert_eq!(wait(&mut terminal.child).code(), Some(0));
}

#[test]
fn ctrl_c_ends_an_answer_and_not_the_chat() {
    let world = TestHome::new();
    let mut args = world.endless();
    args.remove(2); // the prompt
    let mut terminal = Terminal::start(&mut world.paceline(&args));
    terminal.expect("> ");
    for _ in 0..2 {
        terminal.type_keys("go\n");
        terminal.expect(ALPHABET);
        kill_process(pid(&terminal.child), Signal::INT).unwrap();
        terminal.expect("; stopped]\n> ");
    }
    // Where nothing is computed it drops the line, and twice in a row ends the chat.
    terminal.type_keys("half a line\x03");
    terminal.expect("another Ctrl-C, Ctrl-D or /exit ends the chat\n> ");
    terminal.type_keys("\x03");
    assert_eq!(wait(&mut terminal.child).code(), Some(0));
    terminal.rest();
    terminal.assert_usable();
}

#[test]
fn what_needs_a_prompt_says_so_on_a_terminal() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    let base = world.path("models/base.gguf");
    let without_template = TinyChatModel {
        chats: false,
        ..TinyChatModel::default()
    };
    without_template.write(&base);
    let base = base.to_str().unwrap();
    for (model, args, code, error) in [
        (
            &model[..],
            &["--json"][..],
            2,
            "error: --json needs a prompt\nhint: ",
        ),
        (&model, &["--raw"], 2, "error: --raw needs a prompt\nhint: "),
        (
            base,
            &[],
            1,
            "has no chat template: it completes text and cannot chat\nhint: ",
        ),
    ] {
        let mut terminal = Terminal::start(&mut command(&world, model, args));
        assert_eq!(wait(&mut terminal.child).code(), Some(code), "{args:?}");
        let said = terminal.rest();
        assert!(said.contains(error), "{error:?} in {said:?}");
    }
}

#[test]
fn a_terminal_gets_no_control_characters_of_the_model() {
    let world = TestHome::new();
    // A model that says Ctrl-G and so on after every letter: its alphabet is shifted.
    let path = world.path("models/bell.gguf");
    TinyChatModel {
        shift: 0x60,
        ..TinyChatModel::default()
    }
    .write(&path);
    let path = path.to_str().unwrap();
    let mut command = command(&world, path, &["hi", "--raw", "--max-tokens", "8"]);
    let mut terminal = Terminal::start(&mut command);
    assert!(wait(&mut terminal.child).success());
    let shown = terminal.rest();
    assert!(
        shown.starts_with("\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}\n["),
        "{shown:?}"
    );
    // A file or program gets what the model said.
    let output = finish(
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped()),
    );
    assert_eq!(text(&output.stdout), "\x01\x02\x03\x04\x05\x06\x07\x08\n");
}
