//! Attention with a soft cap of scores (Gemma 2), which MLX's own kernels do not have.

use paceline_mlx::{Array, Dtype, Mask};
use paceline_model::Error;

use super::Step;
use super::indexer::causal;

impl Step<'_> {
    /// Attention `(n, H, rows, E)` of queries over keys and values whose KV heads share the query
    /// heads evenly.
    pub(super) fn one_attention(
        &self,
        [q, k, v]: [&Array; 3],
        scale: f32,
        mask: Mask<'_>,
        sinks: Option<&Array>,
    ) -> Result<Array, Error> {
        let (stream, config) = (self.parts.stream, &self.parts.model.config);
        let Some(cap) = config.attention_cap else {
            return Ok(stream.attention([q, k, v], scale, mask, sinks)?);
        };
        let (sizes, keys) = (q.shape(), k.shape());
        let ([n, heads, rows, dim], [_, kv_heads, m, _]) = (&sizes[..], &keys[..]) else {
            unreachable!("heads of rows of sequences");
        };
        let grouped = |x: &Array| {
            let shape = x.shape();
            stream.reshape(x, &[*n, *kv_heads, 1, shape[2], shape[3]])
        };
        let q = stream.reshape(q, &[*n, *kv_heads, heads / kv_heads, *rows, *dim])?;
        let q = stream.multiply(&q, &stream.scalar(scale, q.dtype())?)?;
        let turned = stream.transpose(&grouped(k)?, &[0, 1, 2, 4, 3])?;
        let scores = stream.astype(&stream.matmul(&q, &turned)?, Dtype::F32)?;
        let cap = stream.scalar(cap, Dtype::F32)?;
        let scores = stream.multiply(&stream.tanh(&stream.divide(&scores, &cap)?)?, &cap)?;
        let seen = match mask {
            Mask::None => None,
            Mask::Causal => causal(self, *rows, *m)?,
            Mask::Array(seen) => Some(stream.astype(seen, Dtype::F32)?),
        };
        let scores = match seen {
            None => scores,
            Some(seen) => {
                let seen = stream.reshape(&seen, &[-1, 1, 1, *rows, *m])?;
                self.seen_only(&scores, &seen)?
            }
        };
        let weights = stream.astype(&stream.softmax(&scores, 4)?, v.dtype())?;
        let read = stream.matmul(&weights, &grouped(v)?)?;
        Ok(stream.reshape(&read, &[*n, *heads, *rows, -1])?)
    }
}
