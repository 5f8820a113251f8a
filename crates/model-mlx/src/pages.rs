//! Pages of a cache on MLX as bytes, in the layout of the CPU's cache (`tensor/src/kv.rs`).
//!
//! ```text
//! keys (1, K, 64, D)   --turned--> (K, D 64) --+
//! values (1, K, 64, E) ----------> (K, 64 E) --+--> (K, 64 (D + E)), in the type of the bytes
//! ```
//!
//! So ranks on MLX and on the CPU give each other pages. Recurrent layers have pages of another
//! layout, which are not given.

use paceline_mlx::{Array, Dtype, Stream};
use paceline_model::backend::{PageMemory, store};
use paceline_model::{Error, Kinds, PersistedPage, WindowPool};
use paceline_tensor::{KvType, PAGE};

use super::MlxModel;
use super::cache::{Cache, Kept};
use super::device::Device;

/// The pages of a cache on the thread `mlx`.
pub(super) struct DevicePages<'a> {
    model: &'a MlxModel,
    /// The cache.
    id: u64,
    /// Pages of each pool.
    pools: Vec<usize>,
}

impl<'a> DevicePages<'a> {
    pub(super) fn new(
        model: &'a MlxModel,
        id: u64,
        (pages, windows): (usize, &[WindowPool]),
    ) -> Self {
        let windows = windows.iter().map(|pool| pool.pages);
        Self {
            model,
            id,
            pools: std::iter::once(pages).chain(windows).collect(),
        }
    }

    /// Layers of a pool, counted from the first that this rank holds, and their bytes in a page.
    fn layers(&self, pool: u32, kv: KvType) -> Vec<(usize, usize)> {
        let (config, shard) = (&self.model.config, &self.model.shard);
        let kinds = Kinds::new(config);
        let layers = shard.layers.clone().zip(shard.each_layer()).enumerate();
        let layers = layers.filter(|(_, (index, _))| kinds.of(*index) == pool as usize);
        let bytes = layers.map(|(held, (index, cut))| {
            let heads = (cut.heads.len(), cut.kv_heads.len());
            (held, store(&config.layers[index], heads, kv).page_bytes())
        });
        bytes.collect()
    }
}

/// The type of bytes of `kv`, and the type whose elements have as many bytes. Without a type they
/// are as the cache of type `own` has them.
const fn wire(kv: Option<KvType>, own: Dtype) -> (KvType, Dtype) {
    match (kv, own) {
        (Some(KvType::F16), _) => (KvType::F16, Dtype::F16),
        (None, Dtype::F16 | Dtype::BF16) => (KvType::F16, own),
        _ => (KvType::F32, Dtype::F32),
    }
}

impl PageMemory for DevicePages<'_> {
    fn pool_pages(&self) -> Vec<usize> {
        self.pools.clone()
    }

    fn read_page(
        &self,
        page: &PersistedPage,
        kv: Option<KvType>,
        put: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let (kv, dtype) = wire(kv, self.model.dtype);
        let (layers, id, page) = (self.layers(page.pool, kv), self.id, *page);
        let read = move |device: &mut Device| {
            let watch = device.watch.clone();
            watch.during_part(PAGE, || device.read_page(id, &layers, page, dtype))
        };
        put(&self.model.host.call(read, || ())??);
        Ok(())
    }

    fn write_page(
        &mut self,
        page: &PersistedPage,
        kv: Option<KvType>,
        get: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Result<bool, Error> {
        let (kv, dtype) = wire(kv, self.model.dtype);
        let (layers, id, page) = (self.layers(page.pool, kv), self.id, *page);
        let mut bytes = vec![0; layers.iter().map(|(_, bytes)| bytes).sum()];
        if !get(&mut bytes) {
            return Ok(false);
        }
        let write = move |device: &mut Device| {
            let watch = device.watch.clone();
            watch.during_part(PAGE, || {
                device.write_page(id, &layers, (page, dtype), &bytes)
            })
        };
        self.model.host.call(write, || ())??;
        Ok(true)
    }
}

impl Device {
    fn read_page(
        &mut self,
        cache: u64,
        layers: &[(usize, usize)],
        page: PersistedPage,
        dtype: Dtype,
    ) -> Result<Vec<u8>, Error> {
        let cache = &mut self.caches.get_mut(&cache).ok_or(Error::Gone)?.cache;
        let PersistedPage { pool, page, .. } = page;
        if pool == 0 {
            cache.settle(&self.stream, &[page])?;
        }
        let arrays = layers
            .iter()
            .map(|(layer, _)| cache.page(&self.stream, *layer, page, dtype));
        let arrays = arrays.collect::<Result<Vec<_>, _>>()?.concat();
        self.stream.eval(&arrays)?;
        let mut bytes = Vec::new();
        for array in &arrays {
            bytes.extend_from_slice(array.as_bytes()?);
        }
        Ok(bytes)
    }

    fn write_page(
        &mut self,
        cache: u64,
        layers: &[(usize, usize)],
        (page, dtype): (PersistedPage, Dtype),
        bytes: &[u8],
    ) -> Result<(), Error> {
        let (stream, cache) = (&self.stream, self.caches.get_mut(&cache));
        let cache = &mut cache.ok_or(Error::Gone)?.cache;
        let PersistedPage { pool, page, .. } = page;
        if pool == 0 {
            cache.end_lanes_before(page);
        }
        let end = (page as usize + 1) * PAGE;
        let is_written = |layer| layers.iter().any(|(written, _)| *written == layer);
        let growth = cache.growth(|layer| if is_written(layer) { end } else { 0 });
        cache.grow(stream, &growth)?;
        let mut rest = bytes;
        for (layer, len) in layers {
            let (own, behind) = rest.split_at(*len);
            cache.set_page(stream, *layer, (page, dtype), own)?;
            rest = behind;
        }
        Ok(stream.eval(cache.arrays())?)
    }
}

impl Cache {
    /// A page of a layer, `(K, 64 (D + E))`, and its index rows `(1, 64 X)` in f32. Either is
    /// `None` where the layer has none.
    fn page(
        &self,
        stream: &Stream,
        layer: usize,
        page: u32,
        dtype: Dtype,
    ) -> Result<Vec<Array>, Error> {
        let rows = |held: &Array| {
            let (start, stop) = bounds(held, page);
            stream.slice(held, &start, &stop)
        };
        let flat = |part: &Array| {
            let shape = part.shape();
            stream.reshape(part, &[shape[1], shape[2] * shape[3]])
        };
        let turned = |keys: &Array| flat(&stream.transpose(&rows(keys)?, &[0, 1, 3, 2])?);
        let page = match self.kept(layer) {
            // Quantised rows are not given: see `OnMlx::attach`.
            Kept::Nothing | Kept::Recurrent(_) | Kept::Quantised(..) | Kept::Wide(_) => {
                return Ok(Vec::new());
            }
            Kept::Latent(keys, _) => turned(keys)?,
            Kept::Rows([keys, values]) => {
                stream.concatenate(&[&turned(keys)?, &flat(&rows(values)?)?], 1)?
            }
            Kept::Pooled(own) => {
                let [keys, values @ .., index] = own.arrays() else {
                    unreachable!("keys and index rows");
                };
                let values = values.iter().map(|values| flat(&rows(values)?));
                let values = values.collect::<Result<Vec<_>, _>>()?;
                let keys = turned(keys)?;
                let all: Vec<&Array> = [&keys].into_iter().chain(&values).collect();
                let page = stream.astype(&stream.concatenate(&all, 1)?, dtype)?;
                let index = stream.contiguous(&turned(index)?)?;
                return Ok(vec![stream.contiguous(&page)?, index]);
            }
        };
        Ok(vec![stream.contiguous(&stream.astype(&page, dtype)?)?])
    }

    /// Sets a page of a layer to `bytes` of [`page`](Self::page).
    fn set_page(
        &mut self,
        stream: &Stream,
        layer: usize,
        (page, dtype): (u32, Dtype),
        bytes: &[u8],
    ) -> Result<(), Error> {
        let kept = self.kept_mut(layer);
        let is_pooled = matches!(kept, Kept::Pooled(_));
        let arrays = kept.rows_mut();
        let (arrays, bytes) = match arrays.split_last_mut() {
            Some((index, others)) if is_pooled => {
                let dim = index.shape()[3];
                let (own, behind) = bytes.split_at(bytes.len() - 4 * PAGE * dim as usize);
                let rows = stream.array(behind, &[1, 1, dim, PAGE as i32], Dtype::F32)?;
                put_page(
                    stream,
                    index,
                    page,
                    &stream.transpose(&rows, &[0, 1, 3, 2])?,
                )?;
                (others, own)
            }
            _ => (kept.rows_mut(), bytes),
        };
        let mut arrays = arrays.iter_mut();
        let Some(keys) = arrays.next() else {
            return Ok(());
        };
        let (heads, dim) = (keys.shape()[1], keys.shape()[3]);
        let each = (bytes.len() / dtype.bytes()) as i32 / heads;
        let all = stream.array(bytes, &[heads, each], dtype)?;
        let split = dim * PAGE as i32;
        let own = stream.slice(&all, &[0, 0], &[heads, split])?;
        let own = stream.reshape(&own, &[1, heads, dim, PAGE as i32])?;
        put_page(stream, keys, page, &stream.transpose(&own, &[0, 1, 3, 2])?)?;
        if let Some(values) = arrays.next() {
            let own = stream.slice(&all, &[0, split], &[heads, each])?;
            let own = stream.reshape(&own, &[1, heads, PAGE as i32, values.shape()[3]])?;
            put_page(stream, values, page, &own)?;
        }
        Ok(())
    }
}

/// Where a page lies in `held (1, K, rows, D)`.
fn bounds(held: &Array, page: u32) -> ([i32; 4], [i32; 4]) {
    let (shape, first) = (held.shape(), page as i32 * PAGE as i32);
    let stop = [1, shape[1], first + PAGE as i32, shape[3]];
    ([0, 0, first, 0], stop)
}

/// Writes `new (1, K, 64, D)` to a page of `held`.
fn put_page(stream: &Stream, held: &mut Array, page: u32, new: &Array) -> Result<(), Error> {
    let (start, stop) = bounds(held, page);
    let new = stream.astype(new, held.dtype())?;
    *held = stream.slice_update(held, &new, &start, &stop)?;
    Ok(())
}
