//! llama.cpp and mlx-lm as their maintainers build them, driven by the scripts in the tree.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, bail};
use serde_json::Value;

/// Drives the prebuilt library of the npm package `node-llama-cpp` through Python's ctypes.
const SCRIPT: &str = include_str!("../../../../scripts/peers/llama_bench.py");

/// Drives the Python package `mlx-lm`.
const MLX_LM: &str = include_str!("../../../../scripts/peers/mlx_lm_bench.py");

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

/// Where mlx-lm is and what to run.
#[derive(Debug)]
pub(crate) struct MlxLm {
    /// A Python that has it.
    pub(crate) python: PathBuf,
    pub(crate) prompt: usize,
    pub(crate) generate: usize,
}

impl MlxLm {
    /// The Python that `PACELINE_MLX_PYTHON` names, else the system's.
    pub(crate) fn new(prompt: usize, generate: usize) -> Self {
        let given = std::env::var_os("PACELINE_MLX_PYTHON").filter(|value| !value.is_empty());
        let python = given.unwrap_or_else(|| OsStr::new("python3").to_owned());
        Self {
            python: python.into(),
            prompt,
            generate,
        }
    }

    /// One run after one to warm up: prefill and decode in tokens per second.
    pub(crate) fn run(&self, model: &Path) -> anyhow::Result<(f64, f64)> {
        let mut python = Command::new(&self.python);
        python.arg("-").arg(model);
        python.args(["--prompt", &self.prompt.to_string()]);
        python.args(["--gen", &self.generate.to_string()]);
        speeds("mlx-lm", python, MLX_LM)
    }
}

/// Has Python run `script`, which prints speeds.
fn speeds(name: &str, mut python: Command, script: &str) -> anyhow::Result<(f64, f64)> {
    let mut child = python
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run Python, which drives {name}"))?;
    let mut stdin = child.stdin.take().expect("piped");
    stdin
        .write_all(script.as_bytes())
        .context("python3 ended early")?;
    drop(stdin);
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!(
            "{name} did not run ({}), its message is above",
            output.status
        );
    }
    let result: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("the answer of {name}'s script is no JSON"))?;
    let speed = |key: &str| {
        result[key]
            .as_f64()
            .with_context(|| format!("{name}'s answer has no {key}"))
    };
    Ok((speed("prefill_tok_s")?, speed("decode_tok_s")?))
}
