//! The clients: what they are installed from, and how each is started.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::server::TestServer;
use crate::tally::TestTally;
use crate::{process, repo, venv};

/// The package is 10 MB; a registry that is slower than this is taken for absent.
const NPM_LIMIT: Duration = Duration::from_secs(180);

/// Node's oldest release line that the JavaScript client was run with.
const OLDEST_NODE: u32 = 20;

/// The client that is a browser.
const DASHBOARD: &str = "dashboard";

/// The browser of [`DASHBOARD`], as Debian's package `chromium` has it.
const CHROMIUM: &str = "/usr/bin/chromium";

/// Programs that Node runs.
const JAVASCRIPT: [(&str, &str); 4] = [
    (DASHBOARD, "dashboard.mjs"),
    ("openai-js", "openai_js.mjs"),
    ("dialects-js", "dialects_js.mjs"),
    ("tools-js", "tools_js.mjs"),
];

/// Programs that Python runs.
const PYTHON: [(&str, &str); 6] = [
    ("openai-python", "openai_python.py"),
    ("dialects-python", "dialects_python.py"),
    ("schemathesis", "openapi_fuzz.py"),
    ("tls-python", "tls_python.py"),
    ("tools-python", "tools_python.py"),
    ("tools-schemathesis", "openapi_fuzz.py"),
];

/// Programs of the long run that Python runs, each in an environment of its own: they pin what the
/// others need. Their packages, up to 700 MB each, are in `requirements-NAME.txt`.
const LIBRARIES: [(&str, &str, &str); 4] = [
    (
        "langchain",
        "langchain_python.py",
        "sdk/requirements-langchain.txt",
    ),
    (
        "litellm",
        "litellm_python.py",
        "sdk/requirements-litellm.txt",
    ),
    (
        "instructor",
        "instructor_python.py",
        "sdk/requirements-instructor.txt",
    ),
    ("aider", "aider_python.py", "sdk/requirements-aider.txt"),
];

/// A program that tests the server it is given.
#[derive(Debug)]
pub(super) struct SdkClient {
    /// For its cases and its log.
    pub(super) name: &'static str,
    /// The program that runs the script.
    program: PathBuf,
    /// In `scripts/sdk`.
    script: &'static str,
    /// Whether it takes the model's name.
    wants_model: bool,
    /// Whether its model is to call tools.
    pub(super) wants_tools: bool,
    /// Folder of its packages, if it takes one.
    packages: Option<PathBuf>,
}

impl SdkClient {
    /// Whether it drives a browser.
    pub(super) fn is_browser(&self) -> bool {
        self.name == DASHBOARD
    }

    /// The command that runs it against `server`.
    pub(super) fn command(&self, server: &TestServer) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(repo::root().join("scripts/sdk").join(self.script));
        command.arg(&server.url);
        command.args(self.wants_model.then_some(&server.model));
        command.args(&self.packages);
        command.env("OPENAI_API_KEY", &server.key);
        if let Some((binary, model)) = &server.program {
            command.env("PACELINE_BINARY", binary);
            command.env("PACELINE_MODEL", model);
        }
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }
}

/// All available clients, and skips for the others. Packages go into a folder next to `models` and
/// stay there.
pub(super) fn install(models: &Path) -> (Vec<SdkClient>, TestTally) {
    let folder = models.with_file_name("test-clients");
    let (mut clients, mut tally) = (Vec::new(), TestTally::default());
    match venv::python_in(&folder.join("venv"), "sdk/requirements.txt") {
        Ok(python) => clients.extend(PYTHON.map(|(name, script)| SdkClient {
            name,
            program: python.clone(),
            script,
            wants_model: name != "schemathesis",
            wants_tools: name.starts_with("tools"),
            packages: None,
        })),
        Err(error) => {
            for (name, _) in PYTHON {
                tally.add(TestTally::skip(name, &format!("{error:#}")));
            }
        }
    }
    match npm_packages(&folder.join("npm")) {
        Ok(packages) => clients.extend(JAVASCRIPT.map(|(name, script)| SdkClient {
            name,
            program: "node".into(),
            script,
            wants_model: true,
            wants_tools: name.starts_with("tools"),
            packages: Some(packages.clone()),
        })),
        Err(error) => {
            for (name, _) in JAVASCRIPT {
                tally.add(TestTally::skip(name, &format!("{error:#}")));
            }
        }
    }
    if !Path::new(CHROMIUM).exists() && clients.iter().any(|client| client.name == DASHBOARD) {
        clients.retain(|client| client.name != DASHBOARD);
        tally.add(TestTally::skip(
            DASHBOARD,
            &format!("{CHROMIUM} is not here"),
        ));
    }
    (clients, tally)
}

/// The available libraries of the long run, and skips by name for the others.
pub(super) fn install_libraries(models: &Path) -> (Vec<SdkClient>, TestTally) {
    let folder = models.with_file_name("test-clients");
    let (mut clients, mut tally) = (Vec::new(), TestTally::default());
    for (name, script, requirements) in LIBRARIES {
        match venv::python_in(&folder.join(name), requirements) {
            Ok(program) => clients.push(SdkClient {
                name,
                program,
                script,
                wants_model: true,
                wants_tools: true,
                packages: None,
            }),
            Err(error) => tally.add(TestTally::skip(name, &format!("{error:#}"))),
        }
    }
    (clients, tally)
}

/// `folder` with the packages of `scripts/sdk/package.json` installed. Later calls use no network
/// until that file changes.
fn npm_packages(folder: &Path) -> Result<PathBuf> {
    let mut node = Command::new("node");
    node.arg("--version");
    let version = process::capture(node, NPM_LIMIT)?;
    let is_known = major(&version).is_some_and(|major| major >= OLDEST_NODE);
    ensure!(
        is_known,
        "node is {}, expected {OLDEST_NODE} or later",
        version.trim()
    );
    let file = repo::root().join("scripts/sdk/package.json");
    let wanted = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
    let stamp = folder.join("installed.json");
    if fs::read(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(folder.to_path_buf());
    }
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    fs::write(folder.join("package.json"), &wanted)
        .with_context(|| format!("write to {}", folder.display()))?;
    let mut npm = Command::new("npm");
    npm.args(["install", "--silent", "--no-audit", "--no-fund"]);
    npm.args(["--no-package-lock", "--ignore-scripts"]);
    npm.current_dir(folder);
    process::capture(npm, NPM_LIMIT)?;
    fs::write(&stamp, wanted).with_context(|| format!("write {}", stamp.display()))?;
    Ok(folder.to_path_buf())
}

/// 20 of `v20.1.0`.
fn major(version: &str) -> Option<u32> {
    let (major, _) = version.trim().strip_prefix('v')?.split_once('.')?;
    major.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_line_of_node() {
        for (version, expected) in [
            ("v20.20.2\n", Some(20)),
            ("v8.0.0", Some(8)),
            ("20.1", None),
            ("v20", None),
            ("", None),
        ] {
            assert_eq!(major(version), expected, "{version}");
        }
    }
}
