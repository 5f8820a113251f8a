//! The state and the work of the thread `mlx`, which owns all MLX arrays. It loads a stage and
//! evaluates layers and the head, forward and backward, each under a watchdog.

use std::sync::Arc;

use paceline_base::Bytes;
use paceline_mlx::{Array, DeviceKind as Kind, Dtype, Library, MemoryLimits, Stream};
use paceline_model::adapter::files::{TARGETS, file_row};
use paceline_model::{Config, Error, ModelSource, Role};
use paceline_model_mlx::{MlxForm, MlxMatrix, MlxPlaces, Watch, mlx_dtype};

use super::StageSpec;
use super::graph::slots::{self, TensorSlot};
use super::graph::{Graph, MlxLayer};
use crate::class::TrainingClass;
use crate::dropout::Dropout;
use crate::weights::{Matrix, MatrixStorage, Method, StageWeights};

/// Share of the device's memory that MLX may cache for reuse: a layer's intermediates have the same
/// sizes each time.
const CACHE_SHARE: u64 = 8;

/// Products of a layer in a backward pass for each one of its forward pass: that again, and two
/// gradients.
const BACK: usize = 3;

/// Rows of the self-test: more than a tile of MLX's products.
const TEST_ROWS: usize = 64;

/// A layer's work.
#[derive(Debug)]
pub(super) struct LayerJob {
    pub(super) layer: usize,
    /// Tokens of each sequence.
    pub(super) lengths: Vec<usize>,
    /// (T, C)
    pub(super) x: Vec<f32>,
    /// Values of trained tensors, in the order of slots.
    pub(super) values: Vec<Vec<f32>>,
    pub(super) dropout: Option<Dropout>,
}

/// The head's work.
#[derive(Debug)]
pub(super) struct HeadJob {
    /// (n, C)
    pub(super) x: Vec<f32>,
    pub(super) targets: Vec<u32>,
    pub(super) values: Vec<Vec<f32>>,
    /// Factor of the loss in its gradient; none where only the loss is wanted.
    pub(super) weight: Option<f32>,
}

/// Result of the head's work.
#[derive(Debug)]
pub(super) struct HeadDone {
    /// Loss of each row.
    pub(super) losses: Vec<f32>,
    /// (n, C)
    pub(super) dx: Vec<f32>,
    pub(super) gradients: Vec<Vec<f32>>,
}

/// Facts about a loaded stage.
#[derive(Debug)]
pub(super) struct StageFacts {
    pub(super) device: String,
    pub(super) notes: Vec<String>,
}

pub(super) struct MlxThread {
    pub(super) stream: Stream,
    watch: Watch,
    loaded: Option<LoadedStage>,
}

pub(super) struct LoadedStage {
    pub(super) config: Config,
    pub(super) weights: Arc<StageWeights>,
    dtype: Dtype,
    scale: f32,
    periods: Vec<Array>,
    layers: Vec<[Option<MlxMatrix>; 7]>,
    head: Option<MlxMatrix>,
}

impl MlxThread {
    pub(super) fn open(places: &MlxPlaces, watch: Watch) -> Result<Self, Error> {
        let library = Library::open(places)?;
        let stream = library.stream(library.best_device()?)?;
        Ok(Self {
            stream,
            watch,
            loaded: None,
        })
    }

    /// Loads a stage's fixed matrices.
    pub(super) fn load(&mut self, spec: StageSpec) -> Result<StageFacts, Error> {
        let dtype = match spec.class {
            TrainingClass::Mlx if mlx_dtype(&spec.source, &spec.config)? == Dtype::BF16 => {
                Dtype::BF16
            }
            _ => Dtype::F32,
        };
        let reader = MatrixReader {
            stream: &self.stream,
            spec: &spec,
            dtype,
        };
        reader.admit()?;
        let numbers = spec.weights.numbers();
        let layers = numbers.map(|layer| reader.layer(layer));
        let layers = layers.collect::<Result<Vec<_>, Error>>()?;
        let head = reader.head()?;
        let periods = spec.config.ropes.iter().map(|rope| {
            let periods: Vec<f32> = rope.frequencies.iter().map(|f| (1.0 / f) as f32).collect();
            self.stream.array_f32(&periods, &[periods.len() as i32])
        });
        let periods = periods.collect::<Result<Vec<_>, _>>()?;
        self.loaded = Some(LoadedStage {
            config: spec.config,
            weights: spec.weights,
            dtype,
            scale: spec.scale,
            periods,
            layers,
            head,
        });
        self.facts()
    }

    fn facts(&self) -> Result<StageFacts, Error> {
        let (library, kind) = (self.stream.library(), self.stream.device());
        let name = self.stream.device_name().unwrap_or_default();
        let device = format!(
            "mlx {} {} {name}",
            library.version(),
            library.backend(kind)?
        );
        let mut notes = Vec::new();
        if kind == Kind::Cpu {
            let bed = "mlx computes on the CPU here: a test bed, far slower than --class cpu";
            notes.push(bed.to_owned());
        } else if !self.repeats()? {
            let bits = "bits: not reproducible on this device: a layer's gradient, computed twice, \
                        differs";
            notes.push(bits.to_owned());
        }
        let device = device.trim_end().to_owned();
        Ok(StageFacts { device, notes })
    }

    /// Whether the first layer's gradient has the same bits when it is computed again.
    pub(super) fn repeats(&self) -> Result<bool, Error> {
        let loaded = self.loaded()?;
        let number = |i: usize| ((i * 37) % 1021) as f32 / 2042.0 - 0.25;
        let numbers = |n: usize| (0..n).map(number).collect::<Vec<f32>>();
        let layer = loaded.weights.numbers().start;
        let n = TEST_ROWS * loaded.config.width;
        let slots = slots::of_layer(loaded.weights.layer(layer));
        let job = LayerJob {
            layer,
            lengths: vec![TEST_ROWS],
            x: numbers(n),
            values: slots.iter().map(|slot| numbers(slot.range.len())).collect(),
            dropout: None,
        };
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        let once = || {
            let (dx, gradients) = self.backward(&job, &numbers(n))?;
            let all = std::iter::once(&dx).chain(&gradients);
            Ok::<_, Error>(all.map(|values| bits(values)).collect::<Vec<_>>())
        };
        Ok(once()? == once()?)
    }

    pub(super) fn loaded(&self) -> Result<&LoadedStage, Error> {
        self.loaded.as_ref().ok_or(Error::Gone)
    }

    /// x (T, C) -> y (T, C)
    pub(super) fn forward(&self, job: &LayerJob) -> Result<Vec<f32>, Error> {
        let loaded = self.loaded()?;
        let slots = slots::of_layer(loaded.weights.layer(job.layer));
        let inputs = self.inputs(&job.x, &slots, &job.values)?;
        let y = loaded.layer(&self.stream, job, &slots, &inputs)?;
        let work = loaded.work(job);
        let all = self.read(work, &[&y])?;
        Ok(all.into_iter().flatten().collect())
    }

    /// dy (T, C) -> dx (T, C), and gradients in the order of slots.
    pub(super) fn backward(
        &self,
        job: &LayerJob,
        dy: &[f32],
    ) -> Result<(Vec<f32>, Vec<Vec<f32>>), Error> {
        let loaded = self.loaded()?;
        let slots = slots::of_layer(loaded.weights.layer(job.layer));
        let inputs = self.inputs(&job.x, &slots, &job.values)?;
        let function = |inputs: &[Array]| {
            let y = loaded.layer(&self.stream, job, &slots, inputs)?;
            Ok::<_, paceline_mlx::Error>(vec![y])
        };
        let c = loaded.config.width as i32;
        let dy = self.stream.array_f32(dy, &[dy.len() as i32 / c, c])?;
        let primals: Vec<&Array> = inputs.iter().collect();
        let (_, gradients) = self.stream.vjp(&function, &primals, &[&dy])?;
        let gradients: Vec<&Array> = gradients.iter().collect();
        let mut all = self.read(BACK * loaded.work(job), &gradients)?.into_iter();
        let dx = all.next().unwrap_or_default();
        Ok((dx, all.collect()))
    }

    /// Losses of rows, and with a weight their gradient.
    pub(super) fn head(&self, job: &HeadJob) -> Result<HeadDone, Error> {
        let loaded = self.loaded()?;
        let (norm, matrix) = loaded.weights.head();
        let slots = slots::of_head(norm, matrix);
        let n = job.targets.len();
        let targets = self.stream.array_u32(&job.targets, &[n as i32, 1])?;
        let inputs = self.inputs(&job.x, &slots, &job.values)?;
        let function = |inputs: &[Array]| {
            let graph = loaded.graph(&self.stream, None, (&slots, &inputs[1..]));
            let at = (&inputs[0], &targets);
            let losses = graph.losses((norm, matrix), loaded.head.as_ref(), at)?;
            Ok::<_, paceline_mlx::Error>(vec![losses])
        };
        let work = work(n, matrix.rows * matrix.cols);
        let Some(weight) = job.weight else {
            let losses = function(&inputs)?;
            let losses = self.read(work, &losses.iter().collect::<Vec<_>>())?;
            return Ok(HeadDone {
                losses: losses.into_iter().flatten().collect(),
                dx: Vec::new(),
                gradients: Vec::new(),
            });
        };
        let back = self.stream.array_f32(&vec![weight; n], &[n as i32, 1])?;
        let primals: Vec<&Array> = inputs.iter().collect();
        let (losses, gradients) = self.stream.vjp(&function, &primals, &[&back])?;
        let all: Vec<&Array> = losses.iter().chain(&gradients).collect();
        let mut all = self.read(BACK * work, &all)?.into_iter();
        Ok(HeadDone {
            losses: all.next().unwrap_or_default(),
            dx: all.next().unwrap_or_default(),
            gradients: all.collect(),
        })
    }

    /// x (T, C) and the trained tensors, as arrays.
    pub(super) fn inputs(
        &self,
        x: &[f32],
        slots: &[TensorSlot],
        values: &[Vec<f32>],
    ) -> Result<Vec<Array>, Error> {
        let c = self.loaded()?.config.width;
        let rows = [(x.len() / c) as i32, c as i32];
        let x = std::iter::once(self.stream.array_f32(x, &rows));
        let of =
            |(slot, values): (&TensorSlot, &Vec<f32>)| self.stream.array_f32(values, &slot.shape);
        let all = x.chain(slots.iter().zip(values).map(of));
        Ok(all.collect::<Result<_, _>>()?)
    }

    /// The values of arrays, computed together and watched as so much work.
    pub(super) fn read(&self, work: usize, arrays: &[&Array]) -> Result<Vec<Vec<f32>>, Error> {
        let rows = arrays.iter().map(|array| self.stream.rows_f32(array));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        self.watch.during(work, || self.stream.eval(&rows))?;
        let values = rows
            .iter()
            .map(|rows| Ok::<_, Error>(rows.as_f32()?.to_vec()));
        values.collect()
    }
}

/// Millions of multiplications of `rows` rows with `weights` weights: the unit in which evaluation
/// time is measured.
const fn work(rows: usize, weights: usize) -> usize {
    rows * weights / 1_000_000 + 1
}

impl LoadedStage {
    fn work(&self, job: &LayerJob) -> usize {
        let matrices = self.weights.layer(job.layer).matrices.iter();
        let weights: usize = matrices.map(|matrix| matrix.rows * matrix.cols).sum();
        work(job.lengths.iter().sum(), weights)
    }

    pub(super) fn graph<'a>(
        &'a self,
        stream: &'a Stream,
        dropout: Option<Dropout>,
        (slots, trained): (&'a [TensorSlot], &'a [Array]),
    ) -> Graph<'a> {
        Graph {
            stream,
            config: &self.config,
            dtype: self.dtype,
            scale: self.scale,
            periods: &self.periods,
            dropout,
            slots,
            trained,
        }
    }

    /// A layer of x and its trained tensors.
    pub(super) fn layer(
        &self,
        stream: &Stream,
        job: &LayerJob,
        slots: &[TensorSlot],
        inputs: &[Array],
    ) -> super::graph::ArrayResult {
        let held = MlxLayer {
            shape: &self.config.layers[job.layer],
            layer: self.weights.layer(job.layer),
            matrices: &self.layers[job.layer - self.weights.first_layer],
        };
        let graph = self.graph(stream, job.dropout, (slots, &inputs[1..]));
        graph.layer(&held, &job.lengths, &inputs[0])
    }

    /// The fixed matrix of the head, where it is not trained.
    #[cfg(test)]
    pub(super) const fn head(&self) -> Option<&MlxMatrix> {
        self.head.as_ref()
    }
}

/// Reads a stage's matrices.
struct MatrixReader<'a> {
    stream: &'a Stream,
    spec: &'a StageSpec,
    dtype: Dtype,
}

impl MatrixReader<'_> {
    /// Refuses what does not fit, and sets MLX's limits by what does.
    fn admit(&self) -> Result<(), Error> {
        let spec = self.spec;
        let mut needed = 0;
        for number in spec.weights.numbers() {
            let matrices = spec.weights.layer(number).matrices.iter();
            for (matrix, (part, _, _)) in matrices.zip(TARGETS) {
                needed += self.planned(matrix, Role::Layer(number, part))?;
            }
        }
        if spec.has_head {
            needed += self.planned(spec.weights.head().1, self.head_role())?;
        }
        let (needed, available) = (Bytes(needed), self.stream.available()?);
        if needed > available {
            let what = format!("weights in {}", self.dtype);
            return Err(paceline_mlx::Error::OutOfMemory {
                what,
                needed,
                available,
            }
            .into());
        }
        Ok(self.stream.library().limit(MemoryLimits {
            memory: available,
            cache: Bytes(available.0 / CACHE_SHARE),
            wired: needed,
        })?)
    }

    const fn head_role(&self) -> Role {
        match self.spec.is_tied {
            true => Role::TokenEmbedding,
            false => Role::Output,
        }
    }

    fn file(&self) -> (&ModelSource, &Config) {
        (&*self.spec.source, &self.spec.config)
    }

    fn form<'o>(&self, order: Option<&'o [u32]>) -> MlxForm<'o> {
        MlxForm {
            dtype: self.dtype,
            unpacked: self.spec.method == Method::Lora,
            order,
        }
    }

    fn planned(&self, matrix: &Matrix, role: Role) -> Result<u64, Error> {
        match matrix.kept {
            MatrixStorage::Trained(_) => Ok(0),
            _ => MlxMatrix::planned(self.file(), (role, size(matrix)), self.form(None)),
        }
    }

    fn matrix(&self, matrix: &Matrix, role: Role) -> Result<Option<MlxMatrix>, Error> {
        let heads = match matrix.kept {
            MatrixStorage::Trained(_) => return Ok(None),
            MatrixStorage::Fixed(_) => None,
            MatrixStorage::Stored(_, heads) | MatrixStorage::Elsewhere(heads) => heads,
        };
        // Heads with pairs of neighbours become heads by halves.
        let order = heads.map(|_| {
            let rows = (0..matrix.rows).map(|row| file_row(row, heads) as u32);
            rows.collect::<Vec<u32>>()
        });
        let form = self.form(order.as_deref());
        MlxMatrix::load(self.stream, self.file(), (role, size(matrix)), form).map(Some)
    }

    fn layer(&self, number: usize) -> Result<[Option<MlxMatrix>; 7], Error> {
        let mut all = [const { None }; 7];
        let matrices = &self.spec.weights.layer(number).matrices;
        for ((place, matrix), (part, _, _)) in all.iter_mut().zip(matrices).zip(TARGETS) {
            *place = self.matrix(matrix, Role::Layer(number, part))?;
        }
        Ok(all)
    }

    fn head(&self) -> Result<Option<MlxMatrix>, Error> {
        match self.spec.has_head {
            true => self.matrix(self.spec.weights.head().1, self.head_role()),
            false => Ok(None),
        }
    }
}

/// Outputs and inputs.
const fn size(matrix: &Matrix) -> [usize; 2] {
    [matrix.rows, matrix.cols]
}
