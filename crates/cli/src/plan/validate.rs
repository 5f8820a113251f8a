//! `paceline plan --validate`: the cost model against published numbers.

use std::path::Path;

use paceline_board::lookup;
use paceline_plan::Calibration;
use paceline_plan::fit::fit as fit_rows;
use paceline_plan::publications::{BUILTIN, Published};
use paceline_plan::report::{scores, scores_json};
use paceline_plan::validate::validate;

use crate::output::print;

/// Scores the rows of `file`, or the built-in ones.
pub(super) fn run(file: Option<&Path>, as_json: bool) -> anyhow::Result<()> {
    let published = match file {
        None => Published::from_toml(BUILTIN, "published.toml")?,
        Some(file) => Published::from_toml(&lookup::read(file)?, &file.display().to_string())?,
    };
    let report = validate(&published, &Calibration::builtin()?)?;
    if as_json {
        return print(&scores_json(&report).to_string());
    }
    print(scores(&report).trim_end())
}

/// Prints the constants fitted to the built-in fit rows, as `name value`.
pub(super) fn fit() -> anyhow::Result<()> {
    let mut published = Published::from_toml(BUILTIN, "published.toml")?;
    // Excludes the rows for scoring.
    published.rows.retain(|row| row.split == "fit");
    let fitted = fit_rows(&published, &Calibration::builtin()?)?;
    let line = |p: &paceline_plan::calibration::Parameter| format!("{} {:.4e}", p.name, p.value);
    print(&fitted.parameters().map(line).collect::<Vec<_>>().join("\n"))
}
