//! The solver of integer programs: microlp, or HiGHS with the feature `highs`. microlp is Rust;
//! HiGHS is faster on large programs and is compiled from C++. No other module knows which it is.

#[cfg(not(feature = "highs"))]
mod chosen {
    use good_lp::solvers::microlp::{MicroLpProblem, microlp};
    use good_lp::variable::UnsolvedProblem;

    pub const NAME: &str = "microlp";

    pub(crate) fn model(problem: UnsolvedProblem) -> MicroLpProblem {
        problem.using(microlp)
    }
}

#[cfg(feature = "highs")]
mod chosen {
    use good_lp::solvers::highs::{HighsProblem, highs};
    use good_lp::variable::UnsolvedProblem;

    pub const NAME: &str = "HiGHS";

    /// To the end, as microlp does: HiGHS would stop within 0.01 % of the best, or a microsecond.
    pub(crate) fn model(problem: UnsolvedProblem) -> HighsProblem {
        let all = problem.using(highs).set_option("mip_rel_gap", 0.0);
        all.set_option("mip_abs_gap", 0.0)
    }
}

pub use chosen::NAME;
use good_lp::variable::UnsolvedProblem;
use good_lp::{SolverModel, WithTimeLimit};

/// `problem` for the solver, with a time limit of `seconds`.
pub(crate) fn program(
    problem: UnsolvedProblem,
    seconds: f64,
) -> impl SolverModel<Error: std::fmt::Display> {
    chosen::model(problem).with_time_limit(seconds)
}
