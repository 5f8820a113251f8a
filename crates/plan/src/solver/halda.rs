//! The optimisation model of distilp (HALDA of prima.cpp, as distilp 0.1.6 states it), for
//! comparison: same variables, same constraints, same constants. Its cost model is not ours:
//! docs/planner.md says where the two differ and which is nearer to the truth.
//!
//! Layers go around a ring of devices k times, w layers per device and round, n of them on its GPU.
//! For each divisor k of L the integer program of `solver/halda_p_solver.py` is solved; the least
//! objective wins.

use good_lp::{
    Expression, ProblemVariables, Solution, SolverModel, Variable, constraint, variable, variables,
};

use super::milp::finish;
use super::program::program as integer_program;
use crate::Error;

/// A Mac with Metal as distilp profiles it (its set M2; the reference profiles have no other).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HaldaDevice {
    /// Operations a second of the processor for the model's quantisation.
    pub cpu_flops: f64,
    /// The same of the GPU.
    pub gpu_flops: f64,
    /// Bytes a second into the processor's registers.
    pub cpu_bytes: f64,
    /// The same for the GPU.
    pub gpu_bytes: f64,
    /// Seconds to copy a token's keys and values, processor.
    pub cpu_kv_copy: f64,
    /// The same, GPU.
    pub gpu_kv_copy: f64,
    /// Seconds of communication per round.
    pub comm: f64,
    /// Bytes a second from disk.
    pub disk: f64,
    /// Bytes free for the GPU.
    pub memory: f64,
    /// Whether it holds embedding and output head.
    pub head: bool,
}

/// A model as distilp profiles it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HaldaModel {
    /// Number of layers.
    pub layers: u32,
    pub layer_bytes: f64,
    /// Bytes going in (distilp takes those of the activation).
    pub in_bytes: f64,
    /// Bytes coming out.
    pub out_bytes: f64,
    /// Rows of the embedding.
    pub vocab: f64,
    /// Operations of a layer for one token.
    pub layer_flops: f64,
    /// Operations of the output head.
    pub head_flops: f64,
    /// Keys and values per token and layer.
    pub cached: f64,
    /// Tokens in the cache.
    pub tokens: f64,
}

/// The answer for one k.
#[derive(Clone, Debug, PartialEq)]
pub struct HaldaSolution {
    /// Rounds.
    pub k: u32,
    /// Layers per round and device.
    pub w: Vec<u32>,
    /// Layers on the GPU, among those of `w`.
    pub n: Vec<u32>,
    /// Seconds per token, as distilp counts them.
    pub objective: f64,
}

/// b' of distilp: a layer with 15 % for the program and its cache with scales, in whole bytes.
pub fn padded_layer(model: &HaldaModel, cache_bytes: f64) -> f64 {
    let cache = (1.0 + 2.0 / 64.0) * cache_bytes * model.cached * model.tokens;
    (1.15 * model.layer_bytes + cache).floor()
}

/// The best answer over all divisors k of L except L. `cache_bytes` is 0.5, 1 or 2 per value.
///
/// # Errors
/// [`Error::Program`] when no k has an answer: with the last one's reason.
pub fn solve(
    devices: &[HaldaDevice],
    model: &HaldaModel,
    cache_bytes: f64,
) -> Result<HaldaSolution, Error> {
    let divisors = (1..model.layers).filter(|k| model.layers.is_multiple_of(*k));
    let mut best: Option<HaldaSolution> = None;
    let mut last = None;
    for k in divisors {
        match solve_k(devices, model, cache_bytes, k) {
            Ok(answer) if best.as_ref().is_none_or(|b| answer.objective < b.objective) => {
                best = Some(answer);
            }
            Ok(_) => {}
            Err(error) => last = Some(error),
        }
    }
    let none = Error::Program {
        rows: 0,
        columns: 0,
        reason: "no number of rounds".to_owned(),
    };
    best.ok_or_else(|| last.unwrap_or(none))
}

/// Variables of a device.
#[derive(Clone, Copy, Debug)]
struct Columns {
    w: Variable,
    n: Variable,
    /// Overflow of the processor's memory, in layers.
    s: Variable,
    /// Overflow of the GPU's.
    t: Variable,
    /// Stall on the disk.
    z: Variable,
}

impl Columns {
    fn new(vars: &mut ProblemVariables, window: f64) -> Self {
        let layers = |low: f64| variable().integer().min(low).max(window);
        Self {
            w: vars.add(layers(1.0)),
            n: vars.add(layers(0.0)),
            s: vars.add(layers(0.0)),
            t: vars.add(layers(0.0)),
            z: vars.add(variable().min(0)),
        }
    }
}

/// The answer for one k, a divisor of L.
///
/// # Errors
/// [`Error::Program`] when there is none.
pub fn solve_k(
    devices: &[HaldaDevice],
    model: &HaldaModel,
    cache_bytes: f64,
    k: u32,
) -> Result<HaldaSolution, Error> {
    let window = f64::from(model.layers / k);
    let padded = padded_layer(model, cache_bytes);
    let mut vars = variables!();
    let cycle = vars.add(variable().min(0));
    let columns: Vec<Columns> = devices
        .iter()
        .map(|_| Columns::new(&mut vars, window))
        .collect();
    let busy: Vec<Expression> = devices
        .iter()
        .zip(&columns)
        .map(|(device, c)| busy(device, model, padded, c))
        .collect();
    let comm: f64 = devices.iter().map(|device| device.comm).sum();
    let sum: Expression = busy.iter().cloned().sum();
    // Each round's time has its communication in it; the sum of one round is counted once.
    let objective = f64::from(k - 1) * cycle + sum - comm + comm + head_constant(devices, model);
    let mut program = integer_program(vars.minimise(objective.clone()), 10.0);
    let total: Expression = columns.iter().map(|c| Expression::from(c.w)).sum();
    program = program.with(constraint!(total == window));
    for ((device, c), busy) in devices.iter().zip(&columns).zip(busy) {
        let head = f64::from(u8::from(device.head));
        let io = (model.in_bytes / model.vocab + model.out_bytes) * head;
        let read = padded / device.disk;
        program = program.with(constraint!(c.n <= c.w));
        let room = (device.memory - io) / padded;
        program = program.with(constraint!(c.w - c.s <= room));
        let room = (device.memory - model.out_bytes * head) / padded;
        program = program.with(constraint!(c.n - c.t <= room));
        program = program.with(constraint!(cycle >= busy.clone() + c.z));
        program = program.with(constraint!(c.z >= read * c.w - cycle + busy));
    }
    let solution = finish(program, 1 + 5 * devices.len(), 1 + 5 * devices.len())?;
    let read = |v: Variable| solution.value(v).round() as u32;
    Ok(HaldaSolution {
        k,
        w: columns.iter().map(|c| read(c.w)).collect(),
        n: columns.iter().map(|c| read(c.n)).collect(),
        objective: solution.eval(objective),
    })
}

/// B of distilp without its constant part: compute, overflow read from disk, communication.
fn busy(device: &HaldaDevice, model: &HaldaModel, padded: f64, c: &Columns) -> Expression {
    let alpha =
        model.layer_flops / device.cpu_flops + device.cpu_kv_copy + padded / device.cpu_bytes;
    let gpu = model.layer_flops / device.gpu_flops + device.gpu_kv_copy + padded / device.gpu_bytes;
    let overflow = model.layer_bytes / device.disk;
    alpha * c.w + (gpu - alpha) * c.n + overflow * c.s + overflow * c.t + device.comm
}

/// kappa of distilp: the head on the processor of the first device that has it.
fn head_constant(devices: &[HaldaDevice], model: &HaldaModel) -> f64 {
    let Some(head) = devices.iter().find(|device| device.head) else {
        return 0.0;
    };
    let token = model.in_bytes / model.vocab;
    model.head_flops / head.cpu_flops
        + (token + model.out_bytes) / head.cpu_bytes
        + token / head.disk
        + model.out_bytes / head.disk
}
