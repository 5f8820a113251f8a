//! Errors: exit codes, texts that name the value, hints, and nothing on stdout.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use super::tiny::TinyChatModel;
use super::{TestHome, finish, text, wait};
use crate::common::terminal::Terminal;
use crate::common::{assert_parts, rows};

/// A command line, its environment and input, and how it ends.
struct Case<'a> {
    args: &'a [&'a str],
    env: &'a [(&'a str, &'a str)],
    stdin: &'a [u8],
    code: i32,
    /// Parts of what stderr says, in order.
    says: &'a [&'a str],
}

impl<'a> Case<'a> {
    /// Without environment and input.
    fn new(args: &'a [&'a str], code: i32, says: &'a [&'a str]) -> Self {
        let (env, stdin) = (&[][..], &b""[..]);
        Self {
            args,
            env,
            stdin,
            code,
            says,
        }
    }

    /// Runs it with RUST_BACKTRACE, which adds nothing to an error.
    fn check(&self, world: &TestHome) {
        let input = world.path("input");
        fs::write(&input, self.stdin).unwrap();
        let mut command = world.paceline(self.args);
        command
            .env("RUST_BACKTRACE", "1")
            .envs(self.env.iter().copied())
            .stdin(fs::File::open(&input).unwrap())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let output = finish(&mut command);
        let said = text(&output.stderr);
        let args = self.args;
        assert_eq!(output.status.code(), Some(self.code), "{args:?}: {said}");
        assert_eq!(text(&output.stdout), "", "{args:?}");
        assert_parts(&args, &said, self.says);
        for word in ["panicked", "backtrace"] {
            assert!(!said.contains(word), "{said}");
        }
    }
}

/// Options of `paceline run`, and parts of what is said about them.
const WRONG_OPTIONS: &str = "\
--threads 0 | '0' for '--threads <N>'
--threads -1 | '-1' for '--threads <N>'
--temperature -1 | error: --temperature is -1, expected 0 or more | \\nhint:
--temperature NaN | error: --temperature is NaN, expected 0 or more | \\nhint:
--temperature inf | error: --temperature is inf | \\nhint:
--temperature warm | 'warm' for '--temperature <F>'
--top-p 0 | error: --top-p is 0, expected above 0 and at most 1 | \\nhint:
--min-p 1.5 | error: --min-p is 1.5, expected 0 to 1 | \\nhint:
--repetition-penalty 0 | error: --repetition-penalty is 0 | \\nhint:
--max-tokens -1 | '-1' for '--max-tokens <N>'
--context 1 | '1' for '--context <N|max>'
--class gpu | unknown kernel class \"gpu\", expected cpu
--raw --system x | cannot be used with
--stop= | --stop
--frob | unexpected argument '--frob'";

#[test]
fn wrong_options_exit_with_2() {
    let world = TestHome::new();
    world.tiny_model(TinyChatModel::default());
    for (options, says) in rows(WRONG_OPTIONS) {
        let args = [&["run", "tiny.gguf", "hi"][..], &options].concat();
        let says: Vec<&str> = says.iter().map(String::as_str).collect();
        Case::new(&args, 2, &says).check(&world);
    }
    world.assert_clean();
}

#[test]
fn missing_arguments_exit_with_2() {
    let world = TestHome::new();
    world.tiny_model(TinyChatModel::default());
    let none = "error: the prompt is empty\nhint: ";
    for (args, stdin, says) in [
        (&["run"][..], "", "MODEL"),
        (&["run", "tiny.gguf"], "", none),
        (&["run", "tiny.gguf", ""], "", none),
        (&["run", "tiny.gguf", "--raw", " \n"], "", none),
        (&["run", "tiny.gguf", "--json"], " \n\t", none),
        (&["bench"], "", "Usage"),
        (
            &["bench", "model", "tiny.gguf", "--runs", "0"],
            "",
            "--runs",
        ),
    ] {
        let stdin = stdin.as_bytes();
        let says = [says];
        let case = Case::new(args, 2, &says);
        Case { stdin, ..case }.check(&world);
    }
    world.assert_clean();
}

#[test]
fn prompts_that_cannot_be_answered() {
    let world = TestHome::new();
    world.tiny_model(TinyChatModel::default());
    let base = TinyChatModel {
        chats: false,
        ..TinyChatModel::default()
    };
    base.write(&world.path("models/base.gguf"));
    let long = "x".repeat(600);
    let huge = vec![b'x'; (16 << 20) + 1];
    for (args, stdin, says) in [
        (
            &["run", "tiny.gguf", "hi", "--context", "20"][..],
            &b""[..],
            &[
                "error: the prompt has 21 tokens, but the context holds 20\nhint: shorten the prompt, \
               or give room with --context N, up to 512 for this model\n",
            ][..],
        ),
        (
            &["run", "tiny.gguf", &long],
            b"",
            &[
                "has 619 tokens, but the context holds 512\nhint: shorten the prompt: the model was \
               trained for 512 positions",
            ],
        ),
        (
            &["run", "base.gguf", "hi", "--system", "be brief"],
            b"",
            &[
                "base.gguf has no chat template",
                "\nhint: leave out --system",
            ],
        ),
        (
            &["run", "tiny.gguf"],
            b"caf\xe9",
            &["not UTF-8 text, byte 3 is 0xe9\nhint: convert it"],
        ),
        (
            &["run", "tiny.gguf"],
            &huge,
            &["larger than 16 MiB\nhint: "],
        ),
    ] {
        let case = Case::new(args, 1, says);
        Case { stdin, ..case }.check(&world);
    }
    world.assert_clean();
}

/// Writes files that cannot be used to the folder of `world`'s models.
fn write_bad_models(world: &TestHome) {
    let models = world.path("models");
    let tiny = TinyChatModel::default();
    let whole = tiny.writer().to_bytes();
    for (name, bytes) in [
        ("text.gguf", &b"once upon a time"[..]),
        ("page.gguf", b"<!DOCTYPE html><html>"),
        ("torch.gguf", b"PK\x03\x04 and so on"),
        ("empty.gguf", b""),
        ("header.gguf", &whole[..1000]),
        ("half.gguf", &whole[..whole.len() / 2]),
    ] {
        fs::write(models.join(name), bytes).unwrap();
    }
    let architecture = "mamba";
    TinyChatModel {
        architecture,
        ..tiny
    }
    .write(&models.join("mamba.gguf"));
    let architecture = "qwen2";
    let dense = TinyChatModel {
        architecture,
        ..tiny
    };
    let experts = dense.writer().meta("qwen2.expert_count", 8_u32);
    experts.write(models.join("experts.gguf"));
    let twice = tiny.writer().meta("tokenizer.ggml.merges", "twice");
    twice.write(models.join("twice.gguf"));
    fs::create_dir(models.join("folder")).unwrap();
}

/// A MODEL, how its error begins, and a later part of what is said.
const BAD_MODELS: &str = "\
./none.gguf | ./none.gguf: no such file | \\nhint: check the path
text.gguf | text.gguf is not a model | \\nhint: a model is a .gguf file
page.gguf | page.gguf is not a model | \\nhint: it is a web page
torch.gguf | torch.gguf is not a model | \\nhint: it looks like a PyTorch checkpoint
empty.gguf | empty.gguf is not a model | \\nhint: the file holds no data
header.gguf | header.gguf: | truncated, or the header lies\\nhint: the file is incomplete
half.gguf | half.gguf: | truncated, or the header lies\\nhint: the file is incomplete
mamba.gguf | cannot load mamba.gguf: | \"mamba\" is not supported, expected one of dbrx,
experts.gguf | cannot load experts.gguf: number of experts is 8 | \\nhint:
twice.gguf | twice.gguf: | occurs twice\\nhint:
folder | folder is not a model: the folder has neither a .gguf file nor a config.json | \\nhint:
/dev/null | /dev/null is not a model | \\nhint:";

#[test]
fn files_that_are_no_usable_model() {
    let world = TestHome::new();
    write_bad_models(&world);
    for (model, says) in rows(BAD_MODELS) {
        let args = ["run", model[0], "hi"];
        let says = ["error: ", &says[0], &says[1]];
        Case::new(&args, 1, &says).check(&world);
    }
    world.assert_clean();
}

#[test]
fn parts_of_a_model_that_cannot_be_used() {
    let world = TestHome::new();
    let write = |name: &str, key: &str, value: &str| {
        let base = TinyChatModel {
            chats: false,
            ..TinyChatModel::default()
        };
        let path = world.path("models").join(name);
        base.writer().meta(key, value).write(path);
    };
    write("syntax.gguf", "tokenizer.chat_template", "{% for %}");
    write(
        "refuses.gguf",
        "tokenizer.chat_template",
        "{{ raise_exception('no system') }}",
    );
    write(
        "loops.gguf",
        "tokenizer.chat_template",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    );
    for (model, says) in [
        (
            "syntax.gguf",
            &[
                "error: syntax.gguf: cannot use its chat template: ",
                "line 1",
                "\nhint: --raw",
            ][..],
        ),
        (
            "refuses.gguf",
            &["refuses the conversation: no system\nhint: ", "--system"],
        ),
        (
            "loops.gguf",
            &["error: chat template takes more than ", "\nhint: --raw"],
        ),
    ] {
        let args = ["run", model, "hi"];
        Case::new(&args, 1, says).check(&world);
        // The hint helps.
        let output = world.run(model, &["xy", "--raw"]);
        assert_eq!(text(&output.stdout), "z\n", "{}", text(&output.stderr));
    }
}

#[test]
fn machine_settings_that_do_not_work() {
    let world = TestHome::new();
    world.tiny_model(TinyChatModel::default());
    // No machine has both of these.
    let other = if cfg!(target_arch = "x86_64") {
        "neon-dotprod"
    } else {
        "avx2"
    };
    let lacks = format!("error: PACELINE_CPU is \"{other}\", but this machine has scalar");
    for (env, says) in [
        (
            ("PACELINE_CPU", "foo"),
            &[
                "error: PACELINE_CPU is \"foo\", expected one of scalar, ",
                "\nhint: unset PACELINE_CPU",
            ][..],
        ),
        (
            ("PACELINE_CPU", other),
            &[&lacks, "\nhint: unset PACELINE_CPU"],
        ),
    ] {
        let args = ["run", "tiny.gguf", "hi"];
        let case = Case::new(&args, 1, says);
        Case {
            env: &[env],
            ..case
        }
        .check(&world);
    }
    let home = [("PACELINE_HOME", "/dev/null/home")];
    let args = ["run", "smollm2", "hi"];
    let case = Case::new(&args, 1, &["/dev/null/home", "\nhint: "]);
    Case { env: &home, ..case }.check(&world);
    let args = ["run", "tiny.gguf", "hi", "--context", "4294967294"];
    let says = ["warning: --context is 4294967294, but the model was trained for 512 positions"];
    // Enough address space on some machines, not on others; either way it ends well.
    let output = finish(
        world
            .paceline(args)
            .args(["--max-tokens", "1"])
            .stderr(Stdio::piped()),
    );
    let said = text(&output.stderr);
    assert!(
        said.contains(says[0]) && !said.contains("panicked"),
        "{said}"
    );
    if !output.status.success() {
        assert!(said.contains("\nhint: take less memory"), "{said}");
    }
}

/// OSC 52 writes to the clipboard of the user.
#[test]
fn names_of_a_hostile_file_do_not_drive_the_terminal() {
    let world = TestHome::new();
    let name = b"k\x1b]52;c;ZXZpbA==\x07";
    let text = |bytes: &[u8]| [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat();
    // A string of metadata, twice: the error names it.
    let entry = [text(name), 8_u32.to_le_bytes().to_vec(), text(b"v")].concat();
    let head = [3_u32.to_le_bytes().to_vec(), 0_u64.to_le_bytes().to_vec()].concat();
    let count = 2_u64.to_le_bytes();
    let file = [&b"GGUF"[..], &head, &count, &entry, &entry].concat();
    fs::write(world.path("models").join("evil.gguf"), file).unwrap();
    let mut terminal = Terminal::start(&mut world.paceline(["show", "evil.gguf"]));
    wait(&mut terminal.child);
    let raw = terminal.raw();
    assert!(
        raw.contains("]52;c;ZXZpbA==\u{fffd} occurs twice"),
        "{raw:?}"
    );
    assert!(!raw.contains(['\u{1b}', '\u{7}']), "{raw:?}");
}

#[test]
fn a_file_that_may_not_be_read() {
    let world = TestHome::new();
    let model = world.tiny_model(TinyChatModel::default());
    fs::set_permissions(&model, fs::Permissions::from_mode(0o000)).unwrap();
    if fs::File::open(&model).is_ok() {
        eprintln!("SKIPPED a_file_that_may_not_be_read: this user may read everything");
        return;
    }
    let args = ["run", "tiny.gguf", "hi"];
    let says = [
        "error: ",
        "tiny.gguf",
        "ermission denied",
        "\nhint: give yourself",
    ];
    Case::new(&args, 1, &says).check(&world);
}
