//! Attention to a window and to compressed keys of earlier positions (DeepSeek V4), as on the CPU
//! (`model/src/step/compressed.rs`, `tensor/src/kernels/runs.rs`).
//!
//! ```text
//! row of a position:  key (D) | of the run's key: inputs, gates (N D each) | of its index key: ..
//! a run that ends  -> entry = norm(sum over positions of softmax(gate + bias) * input), turned
//! entry, index key -> over the rows of its run's positions in pages that keep all positions
//! q (H, n, D) over entries (E, D) and the window's keys -> turned back -> (G, n, R), by group
//! ```
//!
//! Rows and entries are f32 in every class, in the layout of the CPU's pages.

use paceline_mlx::{Array, Dtype, Mask};
use paceline_model::{Compressed, Error, KeyRuns, LayerCache};
use paceline_tensor::PAGE;

use super::Step;
use super::indexer::{FAR, Selected};
use super::rounded;
use super::weights::{self, KeySeries, Layer, Mixer};

/// A layer of a step.
#[derive(Clone, Copy)]
struct KeyPlace<'a> {
    own: &'a weights::Compressed,
    of: Compressed,
    /// Rows of the layer, and the entries that it reads, among the arrays of the cache.
    held: [usize; 2],
    /// Elements of a key.
    dim: i32,
}

impl KeyPlace<'_> {
    /// Elements of an entry: a key and its index key.
    const fn entry(&self) -> i32 {
        match self.of.runs {
            Some(runs) => self.dim + runs.index_dim as i32,
            None => self.dim,
        }
    }
}

/// Inputs of all rows of a step.
struct Rows {
    /// `(T, H, D)`
    queries: Array,
    /// `(T, 1, D)`, not yet turned, and `(T, 1, ..)` in f32 of runs.
    keys: Array,
    inputs: Option<Array>,
    /// `(T, I, X)`, not yet turned, and their weights `(T, I)`, in f32.
    index: Option<[Array; 2]>,
}

/// Rows of an entry in pages, and elements of each: the entry is spread over them.
pub(crate) const fn entry_rows(run: usize, entry: usize) -> (usize, usize) {
    let rows = if run < PAGE { run } else { PAGE };
    (rows, entry.div_ceil(rows))
}

impl Step<'_> {
    /// x (T, C) -> keys, to the cache, and attended (T, G R)
    pub(super) fn compressed_attention(&mut self, w: &Layer, index: usize) -> Result<(), Error> {
        self.attended = None;
        let (Mixer::Compressed(own), LayerCache::Compressed(of)) = (&w.mixer, self.layer().0.cache)
        else {
            return self.keep_output_rows();
        };
        let entries = of.runs.and_then(|runs| runs.of).unwrap_or(index);
        let place = KeyPlace {
            own,
            of,
            held: [self.held(index), self.entries_of(entries)],
            dim: self.layer().0.head_dim as i32,
        };
        let rows = self.compressed_rows(place)?;
        let (mut parts, mut first) = (Vec::new(), 0);
        let chosen = std::mem::take(&mut self.selected).into_iter();
        let mut chosen = chosen.map(Some).chain(std::iter::repeat_with(|| None));
        let mut selected = Vec::new();
        for (i, s) in self.batch.sequences.iter().enumerate() {
            let (n, at) = (s.tokens.len() as i32, s.position as i32);
            self.write_compressed(place, i, (&rows, first))?;
            let before = chosen.next().flatten().unwrap_or(Selected::All);
            let own = self.chosen_entries(place, i, (&rows, first))?;
            selected.push(own.unwrap_or(before));
            let query = self.turned(&rows.queries, first, n)?;
            let query = self.turned_end(&query, of.turned, Turn::By(at))?;
            let read = self.over_entries(place, i, (&query, &selected[i]))?;
            let read = self.turned_end(&read, of.turned, Turn::Back(at))?;
            parts.push(self.by_group(place, &read)?);
            first += n;
        }
        self.selected = selected;
        self.attended = self.as_rows(&parts)?;
        self.keep_output_rows()
    }

    /// The array of entries of a layer among those of the cache: behind those of all layers.
    pub(super) fn entries_of(&self, layer: usize) -> usize {
        self.parts.model.shard.layers.len() + self.held(layer)
    }

    /// x (T, C) -> queries, keys, and inputs of compressed keys
    fn compressed_rows(&self, place: KeyPlace<'_>) -> Result<Rows, Error> {
        let (stream, own) = (self.parts.stream, place.own);
        let eps = self.parts.model.config.norm_eps;
        let rows = self.batch.rows() as i32;
        let heads = |x: &Array, dim: i32| stream.reshape(x, &[rows, -1, dim]);
        let wide = |x: &Array| stream.astype(x, Dtype::F32);
        let (down, norm) = &own.query_down;
        let compressed = stream.rms_norm(&self.product(down, &self.x)?, norm, eps)?;
        let queries = self.product(&own.query.0, &compressed)?;
        let mut queries = heads(&queries, place.dim)?;
        if !place.of.is_rounded {
            queries = stream.rms_norm(&queries, &own.query.1, eps)?;
        }
        let keys = stream.rms_norm(&self.product(&own.key.0, &self.x)?, &own.key.1, eps)?;
        let mut inputs = Vec::new();
        for series in &own.series {
            for linear in &series.linears {
                inputs.push(wide(&self.product(linear, &self.x)?)?);
            }
            if series.linears.len() == 1 {
                let gates = inputs.last().map(Array::shape); // that the file lacks
                inputs.push(stream.zeros(&gates.unwrap_or_default(), Dtype::F32)?);
            }
        }
        let inputs = (!inputs.is_empty()).then(|| {
            let all = stream.concatenate(&inputs.iter().collect::<Vec<_>>(), 1)?;
            Ok::<_, Error>(heads(&all, all.shape()[1])?)
        });
        let indexer = own
            .indexer
            .as_ref()
            .zip(place.of.runs.and_then(|of| of.indexer));
        let index = indexer.map(|((queries, weights), of)| {
            let queries = wide(&self.product(queries, &compressed)?)?;
            let weights = stream.matmul(&wide(&self.x)?, weights)?;
            Ok::<_, Error>([heads(&queries, of.dim as i32)?, weights])
        });
        Ok(Rows {
            queries,
            keys: heads(&keys, place.dim)?,
            inputs: inputs.transpose()?,
            index: index.transpose()?,
        })
    }

    /// Writes the rows of sequence `i`, which are those from `first` on, and the entries of runs
    /// that end in the step.
    fn write_compressed(
        &mut self,
        place: KeyPlace<'_>,
        i: usize,
        (rows, first): (&Rows, i32),
    ) -> Result<(), Error> {
        let (stream, sequence) = (self.parts.stream, &self.batch.sequences[i]);
        let (n, at) = (sequence.tokens.len() as i32, sequence.position as i32);
        let key = self.turned(&rows.keys, first, n)?;
        let key = self.turned_end(&key, place.of.turned, Turn::By(at))?;
        let mut row = stream.astype(&key, Dtype::F32)?;
        if place.of.is_rounded {
            row = rounded::to_8_bits(stream, &row)?;
        }
        if let Some(inputs) = &rows.inputs {
            row = stream.concatenate(&[&row, &self.turned(inputs, first, n)?], 3)?;
        }
        let kind = self.parts.constants.span_kind_of[self.index];
        let cache = &mut *self.parts.cache;
        cache.write_index(stream, place.held[0], &self.spans[i][kind], &row)?;
        let Some(runs) = place.of.runs.filter(|runs| runs.of.is_none()) else {
            return Ok(());
        };
        let (at, end) = (sequence.position, sequence.position + sequence.tokens.len());
        let ended = at / runs.len..end / runs.len;
        if ended.is_empty() {
            return Ok(());
        }
        let entries = self.entries(place, (i, runs), ended.clone())?;
        self.write_entries((i, place.held[1]), runs.len, (ended.start, &entries))
    }

    /// The entries (1, 1, R, D + X) of the runs `ended` of sequence `i`, in f32.
    fn entries(
        &self,
        place: KeyPlace<'_>,
        (i, runs): (usize, KeyRuns),
        ended: std::ops::Range<usize>,
    ) -> Result<Array, Error> {
        let (stream, sequence) = (self.parts.stream, &self.batch.sequences[i]);
        let eps = self.parts.model.config.norm_eps;
        let kind = self.parts.constants.span_kind_of[self.index];
        let before = if runs.overlaps { runs.len } else { 0 };
        let first = (ended.start * runs.len).saturating_sub(before);
        let in_pages = sequence.rows_of(self.parts.constants.span_kinds[kind].kind);
        let positions = first..ended.end * runs.len;
        let span = self.spans[i][kind].part(stream, &in_pages, positions)?;
        let rows = self
            .parts
            .cache
            .read_index_rows(stream, place.held[0], &span.view)?;
        let (mut parts, mut column) = (Vec::new(), place.dim);
        for series in &place.own.series {
            let dim = series.norm.shape()[0];
            let sums = self.run_sums((series, runs), &rows, (ended.len() as i32, column))?;
            column += 2 * series.bias.shape()[2];
            let sums = stream.reshape(&sums, &[1, 1, -1, dim])?;
            let plain = stream.rms_norm(&sums, &series.norm, eps)?;
            let turn = Turn::Runs(runs.len, ended.start as i32);
            let mut key = self.turned_end(&plain, place.of.turned, turn)?;
            if place.of.is_rounded {
                key = rounded::to_scaled_4_bits(stream, &key)?;
            }
            parts.push(key);
            if let Some((linear, norm)) = &place.own.index_key {
                let narrow = stream.astype(&plain, self.parts.model.dtype)?;
                let flat = stream.reshape(&narrow, &[-1, dim])?;
                let key = stream.astype(&self.product(linear, &flat)?, Dtype::F32)?;
                let key = stream.rms_norm(&key, norm, eps)?;
                let key = stream.reshape(&key, &[1, 1, -1, runs.index_dim as i32])?;
                let key = self.turned_end(&key, place.of.turned, turn)?;
                parts.push(rounded::to_4_bits(stream, &key)?);
            }
        }
        Ok(stream.concatenate(&parts.iter().collect::<Vec<_>>(), 3)?)
    }

    /// The sums (R, 1, D) of `ended` runs, whose inputs and gates begin at a column of `rows`
    /// `(1, 1, m, ..)`. These are the positions of the runs, behind those of the run before where
    /// runs overlap.
    fn run_sums(
        &self,
        (series, runs): (&KeySeries, KeyRuns),
        rows: &Array,
        (ended, column): (i32, i32),
    ) -> Result<Array, Error> {
        let (stream, len) = (self.parts.stream, runs.len as i32);
        let (m, all, dim) = (
            rows.shape()[2],
            series.bias.shape()[2],
            series.norm.shape()[0],
        );
        // Columns of the rows `part`, by run.
        let of = |part: std::ops::Range<i32>, column: i32| {
            let (start, stop) = ([0, 0, part.start, column], [1, 1, part.end, column + dim]);
            let part = stream.slice(rows, &start, &stop)?;
            Ok::<_, Error>(stream.reshape(&part, &[-1, len, dim])?)
        };
        let bias = |first: i32| stream.slice(&series.bias, &[0, 0, first], &[1, len, first + dim]);
        let own = m - ended * len..m;
        let at = all - dim; // the later columns are those of a position's own run
        let mut inputs = of(own.clone(), column + at)?;
        let mut gates = stream.add(&of(own, column + all + at)?, &bias(at)?)?;
        if runs.overlaps {
            let before = 0..m - len;
            let mut earlier = of(before.clone(), column)?;
            let mut earlier_gates = stream.add(&of(before, column + all)?, &bias(0)?)?;
            if earlier.shape()[0] < ended {
                // The first run has none before.
                let none = stream.zeros(&[1, len, dim], Dtype::F32)?;
                let far = stream.scalar(FAR, Dtype::F32)?;
                let hidden = stream.subtract(&none, &far)?;
                earlier = stream.concatenate(&[&none, &earlier], 0)?;
                earlier_gates = stream.concatenate(&[&hidden, &earlier_gates], 0)?;
            }
            inputs = stream.concatenate(&[&earlier, &inputs], 1)?;
            gates = stream.concatenate(&[&earlier_gates, &gates], 1)?;
        }
        let weights = stream.softmax(&gates, 1)?;
        Ok(stream.sum_along(&stream.multiply(&weights, &inputs)?, 1)?)
    }

    /// Writes entries (1, 1, R, entry) of runs of `len` positions from run `first` on.
    fn write_entries(
        &mut self,
        (i, held): (usize, usize),
        len: usize,
        (first, entries): (usize, &Array),
    ) -> Result<(), Error> {
        let (stream, sequence) = (self.parts.stream, &self.batch.sequences[i]);
        let sizes = entries.shape();
        let (count, entry) = (sizes[2], sizes[3]);
        let (rows, width) = entry_rows(len, entry as usize);
        let (rows, width) = (rows as i32, width as i32);
        let padded = match rows * width - entry {
            0 => entries.clone(),
            rest => {
                let zeros = stream.zeros(&[1, 1, count, rest], Dtype::F32)?;
                stream.concatenate(&[entries, &zeros], 3)?
            }
        };
        let spread = stream.reshape(&padded, &[1, 1, count * rows, width])?;
        let kind = self.parts.constants.entries_kind;
        let in_pages = sequence.rows_of(0);
        // An entry of many positions is in the page of the last.
        let each = if len > PAGE { 1 } else { count };
        for run in (0..count).step_by(each as usize) {
            let (start, stop) = ([0, 0, run * rows, 0], [1, 1, (run + each) * rows, width]);
            let end = (first + (run + each) as usize) * len;
            let positions = end - (each * rows) as usize..end;
            let span = self.spans[i][kind].part(stream, &in_pages, positions)?;
            let part = stream.slice(&spread, &start, &stop)?;
            self.parts.cache.write_index(stream, held, &span, &part)?;
        }
        Ok(())
    }

    /// The entries (1, 1, E, D + X) of all whole runs of sequence `i`; `None` before the first.
    fn read_entries(&self, place: KeyPlace<'_>, i: usize) -> Result<Option<Array>, Error> {
        let (stream, sequence) = (self.parts.stream, &self.batch.sequences[i]);
        let end = sequence.position + sequence.tokens.len();
        let Some(runs) = place.of.runs.filter(|runs| end >= runs.len) else {
            return Ok(None);
        };
        let view = &self.spans[i][self.parts.constants.entries_kind].view;
        let held = self
            .parts
            .cache
            .read_index_rows(stream, place.held[1], view)?;
        let (count, len) = ((end / runs.len) as i32, runs.len as i32);
        let (rows, width) = entry_rows(runs.len, place.entry() as usize);
        let (rows, width) = (rows as i32, width as i32);
        let all = stream.slice(&held, &[0; 4], &[1, 1, count * len, width])?;
        let all = stream.reshape(&all, &[1, count, len / rows, rows * width])?;
        let (start, stop) = (
            [0, 0, len / rows - 1, 0],
            [1, count, len / rows, place.entry()],
        );
        let last = stream.slice(&all, &start, &stop)?;
        Ok(Some(stream.reshape(&last, &[1, 1, count, -1])?))
    }

    /// Entries that the indexer of the layer chooses for rows of sequence `i`; `None` without one.
    fn chosen_entries(
        &self,
        place: KeyPlace<'_>,
        i: usize,
        (rows, first): (&Rows, i32),
    ) -> Result<Option<Selected>, Error> {
        let (stream, sequence) = (self.parts.stream, &self.batch.sequences[i]);
        let runs = place.of.runs;
        let (Some([queries, weights]), Some(runs)) = (&rows.index, runs) else {
            return Ok(None);
        };
        let of = runs.indexer.expect("it has queries");
        let (n, at) = (sequence.tokens.len() as i32, sequence.position as i32);
        let wanted = of.choice.top_k as i32;
        let entries = self.read_entries(place, i)?;
        let Some(entries) = entries.filter(|entries| entries.shape()[2] > wanted) else {
            return Ok(Some(Selected::All));
        };
        let count = entries.shape()[2];
        let (start, stop) = ([0, 0, 0, place.dim], [1, 1, count, place.entry()]);
        let keys = stream.slice(&entries, &start, &stop)?;
        let query = self.turned(queries, first, n)?;
        let mut query = self.turned_end(&query, place.of.turned, Turn::By(at))?;
        if place.of.is_rounded {
            query = rounded::to_4_bits(stream, &query)?;
        }
        let weights = stream.slice(weights, &[first, 0], &[first + n, of.heads as i32])?;
        let scores = self.index_scores([&query, &keys, &weights])?;
        let seen = self.seen_entries(i, (runs.len, count))?;
        Ok(Some(Selected::Mask(self.chosen(&scores, &seen, wanted)?)))
    }

    /// 1 where a row of sequence `i` sees an entry, `(1, 1, n, E)` in f32.
    fn seen_entries(&self, i: usize, (len, count): (usize, i32)) -> Result<Array, Error> {
        let (stream, sequence) = (self.parts.stream, &self.batch.sequences[i]);
        let (n, at) = (sequence.tokens.len(), sequence.position);
        let last = (1..=count).map(|run| (run * len as i32 - 1) as f32);
        let last = stream.array_f32(&last.collect::<Vec<_>>(), &[1, 1, 1, count])?;
        let ends: Vec<f32> = (at + 1..=at + n).map(|end| end as f32).collect();
        let ends = stream.array_f32(&ends, &[1, 1, n as i32, 1])?;
        Ok(stream.astype(&stream.less(&last, &ends)?, Dtype::F32)?)
    }

    /// q (1, H, n, D) of sequence `i` -> (1, H, n, D), by its entries and its window.
    fn over_entries(
        &self,
        place: KeyPlace<'_>,
        i: usize,
        (query, selected): (&Array, &Selected),
    ) -> Result<Array, Error> {
        let (stream, sequence) = (self.parts.stream, &self.batch.sequences[i]);
        let (n, at) = (sequence.tokens.len(), sequence.position);
        let kind = self.parts.constants.span_kind_of[self.index];
        let first = (at + 1).saturating_sub(place.of.window);
        let in_pages = sequence.rows_of(self.parts.constants.span_kinds[kind].kind);
        let span = self.spans[i][kind].part(stream, &in_pages, first..at + n)?;
        let rows = self
            .parts
            .cache
            .read_index_rows(stream, place.held[0], &span.view)?;
        let m = rows.shape()[2];
        let mut keys = stream.slice(&rows, &[0; 4], &[1, 1, m, place.dim])?;
        let numbers = |all: std::ops::Range<usize>| all.map(|i| i as f32).collect::<Vec<_>>();
        let positions = stream.array_f32(&numbers(first..at + n), &[1, 1, 1, m])?;
        let ends = stream.array_f32(&numbers(at + 1..at + n + 1), &[1, 1, n as i32, 1])?;
        let back = stream.scalar(place.of.window as f32, Dtype::F32)?;
        let starts = stream.subtract(&ends, &back)?;
        let below = |x: &Array| stream.astype(&stream.less(&positions, x)?, Dtype::F32);
        let mut seen = stream.subtract(&below(&ends)?, &below(&starts)?)?;
        if let (Some(entries), Some(runs)) = (self.read_entries(place, i)?, place.of.runs) {
            let count = entries.shape()[2];
            let own = stream.slice(&entries, &[0; 4], &[1, 1, count, place.dim])?;
            let is_chosen = runs.index_dim > 0;
            let own_seen = match selected {
                Selected::Mask(chosen) if is_chosen => chosen.clone(),
                _ => self.seen_entries(i, (runs.len, count))?,
            };
            keys = stream.concatenate(&[&own, &keys], 2)?;
            seen = stream.concatenate(&[&own_seen, &seen], 3)?;
        }
        let keys = stream.astype(&keys, query.dtype())?;
        let half = stream.scalar(0.5, Dtype::F32)?;
        let mask = stream.less(&half, &seen)?;
        let sinks = place.own.sinks.as_ref();
        self.attended_by([query, &keys, &keys], Mask::Array(&mask), sinks)
    }

    /// read (1, H, n, D) -> outputs of groups (1, G, n, R)
    fn by_group(&self, place: KeyPlace<'_>, read: &Array) -> Result<Array, Error> {
        let (stream, sizes) = (self.parts.stream, read.shape());
        let each = (self.layer().0.heads / place.of.groups) as i32;
        let (groups, n) = (sizes[1] / each, sizes[2]);
        let read = stream.reshape(read, &[groups, each, n, place.dim])?;
        let read = stream.transpose(&read, &[0, 2, 1, 3])?;
        let read = stream.reshape(&read, &[groups, n, each * place.dim])?;
        let out = place.own.outputs.apply(stream, &read)?;
        Ok(stream.reshape(&out, &[1, groups, n, -1])?)
    }

    /// `x` `(1, heads, n, D)`, the last `turned` elements turned.
    fn turned_end(&self, x: &Array, turned: usize, turn: Turn) -> Result<Array, Error> {
        let (stream, sizes) = (self.parts.stream, x.shape());
        let at = sizes[3] - turned as i32;
        let end = stream.slice(x, &[0, 0, 0, at], &sizes)?;
        let end = self.roped_by(&end, |periods, neighbours| match turn {
            Turn::By(position) => stream.rope(&end, periods, neighbours, position),
            Turn::Back(position) => {
                let back = stream.negative(periods)?;
                stream.rope(&end, &back, neighbours, position)
            }
            Turn::Runs(len, first) => {
                let len = stream.scalar(len as f32, Dtype::F32)?;
                let periods = stream.divide(periods, &len)?;
                stream.rope(&end, &periods, neighbours, first)
            }
        })?;
        let mut stop = sizes;
        stop[3] = at;
        let plain = stream.slice(x, &[0; 4], &stop)?;
        Ok(stream.concatenate(&[&plain, &end], 3)?)
    }
}

/// Rotation of the ends of rows.
#[derive(Clone, Copy)]
enum Turn {
    /// Rows by their positions from this one on.
    By(i32),
    /// The same, back.
    Back(i32),
    /// Rows by the first positions of runs of this length, from a run on.
    Runs(usize, i32),
}
