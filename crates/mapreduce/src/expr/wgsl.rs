//! Programs as WGSL: a statement for each step, by the functions of paceline-gpu's `float.wgsl`.
//!
//! Numbers are written as their bits and names are ours, so no text of a user reaches a compiler.
//! Functions of `libm` have no form here: such programs stay on the CPU.

use std::fmt::Write as _;

use super::{Binary, COLUMNS, ExprProgram, ExprStep, Unary};

/// Statements that compute `value` of `x`, `y`, `z`, `w` and `i`; `None` for a program that has
/// no form with the CPU's bits.
pub(crate) fn text(program: &ExprProgram) -> Option<String> {
    let mut text = String::new();
    let steps = program.steps();
    for (number, step) in steps.iter().enumerate() {
        let value = match *step {
            ExprStep::Constant(value) => constant(value),
            ExprStep::Column(column) => COLUMNS[column].to_owned(),
            ExprStep::Row => "i".to_owned(),
            ExprStep::Unary(op, a) => format!("{}(v{a})", unary(op)?),
            ExprStep::Binary(Binary::Power, a, b) => power(a, steps[b])?,
            ExprStep::Binary(op, a, b) => format!("{}(v{a}, v{b})", binary(op)?),
            ExprStep::Select(condition, a, b) => format!("f_select(v{condition}, v{a}, v{b})"),
        };
        // Writing to a string never fails.
        let _ = writeln!(text, "let v{number} = {value};");
    }
    let last = steps.len().checked_sub(1)?;
    let _ = writeln!(text, "let value = v{last};");
    Some(text)
}

fn constant(value: f64) -> String {
    let bits = value.to_bits();
    format!("vec2<u32>({}u, {}u)", bits as u32, bits >> 32)
}

/// Powers that `libm` computes by one operation.
fn power(base: usize, exponent: ExprStep) -> Option<String> {
    match exponent {
        ExprStep::Constant(2.0) => Some(format!("f_mul(v{base}, v{base})")),
        ExprStep::Constant(1.0) => Some(format!("v{base}")),
        _ => None,
    }
}

const fn unary(op: Unary) -> Option<&'static str> {
    Some(match op {
        Unary::Negate => "f_neg",
        Unary::Not => "f_not",
        Unary::Abs => "f_abs",
        Unary::Sqrt => "f_sqrt",
        Unary::Floor => "f_floor",
        Unary::Ceil => "f_ceil",
        Unary::Trunc => "f_trunc",
        Unary::Round => "f_round",
        Unary::Exp
        | Unary::Log
        | Unary::Sin
        | Unary::Cos
        | Unary::Tan
        | Unary::Atan
        | Unary::Tanh => return None,
    })
}

const fn binary(op: Binary) -> Option<&'static str> {
    Some(match op {
        Binary::Add => "f_add",
        Binary::Subtract => "f_sub",
        Binary::Multiply => "f_mul",
        Binary::Divide => "f_div",
        Binary::Min => "f_min",
        Binary::Max => "f_max",
        Binary::Less => "f_less",
        Binary::LessEqual => "f_less_equal",
        Binary::Equal => "f_equal",
        Binary::NotEqual => "f_not_equal",
        Binary::And => "f_and",
        Binary::Or => "f_or",
        Binary::Remainder | Binary::Power | Binary::Hypot => return None,
    })
}
