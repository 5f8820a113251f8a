//! llama.cpp as its maintainers build it, driven by the script in the tree.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, bail};

/// Drives the prebuilt library of the npm package `node-llama-cpp` through Python's ctypes.
const SCRIPT: &str = include_str!("../../../../scripts/peers/llama_bench.py");

/// What llama.cpp runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    pub(crate) threads: usize,
    pub(crate) prompt: usize,
    pub(crate) generate: usize,
    /// Position that decoding starts from.
    pub(crate) depth: usize,
}

/// llama.cpp in a process of its own, with a model loaded; idle between runs.
#[derive(Debug)]
pub(crate) struct LlamaCpp {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl LlamaCpp {
    /// Starts it; `folder` is the one that `npm install --prefix` filled. The model is loaded and
    /// warmed up while the caller goes on, until the first [`run`](Self::run) waits for that.
    pub(crate) fn start(folder: &Path, model: &Path, task: Task) -> anyhow::Result<Self> {
        let mut child = Command::new("python3")
            .args(["-c", SCRIPT])
            .arg(folder)
            .arg(model)
            .args(["--threads", &task.threads.to_string()])
            .args(["--prompt", &task.prompt.to_string()])
            .args(["--gen", &task.generate.to_string()])
            .args(["--depth", &task.depth.to_string(), "--serve"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run python3, which drives llama.cpp")?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        Ok(Self {
            requests: stdin.expect("piped"),
            answers: BufReader::new(stdout.expect("piped")),
            child,
        })
    }

    /// One run: prefill and decode in tokens per second.
    pub(crate) fn run(&mut self) -> anyhow::Result<(f64, f64)> {
        let mut line = String::new();
        let sent = writeln!(self.requests).and_then(|()| self.requests.flush());
        if sent.is_err() || self.answers.read_line(&mut line)? == 0 {
            let status = self.child.wait()?;
            bail!("llama.cpp did not run ({status}), its message is above");
        }
        serde_json::from_str(&line)
            .context("the answer of scripts/peers/llama_bench.py is not two numbers")
    }
}

impl Drop for LlamaCpp {
    fn drop(&mut self) {
        // The process would end with its standard input, but may be loading a model.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
