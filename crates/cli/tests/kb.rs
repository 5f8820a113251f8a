//! `paceline kb` as a user, a script or a terminal calls it.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::common::terminal::Terminal;
use crate::common::text;

const OWN: &str = "[[finding]]\nid = 9001\nstatement = \"My quokka cluster answers in 4 µs.\"\n\
                   topic = \"RDMA Bandwidth & Latency\"\nconflicts = [306]\n\
                   [[answer]]\nquestion = \"Who feeds the quokka?\"\nanswer = \"I do.\"\nfindings = [9001]\n";

/// An empty home and a folder for files to add.
struct KbHome(tempfile::TempDir);

impl KbHome {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn home(&self) -> PathBuf {
        self.0.path().join("home")
    }

    /// Writes a file of findings; gives its path.
    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = crate::common::paceline(&self.home());
        command.current_dir(self.0.path()).arg("kb").args(args);
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// The output of a command that succeeds.
    fn says(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(
            output.status.success(),
            "{args:?}: {}",
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    /// The complaint of a command that fails with exit code 1.
    fn fails(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(
            said.starts_with("error: ") && said.contains("\nhint: "),
            "{said}"
        );
        said
    }

    fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        let said = self.says(&args);
        let object: Value = serde_json::from_str(&said).unwrap();
        assert!(
            object.is_object() && said.trim_end().lines().count() == 1,
            "{said}"
        );
        object
    }

    /// Every file below the home with its bytes.
    fn kept(&self) -> Vec<(String, Vec<u8>)> {
        let Ok(entries) = fs::read_dir(self.home().join("kb")) else {
            return Vec::new();
        };
        let paths = entries.map(|entry| entry.unwrap().path());
        let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
        let mut kept: Vec<_> = paths.map(|p| (name(&p), fs::read(&p).unwrap())).collect();
        kept.sort();
        kept
    }
}

#[test]
fn exit_codes_tell_failure_from_wrong_usage() {
    let world = KbHome::new();
    for (args, code) in [
        (&["stats"][..], 0),
        (&["skill"], 0),
        (&["search", "rdma"], 0),
        (&["search", "zzyzx"], 0),
        (&["ask", "how", "do", "I", "bake", "bread?"], 0),
        (&["detail", "#415"], 0),
        (&["detail", "999"], 1),
        (&["skill", "cooking"], 1),
        (&["skill", "rdma"], 1),
        (&["search", "the of"], 1),
        (&["ask", "?"], 1),
        (&["add", "missing.toml"], 1),
        (&[], 2),
        (&["nope"], 2),
        (&["search"], 2),
        (&["ask"], 2),
        (&["add"], 2),
        (&["detail"], 2),
        (&["detail", "x"], 2),
        (&["detail", "-3"], 2),
        (&["search", "rdma", "--limit", "many"], 2),
    ] {
        let output = world.run(args);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{args:?}: {}",
            text(&output.stderr)
        );
    }
}

#[test]
fn hints_name_what_was_meant() {
    let world = KbHome::new();
    for (args, hint) in [
        (&["detail", "451"][..], "did you mean 415, 421, 431?"),
        (&["skill", "jacl"], "did you mean JACCL Backend?"),
        (
            &["skill", "rdma"],
            "name one of rdma-over-thunderbolt-5, rdma-bandwidth-latency",
        ),
        (
            &["skill", "cooking"],
            "`paceline kb skill` lists the topics",
        ),
    ] {
        let said = world.fails(args);
        assert!(said.contains(hint), "{args:?}: {said}");
    }
    let output = world.run(&["search", "thunderbold"]);
    assert!(text(&output.stderr).contains("did you mean thunderbolt"));
    assert!(output.stdout.is_empty());
}

#[test]
fn own_findings_are_added_and_found() {
    let world = KbHome::new();
    let added = world.json(&["add", &world.file("own.toml", OWN)]);
    assert_eq!(added["findings"], json!([9001]));
    assert_eq!(
        (&added["changed"], &added["answers"]),
        (&json!(true), &json!(1))
    );
    assert_eq!(
        world.kept(),
        [("own.toml".to_owned(), OWN.as_bytes().to_vec())]
    );
    let hits = world.json(&["search", "quokka"])["hits"].clone();
    assert_eq!(
        (&hits[0]["id"], &hits[0]["origin"]),
        (&json!(9001), &json!("own.toml"))
    );
    assert_eq!(
        world.json(&["detail", "9001"])["topic"],
        "RDMA Bandwidth & Latency"
    );
    assert_eq!(
        world.json(&["ask", "who feeds my quokka?"])["answer"]["answer"],
        "I do."
    );
    assert_eq!(world.json(&["stats"])["own_findings"], 1);
    let conflicts = world.json(&["detail", "306"])["conflicts"].clone();
    assert!(conflicts.as_array().unwrap().contains(&json!(9001)));
    // Again, and of any other name for the same findings.
    assert_eq!(
        world.json(&["add", &world.file("own.toml", OWN)])["changed"],
        false
    );
    let said = world.fails(&["add", &world.file("copy.toml", OWN)]);
    assert!(
        said.contains("9001 is taken by a finding of own.toml"),
        "{said}"
    );
}

#[test]
fn a_file_of_the_same_name_is_replaced_only_when_asked() {
    let world = KbHome::new();
    world.says(&["add", &world.file("own.toml", OWN)]);
    let newer = OWN.replace("4 µs", "3 µs");
    let path = world.file("own.toml", &newer);
    let said = world.fails(&["add", &path]);
    assert!(
        said.contains("is there already") && said.contains("--replace"),
        "{said}"
    );
    assert_eq!(world.kept()[0].1, OWN.as_bytes());
    world.says(&["add", &path, "--replace"]);
    assert_eq!(world.kept()[0].1, newer.as_bytes());
    // Another file rests on 9001, so it cannot go.
    let other = "[[finding]]\nid = 9002\nstatement = \"No.\"\nconflicts = [9001]\n";
    world.says(&["add", &world.file("another.toml", other)]);
    let without = world.file("own.toml", OWN.replace("9001", "9003"));
    let said = world.fails(&["add", &without, "--replace"]);
    assert!(
        said.contains("your findings in another.toml would be left out"),
        "{said}"
    );
    assert_eq!(world.kept()[1].1, newer.as_bytes());
    assert_eq!(world.json(&["stats"])["own_findings"], 2);
}

#[test]
fn a_bad_file_is_told_of_with_line_and_key_and_changes_nothing() {
    let world = KbHome::new();
    world.says(&["add", &world.file("own.toml", OWN)]);
    let before = world.kept();
    // The other refusals: `crates/kb/tests/refused.toml`.
    for (bytes, told) in [
        (
            b"[[finding]]\nid = 77\nstatment = \"s\"\n".to_vec(),
            "line 3, [[finding]] 1 (id 77), key `statment`: unknown key, did you",
        ),
        (
            b"[[finding]]\nid = 9001\nstatement = \"s\"\n".to_vec(),
            "key `id`: 9001 is taken by a finding of own.toml",
        ),
        (vec![b'#'; 2 << 20], "larger than 1048576 bytes"),
        (
            "[[finding]]\n".repeat(80_000).into_bytes(),
            "and 159980 more",
        ),
    ] {
        let said = world.fails(&["add", &world.file("bad.toml", &bytes)]);
        assert!(said.contains(told), "{told}: {said:.600}");
        assert!(said.contains("bad.toml is not taken"), "{said:.600}");
        assert!(said.len() < 6000, "{}", said.len());
        assert_eq!(world.kept(), before, "{told}");
    }
    assert_eq!(world.json(&["search", "quokka"])["hits"][0]["id"], 9001);
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let world = KbHome::new();
    let folder = world.0.path().join("folder.toml");
    fs::create_dir(&folder).unwrap();
    let pipe = world.0.path().join("pipe.toml");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success(), "mkfifo is part of every Unix");
    for path in [&folder, &pipe] {
        let said = world.fails(&["add", path.to_str().unwrap()]);
        assert!(said.contains("is not a file"), "{said}");
    }
    let said = world.fails(&["add", "/dev/zero"]);
    assert!(said.contains("is not a file"), "{said}");
    assert!(!world.home().exists());
}

#[test]
fn a_home_that_cannot_be_written_to_is_said() {
    let world = KbHome::new();
    fs::write(world.home(), "a file where the folder should be").unwrap();
    let output = world.run(&["add", &world.file("own.toml", OWN)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot write "));
    // Without any home, what is built in still works; adding does not.
    let mut stats = world.command(&["stats"]);
    assert!(
        stats
            .env_remove("PACELINE_HOME")
            .output()
            .unwrap()
            .status
            .success()
    );
    let mut add = world.command(&["add", &world.file("own.toml", OWN)]);
    let output = add.env_remove("PACELINE_HOME").output().unwrap();
    assert!(text(&output.stderr).contains("PACELINE_HOME"));
}

fn on_terminal(mut command: Command) -> String {
    let mut terminal = Terminal::of_width(&mut command, Some(50));
    assert!(terminal.child.wait().unwrap().success());
    terminal.raw()
}

#[test]
fn a_terminal_gets_its_width_and_bold_words() {
    let world = KbHome::new();
    let command = |term: &str, no_color: &str| {
        let mut command = world.command(&["search", "SIGBUS"]);
        command
            .env("TERM", term)
            .env("NO_COLOR", no_color)
            .env("COLUMNS", "90");
        command
    };
    let shown = on_terminal(command("xterm", ""));
    assert!(shown.contains("\x1b[1mSIGBUS\x1b[0m"), "{shown}");
    let plain = on_terminal(command("xterm", "1"));
    assert!(
        plain.contains("SIGBUS") && !plain.contains('\x1b'),
        "{plain}"
    );
    assert!(
        plain.lines().all(|line| line.chars().count() <= 50),
        "{plain}"
    );
    assert!(!on_terminal(command("dumb", "")).contains('\x1b'));
}

#[test]
fn two_at_once_lose_nothing() {
    let world = KbHome::new();
    let files: Vec<String> = (0..8)
        .map(|n| {
            let finding = format!(
                "[[finding]]\nid = {}\nstatement = \"Number {n} of koalas.\"\n",
                8000 + n
            );
            world.file(&format!("f{n}.toml"), finding)
        })
        .collect();
    let mut children: Vec<_> = files
        .iter()
        .map(|file| {
            world
                .command(&["add", file])
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    assert!(
        children
            .iter_mut()
            .all(|child| child.wait().unwrap().success())
    );
    assert_eq!(world.json(&["search", "koalas"])["n_found"], 8);
    assert_eq!(world.kept().len(), 8);
}
