//! llama.cpp and mlx-lm as their maintainers build them, driven by the scripts in the tree.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use paceline_process::{Ending, Program};

/// Drives the prebuilt library of the npm package `node-llama-cpp` through Python's ctypes.
const LLAMA_CPP: &str = include_str!("../../../scripts/peers/llama_bench.py");

/// Drives the Python package `mlx-lm`.
const MLX_LM: &str = include_str!("../../../scripts/peers/mlx_lm_bench.py");

/// Parameters of a peer's run.
#[derive(Clone, Copy, Debug)]
pub struct PeerRun {
    pub threads: usize,
    pub prompt: usize,
    /// Tokens to decode.
    pub generate: usize,
    /// Position that decoding starts from.
    pub depth: usize,
}

/// Another program in its own process, with a model loaded; idle between runs.
#[derive(Debug)]
pub struct PeerProcess {
    name: &'static str,
    program: Program,
}

impl PeerProcess {
    /// Starts llama.cpp; `folder` is the one that `npm install --prefix` filled. The model is
    /// loaded and warmed up in the background, until the first [`run`](Self::run) waits for that.
    pub fn llama_cpp(folder: &Path, model: &Path, task: PeerRun) -> Result<Self> {
        let mut python = Command::new("python3");
        python.args(["-c", LLAMA_CPP]).arg(folder).arg(model);
        python.args(["--threads", &task.threads.to_string()]);
        python.args(["--depth", &task.depth.to_string()]);
        Self::start("llama.cpp", python, task)
    }

    /// Starts mlx-lm, with this Python, else with the system's.
    ///
    /// # Errors
    /// If there is no such Python, or `task.depth` is not the length of the prompt.
    pub fn mlx_lm(python: Option<OsString>, model: &Path, task: PeerRun) -> Result<Self> {
        ensure!(
            task.depth == task.prompt,
            "mlx-lm decodes behind the prompt, so --depth cannot be compared with it"
        );
        let python: OsString = python.unwrap_or_else(|| OsStr::new("python3").to_owned());
        let mut python = Command::new(python);
        python.args(["-c", MLX_LM]).arg(model);
        python.env_remove(paceline_mlx::TF32); // its default, which this program has changed
        Self::start("mlx-lm", python, task)
    }

    fn start(name: &'static str, mut python: Command, task: PeerRun) -> Result<Self> {
        python
            .env("PYTHONSAFEPATH", "1") // no module of the current folder
            .args(["--prompt", &task.prompt.to_string()])
            .args(["--gen", &task.generate.to_string(), "--serve"]);
        let program = Program::start(&mut python)
            .with_context(|| format!("cannot run Python, which drives {name}"))?;
        Ok(Self { name, program })
    }

    /// Name of the program.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Runs once; returns prefill and decode in tokens per second.
    ///
    /// # Errors
    /// If the program ended, or its output is invalid.
    pub fn run(&mut self) -> Result<(f64, f64)> {
        let name = self.name;
        let sent = self.program.send_line("");
        let line = self.program.receive_line();
        let line = line.with_context(|| format!("cannot hear {name}"))?;
        if sent.is_err() || line.is_empty() {
            let ending = self.program.wait().unwrap_or(Ending::Unknown);
            bail!("{name} {ending}, its message is above");
        }
        serde_json::from_str(&line)
            .with_context(|| format!("the answer of {name}'s script is not two numbers"))
    }
}
