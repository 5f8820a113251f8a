//! A user's WGSL functions over blocks of rows: loops, local arrays, and reads of rows nearby.
//!
//! ```wgsl
//! fn f(row: i32, column: i32) -> f32 {
//!     return 0.5 * (x(row - 1, column) + x(row + 1, column));
//! }
//! ```
//! `f` computes a value of each row and column of `x`. With the argument `row` alone it computes a
//! whole row: a float, a vector or an array. `x`, `y`, `z` and `w` read the inputs by numbers of
//! the whole arrays; beyond an edge they give the value at the edge. `rows()` and `columns()` are
//! those of `x`. So a function does not depend on the cut into blocks.
//!
//! Nothing hangs a device: loops share a budget of iterations, and functions one of calls. A read
//! beyond the loaded rows is reported and never answered. The text is checked and written anew as
//! by [`function`](crate::ScalarFunction).

#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use naga::back::wgsl::{WriterFlags, write_string};
use naga::front::wgsl::parse_str;
use naga::{
    ArraySize, Block, Expression, Function, Handle, Module, ScalarKind, Statement, Type, TypeInner,
    VectorSize,
};

use crate::Error;
use crate::device::{Gpu, Kernel};
use crate::function::{EXPRESSIONS_MAX, bounded, one_line, refused, valid, with_stack};
use crate::kernels::{KernelRun, ROWS_EACH, words};

/// Iterations of all loops of a call. A million of 10 ns are 10 ms; drivers reset a card after 2 s.
const ITERATIONS_MAX: u32 = 1 << 20;

/// The same on software: llvmpipe ends loops without a word after 65,535 iterations of all lanes of
/// a vector. So loops of lanes that differ much can still end early there.
const ITERATIONS_MAX_OF_SOFTWARE: u32 = 60_000;

/// Calls of functions that a call may lead to without loops; compilers write each one out.
const CALLS_MAX: u64 = 256;

/// Bytes of a function's local variables: beyond, cards keep them in memory.
const LOCAL_BYTES_MAX: u64 = 4096;

/// Values of a row that a function returns.
const RESULTS_MAX: u32 = 64;

/// Most inputs: a buffer each.
const INPUTS_MAX: usize = 4;

/// Words before the values of a result: the farthest row beyond the loaded ones, and whether loops
/// ran out of iterations.
const HEAD_WORDS: u64 = 2;

/// Names of the functions that read inputs.
const NAMES: [&str; INPUTS_MAX] = ["x", "y", "z", "w"];

/// Begins the names that the compiled text adds.
const OWN: &str = "paceline_";

/// A checked function over blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockFunction {
    columns: Vec<u32>,
    results: BlockResults,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockResults {
    /// A value of a row and column.
    Value,
    Float,
    /// A row as a vector or an array of this many floats.
    Many(u32),
}

/// The rows of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// First row that is computed.
    pub first: u64,
    /// Number of rows that are computed.
    pub count: u64,
    /// First row of the inputs' values; not above `first`.
    pub loaded_first: u64,
    /// Number of rows of the inputs' values.
    pub loaded: u64,
    /// Rows of the whole inputs.
    pub rows: u64,
}

impl BlockFunction {
    /// Checks a text for inputs of these numbers of columns, one to four inputs. It has a function
    /// `f` and any functions and constants that this uses.
    ///
    /// # Errors
    /// [`Error::Function`] with the reason. Refused are variables of the module, entry points,
    /// pointers, atomics and barriers. So are over 4 KiB of local variables, 256 calls, or 1,000
    /// operations.
    pub fn parse(text: &str, columns: &[u32]) -> Result<Self, Error> {
        bounded(text).map_err(refused)?;
        if text.contains(OWN) {
            return Err(refused(format!("names with {OWN} are taken")));
        }
        if !(1..=INPUTS_MAX).contains(&columns.len()) || columns.contains(&0) {
            return Err(refused(format!(
                "inputs of {columns:?} columns, expected 1 to {INPUTS_MAX} inputs with columns"
            )));
        }
        let (text, columns) = (text.to_owned(), columns.to_vec());
        with_stack(move || check(&text, columns))
    }

    /// Columns of the result.
    pub fn result_columns(&self) -> u32 {
        match self.results {
            BlockResults::Value => self.columns[0],
            BlockResults::Float => 1,
            BlockResults::Many(count) => count,
        }
    }

    fn calls_per_row(&self) -> u64 {
        match self.results {
            BlockResults::Value => u64::from(self.columns[0]),
            BlockResults::Float | BlockResults::Many(_) => 1,
        }
    }

    fn kernel(&self) -> String {
        let columns = self.columns[0];
        let row = "paceline_params[4] + at";
        let (call, store) = match self.results {
            BlockResults::Value => (
                format!("f({row} / {columns}, at % {columns})"),
                "paceline_result.values[at] = value;".to_owned(),
            ),
            BlockResults::Float => (
                format!("f({row})"),
                "paceline_result.values[at] = value;".to_owned(),
            ),
            BlockResults::Many(count) => (
                format!("f({row})"),
                format!(
                    "var all = value;\nfor (var k = 0; k < {count}; k += 1) {{ \
                     paceline_result.values[at * {count} + k] = all[k]; }}"
                ),
            ),
        };
        // An input that the function does not read is bound all the same.
        let bound = |name: &&str| format!(" && arrayLength(&paceline_{name}) > 0u");
        let bound: String = NAMES[..self.columns.len()].iter().map(bound).collect();
        format!(
            "{}
struct paceline_Result {{ past: atomic<u32>, spent: atomic<u32>, values: array<f32> }}
@group(0) @binding(1) var<storage, read_write> paceline_done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> paceline_result: paceline_Result;
@compute @workgroup_size(64)
fn block_of_user(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {{
    let at = i32(id.x);
    if at < paceline_params[0]{bound} {{
        paceline_left = u32(paceline_params[5]);
        let value = {call};
        {store}
        if paceline_past > 0u {{ atomicMax(&paceline_result.past, paceline_past); }}
        if paceline_left == 0u {{ atomicMax(&paceline_result.spent, 1u); }}
    }}
    if thread == 0u {{ atomicAdd(&paceline_done[0], 1u); }}
}}
",
            self.text
        )
    }
}

/// Declarations that the user's text stands on. They come behind it, so that lines in messages are
/// the user's.
fn declarations(columns: &[u32]) -> String {
    let mut text = format!(
        "
@group(0) @binding(0) var<storage, read> paceline_params: array<i32>;
var<private> paceline_left: u32;
var<private> paceline_past: u32 = 0u;
fn rows() -> i32 {{ return paceline_params[1]; }}
fn columns() -> i32 {{ return {}; }}
fn paceline_place(row: i32, column: i32, columns: i32) -> i32 {{
    let whole = clamp(row, 0, paceline_params[1] - 1);
    let near = whole - paceline_params[2];
    if near < 0 || near >= paceline_params[3] {{
        paceline_past = u32(whole) + 1u;
        return 0;
    }}
    return near * columns + clamp(column, 0, columns - 1);
}}
",
        columns[0]
    );
    for (i, (name, columns)) in NAMES.iter().zip(columns).enumerate() {
        // Writing to a string never fails.
        let _ = writeln!(
            text,
            "@group(0) @binding({}) var<storage, read> paceline_{name}: array<f32>;
fn {name}(row: i32, column: i32) -> f32 {{
    return paceline_{name}[paceline_place(row, column, {columns})];
}}",
            i + 3
        );
    }
    text
}

fn check(text: &str, columns: Vec<u32>) -> Result<BlockFunction, String> {
    let whole = format!("{text}{}", declarations(&columns));
    let module = parse_str(&whole).map_err(|error| one_line(&error.emit_to_string(&whole)))?;
    let globals = module.global_variables.len();
    let own = 3 + columns.len();
    let none = [
        ("entry points", module.entry_points.len()),
        ("variables", globals.saturating_sub(own)),
        ("overrides", module.overrides.len()),
    ];
    if let Some((what, got)) = none.into_iter().find(|(_, got)| *got > 0) {
        return Err(format!("{got} {what} beside the functions, expected none"));
    }
    if globals < own {
        return Err("its last comment has no end".to_owned());
    }
    let loops = contents(&module)?;
    let results = results(&module)?;
    let info = valid(&module, &whole)?;
    let written = write_string(&module, &info, WriterFlags::empty());
    let written = written.map_err(|error| error.to_string())?;
    if !written.contains("fn f(") || written.matches("loop {").count() != loops {
        return Err("its names cannot be kept".to_owned());
    }
    // The budget: a loop without iterations left ends, and the call is reported.
    let text = written.replace(
        "loop {",
        "loop { if paceline_left == 0u { break; } paceline_left -= 1u;",
    );
    Ok(BlockFunction {
        columns,
        results,
        text,
    })
}

/// Whether a function is one of [`declarations`].
fn is_own(function: &Function) -> bool {
    let name = function.name.as_deref().unwrap_or_default();
    name.starts_with(OWN) || NAMES.contains(&name) || ["rows", "columns"].contains(&name)
}

/// Checks what the user's functions do; the number of their loops.
fn contents(module: &Module) -> Result<usize, String> {
    let mut calls: Vec<(Handle<Function>, u64)> = Vec::new();
    let mut loops = 0;
    for (handle, function) in module.functions.iter() {
        let mut count = 1;
        let mut walk = Walk {
            calls: &calls,
            count: &mut count,
            loops: &mut loops,
        };
        walk.block(&function.body)?;
        if count > CALLS_MAX {
            return Err(format!(
                "a call leads to {count} calls, expected at most {CALLS_MAX}"
            ));
        }
        calls.push((handle, count));
        if !is_own(function) {
            own_memory(module, function)?;
        }
    }
    Ok(loops)
}

/// Whether a function of the user reads and writes nothing but its arguments and variables.
fn own_memory(module: &Module, function: &Function) -> Result<(), String> {
    let expressions = function.expressions.len();
    if expressions > EXPRESSIONS_MAX {
        return Err(format!(
            "{expressions} operations, expected at most {EXPRESSIONS_MAX}"
        ));
    }
    for (_, expression) in function.expressions.iter() {
        match expression {
            Expression::GlobalVariable(_) => return Err("it names a buffer".to_owned()),
            Expression::Derivative { .. } => {
                return Err("derivatives are of pictures alone".to_owned());
            }
            _ => {}
        }
    }
    let locals = function.local_variables.iter();
    let sizes = locals.map(|(_, local)| {
        let inner = &module.types[local.ty].inner;
        u64::from(inner.size(module.to_ctx()))
    });
    let bytes: u64 = sizes.sum();
    if bytes > LOCAL_BYTES_MAX {
        return Err(format!(
            "{bytes} bytes of local variables, expected at most {LOCAL_BYTES_MAX}"
        ));
    }
    for argument in &function.arguments {
        if matches!(module.types[argument.ty].inner, TypeInner::Pointer { .. }) {
            return Err("pointers are not allowed".to_owned());
        }
    }
    Ok(())
}

/// Counts of a function's statements.
struct Walk<'a> {
    /// Calls that each function before leads to; callees come before callers.
    calls: &'a [(Handle<Function>, u64)],
    count: &'a mut u64,
    loops: &'a mut usize,
}

impl Walk<'_> {
    fn block(&mut self, block: &Block) -> Result<(), String> {
        block
            .iter()
            .try_for_each(|statement| self.statement(statement))
    }

    fn statement(&mut self, statement: &Statement) -> Result<(), String> {
        match statement {
            Statement::Emit(_)
            | Statement::Return { .. }
            | Statement::Store { .. }
            | Statement::Break
            | Statement::Continue => Ok(()),
            Statement::Block(inner) => self.block(inner),
            Statement::If { accept, reject, .. } => {
                self.block(accept)?;
                self.block(reject)
            }
            Statement::Switch { cases, .. } => {
                cases.iter().try_for_each(|case| self.block(&case.body))
            }
            Statement::Loop {
                body, continuing, ..
            } => {
                *self.loops += 1;
                self.block(body)?;
                self.block(continuing)
            }
            Statement::Call { function, .. } => {
                let known = self.calls.iter().find(|(handle, _)| handle == function);
                let (_, calls) = known.ok_or("it calls itself")?;
                *self.count = self.count.saturating_add(*calls);
                Ok(())
            }
            _ => Err("it does more than compute".to_owned()),
        }
    }
}

/// Whether it is a number of 32 bits.
fn is_scalar(inner: &TypeInner, kind: ScalarKind) -> bool {
    matches!(inner, TypeInner::Scalar(it) if it.kind == kind && it.width == 4)
}

fn results(module: &Module) -> Result<BlockResults, String> {
    const EXPECTED: &str = "expected fn f(row: i32) -> f32, a vector or array<f32, N>, or \
                            fn f(row: i32, column: i32) -> f32";
    let mut functions = module.functions.iter();
    let found = functions.find(|(_, function)| function.name.as_deref() == Some("f"));
    let (_, function) = found.ok_or_else(|| format!("no function f: {EXPECTED}"))?;
    let of = |handle: Handle<Type>| &module.types[handle].inner;
    let mut arguments = function.arguments.iter().map(|argument| of(argument.ty));
    let count = function.arguments.len();
    let returned = function.result.as_ref().map(|result| of(result.ty));
    let results = match (count, returned) {
        _ if !arguments.all(|inner| is_scalar(inner, ScalarKind::Sint)) => None,
        (2, Some(inner)) if is_scalar(inner, ScalarKind::Float) => Some(BlockResults::Value),
        (1, Some(inner)) if is_scalar(inner, ScalarKind::Float) => Some(BlockResults::Float),
        (1, Some(TypeInner::Vector { size, scalar })) if scalar.kind == ScalarKind::Float => {
            Some(BlockResults::Many(match size {
                VectorSize::Bi => 2,
                VectorSize::Tri => 3,
                VectorSize::Quad => 4,
            }))
        }
        (
            1,
            Some(TypeInner::Array {
                base,
                size: ArraySize::Constant(count),
                ..
            }),
        ) if is_scalar(of(*base), ScalarKind::Float) => Some(BlockResults::Many(count.get())),
        _ => None,
    };
    match results.ok_or_else(|| EXPECTED.to_owned())? {
        BlockResults::Many(count) if count > RESULTS_MAX => Err(format!(
            "a row of {count} values, expected at most {RESULTS_MAX}"
        )),
        results => Ok(results),
    }
}

impl Gpu {
    /// A user's function of the rows of a block: `(range.count, result_columns)` values. `inputs`
    /// are the loaded rows of each.
    ///
    /// # Errors
    /// As of [`Gpu::values`]. [`Error::Halo`] if it reads beyond the loaded rows;
    /// [`Error::Iterations`] if its loops do not end in time.
    ///
    /// # Panics
    /// If the inputs have other sizes than `range` says.
    pub fn block(
        &self,
        function: &BlockFunction,
        inputs: &[&[f32]],
        range: BlockRange,
    ) -> Result<Vec<f32>, Error> {
        for (values, columns) in inputs.iter().zip(&function.columns) {
            let expected = range.loaded * u64::from(*columns);
            assert_eq!(values.len() as u64, expected, "values of an input");
        }
        let _turn = self.turn();
        let calls = range.count * function.calls_per_row();
        let values = range.count * u64::from(function.result_columns());
        let calls_max = ROWS_EACH * u64::from(self.groups_max());
        if calls > calls_max {
            return Err(Error::Bytes {
                label: self.label().to_owned(),
                bytes: 4 * calls,
                most: 4 * calls_max,
            });
        }
        let kernel = function.kernel();
        let numbers = [calls, range.rows, range.loaded_first, range.loaded];
        let mut params = numbers.map(|number| number as u32).to_vec();
        let most = match self.is_software() {
            true => ITERATIONS_MAX_OF_SOFTWARE,
            false => ITERATIONS_MAX,
        };
        params.extend([range.first as u32, most]);
        let run = KernelRun {
            kernel: Kernel {
                entry: "block_of_user",
                text: &[&kernel],
            },
            params: &params,
            groups: calls.div_ceil(ROWS_EACH),
            result_bytes: 4 * (HEAD_WORDS + values),
        };
        let bytes = |values: &&[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let buffers: Vec<Vec<u8>> = inputs.iter().map(bytes).collect();
        let buffers: Result<Vec<_>, Error> = buffers.iter().map(|it| self.filled(it)).collect();
        let buffers = buffers?;
        let result = words(&self.job(&run, &buffers.iter().collect::<Vec<_>>())?);
        let (past, spent) = (result[0], result[1]);
        if past > 0 {
            return Err(Error::Halo {
                row: u64::from(past) - 1,
                first: range.loaded_first,
                end: range.loaded_first + range.loaded,
            });
        }
        if spent > 0 {
            return Err(Error::Iterations { most });
        }
        let values = result[HEAD_WORDS as usize..].iter();
        Ok(values.map(|word| f32::from_bits(*word)).collect())
    }
}
