//! A paceline with an empty home.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use super::{finish, text};

/// A world of its own for one paceline: an empty home, an empty folder for temporary files, and a
/// folder for models.
pub(crate) struct TestHome {
    dir: tempfile::TempDir,
}

impl TestHome {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["home", "tmp", "models"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Self { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// paceline in its folder of models, its output piped.
    pub(crate) fn paceline<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = super::paceline(&self.path("home"));
        command
            .env("TMPDIR", self.path("tmp"))
            .current_dir(self.path("models"))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn run(&self, model: &str, args: &[&str]) -> Output {
        let all = ["run", model].into_iter().chain(args.iter().copied());
        finish(&mut self.paceline(all))
    }

    /// The object that `paceline run MODEL ARGS --json` prints, and nothing else.
    pub(crate) fn json(&self, model: &str, args: &[&str]) -> Value {
        object(&self.run(model, &[args, &["--json"]].concat()))
    }

    /// Fails when something was left behind. Exempt are measurements of this machine, a node's
    /// identity after its end, the prompts that it has read, and lines typed in chats.
    pub(crate) fn assert_clean(&self) {
        for name in ["home", "tmp"] {
            let entries = fs::read_dir(self.path(name)).unwrap();
            let mut left: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            // What is being written when a signal ends it goes with the next run.
            left.retain(|file| !file.to_string_lossy().starts_with("measured."));
            let kept = [
                "audit.jsonl",
                "chat-history",
                "copies",
                "engine-rates.json",
                "packed",
                "prefixes",
            ];
            left.retain(|file| !kept.iter().any(|kept| file == kept));
            if let Ok(node) = fs::read_dir(self.path(name).join("node")) {
                let kept = ["identity", "cluster-key", "map.json", "lock"];
                left.retain(|file| file != "node");
                left.extend(node.map(|entry| entry.unwrap().file_name()));
                left.retain(|file| !kept.iter().any(|kept| file == kept));
            }
            assert!(left.is_empty(), "in {name}: {left:?}");
        }
    }
}

/// The one JSON object on stdout.
pub(crate) fn object(output: &Output) -> Value {
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    let json: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stdout)));
    assert!(json.is_object(), "{json}");
    json
}
