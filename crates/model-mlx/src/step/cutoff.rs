//! Gates cut by their mean and deviation over the whole feed-forward (Gemma 3n), whichever ranks
//! hold its columns: `gate = max(gate - (mean + cutoff * deviation), 0)`.

use paceline_mlx::{Array, Dtype};
use paceline_model::Error;

use super::Step;

impl Step<'_> {
    /// Cuts this rank's gates in place, in layers with a cutoff. Collective where ranks share the
    /// feed-forward: they gather the sums of gates and of their squares.
    pub(super) fn cut_gates(&mut self) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        let Some(cutoff) = shape.gate_cutoff else {
            return Ok(());
        };
        let (stream, model) = (self.parts.stream, self.parts.model);
        let own = self.gate_up.as_ref().map(|(gate, _)| self.sums(gate));
        let own = own.transpose()?;
        let links = model.links.as_ref().filter(|links| links.stage.size() > 1);
        let sums = match links.filter(|_| !cut.dense().is_whole()) {
            None => own,
            Some(links) => {
                let columns = cut.dense().columns_by_rank();
                let columns = columns.map(|own| if own.is_empty() { 0 } else { 2 });
                let columns: Vec<usize> = columns.collect();
                let parts = self.gather_columns(links, own.as_ref(), &columns, Dtype::F32)?;
                let mut parts = parts.into_iter();
                let first = parts.next();
                let mut add = |sum: Array, part| Ok::<_, Error>(stream.add(&sum, &part)?);
                first
                    .map(|first| parts.try_fold(first, &mut add))
                    .transpose()?
            }
        };
        let (Some((gate, up)), Some(sums)) = (self.gate_up.take(), sums) else {
            return Ok(());
        };
        let n = stream.scalar(shape.ffn as f32, Dtype::F32)?;
        let means = stream.divide(&sums, &n)?;
        let rows = gate.shape()[0];
        let mean = stream.slice(&means, &[0, 0], &[rows, 1])?;
        let squares = stream.slice(&means, &[0, 1], &[rows, 2])?;
        let [zero, half, cutoff] = [0.0, 0.5, cutoff].map(|x| stream.scalar(x, Dtype::F32));
        let (zero, half, cutoff) = (zero?, half?, cutoff?);
        let variance = stream.subtract(&squares, &stream.multiply(&mean, &mean)?)?;
        let deviation = stream.power(&stream.maximum(&variance, &zero)?, &half)?;
        let least = stream.add(&mean, &stream.multiply(&cutoff, &deviation)?)?;
        let wide = stream.subtract(&stream.astype(&gate, Dtype::F32)?, &least)?;
        let cut = stream.astype(&stream.maximum(&wide, &zero)?, gate.dtype())?;
        self.gate_up = Some((cut, up));
        Ok(())
    }

    /// Sums of gates (T, F) and of their squares, `(T, 2)` in f32.
    fn sums(&self, gate: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let wide = stream.astype(gate, Dtype::F32)?;
        let sums = stream.sum_along(&wide, 1)?;
        let squares = stream.sum_along(&stream.multiply(&wide, &wide)?, 1)?;
        Ok(stream.concatenate(&[&sums, &squares], 1)?)
    }
}
