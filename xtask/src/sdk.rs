//! `cargo xtask sdk`: clients that others wrote, against the HTTP API of real processes.
//!
//! ```text
//! xtask --starts--> scripts/cases/run.py --starts--> paceline up with tiny models, and commands
//!   |
//! xtask --stdin--> sh --starts--> paceline up --nodes 2 --starts--> two workers
//!   |                                  ^
//!   +--starts--> openai_python.py -----+  one after the other
//!                openapi_fuzz.py
//!                openai_js.mjs
//!                dialects_python.py, dialects_js.mjs
//!                tls_python.py --> two more nodes, off loopback
//!
//! in parallel, with a server of its own: dashboard.mjs --> Chromium, two more nodes, and then
//!
//! xtask --starts--> example scripted of crates/serve: a "model" that calls tools
//!   +--starts--> tools_python.py, tools_js.mjs, openapi_fuzz.py
//!   +--starts--> agents.py --> Claude Code, Codex, OpenCode (the long run only)
//!   +--starts--> langchain_python.py, litellm_python.py, ... (the long run only)
//! ```
//!
//! The shell ends the server when its standard input does: also when this program is killed.

mod clients;
mod server;

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::extent::{LONG, TestExtent};
use crate::tally::TestTally;
use crate::{models, process, repo};
use clients::SdkClient;
use server::TestServer;

/// Runs every client that is available here against `binary`, or the program built here; missing
/// clients are skipped by name.
pub(crate) fn run(
    binary: Option<PathBuf>,
    extent: TestExtent,
    see: &mut (impl FnMut(&str) + Send),
) -> Result<TestTally> {
    let model = models::smollm2()?;
    let (clients, mut tally) = clients::install(&models::folder()?);
    if clients.is_empty() {
        return Ok(tally);
    }
    let binary = binary.map_or_else(|| build(see), Ok)?;
    let scripted = build_target(&["--workspace", "--example", "scripted"], see)?;
    let (tools, others): (Vec<_>, Vec<_>) = clients.iter().partition(|client| client.wants_tools);
    let (page, others): (Vec<_>, Vec<_>) = others.iter().partition(|client| client.is_browser());
    let requests = |see: &mut dyn FnMut(&str)| -> Result<TestTally> {
        let mut tally = drive_cases(&binary, &model, see)?;
        let server = TestServer::start("requests", &binary, &model)?;
        tally.add(drive_all(&others, server, extent, see)?);
        Ok(tally)
    };
    let pages = |see: &mut dyn FnMut(&str)| -> Result<TestTally> {
        let server = TestServer::start("page", &binary, &model)?;
        let mut tally = drive_all(&page, server, extent, see)?;
        let server = TestServer::scripted(&scripted)?;
        tally.add(drive_all(&tools, server, extent, see)?);
        Ok(tally)
    };
    let (requests, pages) = beside(requests, pages, see);
    tally.add(requests?);
    tally.add(pages?);
    if extent == TestExtent::Long {
        let folder = models::folder()?.with_file_name("test-clients/agents");
        tally.add(drive_agents(&binary, &scripted, &folder, see)?);
        tally.add(drive_libraries(&scripted, see)?);
    }
    Ok(tally)
}

/// Runs both in parallel; they share the lines of `see`.
fn beside<T: Send>(
    first: impl FnOnce(&mut dyn FnMut(&str)) -> T + Send,
    second: impl FnOnce(&mut dyn FnMut(&str)) -> T,
    see: &mut (impl FnMut(&str) + Send),
) -> (T, T) {
    let shared = Mutex::new(see);
    let line = |line: &str| shared.lock().unwrap_or_else(PoisonError::into_inner)(line);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| first(&mut { line }));
        let second = second(&mut { line });
        (
            first.join().unwrap_or_else(|why| resume_unwind(why)),
            second,
        )
    })
}

/// Runs the cases of users of other programs, which start a server of their own.
fn drive_cases(binary: &Path, model: &Path, see: &mut dyn FnMut(&str)) -> Result<TestTally> {
    see("-- cases");
    let mut command = Command::new("python3");
    command.arg(repo::root().join("scripts/cases/run.py"));
    command.arg(binary).env("PACELINE_MODEL", model);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    stream("cases", command, see)
}

/// Runs the available libraries against the scripted server; missing ones are skipped by name.
fn drive_libraries(scripted: &Path, see: &mut dyn FnMut(&str)) -> Result<TestTally> {
    let (libraries, mut tally) = clients::install_libraries(&models::folder()?);
    if !libraries.is_empty() {
        let libraries: Vec<&SdkClient> = libraries.iter().collect();
        let server = TestServer::scripted(scripted)?;
        tally.add(drive_all(&libraries, server, TestExtent::Long, see)?);
    }
    Ok(tally)
}

/// Runs the available coding agents against the scripted server, each a minute or two.
fn drive_agents(
    binary: &Path,
    scripted: &Path,
    folder: &Path,
    see: &mut dyn FnMut(&str),
) -> Result<TestTally> {
    see("-- agents");
    let server = TestServer::scripted(scripted)?;
    let mut command = Command::new("python3");
    command.arg(repo::root().join("scripts/sdk/agents.py"));
    command.args([&server.url, &server.model]);
    command.arg(binary).arg(folder);
    let tally = stream("agents", command, see)?;
    server.end().iter().for_each(|why| see(why));
    Ok(tally)
}

/// Runs clients one after the other and ends the server.
fn drive_all(
    clients: &[&SdkClient],
    server: TestServer,
    extent: TestExtent,
    see: &mut dyn FnMut(&str),
) -> Result<TestTally> {
    let mut tally = TestTally::default();
    for client in clients {
        see(&format!("-- {}", client.name));
        tally.add(drive(client, &server, extent, see)?);
    }
    let name = format!("sdk: the server of {} ends when told", server.model);
    let ended = server.end();
    ended.iter().for_each(|why| see(why));
    tally.add(TestTally::check(&name, ended.is_none()));
    Ok(tally)
}

/// paceline as README's first command builds it.
pub(crate) fn build(see: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    build_target(&["--bin", "paceline"], see)
}

/// The target of the workspace that `target` names.
fn build_target(target: &[&str], see: &mut dyn FnMut(&str)) -> Result<PathBuf> {
    let mut command = repo::cargo();
    command.args(["build", "--release"]).args(target);
    command.arg("--message-format=json-render-diagnostics");
    let mut binary = None;
    let log = process::log_path("sdk-build");
    let built = process::stream(command, &log, |line| match executable(line) {
        Some(path) => binary = Some(path),
        None if line.starts_with('{') || process::is_progress(line) => {}
        None => see(line),
    })?;
    ensure!(built, "paceline does not build: see {}", log.display());
    binary.context("cargo named no executable")
}

/// The path in one of cargo's messages, if it is about an executable.
fn executable(line: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(line).ok()?;
    Some(message["executable"].as_str()?.into())
}

/// Runs one client to its end and counts its cases.
fn drive(
    client: &SdkClient,
    server: &TestServer,
    extent: TestExtent,
    see: &mut dyn FnMut(&str),
) -> Result<TestTally> {
    let mut command = client.command(server);
    if extent == TestExtent::Long {
        command.env(LONG.0, LONG.1);
    }
    stream(client.name, command, see)
}

/// Runs a client that prints its cases; it may skip all of them.
fn stream(name: &str, command: Command, see: &mut dyn FnMut(&str)) -> Result<TestTally> {
    let log = process::log_path(&format!("sdk-{name}"));
    let (passed, tally) = read(name, &log, command, see)?;
    let is_whole = passed && tally.passed + tally.skips.len() > 0;
    Ok(close(name, &log, (tally, is_whole), see))
}

/// Runs a program that prints its cases to its end, with all it says in the file `log`, and counts
/// them. One that fails without naming a case, or has none that passes, is a failure.
pub(crate) fn cases(
    name: &str,
    log: &Path,
    command: Command,
    see: &mut dyn FnMut(&str),
) -> Result<TestTally> {
    let (passed, tally) = read(name, log, command, see)?;
    let is_whole = passed && tally.passed + tally.skips.len() > 0;
    Ok(close(name, log, (tally, is_whole), see))
}

/// Whether the program ends well, and its cases.
fn read(
    name: &str,
    log: &Path,
    command: Command,
    see: &mut dyn FnMut(&str),
) -> Result<(bool, TestTally)> {
    let mut tally = TestTally::default();
    let passed = process::stream(command, log, |line| {
        if let Some(case) = case(name, line) {
            see(line);
            tally.add(case);
        }
    })?;
    Ok((passed, tally))
}

/// Adds a failure where a program is not whole and named none itself, and says where its log is.
fn close(
    name: &str,
    log: &Path,
    (mut tally, is_whole): (TestTally, bool),
    see: &mut dyn FnMut(&str),
) -> TestTally {
    if tally.failed == 0 && !is_whole {
        tally.add(TestTally::failure(&format!("{name}: ended early")));
    }
    if tally.failed > 0 {
        see(&format!("see {}", log.display()));
    }
    tally
}

/// The case that `line` is the outcome of: `ok NAME ...`, `FAILED NAME: why` or
/// `SKIPPED NAME: why`.
fn case(client: &str, line: &str) -> Option<TestTally> {
    if let Some(case) = line.strip_prefix("ok ") {
        return Some(TestTally::check(case, true));
    }
    if let Some((case, why)) = line
        .strip_prefix("SKIPPED ")
        .and_then(|c| c.split_once(": "))
    {
        return Some(TestTally::skip(&format!("{client}: {case}"), why));
    }
    let case = line.strip_prefix("FAILED ")?;
    Some(TestTally::failure(&format!("{client}: {case}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_told_from_other_lines() {
        let text = |line| case("js", line).map(|tally| tally.to_string());
        assert_eq!(
            text("ok models (0.1 s)").as_deref(),
            Some("1 passed, 0 failed, 0 skipped")
        );
        let failed = case("js", "FAILED seeds: both are x").expect("an outcome");
        assert_eq!(failed.failures, ["js: seeds: both are x"]);
        let skipped = text("SKIPPED codex-chat: npm failed");
        assert_eq!(skipped.as_deref(), Some("0 passed, 0 failed, 1 skipped"));
        for line in ["", "okay", "  ok x", "Error: FAILED", "FAILURE x"] {
            assert_eq!(text(line), None, "{line}");
        }
    }

    #[test]
    fn cargo_names_the_executable() {
        let line = r#"{"reason":"compiler-artifact","executable":"/t/release/paceline"}"#;
        assert_eq!(executable(line), Some("/t/release/paceline".into()));
        for line in [
            r#"{"reason":"compiler-artifact","executable":null}"#,
            r#"{"reason":"build-finished"}"#,
            "   Compiling serde",
        ] {
            assert_eq!(executable(line), None, "{line}");
        }
    }
}
