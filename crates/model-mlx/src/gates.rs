//! The function on gates, times up: as operations, or compiled into one kernel.
//!
//! MLX runs each operation as a kernel of its own. Its compiler makes one of a chain of elementwise
//! ones, which mlx-lm uses for these same functions (`mlx_lm/models/activations.py`). Whether that
//! is faster depends on the device, so both are timed when a model is loaded. The compiled form is
//! used only if it is faster and gives the same bits on a sample. Machines of one class may choose
//! differently, and must not differ in their answers.
//!
//! A whole decode step is not compiled. Its graph depends on pages and positions, and is cut where
//! ranks exchange sums; MLX would trace and compile it anew whenever a shape changes.

use std::time::{Duration, Instant};

use paceline_mlx::{Array, Compiled, DeviceKind, Dtype, Stream};
use paceline_model::backend::CLAMP_SLOPE;
use paceline_model::{Activation, Config, Error};

type Made = Result<Array, paceline_mlx::Error>;

/// Calls in a row that are timed together. The wait for the device is a small part of their time.
const CALLS: usize = 64;

/// Timings after one that compiles kernels. The shortest counts.
const ROUNDS: usize = 5;

/// Share of the plain form's time that the compiled one may take at most: less is noise.
const FASTER: f64 = 0.9;

/// Columns of the sample: gates from -16 to 16 in steps of 1/128.
const SAMPLE: i32 = 4096;

/// A function of gate and up, all of one shape.
#[derive(Clone, Debug)]
enum Function {
    /// `silu(gate) * up`
    Silu,
    /// `gelu(gate) * up`
    Gelu(Gelu),
    /// A gate with a limit.
    Clamped(Clamped),
    /// The bounded gate of Kimi K3.
    Situ(Situ),
    /// The square of what is above 0, of the gate alone.
    ReluSquared,
}

impl Function {
    const fn name(&self) -> &'static str {
        match self {
            Self::Silu => "SwiGLU",
            Self::Gelu(_) => "GeGLU",
            Self::Clamped(_) => "clamped SwiGLU",
            Self::Situ(_) => "bounded SwiGLU",
            Self::ReluSquared => "squared ReLU",
        }
    }

    fn apply(&self, stream: &Stream, gate: &Array, up: &Array) -> Made {
        match self {
            Self::Silu => stream.multiply(&silu(stream, gate)?, up),
            Self::Gelu(gelu) => stream.multiply(&gelu.apply(stream, gate)?, up),
            Self::Clamped(clamped) => clamped.apply(stream, gate, up),
            Self::Situ(situ) => situ.apply(stream, gate, up),
            Self::ReluSquared => {
                let zero = stream.scalar(0.0, gate.dtype())?;
                let above = stream.maximum(gate, &zero)?;
                stream.multiply(&above, &above)
            }
        }
    }
}

/// A function, and its compiled form where that is used.
#[derive(Debug)]
struct Gate {
    function: Function,
    compiled: Option<Compiled>,
}

impl Gate {
    /// Chooses the form; the line says why.
    fn measured(stream: &Stream, function: Function, at: (Dtype, usize)) -> (Self, String) {
        let name = function.name();
        let (compiled, why) = match choose(stream, &function, at) {
            Ok(chosen) => chosen,
            // The system's compiler may be missing; operations need none.
            Err(error) => (
                None,
                format!("as operations: it cannot be compiled: {error}"),
            ),
        };
        let gate = Self { function, compiled };
        (gate, format!("mlx computes {name} {why}"))
    }

    fn apply(&self, stream: &Stream, gate: &Array, up: &Array) -> Made {
        match &self.compiled {
            None => self.function.apply(stream, gate, up),
            Some(compiled) => only(compiled.apply(stream, &[gate, up])?),
        }
    }
}

/// The one result of a function.
fn only(results: Vec<Array>) -> Made {
    let [result] = <[Array; 1]>::try_from(results).expect("a function of one result");
    Ok(result)
}

fn choose(
    stream: &Stream,
    function: &Function,
    (dtype, width): (Dtype, usize),
) -> Result<(Option<Compiled>, String), paceline_mlx::Error> {
    let own = function.clone();
    let compiled = stream.compile(move |stream, inputs| {
        let [gate, up] = inputs else {
            unreachable!("it is called with gate and up");
        };
        Ok(vec![own.apply(stream, gate, up)?])
    })?;
    let plain = |gate: &Array, up: &Array| function.apply(stream, gate, up);
    let one = |gate: &Array, up: &Array| only(compiled.apply(stream, &[gate, up])?);
    for rows in [1, 3] {
        let [gate, up] = sample(stream, rows, dtype)?;
        if bits(stream, &plain(&gate, &up)?)? != bits(stream, &one(&gate, &up)?)? {
            return Ok((None, "as operations: compiled it has other bits".to_owned()));
        }
    }
    let shape = [1, width as i32];
    let at = [stream.zeros(&shape, dtype)?, stream.zeros(&shape, dtype)?];
    let (apart, together) = (time(stream, &at, plain)?, time(stream, &at, one)?);
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let (apart, together) = (us(apart), us(together));
    Ok(match together < FASTER * apart {
        true => {
            let why = format!("compiled: {together:.1} us a row, {apart:.1} us as operations");
            (Some(compiled), why)
        }
        false => {
            let why = format!("as operations: {apart:.1} us a row, {together:.1} us compiled");
            (None, why)
        }
    })
}

/// Gates from one end to the other, and ups of all sizes.
fn sample(stream: &Stream, rows: i32, dtype: Dtype) -> Result<[Array; 2], paceline_mlx::Error> {
    let shape = [rows, SAMPLE];
    let n = (rows * SAMPLE) as usize;
    let gates: Vec<f32> = (0..n).map(|i| (i % 4096) as f32 / 128.0 - 16.0).collect();
    let ups: Vec<f32> = (0..n)
        .map(|i| ((i * 37) % 1021) as f32 / 97.0 - 5.0)
        .collect();
    let of = |values: &[f32]| stream.astype(&stream.array_f32(values, &shape)?, dtype);
    Ok([of(&gates)?, of(&ups)?])
}

/// The bits of values, which are widened to f32 without a loss.
fn bits(stream: &Stream, array: &Array) -> Result<Vec<u32>, paceline_mlx::Error> {
    let rows = stream.rows_f32(array)?;
    stream.eval([&rows])?;
    Ok(rows.as_f32()?.iter().map(|x| x.to_bits()).collect())
}

/// The time of one call, each on the result of the one before.
fn time(
    stream: &Stream,
    [gate, up]: &[Array; 2],
    apply: impl Fn(&Array, &Array) -> Made,
) -> Result<Duration, paceline_mlx::Error> {
    stream.eval([gate, up])?;
    let mut best = Duration::MAX;
    for round in 0..=ROUNDS {
        let start = Instant::now();
        let mut x = gate.clone();
        for _ in 0..CALLS {
            x = apply(&x, up)?;
        }
        stream.eval([&x])?;
        stream.synchronize()?;
        if round > 0 {
            best = best.min(start.elapsed());
        }
    }
    Ok(best / CALLS as u32)
}

/// The functions on gates of a model.
#[derive(Debug)]
pub(super) struct Gates {
    gate: Gate,
    /// Of experts, where these have a limit.
    clamped: Option<Gate>,
}

impl Gates {
    /// With a line for each function that says how it is computed. There is none on the CPU, where
    /// MLX compiles through the system's C++ compiler and is a test bed.
    pub(super) fn new(
        stream: &Stream,
        config: &Config,
        dtype: Dtype,
    ) -> Result<(Self, Vec<String>), Error> {
        let clamped = |limit: Option<f32>| {
            let of_silu = config.family.clamps_silu();
            let clamped = limit.map(|limit| Clamped::new(stream, (limit, of_silu), dtype));
            Ok::<_, Error>(clamped.transpose()?.map(Function::Clamped))
        };
        let function = match config.activation {
            Activation::Silu => Function::Silu,
            Activation::GeluTanh => Function::Gelu(Gelu::new(stream, dtype)?),
            Activation::Situ { gate, up } => Function::Situ(Situ::new(stream, (gate, up), dtype)?),
            Activation::ReluSquared => Function::ReluSquared,
        };
        let experts = config.experts();
        let of_experts = clamped(experts.and_then(|experts| experts.clamp))?;
        let function = clamped(config.dense_clamp)?.unwrap_or(function);
        let dense = config.layers.iter().map(|layer| layer.ffn).max();
        let width = dense.unwrap_or(0).max(experts.map_or(1, |of| of.width));
        let mut notes = Vec::new();
        let mut form = |function| {
            if stream.device() == DeviceKind::Cpu {
                let compiled = None;
                return Gate { function, compiled };
            }
            let (gate, note) = Gate::measured(stream, function, (dtype, width));
            notes.push(note);
            gate
        };
        let (gate, clamped) = (form(function), of_experts.map(form));
        Ok((Self { gate, clamped }, notes))
    }

    /// The model's function on a gate alone.
    pub(super) fn activated(&self, stream: &Stream, gate: &Array) -> Result<Array, Error> {
        Ok(match &self.gate.function {
            Function::Gelu(gelu) => gelu.apply(stream, gate)?,
            _ => silu(stream, gate)?,
        })
    }

    /// Input of a feed-forward's down projection; without `up` of a function of the gate alone.
    pub(super) fn hidden(
        &self,
        stream: &Stream,
        gate: &Array,
        up: Option<&Array>,
    ) -> Result<Array, Error> {
        Ok(self.gate.apply(stream, gate, up.unwrap_or(gate))?)
    }

    pub(super) fn of_expert(
        &self,
        stream: &Stream,
        gate: &Array,
        up: Option<&Array>,
    ) -> Result<Array, Error> {
        let own = self.clamped.as_ref().unwrap_or(&self.gate);
        Ok(own.apply(stream, gate, up.unwrap_or(gate))?)
    }
}

/// `gate / (1 + exp(-gate))`
pub(super) fn silu(stream: &Stream, gate: &Array) -> Made {
    stream.multiply(gate, &stream.sigmoid(gate)?)
}

/// The gate of gpt-oss: `min(gate, limit)` by its own sigmoid, times `clamp(up) + 1`. Of silu
/// (DeepSeek V4): `silu(min(gate, limit)) * clamp(up)`.
#[derive(Clone, Debug)]
struct Clamped {
    most: Array,
    least: Array,
    /// Of gpt-oss.
    slope_and_one: Option<[Array; 2]>,
}

impl Clamped {
    fn new(
        stream: &Stream,
        (limit, of_silu): (f32, bool),
        dtype: Dtype,
    ) -> Result<Self, paceline_mlx::Error> {
        let number = |value| stream.scalar(value, dtype);
        let own = || Ok::<_, paceline_mlx::Error>([number(CLAMP_SLOPE)?, number(1.0)?]);
        Ok(Self {
            most: number(limit)?,
            least: number(-limit)?,
            slope_and_one: (!of_silu).then(own).transpose()?,
        })
    }

    fn apply(&self, stream: &Stream, gate: &Array, up: &Array) -> Made {
        let gate = stream.minimum(gate, &self.most)?;
        let up = stream.maximum(&stream.minimum(up, &self.most)?, &self.least)?;
        let Some([slope, one]) = &self.slope_and_one else {
            return stream.multiply(&silu(stream, &gate)?, &up);
        };
        let slope = stream.sigmoid(&stream.multiply(&gate, slope)?)?;
        let gate = stream.multiply(&gate, &slope)?;
        stream.multiply(&gate, &stream.add(&up, one)?)
    }
}

/// `sigmoid(gate) * bounded(gate) * bounded(up)`, where a value bounded by b is `b tanh(x / b)`;
/// up itself without a bound.
#[derive(Clone, Debug)]
struct Situ {
    gate: Array,
    up: Option<Array>,
}

impl Situ {
    fn new(
        stream: &Stream,
        (gate, up): (f32, Option<f32>),
        dtype: Dtype,
    ) -> Result<Self, paceline_mlx::Error> {
        Ok(Self {
            gate: stream.scalar(gate, dtype)?,
            up: up.map(|up| stream.scalar(up, dtype)).transpose()?,
        })
    }

    fn apply(&self, stream: &Stream, gate: &Array, up: &Array) -> Made {
        let bounded = |x: &Array, bound: &Array| {
            stream.multiply(&stream.tanh(&stream.divide(x, bound)?)?, bound)
        };
        let own = stream.multiply(&stream.sigmoid(gate)?, &bounded(gate, &self.gate)?)?;
        match &self.up {
            Some(bound) => stream.multiply(&own, &bounded(up, bound)?),
            None => stream.multiply(&own, up),
        }
    }
}

/// The tanh form of GELU, in the order of operations of MLX's `nn.gelu_approx`.
#[derive(Clone, Debug)]
struct Gelu {
    cubed: Array,
    half: Array,
    one: Array,
    three: Array,
    root: Array,
}

impl Gelu {
    fn new(stream: &Stream, dtype: Dtype) -> Result<Self, Error> {
        let scalar = |value: f64| stream.scalar(value as f32, dtype);
        Ok(Self {
            cubed: scalar(0.044_715)?,
            half: scalar(0.5)?,
            one: scalar(1.0)?,
            three: scalar(3.0)?,
            root: scalar(std::f64::consts::FRAC_2_PI.sqrt())?,
        })
    }

    fn apply(&self, stream: &Stream, x: &Array) -> Made {
        let cubed = stream.multiply(&self.cubed, &stream.power(x, &self.three)?)?;
        let inner = stream.multiply(&self.root, &stream.add(x, &cubed)?)?;
        let outer = stream.add(&self.one, &stream.tanh(&inner)?)?;
        let half = stream.multiply(&self.half, x)?;
        stream.multiply(&half, &outer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On the CPU too, by hand: whichever form is chosen, the bits are those of the operations.
    #[test]
    fn the_compiled_form_has_the_bits_of_the_operations() {
        let Some(stream) = crate::test_stream("mlx compiles gates") else {
            return;
        };
        for dtype in [Dtype::F32, Dtype::BF16] {
            let functions = [
                Function::Silu,
                Function::ReluSquared,
                Function::Gelu(Gelu::new(&stream, dtype).unwrap()),
                Function::Clamped(Clamped::new(&stream, (7.0, false), dtype).unwrap()),
            ];
            for function in functions {
                let name = function.name();
                let plain = function.clone();
                let (gate, note) = Gate::measured(&stream, function, (dtype, 256));
                eprintln!("{dtype}: {note}");
                assert!(note.starts_with(&format!("mlx computes {name} ")), "{note}");
                let said = note.contains(&format!("{name} compiled: "));
                assert_eq!(gate.compiled.is_some(), said, "{note}");
                let [a, b] = sample(&stream, 2, dtype).unwrap();
                let expected = bits(&stream, &plain.apply(&stream, &a, &b).unwrap()).unwrap();
                let got = bits(&stream, &gate.apply(&stream, &a, &b).unwrap()).unwrap();
                assert!(got == expected, "{note}");
            }
        }
    }
}
