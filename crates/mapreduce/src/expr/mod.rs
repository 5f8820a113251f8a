//! Expressions of users: scalar text to a typed program over columns.
//!
//! ```
//! use paceline_mapreduce::expr::{ExprProgram, Registers};
//!
//! let program = ExprProgram::parse("select(x > 1, sqrt(x), -x)", 1).unwrap();
//! let mut out = Vec::new();
//! program.run(&[&[4.0, 0.5]], 0, &mut Registers::default(), &mut out);
//! assert_eq!(out, [2.0, -0.5]);
//! ```
//!
//! | | |
//! |---|---|
//! | columns | `x`, `y`, `z`, `w`: the inputs; `i`: the number of the row, from 0 |
//! | numbers | `1`, `2.5`, `1e-3`, `pi`, `inf`, `nan` |
//! | arithmetic | `+ - * /`, `%` (sign of the left side), `^` (a power; binds to the right) |
//! | comparison | `< <= > >= == !=`, giving truth values |
//! | truth | `&& \|\| !`, `true`, `false`, `select(condition, then, else)` |
//! | rounding | `floor ceil trunc round` |
//! | functions | `abs sqrt exp log sin cos tan atan tanh min max pow hypot` |
//!
//! Numbers are f64, and truth values are a type of their own: `x + (y > 0)` is refused. `+ - * /`,
//! `sqrt` and rounding are IEEE 754's. The other functions are those of the crate `libm`, so that
//! every machine gives the same bits. `round` takes ties to even; `min` and `max` give NaN when a
//! side is NaN. A result that is NaN has the same bits everywhere.
//!
//! A program has no loops, no memory and no names but these. Text is bounded in length and depth,
//! and a program in steps, so that no text costs more than [`STEPS_MAX`] operations a row.

mod parse;
mod run;
#[cfg(test)]
mod tests;
#[cfg(feature = "gpu")]
pub(crate) mod wgsl;

pub use run::Registers;

/// Longest text in bytes.
pub const TEXT_BYTES_MAX: usize = 16 << 10;

/// Most operations of a program.
pub const STEPS_MAX: usize = 1000;

/// Deepest nesting of a text.
pub const DEPTH_MAX: usize = 200;

/// Names of the inputs.
pub const COLUMNS: [&str; 4] = ["x", "y", "z", "w"];

/// The type that a step gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    Number,
    Truth,
}

impl std::fmt::Display for Type {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Number => "a number",
            Self::Truth => "a truth value",
        })
    }
}

/// An operation on one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "their names are the functions'")]
pub enum Unary {
    Negate,
    Not,
    Abs,
    Sqrt,
    Floor,
    Ceil,
    Trunc,
    Round,
    Exp,
    Log,
    Sin,
    Cos,
    Tan,
    Atan,
    Tanh,
}

/// An operation on two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "their names are the operators'")]
pub enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
    Power,
    Min,
    Max,
    Hypot,
    Less,
    LessEqual,
    Equal,
    NotEqual,
    And,
    Or,
}

/// A step of a program; operands are numbers of earlier steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExprStep {
    /// A constant; a truth value is 0 or 1.
    Constant(f64),
    /// An input, by number.
    Column(usize),
    Row,
    /// An operation on one value.
    Unary(Unary, usize),
    /// An operation on two.
    Binary(Binary, usize, usize),
    /// The second value where the first is true, else the third.
    Select(usize, usize, usize),
}

/// A program: steps in order, the last one is the result, a number.
#[derive(Clone, Debug, PartialEq)]
pub struct ExprProgram {
    steps: Vec<ExprStep>,
}

/// Why a text is no expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}, at character {at} of the expression")]
pub struct ExprError {
    /// Place in the text, from 1.
    pub at: usize,
    pub problem: ExprErrorKind,
}

/// A problem of a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExprErrorKind {
    #[error("expected {0}")]
    Expected(&'static str),
    #[error("no column or function is called {0:?}")]
    Name(String),
    #[error("{name} is input {number}, but there are {inputs}")]
    Input {
        name: &'static str,
        /// Its number, from 1.
        number: usize,
        inputs: usize,
    },
    #[error("{name} takes {expected} arguments, got {got}")]
    Arguments {
        name: String,
        expected: usize,
        got: usize,
    },
    #[error("expected {expected}, got {got}")]
    Type { expected: Type, got: Type },
    #[error("more than {max} {what}")]
    Bound { what: &'static str, max: usize },
}

impl ExprProgram {
    /// Reads an expression over `inputs` columns. Its result is a number; a truth value becomes
    /// 0 or 1.
    ///
    /// # Errors
    /// The problem of the text, and its position.
    pub fn parse(text: &str, inputs: usize) -> Result<Self, ExprError> {
        parse::parse(text, inputs).map(|steps| Self { steps })
    }

    /// The steps, in order.
    pub fn steps(&self) -> &[ExprStep] {
        &self.steps
    }
}
