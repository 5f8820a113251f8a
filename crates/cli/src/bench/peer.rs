//! llama.cpp and mlx-lm as their maintainers build them, driven by the scripts in the tree.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, bail};

/// Drives the prebuilt library of the npm package `node-llama-cpp` through Python's ctypes.
const LLAMA_CPP: &str = include_str!("../../../../scripts/peers/llama_bench.py");

/// Drives the Python package `mlx-lm`.
const MLX_LM: &str = include_str!("../../../../scripts/peers/mlx_lm_bench.py");

/// What a peer runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    pub(crate) threads: usize,
    pub(crate) prompt: usize,
    pub(crate) generate: usize,
    /// Position that decoding starts from.
    pub(crate) depth: usize,
}

/// Another program in a process of its own, with a model loaded; idle between runs.
#[derive(Debug)]
pub(crate) struct Served {
    name: &'static str,
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Served {
    /// Starts llama.cpp; `folder` is the one that `npm install --prefix` filled. The model is
    /// loaded and warmed up while the caller goes on, until the first [`run`](Self::run) waits
    /// for that.
    pub(crate) fn llama_cpp(folder: &Path, model: &Path, task: Task) -> anyhow::Result<Self> {
        let mut python = Command::new("python3");
        python.args(["-c", LLAMA_CPP]).arg(folder).arg(model);
        python.args(["--threads", &task.threads.to_string()]);
        python.args(["--depth", &task.depth.to_string()]);
        Self::start("llama.cpp", python, task)
    }

    /// Starts mlx-lm, of the Python that `PACELINE_MLX_PYTHON` names, else of the system's.
    ///
    /// # Errors
    /// When there is no such Python, or decoding is to start elsewhere than behind the prompt.
    pub(crate) fn mlx_lm(model: &Path, task: Task) -> anyhow::Result<Self> {
        if task.depth != task.prompt {
            bail!("mlx-lm decodes behind the prompt, so --depth cannot be compared with it");
        }
        let given = std::env::var_os("PACELINE_MLX_PYTHON").filter(|value| !value.is_empty());
        let python: OsString = given.unwrap_or_else(|| OsStr::new("python3").to_owned());
        let mut python = Command::new(python);
        python.args(["-c", MLX_LM]).arg(model);
        Self::start("mlx-lm", python, task)
    }

    fn start(name: &'static str, mut python: Command, task: Task) -> anyhow::Result<Self> {
        let mut child = python
            .env("PYTHONSAFEPATH", "1") // no module of the current folder
            .args(["--prompt", &task.prompt.to_string()])
            .args(["--gen", &task.generate.to_string(), "--serve"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run Python, which drives {name}"))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        Ok(Self {
            name,
            requests: stdin.expect("piped"),
            answers: BufReader::new(stdout.expect("piped")),
            child,
        })
    }

    /// Whom it runs.
    pub(crate) const fn name(&self) -> &'static str {
        self.name
    }

    /// One run: prefill and decode in tokens per second.
    pub(crate) fn run(&mut self) -> anyhow::Result<(f64, f64)> {
        let (mut line, name) = (String::new(), self.name);
        let sent = writeln!(self.requests).and_then(|()| self.requests.flush());
        if sent.is_err() || self.answers.read_line(&mut line)? == 0 {
            let status = self.child.wait()?;
            bail!("{name} did not run ({status}), its message is above");
        }
        serde_json::from_str(&line)
            .with_context(|| format!("the answer of {name}'s script is not two numbers"))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // The process would end with its standard input, but may be loading a model.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
