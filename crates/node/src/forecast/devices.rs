//! Rates of a device on which MLX computes: as its node measured them, or constants of its class.

use paceline_cluster::nodes::agent::{DeviceRates, EngineDevice, FormRates};
use paceline_plan::calibration::family;
use paceline_plan::{Backend, Catalogue, ClusterNode};

/// Launched operations of a dense layer (`model-mlx/src/step.rs`).
const LAYER_OPERATIONS: f64 = 33.0;

/// Launched operations of our graphs over those that the planner counts for a layer.
const OPERATIONS: f64 = LAYER_OPERATIONS / 18.0;

/// Bits of a weight below which MLX holds it in 8 bits: it has no form for blocks of 2 and 3 bits.
const BITS_MIN: f64 = 4.2;

/// Bits of a weight of most models people run: blocks of 4 bits with a scale.
const USUAL_BITS: f64 = 4.5;

/// Share of a quoted bandwidth and of a quoted arithmetic rate that constants assume: those of
/// GPUs in the planner's `calibration.toml`.
const REACHED: [f64; 2] = [0.81, 0.59];

/// Reached over assumed rates of a chip that the catalogue has. On an H100 paceline decoded at 0.63
/// of mlx-lm (docs/measurements.md).
const OF_CHIP: [f64; 2] = [0.6, 1.2];

/// Bandwidth and 16-bit rate of other chips, and the range of reached over assumed rates. Macs have
/// 68 to 819 GB/s, NVIDIA's devices 273 to 4,800.
const METAL: ([f64; 2], [f64; 2]) = ([200e9, 10e12], [0.3, 4.1]);
const CUDA: ([f64; 2], [f64; 2]) = ([900e9, 100e12], [0.3, 5.3]);

/// Seconds of a launched operation: the planner's `op.generic`.
const OPERATION_S: f64 = 7e-6;

/// Seconds from the request for a result until the processor has it: 180 us are reported of Metal
/// (mlx #4438). CUDA's is a guess.
const CROSSING_S: [f64; 2] = [180e-6, 50e-6];

/// Most rows of a prompt's chunk: as of mlx-lm (`prefill_step_size` in its `generate.py`, 0.32.2).
const CHUNK_MAX: usize = 2048;

/// Rows of a chunk over those of a step's fixed part: a tenth of the time goes to that part.
const CHUNK: usize = 9;

/// Rows of a prompt's chunk on a device with these [`fixed_rows`](DeviceSpeed::fixed_rows), at
/// least `least`. They are a power of two, so that small changes of a measured rate change no bits.
pub(crate) fn chunk_rows(fixed: usize, least: usize) -> usize {
    let rows = fixed.saturating_mul(CHUNK).min(CHUNK_MAX);
    rows.next_power_of_two().max(least)
}

/// A device of MLX and its rates.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSpeed {
    /// `metal`, `cuda` or `cpu`.
    pub name: String,
    pub backend: Backend,
    rates: DeviceRates,
    /// Slowest and fastest speed over the predicted one, where the rates are constants of its
    /// class; `None` for measured rates.
    pub range: Option<[f64; 2]>,
}

impl DeviceSpeed {
    /// Of a device of MLX as its node lists it. `None` for a processor that was not measured.
    pub fn of(device: &EngineDevice) -> Option<Self> {
        let backend = match device.backend.as_str() {
            "metal" => Backend::Metal,
            "cuda" => Backend::Cuda,
            _ => Backend::Cpu,
        };
        let measured = device.rates.clone().filter(|it| !it.forms.is_empty());
        let (rates, range) = match measured {
            Some(rates) => (rates, None),
            None => {
                let (rates, range) = constants(backend, device.name.as_deref())?;
                (rates, Some(range))
            }
        };
        Some(Self {
            name: device.backend.clone(),
            backend,
            rates,
            range,
        })
    }

    /// Bytes of a model's file a second in products with one row.
    pub(super) fn reads(&self, weights: WeightBits) -> f64 {
        let weight_s = |form: &FormRates| f64::from(form.bits) / 8.0 / form.reads.max(1) as f64;
        weights.bits / 8.0 / self.between(weights, weight_s)
    }

    /// Operations a second in products with many rows.
    pub(super) fn computes(&self, weights: WeightBits) -> f64 {
        1.0 / self.between(weights, |form| 1.0 / form.computes.max(1) as f64)
    }

    /// Rows of a prompt that it computes in the time of a step's fixed part, as a stage of `layers`
    /// layers with `bytes` of weights. In that part it reads them, launches operations and is
    /// awaited.
    pub(crate) fn fixed_rows(&self, (layers, bytes): (usize, u64)) -> usize {
        let (reads, computes) = self.usual_rates();
        let weights = bytes as f64 * 8.0 / USUAL_BITS;
        let launches = layers as f64 * LAYER_OPERATIONS * self.rates.operation_ns as f64 / 1e9;
        let fixed = bytes as f64 / reads + launches + self.crossing_s();
        (fixed * computes / (2.0 * weights.max(1.0))).round() as usize // saturates
    }

    /// Seconds of one of the operations that the planner counts.
    pub(super) fn operation_s(&self) -> f64 {
        self.rates.operation_ns as f64 / 1e9 * OPERATIONS
    }

    /// Seconds that an exchange costs besides the network.
    pub fn crossing_s(&self) -> f64 {
        self.rates.crossing_ns as f64 / 1e9
    }

    /// Bytes a second that a model of 4.5 bits a weight reads, and its operations a second in
    /// prompts.
    pub fn usual_rates(&self) -> (f64, f64) {
        let weights = WeightBits {
            bits: USUAL_BITS,
            wide: false,
        };
        (self.reads(weights), self.computes(weights))
    }

    /// A cost of the form that MLX holds the weights in. For a mean of several forms it is between
    /// theirs.
    fn between(&self, weights: WeightBits, cost: impl Fn(&FormRates) -> f64) -> f64 {
        let all = self.rates.forms.iter();
        let forms: Vec<&FormRates> = match weights.wide {
            true => all.clone().filter(|form| form.wide).collect(),
            false => all
                .clone()
                .filter(|form| !form.wide || form.bits >= 32)
                .collect(),
        };
        let forms = if forms.is_empty() {
            all.collect()
        } else {
            forms
        };
        let bits = weights.held();
        let above = forms.iter().position(|form| in_file(form) >= bits);
        let above = above.unwrap_or(forms.len() - 1);
        let (low, high) = (forms[above.saturating_sub(1)], forms[above]);
        let width = in_file(high) - in_file(low);
        let part = if width > 0.0 {
            ((bits - in_file(low)) / width).clamp(0.0, 1.0)
        } else {
            1.0
        };
        cost(low) + (cost(high) - cost(low)) * part
    }
}

/// Bits of a weight in a file that MLX holds in this form: a file's groups have no bias.
fn in_file(form: &FormRates) -> f64 {
    match form.bits {
        ..8 => 4.5,
        8..16 => 8.5,
        bits => f64::from(bits),
    }
}

/// Bits of a model's weights, and whether it computes with 32 bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightBits {
    /// In the file, as a mean.
    pub(super) bits: f64,
    pub(super) wide: bool,
}

impl WeightBits {
    /// Bits in a file that costs as much.
    const fn held(self) -> f64 {
        match self.bits {
            ..BITS_MIN => 8.5,
            bits if self.wide && bits > 12.0 => 32.0, // all floats are as wide
            bits => bits,
        }
    }
}

/// Rates of a GPU that was not measured, and the range of reached over these.
fn constants(backend: Backend, name: Option<&str>) -> Option<(DeviceRates, [f64; 2])> {
    let (quoted, class_range) = match backend {
        Backend::Metal => METAL,
        Backend::Cuda => CUDA,
        Backend::Gpu | Backend::Cpu => return None,
    };
    let chip = name.and_then(chip_of);
    let range = if chip.is_some() { OF_CHIP } else { class_range };
    let quoted = chip.map_or(quoted, |chip| {
        let computes = chip.rates.map_or(quoted[1], |rates| rates.matmul);
        [chip.bandwidth, computes]
    });
    let form = |bits| FormRates {
        bits,
        wide: bits == 32,
        reads: (quoted[0] * REACHED[0]) as u64,
        computes: (quoted[1] * REACHED[1]) as u64,
    };
    let crossing_s = CROSSING_S[usize::from(backend == Backend::Cuda)];
    let rates = DeviceRates {
        forms: [5, 9, 16, 32].map(form).to_vec(),
        operation_ns: (OPERATION_S * 1e9) as u64,
        crossing_ns: (crossing_s * 1e9) as u64,
    };
    Some((rates, range))
}

/// The catalogue's machine with the chip of this name, such as `Apple M3 Ultra`.
fn chip_of(name: &str) -> Option<ClusterNode> {
    let chip = name.to_lowercase().replace(' ', "-");
    let chip = chip.strip_prefix("apple")?;
    let catalogue = Catalogue::builtin().ok()?;
    let mut machines = catalogue.hardware.iter();
    let machine = machines.find(|machine| family(&machine.kind).ends_with(chip))?;
    machine.node("chip", None).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(backend: &str, name: &str, rates: Option<DeviceRates>) -> EngineDevice {
        EngineDevice {
            engine: "mlx".to_owned(),
            kind: "gpu".to_owned(),
            backend: backend.to_owned(),
            name: Some(name.to_owned()),
            rates,
            ..EngineDevice::default()
        }
    }

    /// Weights of a 16-bit class.
    const fn bits(bits: f64) -> WeightBits {
        WeightBits { bits, wide: false }
    }

    #[test]
    fn gpus_that_were_not_measured_have_constants_with_a_range() {
        let speed = |backend, name| DeviceSpeed::of(&device(backend, name, None));
        let ultra = speed("metal", "Apple M3 Ultra").unwrap();
        assert!((ultra.reads(bits(4.5)) * 5.0 / 4.5 / (819e9 * 0.81) - 1.0).abs() < 1e-6);
        assert_eq!(ultra.range, Some(OF_CHIP));
        let plain = speed("metal", "Apple M4").unwrap();
        assert!(plain.reads(bits(16.0)) < 100e9, "not that of an M4 Max");
        let other = speed("metal", "Apple M9").unwrap();
        assert_eq!((other.range, other.crossing_s()), (Some(METAL.1), 180e-6));
        assert_eq!(speed("cpu", "Xeon"), None);
    }

    /// Half of an 8B model in 4 bits. On a slow GPU a row takes a larger part of a step.
    #[test]
    fn the_fixed_part_of_a_step_is_some_rows_of_a_prompt() {
        let rows = |name| {
            let speed = DeviceSpeed::of(&device("metal", name, None)).unwrap();
            speed.fixed_rows((16, 2_250_000_000))
        };
        let [plain, ultra] = ["Apple M4", "Apple M3 Ultra"].map(rows);
        assert!((5..40).contains(&plain), "{plain}");
        assert!((5..40).contains(&ultra), "{ultra}");
    }

    #[test]
    fn chunks_are_long_where_the_fixed_part_is() {
        // Fixed rows of an M4, of an H100 with an 8B model in 4 bits, and of a guess without end.
        for (fixed, rows) in [
            (0, 512),
            (30, 512),
            (60, 1024),
            (330, 2048),
            (usize::MAX, 2048),
        ] {
            assert_eq!(chunk_rows(fixed, 512), rows, "{fixed}");
        }
    }

    #[test]
    fn a_mean_of_forms_costs_between_theirs() {
        let form = |(bits, wide, reads)| FormRates {
            bits,
            wide,
            reads,
            computes: reads,
        };
        let measured = [
            (5, false, 1000),
            (9, false, 3600),
            (16, false, 32_000),
            (6, true, 12_000),
            (10, true, 20_000),
            (32, true, 128_000),
        ];
        let rates = DeviceRates {
            forms: measured.map(form).to_vec(),
            ..DeviceRates::default()
        };
        let speed = DeviceSpeed::of(&device("cuda", "", Some(rates))).unwrap();
        assert_eq!(speed.range, None);
        let weights_s = |bits: f64, wide| speed.reads(WeightBits { bits, wide }) * 8.0 / bits;
        for (bits, narrow, wide) in [
            (4.5, 1600.0, 16_000.0),
            (8.5, 3200.0, 16_000.0),
            (3.4, 3200.0, 16_000.0),
            (16.0, 16_000.0, 32_000.0),
            (40.0, 32_000.0, 32_000.0),
        ] {
            assert!(
                (weights_s(bits, false) / narrow - 1.0).abs() < 1e-9,
                "{bits}"
            );
            assert!((weights_s(bits, true) / wide - 1.0).abs() < 1e-9, "{bits}");
        }
        assert!((1600.0..3200.0).contains(&weights_s(6.0, false)));
        assert!((speed.computes(bits(16.0)) / 32_000.0 - 1.0).abs() < 1e-9);
    }
}
