//! From text to steps: recursive descent, bounded in depth, checking types on the way.

use super::{
    Binary, COLUMNS, DEPTH_MAX, ExprError, ExprErrorKind, ExprStep, STEPS_MAX, TEXT_BYTES_MAX,
    Type, Unary,
};

/// Functions of one number.
const UNARY: [(&str, Unary); 13] = [
    ("abs", Unary::Abs),
    ("sqrt", Unary::Sqrt),
    ("floor", Unary::Floor),
    ("ceil", Unary::Ceil),
    ("trunc", Unary::Trunc),
    ("round", Unary::Round),
    ("exp", Unary::Exp),
    ("log", Unary::Log),
    ("sin", Unary::Sin),
    ("cos", Unary::Cos),
    ("tan", Unary::Tan),
    ("atan", Unary::Atan),
    ("tanh", Unary::Tanh),
];

/// Functions of two numbers.
const BINARY: [(&str, Binary); 4] = [
    ("min", Binary::Min),
    ("max", Binary::Max),
    ("pow", Binary::Power),
    ("hypot", Binary::Hypot),
];

const CONSTANTS: [(&str, f64, Type); 5] = [
    ("pi", std::f64::consts::PI, Type::Number),
    ("inf", f64::INFINITY, Type::Number),
    ("nan", f64::NAN, Type::Number),
    ("true", 1.0, Type::Truth),
    ("false", 0.0, Type::Truth),
];

/// Operators by precedence, loosest first; whether the sides are swapped. Longer operators precede
/// their prefixes.
const LEVELS: [&[(&str, Binary, bool)]; 6] = [
    &[("||", Binary::Or, false)],
    &[("&&", Binary::And, false)],
    &[
        ("==", Binary::Equal, false),
        ("!=", Binary::NotEqual, false),
    ],
    &[
        ("<=", Binary::LessEqual, false),
        (">=", Binary::LessEqual, true),
        ("<", Binary::Less, false),
        (">", Binary::Less, true),
    ],
    &[("+", Binary::Add, false), ("-", Binary::Subtract, false)],
    &[
        ("*", Binary::Multiply, false),
        ("/", Binary::Divide, false),
        ("%", Binary::Remainder, false),
    ],
];

/// A value: the step that computes it, its type, and its position in the text.
#[derive(Clone, Copy)]
struct Operand {
    step: usize,
    of: Type,
    at: usize,
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    inputs: usize,
    depth: usize,
    steps: Vec<ExprStep>,
}

pub(super) fn parse(text: &str, inputs: usize) -> Result<Vec<ExprStep>, ExprError> {
    let mut parser = Parser {
        text,
        at: 0,
        inputs,
        depth: 0,
        steps: Vec::new(),
    };
    if text.len() > TEXT_BYTES_MAX {
        return Err(parser.bound("bytes", TEXT_BYTES_MAX));
    }
    let result = parser.level(0)?;
    parser.spaces();
    if parser.at < text.len() {
        return Err(parser.wrong(ExprErrorKind::Expected("an operator or the end")));
    }
    // A step may be used by name only once, so the last one is the result.
    debug_assert_eq!(result.step + 1, parser.steps.len());
    Ok(parser.steps)
}

impl Parser<'_> {
    fn wrong(&self, problem: ExprErrorKind) -> ExprError {
        self.wrong_at(self.at, problem)
    }

    fn wrong_at(&self, at: usize, problem: ExprErrorKind) -> ExprError {
        let at = self.text[..at].chars().count() + 1;
        ExprError { at, problem }
    }

    fn bound(&self, what: &'static str, max: usize) -> ExprError {
        self.wrong(ExprErrorKind::Bound { what, max })
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn spaces(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    fn take(&mut self, token: &str) -> bool {
        self.spaces();
        let there = self.rest().starts_with(token);
        self.at += if there { token.len() } else { 0 };
        there
    }

    fn need(&mut self, token: &'static str) -> Result<(), ExprError> {
        match self.take(token) {
            true => Ok(()),
            false => Err(self.wrong(ExprErrorKind::Expected(token))),
        }
    }

    fn push(&mut self, step: ExprStep, of: Type, at: usize) -> Result<Operand, ExprError> {
        if self.steps.len() == STEPS_MAX {
            return Err(self.bound("operations", STEPS_MAX));
        }
        self.steps.push(step);
        let step = self.steps.len() - 1;
        Ok(Operand { step, of, at })
    }

    fn expect(&self, operand: Operand, expected: Type) -> Result<usize, ExprError> {
        let got = operand.of;
        match got == expected {
            true => Ok(operand.step),
            false => Err(self.wrong_at(operand.at, ExprErrorKind::Type { expected, got })),
        }
    }

    fn binary(&mut self, op: Binary, a: Operand, b: Operand) -> Result<Operand, ExprError> {
        let (takes, gives) = match op {
            Binary::And | Binary::Or => (Type::Truth, Type::Truth),
            Binary::Equal | Binary::NotEqual => (a.of, Type::Truth),
            Binary::Less | Binary::LessEqual => (Type::Number, Type::Truth),
            _ => (Type::Number, Type::Number),
        };
        let (left, right) = (self.expect(a, takes)?, self.expect(b, takes)?);
        self.push(ExprStep::Binary(op, left, right), gives, a.at)
    }

    fn level(&mut self, level: usize) -> Result<Operand, ExprError> {
        let Some(operators) = LEVELS.get(level) else {
            return self.prefix();
        };
        let mut left = self.level(level + 1)?;
        while let Some((op, swapped)) = self.operator(operators) {
            let right = self.level(level + 1)?;
            let (a, b) = if swapped {
                (right, left)
            } else {
                (left, right)
            };
            let at = left.at;
            left = Operand {
                at,
                ..self.binary(op, a, b)?
            };
        }
        Ok(left)
    }

    fn operator(&mut self, operators: &[(&str, Binary, bool)]) -> Option<(Binary, bool)> {
        let found = operators.iter().find(|(token, ..)| self.take(token))?;
        Some((found.1, found.2))
    }

    /// A sign or `!`, then a power. Every way down passes here.
    fn prefix(&mut self) -> Result<Operand, ExprError> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.bound("levels of nesting", DEPTH_MAX));
        }
        self.spaces();
        let at = self.at;
        let result = if self.take("-") {
            let of = self.prefix()?;
            let step = self.expect(of, Type::Number)?;
            self.push(ExprStep::Unary(Unary::Negate, step), Type::Number, at)
        } else if self.take("+") {
            self.prefix()
        } else if self.take("!") {
            let of = self.prefix()?;
            let step = self.expect(of, Type::Truth)?;
            self.push(ExprStep::Unary(Unary::Not, step), Type::Truth, at)
        } else {
            self.power()
        };
        self.depth -= 1;
        result
    }

    /// `a ^ b`: to the right, and tighter than a sign before it.
    fn power(&mut self) -> Result<Operand, ExprError> {
        let base = self.atom()?;
        if !self.take("^") {
            return Ok(base);
        }
        let exponent = self.prefix()?;
        self.binary(Binary::Power, base, exponent)
    }

    fn atom(&mut self) -> Result<Operand, ExprError> {
        self.spaces();
        let at = self.at;
        if self.take("(") {
            let inner = self.level(0)?;
            self.need(")")?;
            return Ok(Operand { at, ..inner });
        }
        match self.rest().chars().next() {
            Some(c) if c.is_ascii_digit() || c == '.' => self.number(),
            Some(c) if c.is_ascii_alphabetic() || c == '_' => self.name(),
            _ => Err(self.wrong(ExprErrorKind::Expected("a number, a name or ("))),
        }
    }

    fn number(&mut self) -> Result<Operand, ExprError> {
        let (at, bytes) = (self.at, self.rest().as_bytes());
        let digits = |from: usize| {
            let digits = bytes[from..].iter().take_while(|c| c.is_ascii_digit());
            from + digits.count()
        };
        let mut end = digits(0);
        if bytes.get(end) == Some(&b'.') {
            end = digits(end + 1);
        }
        if matches!(bytes.get(end), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
            end = digits(end + 1 + sign);
        }
        let value = self.rest()[..end].parse();
        let value = value.map_err(|_| self.wrong(ExprErrorKind::Expected("a number")))?;
        self.at += end;
        if self
            .rest()
            .starts_with(|c: char| c.is_alphanumeric() || c == '_' || c == '.')
        {
            return Err(self.wrong(ExprErrorKind::Expected("an operator")));
        }
        self.push(ExprStep::Constant(value), Type::Number, at)
    }

    fn name(&mut self) -> Result<Operand, ExprError> {
        let (at, inputs) = (self.at, self.inputs);
        let is_other = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
        let end = self.rest().find(is_other).unwrap_or(self.rest().len());
        let name = self.rest()[..end].to_owned();
        self.at += end;
        if let Some(number) = COLUMNS.iter().position(|column| *column == name) {
            if number >= inputs {
                let (name, number) = (COLUMNS[number], number + 1);
                let problem = ExprErrorKind::Input {
                    name,
                    number,
                    inputs,
                };
                return Err(self.wrong_at(at, problem));
            }
            return self.push(ExprStep::Column(number), Type::Number, at);
        }
        if name == "i" {
            return self.push(ExprStep::Row, Type::Number, at);
        }
        if let Some((_, value, of)) = CONSTANTS.iter().find(|constant| constant.0 == name) {
            return self.push(ExprStep::Constant(*value), *of, at);
        }
        self.call(&name, at)
    }

    fn call(&mut self, name: &str, at: usize) -> Result<Operand, ExprError> {
        let unary = UNARY.iter().find(|row| row.0 == name);
        let binary = BINARY.iter().find(|row| row.0 == name);
        let expected = match (unary, binary) {
            (Some(_), _) => 1,
            (_, Some(_)) => 2,
            _ if name == "select" => 3,
            _ => return Err(self.wrong_at(at, ExprErrorKind::Name(name.to_owned()))),
        };
        self.need("(")?;
        let mut arguments = vec![self.level(0)?];
        while self.take(",") {
            arguments.push(self.level(0)?);
        }
        self.need(")")?;
        match (arguments[..].as_ref(), unary, binary) {
            ([a], Some((_, op)), _) => {
                let step = self.expect(*a, Type::Number)?;
                self.push(ExprStep::Unary(*op, step), Type::Number, at)
            }
            ([a, b], _, Some((_, op))) => self.binary(*op, *a, *b),
            ([condition, then, other], None, None) => {
                let condition = self.expect(*condition, Type::Truth)?;
                let (a, b) = (then.step, self.expect(*other, then.of)?);
                self.push(ExprStep::Select(condition, a, b), then.of, at)
            }
            _ => {
                let (name, got) = (name.to_owned(), arguments.len());
                let problem = ExprErrorKind::Arguments {
                    name,
                    expected,
                    got,
                };
                Err(self.wrong_at(at, problem))
            }
        }
    }
}
