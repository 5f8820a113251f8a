//! `paceline plan --validate`: the cost model against published numbers.

use std::path::Path;

use paceline_board::named;
use paceline_plan::Calibration;
use paceline_plan::fit::fit as fit_rows;
use paceline_plan::published::{BUILTIN, Published};
use paceline_plan::report::{scores, scores_json};
use paceline_plan::validate::validate;

use crate::output::print;

/// Scores the rows of `file`, or those in the tree.
pub(super) fn run(file: Option<&Path>, as_json: bool) -> anyhow::Result<()> {
    let published = match file {
        None => Published::from_toml(BUILTIN, "published.toml")?,
        Some(file) => Published::from_toml(&named::read(file)?, &file.display().to_string())?,
    };
    let report = validate(&published, &Calibration::builtin()?)?;
    if as_json {
        return print(&scores_json(&report).to_string());
    }
    print(scores(&report).trim_end())
}

/// Prints the constants that the fit rows in the tree give, as `name value`.
pub(super) fn fit() -> anyhow::Result<()> {
    let mut published = Published::from_toml(BUILTIN, "published.toml")?;
    // Rows that only score cannot have a say: they are not even there.
    published.rows.retain(|row| row.split == "fit");
    let fitted = fit_rows(&published, &Calibration::builtin()?)?;
    let line = |p: &paceline_plan::calibration::Parameter| format!("{} {:.4e}", p.name, p.value);
    print(&fitted.parameters().map(line).collect::<Vec<_>>().join("\n"))
}
