//! `cargo xtask docs`: pages that are made of definitions, tutorials, and samples for schedulers.
//!
//! `scripts/docs/reference.py` makes `docs/reference` or checks that it is fresh. `tutorials.py`
//! follows `docs/tutorials`. `first_day.py` runs a new user's first day in network namespaces.
//! `packaging/check.py --samples` has the samples. What needs the package for Python is skipped
//! unless `cargo xtask wheel` has installed it as it is in the tree.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::extent::TestExtent;
use crate::tally::TestTally;
use crate::{models, package, process, repo, sdk, wheel};

/// Whether pages are made or checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReferencePages {
    /// Compared with what their definitions say now.
    Check,
    /// Written.
    Write,
}

/// Checks, or makes, everything.
///
/// # Errors
/// When a program cannot be started or does not build. Without SmolLM2 all is a skip.
pub(crate) fn run(
    pages: ReferencePages,
    extent: TestExtent,
    see: &mut impl FnMut(&str),
) -> Result<TestTally> {
    let model = match models::smollm2() {
        Ok(model) => model,
        Err(error) => return Ok(TestTally::skip("the documentation", &format!("{error:#}"))),
    };
    let world = ScriptInputs {
        binary: sdk::build(see)?,
        model,
        python: wheel::installed(),
    };
    let mut tally = world.run(
        "reference",
        (pages == ReferencePages::Write).then_some("--write"),
        see,
    )?;
    if pages == ReferencePages::Check {
        tally.add(world.run(
            "tutorials",
            (extent == TestExtent::Long).then_some("--long"),
            see,
        )?);
        tally.add(world.run("first_day", None, see)?);
        tally.add(package::samples(&world.binary, see)?);
    }
    Ok(tally)
}

struct ScriptInputs {
    binary: PathBuf,
    model: PathBuf,
    /// An interpreter that has the package for Python.
    python: Option<PathBuf>,
}

impl ScriptInputs {
    /// Runs `scripts/docs/<name>.py` to its end and counts its cases.
    fn run(
        &self,
        name: &str,
        option: Option<&str>,
        see: &mut impl FnMut(&str),
    ) -> Result<TestTally> {
        let mut command = Command::new("python3");
        command.arg(repo::root().join(format!("scripts/docs/{name}.py")));
        let given = |name: &str, path: &Path| [OsStr::new(name).to_owned(), path.into()];
        command.args(given("--binary", &self.binary));
        command.args(given("--model", &self.model));
        if let Some(python) = &self.python {
            command.args(given("--python", python));
        }
        command.args(option).env("PYTHONDONTWRITEBYTECODE", "1");
        sdk::cases(
            "docs",
            &process::log_path(&format!("docs-{name}")),
            command,
            see,
        )
    }
}
