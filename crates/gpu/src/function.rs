//! A user's WGSL function: parsed as its own module, checked, and written anew.
//!
//! The user's text is never mixed with ours: naga writes the compiled text from the checked module.
//! So the text cannot close our function, name our buffers or add an entry point.

use std::fmt::Write as _;

use naga::back::wgsl::{WriterFlags, write_string};
use naga::front::wgsl::parse_str;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{Block, Expression, Module, ScalarKind, Statement, Type, TypeInner};

use crate::Error;

/// Longest text in bytes, as of expressions.
const TEXT_BYTES_MAX: usize = 16 << 10;

pub(crate) const EXPRESSIONS_MAX: usize = 1000;

/// Deepest nesting of braces and brackets of any kind.
const DEPTH_MAX: usize = 100;

/// Most arguments: one for each column.
const ARGUMENTS_MAX: usize = 4;

/// Stack of the parsing and writing thread: a thousand nested calls of 4 KiB, and slack.
const STACK_BYTES: usize = 16 << 20;

const NAME: &str = "user_function";

paceline_base::named_enum! {
    /// Type of an argument or a result.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Scalar {
        /// A 32-bit float with the device's operations: results differ between devices.
        F32 = "f32",
        /// A signed integer of 32 bits.
        I32 = "i32",
        /// An unsigned integer of 32 bits.
        U32 = "u32",
    }
}

/// A checked function of one to four numbers that returns a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalarFunction {
    arguments: Vec<Scalar>,
    result: Scalar,
    text: String,
}

impl ScalarFunction {
    /// Checks a text: exactly one function of one to four arguments. Arguments and result are of
    /// type `f32`, `i32` or `u32`. Globals, entry points, overrides, arrays, loops and features of
    /// a device are refused. Values are numbers and vectors.
    pub fn parse(text: &str) -> Result<Self, Error> {
        bounded(text).map_err(refused)?;
        let text = text.to_owned();
        with_stack(move || check(&text))
    }

    /// Types of its arguments.
    pub fn arguments(&self) -> &[Scalar] {
        &self.arguments
    }

    /// Type of its result.
    pub const fn result(&self) -> Scalar {
        self.result
    }

    /// A kernel that computes the function for each row. Values are passed as words.
    pub(crate) fn kernel(&self) -> String {
        let mut bindings = String::new();
        let mut values = Vec::new();
        for (i, scalar) in self.arguments.iter().enumerate() {
            let name = scalar.name();
            // Writing to a string never fails.
            let _ = writeln!(
                bindings,
                "@group(0) @binding({}) var<storage, read> paceline_column_{i}: array<{name}>;",
                i + 3
            );
            values.push(format!("paceline_column_{i}[id.x]"));
        }
        format!(
            "{}
@group(0) @binding(0) var<storage, read> paceline_params: array<u32>;
@group(0) @binding(1) var<storage, read_write> paceline_done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> paceline_result: array<{}>;
{bindings}
@compute @workgroup_size(64)
fn function_of_user(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {{
    if id.x < paceline_params[0] {{
        paceline_result[id.x] = {NAME}({});
    }}
    if thread == 0u {{
        atomicAdd(&paceline_done[0], 1u);
    }}
}}
",
            self.text,
            self.result.name(),
            values.join(", ")
        )
    }
}

/// Runs a check on a thread of its own: the parser recurses, and a crash of it is a refusal.
pub(crate) fn with_stack<T: Send + 'static>(
    check: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, Error> {
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
    let started = thread.spawn(check);
    let thread = started.map_err(|error| refused(error.to_string()))?;
    let crashed = |_| Err("the parser has failed on it".to_owned());
    thread.join().unwrap_or_else(crashed).map_err(refused)
}

pub(crate) fn refused(reason: String) -> Error {
    Error::Function { reason }
}

/// Checks length and nesting before the parser sees the text.
pub(crate) fn bounded(text: &str) -> Result<(), String> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(format!(
            "{} bytes, expected at most {TEXT_BYTES_MAX}",
            text.len()
        ));
    }
    let (mut depth, mut deepest) = (0usize, 0);
    for c in text.chars() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    match deepest {
        ..=DEPTH_MAX => Ok(()),
        _ => Err(format!(
            "brackets nested {deepest} deep, expected at most {DEPTH_MAX}"
        )),
    }
}

fn check(text: &str) -> Result<ScalarFunction, String> {
    let mut module = parse_str(text).map_err(|error| one_line(&error.emit_to_string(text)))?;
    let (arguments, result) = signature(&module)?;
    for (_, of) in module.types.iter() {
        plain(of)?;
    }
    for (_, function) in module.functions.iter_mut() {
        loopless(&function.body)?;
        let expressions = function.expressions.len();
        if expressions > EXPRESSIONS_MAX {
            return Err(format!(
                "{expressions} operations, expected at most {EXPRESSIONS_MAX}"
            ));
        }
        let is_of_pictures = |it: &Expression| matches!(it, Expression::Derivative { .. });
        if function
            .expressions
            .iter()
            .any(|(_, it)| is_of_pictures(it))
        {
            return Err("derivatives are of pictures alone".to_owned());
        }
        function.name = Some(NAME.to_owned());
    }
    let info = valid(&module, text)?;
    let text = write_string(&module, &info, WriterFlags::empty());
    let text = text.map_err(|error| error.to_string())?;
    if !text.contains(&format!("fn {NAME}(")) {
        return Err("its name cannot be changed".to_owned());
    }
    Ok(ScalarFunction {
        arguments,
        result,
        text,
    })
}

pub(crate) fn valid(module: &Module, text: &str) -> Result<ModuleInfo, String> {
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::empty());
    let checked = validator.validate(module);
    checked.map_err(|error| one_line(&error.emit_to_string(text)))
}

/// Types of the arguments and the result; the module must contain the one function only.
fn signature(module: &Module) -> Result<(Vec<Scalar>, Scalar), String> {
    let none = [
        ("entry points", module.entry_points.len()),
        ("variables", module.global_variables.len()),
        ("constants", module.constants.len()),
        ("overrides", module.overrides.len()),
    ];
    if let Some((what, got)) = none.into_iter().find(|(_, got)| *got > 0) {
        return Err(format!("{got} {what} beside the function, expected none"));
    }
    let mut functions = module.functions.iter();
    let (Some((_, function)), None) = (functions.next(), functions.next()) else {
        let got = module.functions.len();
        return Err(format!("{got} functions, expected exactly one"));
    };
    let arguments = function.arguments.iter();
    let arguments = arguments.map(|argument| scalar(&module.types[argument.ty]));
    let arguments: Vec<Scalar> = arguments.collect::<Result<_, _>>()?;
    if !(1..=ARGUMENTS_MAX).contains(&arguments.len()) {
        let got = arguments.len();
        return Err(format!("{got} arguments, expected 1 to {ARGUMENTS_MAX}"));
    }
    let result = function.result.as_ref().ok_or("it gives no result")?;
    Ok((arguments, scalar(&module.types[result.ty])?))
}

fn scalar(of: &Type) -> Result<Scalar, String> {
    let known = match &of.inner {
        TypeInner::Scalar(scalar) if scalar.width == 4 => match scalar.kind {
            ScalarKind::Float => Some(Scalar::F32),
            ScalarKind::Sint => Some(Scalar::I32),
            ScalarKind::Uint => Some(Scalar::U32),
            _ => None,
        },
        _ => None,
    };
    known.ok_or_else(|| "arguments and result have the types f32, i32 or u32".to_owned())
}

/// Whether values of this type are numbers, vectors or matrices.
fn plain(of: &Type) -> Result<(), String> {
    match of.inner {
        TypeInner::Scalar(_) | TypeInner::Vector { .. } | TypeInner::Matrix { .. } => Ok(()),
        _ => Err("arrays, structures and pointers are not allowed".to_owned()),
    }
}

/// Rejects constructs that may not terminate. A hanging device is reset, and all of its work is
/// lost.
fn loopless(block: &Block) -> Result<(), String> {
    for statement in block.iter() {
        match statement {
            Statement::Emit(_) | Statement::Return { .. } | Statement::Store { .. } => {}
            Statement::Break => {}
            Statement::Block(inner) => loopless(inner)?,
            Statement::If { accept, reject, .. } => {
                loopless(accept)?;
                loopless(reject)?;
            }
            Statement::Switch { cases, .. } => {
                cases.iter().try_for_each(|case| loopless(&case.body))?;
            }
            Statement::Loop { .. } => return Err("loops are not allowed".to_owned()),
            _ => return Err("it does more than compute".to_owned()),
        }
    }
    Ok(())
}

/// Joins the lines of a message.
pub(crate) fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join(" ")
}
