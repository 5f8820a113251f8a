//! llama.cpp as its maintainers build it, driven by the script in the tree.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde_json::Value;

/// Drives the prebuilt library of the npm package `node-llama-cpp` through Python's ctypes.
const SCRIPT: &str = include_str!("../../../../scripts/peers/llama_bench.py");

/// Where llama.cpp is and what to run.
#[derive(Debug)]
pub(crate) struct LlamaCpp {
    /// Folder that `npm install --prefix` filled.
    pub(crate) folder: PathBuf,
    pub(crate) threads: usize,
    pub(crate) prompt: usize,
    pub(crate) generate: usize,
}

impl LlamaCpp {
    /// One run after one to warm up: prefill and decode in tokens per second.
    pub(crate) fn run(&self, model: &Path) -> anyhow::Result<(f64, f64)> {
        let mut child = Command::new("python3")
            .arg("-")
            .arg(&self.folder)
            .arg(model)
            .args(["--threads", &self.threads.to_string()])
            .args(["--prompt", &self.prompt.to_string()])
            .args(["--gen", &self.generate.to_string(), "--runs", "1"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run python3, which drives llama.cpp")?;
        let mut stdin = child.stdin.take().expect("piped");
        stdin
            .write_all(SCRIPT.as_bytes())
            .context("python3 ended early")?;
        drop(stdin);
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!(
                "llama.cpp did not run ({}), its message is above",
                output.status
            );
        }
        let result: Value = serde_json::from_slice(&output.stdout)
            .context("the answer of scripts/peers/llama_bench.py is no JSON")?;
        let speed = |key: &str| {
            result[key]
                .as_f64()
                .with_context(|| format!("llama.cpp's answer has no {key}"))
        };
        Ok((speed("prefill_tok_s")?, speed("decode_tok_s")?))
    }
}
